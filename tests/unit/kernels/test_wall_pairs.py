"""The nearest walls of all tokens are counted, each under the pair of the reference."""

from __future__ import annotations

import numpy as np

from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.geometry.boundary import boundary_distance, row_distances
from moegeom.geometry.selection.pick import top_k
from moegeom.kernels.table import load_kernels
from moegeom.metrics import METRICS, RouterRun, measure_router
from moegeom.testing.array_source import ArraySource


def test_pairs_are_those_of_the_reference_and_add_up_to_the_tokens() -> None:
    generator = np.random.default_rng(5)
    weight = generator.standard_normal((12, 6), dtype=np.float32)
    values = generator.standard_normal((3000, 6), dtype=np.float32)
    rule = Rule(3, "softmax", Weights("scores"))
    router = Router("text/0", "text", 0, weight, rule, Provenance("made up", (), "", "F32"))
    source = ArraySource({"text/0": values})
    run = RouterRun(router, source, load_kernels("cpu"), METRICS.all())
    counted = {
        (row["expert_out"], row["expert_in"]): row["num_tokens"]
        for row in measure_router(run).rows["pairs"]
        if row["population"] == "all"
    }
    logits = values.astype(np.float64) @ weight.astype(np.float64).T
    nearest = boundary_distance(logits, top_k(logits, 3), row_distances(weight)).pair
    pairs, tokens = np.unique(nearest, axis=0, return_counts=True)
    expected = {
        tuple(pair): count for pair, count in zip(pairs.tolist(), tokens.tolist(), strict=True)
    }
    assert sum(counted.values()) == 3000
    # float32 logits may name another of two walls that are equally near to within rounding
    differing = sum(abs(counted.get(p, 0) - expected.get(p, 0)) for p in {*counted, *expected})
    assert differing <= 4
