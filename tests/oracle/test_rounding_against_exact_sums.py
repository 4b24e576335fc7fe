"""Oracle: math.fsum for exact logits, ml_dtypes for bfloat16, Monte Carlo for flipping."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.rounding import bf16_noise_scale, flip_probability, logit_error_bound
from moegeom.geometry.selection import top_k


def sequential(terms):
    total = np.float32(0.0)
    for term in terms:
        total += term
    return total


def halves(terms):
    terms = terms.copy()
    while len(terms) > 1:
        if len(terms) % 2:
            terms = np.append(terms, np.float32(0.0))
        terms = terms[::2] + terms[1::2]
    return terms[0]


def float32_sums(weight, y, bias, random) -> list[float]:
    """The same logit in float32 in many orders: forwards, backwards, sorted, shuffled, in halves."""
    terms = weight * y
    orders = [terms, terms[::-1], np.sort(terms), np.sort(terms)[::-1]]
    orders += [random.permutation(terms) for _ in range(6)]
    sums = [sequential(order) for order in orders] + [halves(order) for order in orders]
    sums += [sum((sequential(terms[i::8]) for i in range(8)), np.float32(0.0))]
    # a bias may come last or first
    first = [sequential(np.append(bias, order)) for order in orders]
    return [float(np.float32(s + bias)) for s in sums] + [float(s) for s in first]


@pytest.mark.parametrize(
    "kind", ["gaussian", "cancelling", "all_positive", "wide_range", "large_bias"]
)
def test_no_two_float32_sums_are_farther_apart_than_the_bound(kind):
    random = np.random.default_rng(8)
    for _ in range(12):
        hidden = int(random.integers(2, 300))
        weight = random.standard_normal(hidden).astype(np.float32)
        y = random.standard_normal(hidden).astype(np.float32)
        bias = np.float32(random.standard_normal() * 3)
        if kind == "cancelling":
            weight[1::2] = -weight[::2][: len(weight[1::2])]
            y[1::2] = y[::2][: len(y[1::2])]
        elif kind == "all_positive":
            weight, y = np.abs(weight), np.abs(y)
        elif kind == "large_bias":
            bias *= np.float32(1e4)
        elif kind == "wide_range":
            y *= np.float32(2.0) ** random.integers(-12, 12, hidden).astype(np.float32)
        found = float32_sums(weight, y, bias, random)
        norm = np.array([math.sqrt(math.fsum(float(v) ** 2 for v in y))])
        bound = logit_error_bound(
            norm, hidden, float(np.linalg.norm(weight.astype(np.float64))), abs(float(bias))
        )
        exact = math.fsum(
            [*(float(w) * float(v) for w, v in zip(weight, y, strict=True)), float(bias)]
        )
        # the bound is for two engines, so each is within half of it of the exact logit
        farthest = np.abs(np.subtract(found, exact)).max()
        np.testing.assert_array_less(farthest, bound[0] / 2)
        np.testing.assert_array_less(max(found) - min(found), bound[0])


def test_without_input_and_bias_there_is_no_error():
    np.testing.assert_array_equal(logit_error_bound(np.zeros(2), 3, 1.0), [0.0, 0.0])


@pytest.mark.parametrize("scale", [1.0, 0.013, 700.0])
def test_the_noise_scale_is_the_measured_error_of_rounding_to_bfloat16(scale):
    """Relative errors are measured as .415 to .4247 ulps (docs/theory.md E4): within 5 %."""
    y = (scale * np.random.default_rng(9).standard_normal((40, 4096))).astype(np.float32)
    error = y.astype(ml_dtypes.bfloat16).astype(np.float64) - y
    measured = np.sqrt((error**2).mean(axis=1))
    norm = np.linalg.norm(y.astype(np.float64), axis=1)
    found = bf16_noise_scale(norm, 4096)
    np.testing.assert_allclose(found.mean(), measured.mean(), rtol=0.05)


def test_half_of_the_noise_crosses_a_boundary_it_stands_on():
    found = flip_probability(np.array([0.0, 0.0, np.inf, 1.0]), np.array([1.0, 0.0, 1.0, 0.0]))
    np.testing.assert_array_equal(found, [0.5, 0.5, 0.0, 0.0])


def test_with_one_boundary_the_flip_probability_is_the_simulated_one():
    random = np.random.default_rng(10)
    weight = random.standard_normal((2, 6))
    y = random.standard_normal((8, 6)) * 0.3
    logits = y @ weight.T
    chosen = top_k(logits, 1)
    distance = boundary_distance(logits, chosen, row_distances(weight)).distance
    noise = np.full(8, 0.5)
    steps = random.standard_normal((20000, 1, 6)) * 0.5
    flipped = ((y + steps) @ weight.T).argmax(axis=2) != chosen[:, 0]
    expected = flipped.mean(axis=0)
    np.testing.assert_allclose(
        flip_probability(distance, noise), expected, atol=4 * 0.5 / np.sqrt(20000)
    )


def test_with_many_boundaries_the_flip_probability_is_a_lower_bound():
    random = np.random.default_rng(11)
    weight = random.standard_normal((12, 8))
    y = random.standard_normal((6, 8))
    logits = y @ weight.T
    chosen = np.sort(top_k(logits, 3), axis=1)
    distance = boundary_distance(logits, top_k(logits, 3), row_distances(weight)).distance
    steps = random.standard_normal((8000, 8)) * 0.3
    for token in range(6):
        moved = np.sort(top_k((y[token] + steps) @ weight.T, 3), axis=1)
        expected = (moved != chosen[token]).any(axis=1).mean()
        found = flip_probability(distance[token : token + 1], np.array([0.3]))
        np.testing.assert_array_less(found, expected + 4 * 0.5 / np.sqrt(8000))
