"""Oracles: exact sums in fractions, and each order written out in plain Python."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from moegeom.geometry.number_formats import sum_error
from moegeom.geometry.rounding import SUMMATION_ORDERS, UNIT_FLOAT32, gamma, ordered_sums

KNOWN = [name for name, order in SUMMATION_ORDERS.items() if order.sums is not None]
WIDTHS = (1, 2, 7, 64, 1000, 2048)


def drawn(width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two tokens and three rows with large terms that cancel."""
    random = np.random.default_rng(seed)
    scale = 2.0 ** random.integers(-8, 8, width)
    values, rows = (random.standard_normal((n, width)) * scale for n in (2, 3))
    return values.astype(np.float32), rows.astype(np.float32)


def exact(y: np.ndarray, w: np.ndarray) -> Fraction:
    return sum(
        (Fraction(float(a)) * Fraction(float(b)) for a, b in zip(y, w, strict=True)), Fraction()
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("order", KNOWN)
def test_sums_are_within_gamma_of_the_exact_ones(order: str, width: int) -> None:
    values, rows = drawn(width)
    found = ordered_sums(values, rows, order)
    bound = gamma(SUMMATION_ORDERS[order].depth(width), UNIT_FLOAT32)
    for t, y in enumerate(values):
        for e, w in enumerate(rows):
            size = np.abs(y.astype(np.float64) * w).sum()
            error = abs(Fraction(float(found[t, e])) - exact(y, w))
            assert error <= Fraction(bound * size)


@pytest.mark.parametrize("width", WIDTHS)
def test_any_order_of_a_matrix_product_is_within_the_error_of_a_sum(width: int) -> None:
    values, rows = drawn(width, seed=1)
    norm, longest = np.linalg.norm(values, axis=1), float(np.linalg.norm(rows, axis=1).max())
    bound = sum_error(norm, width, SUMMATION_ORDERS["any"].depth(width), longest, 0.5)
    random = np.random.default_rng(2)
    for _ in range(5):
        order = random.permutation(width)
        found = values[:, order] @ rows[:, order].T + np.float32(0.5)
        for t, y in enumerate(values):
            error = [
                abs(float(Fraction(float(found[t, e])) - exact(y, w) - Fraction(1, 2)))
                for e, w in enumerate(rows)
            ]
            assert max(error) <= bound[t]


def test_a_sequence_is_added_from_the_left() -> None:
    values, rows = drawn(50)
    found = ordered_sums(values, rows, "sequential")
    total = np.float32(0.0)
    for y, w in zip(values[1], rows[2], strict=True):
        total = np.float32(total + np.float32(y * w))
    assert found[1, 2] == total


def test_pairs_are_added_first() -> None:
    values, rows = drawn(4)
    p = values[0] * rows[0]
    expected = np.float32(p[0] + p[1]) + np.float32(p[2] + p[3])
    assert ordered_sums(values, rows, "pairwise")[0, 0] == expected


def test_the_order_of_the_router_kernel_is_threads_then_lanes_then_warps() -> None:
    width = 2048
    values, rows = (a.astype(ml_dtypes.bfloat16).astype(np.float32) for a in drawn(width))
    threads = np.zeros(128, np.float32)
    for i in range(0, width, 1024):
        for thread in range(128):
            for r in range(8):
                k = i + 8 * thread + r
                threads[thread] = np.float32(threads[thread] + values[0, k] * rows[0, k])
    total = np.float32(0.0)
    for warp in threads.reshape(4, 32):
        lanes = warp.copy()
        for step in (16, 8, 4, 2, 1):
            lanes = np.float32([lanes[n] + lanes[n ^ step] for n in range(32)])
        total = np.float32(total + lanes[0])
    assert ordered_sums(values, rows, "strided_128")[0, 0] == total


def test_an_order_that_is_not_known_has_no_sums() -> None:
    values, rows = drawn(4)
    with pytest.raises(ValueError, match="has a bound and no sums"):
        ordered_sums(values, rows, "any")
    assert gamma(2**24, UNIT_FLOAT32) == np.inf
