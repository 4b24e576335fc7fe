"""Oracles: torch's casts, and for TF32 its definition in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moegeom.geometry.number_formats import NUMBER_FORMATS, format_gap, rounded_to

SINGLES = st.floats(width=32, allow_nan=False, allow_infinity=False)

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def tf32(value: np.float32) -> Fraction:
    """The nearest number of eleven significant bits, ties to the even one."""
    exact = Fraction(float(value))
    _, exponent = np.frexp(np.float32(value))
    step = Fraction(2) ** (max(int(exponent), -125) - 11)
    return round(exact / step) * step


@pytest.mark.parametrize("name", TORCH)
def test_rounding_is_that_of_torch(name: str) -> None:
    random = np.random.default_rng(0)
    values = (random.standard_normal(20_000) * 2.0 ** random.integers(-40, 40, 20_000)).astype("f4")
    values = np.concatenate([values, np.float32([0.0, -0.0, np.inf, -np.inf, 65520.0, 1e38])])
    expected = torch.from_numpy(values).to(TORCH[name]).to(torch.float32).numpy()
    np.testing.assert_array_equal(rounded_to(values, name), expected)


@given(SINGLES)
def test_tf32_keeps_eleven_bits(value: float) -> None:
    single = np.float32(value)
    found = rounded_to(np.array([single]), "tf32")[0]
    expected = tf32(single)
    if abs(expected) <= Fraction(float(np.finfo(np.float32).max)):
        assert Fraction(float(found)) == expected
    else:
        assert np.isinf(found)


@pytest.mark.parametrize("name", NUMBER_FORMATS)
@given(one=SINGLES, other=SINGLES)
def test_the_error_is_within_the_unit_and_order_survives_the_gap(
    name: str, one: float, other: float
) -> None:
    form = NUMBER_FORMATS[name]
    pair = np.array([one, other], np.float64)
    rounded = rounded_to(pair, name)
    finite = np.isfinite(rounded)
    error = np.abs(rounded[finite] - pair[finite])
    assert (error <= form.unit * np.abs(pair[finite]) + form.least).all()
    if finite.all() and one - other > format_gap(pair[:1], pair[1:], name)[0]:
        assert rounded[0] > rounded[1]


def test_what_is_not_finite_stays() -> None:
    for name in NUMBER_FORMATS:
        found = rounded_to(np.float32([np.nan, np.inf, -np.inf]), name)
        assert np.isnan(found[0])
        assert found[1:].tolist() == [np.inf, -np.inf]
