"""The null: random rows of the same lengths, the same every time."""

import dataclasses

import numpy as np
import pytest

from moegeom.core.router import Rule
from moegeom.variants.random_router import random_router
from tests.unit.scan.routers import SOFTMAX, normal_rows, router_with


@pytest.fixture
def router():
    weight = normal_rows(16, 300)
    weight[3] *= 40.0
    weight[5] = 0.0
    return router_with(weight, Rule(4, "softmax", SOFTMAX), logit_bias=np.ones(16, np.float32))


def lengths(router) -> np.ndarray:
    return np.linalg.norm(router.weight.astype(np.float64), axis=1)


def test_rows_keep_their_lengths_and_all_else_stays(router):
    null = random_router(router, 0)
    np.testing.assert_allclose(lengths(null), lengths(router), rtol=1e-6)
    assert (null.rule, null.name, null.weight.dtype) == (router.rule, router.name, np.float32)
    np.testing.assert_array_equal(null.logit_bias, router.logit_bias)


def test_directions_are_new_and_unrelated(router):
    null = random_router(router, 0)
    is_long = lengths(router) > 0
    cosine = (null.weight * router.weight).sum(axis=1)[is_long] / lengths(router)[is_long] ** 2
    np.testing.assert_array_less(np.abs(cosine), 5 / np.sqrt(300))
    gram = null.weight[is_long] @ null.weight[is_long].T
    gram /= np.sqrt(np.outer(np.diag(gram), np.diag(gram)))
    np.testing.assert_array_less(np.abs(gram[~np.eye(15, dtype=bool)]), 5.5 / np.sqrt(300))


def test_rows_are_those_of_the_seed_and_the_layer(router):
    first = random_router(router, 7)
    np.testing.assert_array_equal(random_router(router, 7).weight, first.weight)
    other_layer = random_router(dataclasses.replace(router, name="text/3"), 7)
    for other in (random_router(router, 8), other_layer):
        same = (first.weight == other.weight).mean(axis=1)[lengths(router) > 0]
        np.testing.assert_array_less(same, 0.01)
