"""Products of output and value matrices: spectra, dead heads, heads that are alike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moegeom.geometry.value_output import (
    alike_heads,
    dead_heads,
    product_spectra,
    spectrum_rank,
)


def heads(seed: int, values: int, number: int, channels: int, hidden: int, inputs: int):
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((values, channels, inputs)),
        random.standard_normal((number, hidden, channels)),
    )


def products(values, outputs):
    group = len(outputs) // len(values)
    return [outputs[h] @ values[h // group] for h in range(len(outputs))]


@pytest.mark.parametrize(
    ("hidden", "inputs"), [(20, 30), (5, 30), (20, 3)], ids=["wide", "few rows", "few columns"]
)
def test_spectra_are_those_of_the_explicit_product(hidden, inputs):
    values, outputs = heads(1, 2, 6, 8, hidden, inputs)
    found = product_spectra(values, outputs)
    for spectrum, product in zip(found, products(values, outputs), strict=True):
        explicit = np.zeros(8)
        singular = np.linalg.svd(product, compute_uv=False)[:8]
        explicit[: len(singular)] = singular
        np.testing.assert_allclose(spectrum, explicit, atol=1e-12 * singular[0])


def test_rank_is_that_of_the_explicit_product():
    values, outputs = heads(2, 3, 3, 8, 40, 40)
    values[1, 5:] = values[1, :3]
    outputs[2, :, 1:] = outputs[2, :, :1]
    ranks = [spectrum_rank(spectrum)[0] for spectrum in product_spectra(values, outputs)]
    explicit = [np.linalg.matrix_rank(p, rtol=1e-7) for p in products(values, outputs)]
    assert ranks == explicit == [8, 5, 1]


def test_effective_rank_is_the_number_of_equal_values_and_the_exponential_of_an_entropy():
    assert spectrum_rank(np.array([3.0, 3.0, 3.0, 0.0])) == (3, pytest.approx(3.0))
    share = np.array([4.0, 2.0, 1.0]) / 7.0
    expected = math.exp(-sum(p * math.log(p) for p in share))
    assert spectrum_rank(np.array([4.0, 2.0, 1.0])) == (3, pytest.approx(expected))
    assert spectrum_rank(np.zeros(4)) == (0, 0.0)


def test_a_head_is_dead_below_a_hundredth_of_the_median_and_at_zero():
    norms = np.array([1.0, 1.0, 1.0, 0.0099, 0.0101])
    assert dead_heads(norms).tolist() == [False, False, False, True, False]
    assert dead_heads(np.array([0.0, 0.0, 0.0, 5.0])).tolist() == [True, True, True, False]


def test_heads_with_one_product_are_alike_however_their_channels_are_mixed():
    values, outputs = heads(3, 5, 5, 6, 30, 30)
    mixing = np.random.default_rng(4).standard_normal((6, 6))
    values[4] = mixing @ values[1]
    outputs[4] = -3.0 * outputs[1] @ np.linalg.inv(mixing)
    outputs[2] *= 0.0
    found = alike_heads(values, outputs, least=-1.0)
    assert all(pair[2] > 0.8 for pair in found)  # only those that agree on probes are looked at
    assert alike_heads(values, outputs) == []  # the opposite is not alike
    outputs[4] *= -1.0
    ((one, two, cosine),) = alike_heads(values, outputs)
    assert (one, two) == (1, 4)
    assert cosine == pytest.approx(1.0, abs=1e-12)


def test_the_cosine_is_that_of_the_explicit_products():
    values, outputs = heads(5, 2, 4, 6, 30, 30)
    outputs[1] = outputs[0] + 0.1 * np.random.default_rng(6).standard_normal((30, 6))
    ((one, two, cosine),) = alike_heads(values, outputs, least=0.9)
    first, second = (products(values, outputs)[h].ravel() for h in (one, two))
    explicit = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert 0.99 < cosine < 0.999
    assert cosine == pytest.approx(explicit, abs=1e-12)
