"""Rows as codes are what each group gives by itself."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from moegeom.geometry.codes import FLOATS, Code, decoded, in_eight_bits


def rows(seed: int = 0, experts: int = 5, hidden: int = 37) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((experts, hidden)).astype(np.float32)


def groups(weight: np.ndarray, height: int, width: int):
    height, width = height or len(weight), width or weight.shape[1]
    for top in range(0, len(weight), height):
        for left in range(0, weight.shape[1], width):
            yield slice(top, top + height), slice(left, left + width)


@pytest.mark.parametrize(("height", "width"), [(0, 0), (1, 0), (0, 1), (1, 16), (2, 8)])
@pytest.mark.parametrize(("bits", "largest"), [(8, 127.0), (8, 127.5), (4, 7.0), (4, 8.0)])
def test_signed_integers_are_rounded_group_by_group(height, width, bits, largest):
    weight, half = rows(), 2 ** (bits - 1)
    found = decoded(weight, Code(f"int{bits}", height, width, largest))
    for part in groups(weight, height, width):
        scale = np.abs(weight[part]).max() / np.float32(largest)
        expected = np.clip(np.round(weight[part] / scale), -half, half - 1) * scale
        np.testing.assert_allclose(found[part], expected, rtol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(0, 0), (1, 0), (1, 8)])
def test_unsigned_integers_take_as_many_values_as_they_have_and_are_half_a_step_off(height, width):
    weight = rows(1)
    found = decoded(weight, Code("uint4", height, width, None))
    for part in groups(weight, height, width):
        values = weight[part]
        # a group that the border cuts holds a zero beside its own numbers
        low, high = values.min(), values.max()
        step = (max(high, 0.0) - min(low, 0.0)) / 15.0
        assert len(np.unique(found[part])) <= 16
        assert np.abs(found[part] - values).max() <= 1.01 * step


@pytest.mark.parametrize(
    ("name", "kind"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)]
)
def test_eight_bit_floats_are_casts_of_scaled_rows(name, kind):
    weight = rows(2)
    plain = decoded(weight, Code(name, 0, 0, None))
    np.testing.assert_array_equal(plain, weight.astype(kind).astype(np.float32))
    most = float(ml_dtypes.finfo(kind).max)
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(most)
    expected = (weight / scale).astype(kind).astype(np.float32) * scale
    np.testing.assert_allclose(decoded(weight, Code(name, 1, 0, most)), expected, rtol=1e-6)
    stored = decoded(weight, Code(name, 1, 0, most, is_stored=True))
    np.testing.assert_array_equal(stored, expected.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_zeros_stay_zeros():
    weight = np.zeros((3, 8), np.float32)
    for form in ("int8", "uint4", "e4m3"):
        np.testing.assert_array_equal(decoded(weight, Code(form, 1, 0, 7.0)), weight)


@pytest.mark.parametrize("form", FLOATS)
def test_eight_bits_are_those_of_a_cast_for_every_kind_of_number(form):
    halves = np.arange(2**16, dtype=np.uint32) << 16
    random = np.random.default_rng(3).integers(0, 2**32, 2**17, dtype=np.uint32)
    # halfway between two numbers, and one bit to either side of it
    bits = np.concatenate([halves, halves + 1, halves - 1, random])
    with np.errstate(all="ignore"):
        expected = bits.view(np.float32).astype(FLOATS[form]).astype(np.float32)
    found = in_eight_bits(bits.view(np.float32), form)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))
