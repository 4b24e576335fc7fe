"""The nearest boundaries of all tokens are counted, each under the pair of the reference."""

from __future__ import annotations

import numpy as np

from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.rounding import logit_error_bound
from moegeom.geometry.selection import margin, top_k
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.testing.array_source import ArraySource


def test_pairs_are_those_of_the_reference_and_add_up_to_the_tokens() -> None:
    generator = np.random.default_rng(5)
    weight = generator.standard_normal((12, 6), dtype=np.float32)
    values = generator.standard_normal((3000, 6), dtype=np.float32)
    rule = Rule(3, "softmax", Weights("scores"))
    router = Router("text/0", "text", 0, weight, rule, Provenance("made up", (), "", "F32"))
    source = ArraySource({"text/0": values})
    run = RouterRun(router, source, METRICS.all())
    counted = {
        (row["expert_out"], row["expert_in"]): row["num_tokens"]
        for row in measure_router(run).rows["pairs"]
        if row["population"] == "all"
    }
    logits = values.astype(np.float64) @ weight.astype(np.float64).T
    assert not is_within_rounding(logits, values, weight).any()
    nearest = boundary_distance(logits, top_k(logits, 3), row_distances(weight)).pair
    pairs, tokens = np.unique(nearest, axis=0, return_counts=True)
    expected = {
        tuple(pair): count for pair, count in zip(pairs.tolist(), tokens.tolist(), strict=True)
    }
    assert counted == expected
    assert sum(counted.values()) == 3000


def is_within_rounding(logits: np.ndarray, values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Tokens whose chosen set or nearest boundary the order of a float32 sum could change."""
    chosen, inverse = top_k(logits, 3), row_distances(weight).inverse
    is_chosen = np.zeros(logits.shape, dtype=bool)
    np.put_along_axis(is_chosen, chosen.astype(np.int64), True, axis=1)
    is_boundary = is_chosen[:, :, None] & ~is_chosen[:, None, :]
    distances = np.where(is_boundary, (logits[:, :, None] - logits[:, None, :]) * inverse, np.inf)
    first, second = np.sort(distances.reshape(len(logits), -1), axis=1)[:, :2].T
    norm = np.linalg.norm(values.astype(np.float64), axis=1)
    longest_row = np.linalg.norm(weight.astype(np.float64), axis=1).max()
    # of two engines; no gap of float32 logits is further than this from the exact one
    moves = logit_error_bound(norm, weight.shape[1], longest_row)
    nearest_rows = inverse[~np.eye(len(weight), dtype=bool)].max()
    return (margin(logits, 3) <= moves) | (second - first <= 2.0 * moves * nearest_rows)
