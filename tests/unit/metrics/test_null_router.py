"""The null: random rows of the same lengths, the same every time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.variants.random_router import random_router


@pytest.fixture
def router():
    weight = np.random.default_rng(0).standard_normal((16, 300)).astype(np.float32)
    weight[3] *= 40.0
    weight[5] = 0.0
    return Router(
        name="text/2",
        stack="text",
        layer=2,
        weight=weight,
        rule=Rule(4, "softmax", Weights("scores")),
        provenance=Provenance("made", ("gate.weight",), "made.safetensors", "F32"),
        logit_bias=np.ones(16, np.float32),
    )


def lengths(router) -> np.ndarray:
    return np.linalg.norm(router.weight.astype(np.float64), axis=1)


def test_rows_keep_their_lengths(router):
    np.testing.assert_allclose(lengths(random_router(router, 0)), lengths(router), rtol=1e-6)


def test_directions_are_new_and_unrelated(router):
    null = random_router(router, 0)
    kept = lengths(router) > 0
    cosine = (null.weight * router.weight).sum(axis=1)[kept] / lengths(router)[kept] ** 2
    np.testing.assert_array_less(np.abs(cosine), 5 / np.sqrt(300))
    gram = null.weight[kept] @ null.weight[kept].T
    gram /= np.sqrt(np.outer(np.diag(gram), np.diag(gram)))
    np.testing.assert_array_less(np.abs(gram[~np.eye(15, dtype=bool)]), 5.5 / np.sqrt(300))


def test_a_seed_gives_the_same_rows_every_time(router):
    first, again = random_router(router, 7), random_router(router, 7)
    np.testing.assert_array_equal(first.weight, again.weight)


def test_seeds_and_layers_differ(router):
    first = random_router(router, 7)
    other_layer = random_router(dataclasses.replace(router, name="text/3"), 7)
    kept = lengths(router) > 0
    for other in (random_router(router, 8), other_layer):
        same = (first.weight == other.weight).mean(axis=1)[kept]
        np.testing.assert_array_less(same, 0.01)


def test_rule_biases_and_dtype_stay(router):
    null = random_router(router, 0)
    assert (null.rule, null.name, null.weight.dtype) == (router.rule, router.name, np.float32)
    np.testing.assert_array_equal(null.logit_bias, router.logit_bias)
