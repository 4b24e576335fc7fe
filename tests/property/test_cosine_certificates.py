"""Certificates about routers of cosines, against a dense search with their definition in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moegeom.core.metric import RouterFacts
from moegeom.core.router import Projection, Provenance, Router, Rule, Weights
from moegeom.geometry.boundary.reachability import Proof, reachability
from moegeom.geometry.gram import effective_rows
from moegeom.geometry.rows import composed_rows
from moegeom.metrics import METRICS

EXPERTS, HIDDEN, PROJECTED, INPUTS, SCALE = 8, 6, 5, 20_000, 14.3


def drawn(seed: int):
    """Rows, projection and bias; the less the input turns the projection, the more is decided."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((EXPERTS, PROJECTED)) * random.uniform(0.1, 9.0, (EXPERTS, 1))
    turn = 10.0 ** random.uniform(-2.0, 0.0)
    projection = turn * random.standard_normal((PROJECTED, HIDDEN))
    return rows, projection, random.standard_normal(PROJECTED), random


def searched(rows, projection, bias, top_k, radius, random) -> np.ndarray:
    """For inputs all over the ball, most at its surface, which experts have the largest cosines."""
    inputs = random.standard_normal((INPUTS, HIDDEN))
    inputs *= radius / np.linalg.norm(inputs, axis=1, keepdims=True)
    inputs[: INPUTS // 4] *= random.random((INPUTS // 4, 1))
    seen = inputs @ projection.T + bias
    lengths = np.linalg.norm(seen, axis=1)[:, None] * np.linalg.norm(rows, axis=1)
    probabilities = np.exp(SCALE * (seen @ rows.T) / lengths)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    has = np.zeros(probabilities.shape, dtype=bool)
    np.put_along_axis(has, np.argsort(-probabilities, axis=1)[:, :top_k], True, axis=1)
    return has


@pytest.mark.parametrize("top_k", [1, 3])
def test_no_input_contradicts_a_certificate_about_cosines(top_k):
    rule, radius = Rule(top_k, "softmax", Weights("scores"), has_logit_bias=True), HIDDEN**0.5
    numbers = np.zeros(4, int)
    for seed in range(60):
        rows, projection, bias, random = drawn(seed)
        weight, offset = composed_rows(rows, projection, bias)
        certificates = reachability(effective_rows(weight, None), rule, radius, offset)
        has = searched(rows, projection, bias, top_k, radius, random)
        beaten, reached = (
            np.array([proof is kind for proof in certificates.proofs])
            for kind in (Proof.beaten, Proof.point)
        )
        assert not has[:, beaten].any()
        assert has[:, certificates.is_certain].all()
        for expert, others in enumerate(certificates.beaten_by):
            assert has[has[:, expert]][:, others].all()
        met = has.any(axis=0)[reached]
        numbers += [beaten.sum(), certificates.is_certain.sum(), reached.sum(), met.sum()]
    assert numbers.min() > 20
    # an expert is hardly ever reached so narrowly that 20 000 inputs miss it
    assert numbers[3] >= 0.95 * numbers[2]


def test_nothing_is_certified_where_cosines_are_scored_before_a_bias_is_added():
    """The range of a cosine is not that of the product that stands for it."""
    rows, projection, bias, _ = drawn(3)
    weight, offset = composed_rows(rows, projection, bias)
    plain = Router(
        name="text/0",
        stack="text",
        layer=0,
        weight=weight,
        rule=Rule(1, "softmax", Weights("scores"), has_logit_bias=True),
        provenance=Provenance("made", ("gate.weight",), "made.safetensors", "F64"),
        logit_bias=offset,
        projection=Projection(projection, bias, SCALE),
    )
    rule = replace(plain.rule, score="sigmoid", has_selection_bias=True)
    biased = replace(plain, rule=rule, selection_bias=np.linspace(0.0, 9.0, EXPERTS))
    metric, quantities = METRICS["reachability"], {"effective_rows": effective_rows(weight, None)}
    row = metric.finish(quantities, RouterFacts(plain, 0))["layers"]
    assert row["num_unreachable"] + row["num_reachable"] + row["num_reach_open"] == EXPERTS
    assert metric.finish(quantities, RouterFacts(biased, 0))["layers"] == {}
