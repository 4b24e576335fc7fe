"""Oracle: rows drawn and cast by ml_dtypes and numpy, and quantised the way people do it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.core.router import mantissa_bits
from moegeom.geometry.number_formats import WINDOW, expected_window_levels, window_levels

FLOATS = ["F16", "BF16", "F8_E4M3", "F8_E5M2", "F32", "F64"]


@pytest.fixture
def rows():
    return np.random.default_rng(8).standard_normal((2000, 512))


@pytest.mark.parametrize("dtype", FLOATS)
def test_mantissa_bits_are_those_of_ml_dtypes(dtype):
    stored = DTYPES[dtype].numpy
    assert stored is not None
    assert mantissa_bits(dtype) == mantissa_bits(dtype.lower()) == ml_dtypes.finfo(stored).nmant


@pytest.mark.parametrize("dtype", ["I8", "U32", "F8_E8M0", "", "bfloat16"])
def test_what_is_no_float_of_a_router_has_no_mantissa_bits(dtype):
    assert mantissa_bits(dtype) is None


@pytest.mark.parametrize("scale", [1.0, 1.37, 3.9])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gaussian_rows_hold_the_expected_values(dtype, scale, rows):
    stored = (scale * rows).astype(DTYPES[dtype].numpy).astype(np.float64)
    bits = mantissa_bits(dtype)
    assert bits is not None
    expected = expected_window_levels(scale, bits)
    # 32 000 windows: the error of their mean is below .01; subnormals take .05 from 8-bit floats
    np.testing.assert_allclose(window_levels(stored).mean(), expected, atol=0.1)


def quantised(rows, bits, group, is_symmetric):
    """Round to nearest in groups along a row: absmax, or least to largest with a zero point."""
    grouped = rows.reshape(len(rows), -1, group)
    least, largest = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
    if is_symmetric:
        step = np.maximum(-least, largest) / (2 ** (bits - 1) - 1)
        return (np.rint(grouped / step) * step).reshape(rows.shape)
    step = (largest - least) / (2**bits - 1)
    return (np.rint((grouped - least) / step) * step + least).reshape(rows.shape)


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 512])
@pytest.mark.parametrize(("bits", "most"), [(4, 16), (2, 4)])
def test_few_bit_integers_hold_no_more_than_their_levels(bits, most, group, is_symmetric, rows):
    found = window_levels(quantised(rows, bits, group, is_symmetric))
    np.testing.assert_array_less(found, most + 1e-12)
    # so that bfloat16 storage of such rows shows half the values that it should
    expected = expected_window_levels(1.0, 7)
    np.testing.assert_array_less(found.mean() / expected, 0.51)


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 128, 512])
def test_eight_bit_integers_hold_28_to_30_values(group, is_symmetric, rows):
    found = window_levels(quantised(rows, 8, group, is_symmetric)).mean()
    np.testing.assert_array_less([28.0, found], [found, 30.0])


def test_rows_hold_the_stated_values_in_bfloat16_and_in_8_bit_floats(rows):
    for dtype, stated in ((ml_dtypes.bfloat16, 31.6), (ml_dtypes.float8_e4m3fn, 26.0)):
        found = window_levels(rows.astype(dtype).astype(np.float64)).mean()
        np.testing.assert_allclose(found, stated, atol=0.1)


def test_casting_few_levels_to_a_finer_dtype_does_not_hide_them(rows):
    coarse = quantised(rows, 4, 128, True).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_less(window_levels(coarse), 16.5)
    np.testing.assert_array_equal(expected_window_levels(1.0, 23), WINDOW)
