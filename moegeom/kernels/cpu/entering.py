"""Router inputs as they enter the product of an engine, and its logits in float64."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from moegeom.kernels.cpu import COUNTLESS, UNCOUNTED, kernel

#: The order of sums is free, so that they run in vector registers.
_ANY_ORDER = {"reassoc", "contract"}

#: Infinity, the largest bits of a number that is not nan.
_INFINITY = np.uint32(0x7F800000)


# ---------------------------------------------------------------------------------------- rounding
@njit(**UNCOUNTED)
def _round_row(bits, lost, out):
    """Rounds to the nearest number whose last ``lost`` bits are 0, ties to even; nan stays."""
    below_half = np.uint32((np.uint32(1) << np.uint32(lost)) // 2 - 1)
    mask = ~np.uint32((np.uint32(1) << np.uint32(lost)) - 1)
    for column in range(bits.shape[0]):
        own = np.uint32(bits[column])
        odd = np.uint32((own >> np.uint32(lost)) & np.uint32(1))
        rounded = np.uint32(np.uint32(own + np.uint32(odd + below_half)) & mask)
        is_nan = np.uint32(own & np.uint32(0x7FFFFFFF)) > _INFINITY
        out[column] = own if is_nan else rounded


@njit(**UNCOUNTED, fastmath=_ANY_ORDER)
def _lengths(own, rounded):
    """Squared lengths of the rounded row and of what rounding moved it by, in float32."""
    length, moved = np.float32(0.0), np.float32(0.0)
    for column in range(own.shape[0]):
        length += rounded[column] * rounded[column]
        change = rounded[column] - own[column]
        moved += change * change
    return length, moved


@njit(**UNCOUNTED, fastmath=_ANY_ORDER)
def _wide_lengths(own, rounded):
    """The same in float64."""
    length, moved = 0.0, 0.0
    for column in range(own.shape[0]):
        entering = np.float64(rounded[column])
        length += entering * entering
        change = np.float64(rounded[column] - own[column])
        moved += change * change
    return length, moved


@kernel(**COUNTLESS)
def _enter(values, bits, lost, out, out_bits, norm, moved):
    for token in range(values.shape[0]):
        _round_row(bits[token], lost, out_bits[token])
        length, change = _lengths(values[token], out[token])
        # a float32 sum outside [2^-100, inf) has overflowed, lost small squares, or met no number
        if not (length >= 2.0**-100 and change >= 2.0**-100 and max(length, change) < np.inf):
            length, change = _wide_lengths(values[token], out[token])
        norm[token], moved[token] = math.sqrt(length), math.sqrt(change)


def rounded_inputs(values: np.ndarray, lost: int, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fills ``out`` with float32 inputs less their last bits; |out| and |out - y| of each token."""
    values = np.ascontiguousarray(values)
    norm, moved = np.empty((2, len(values)))
    _enter(values, values.view(np.uint32), lost, out, out.view(np.uint32), norm, moved)
    return norm, moved


# ------------------------------------------------------------------------------------------ logits
@njit(**UNCOUNTED, fastmath=_ANY_ORDER)
def _dot(one, other):
    total = 0.0
    for column in range(one.shape[0]):
        total += np.float64(one[column]) * np.float64(other[column])
    return total


@kernel(**COUNTLESS)
def _wide_logits(values, bits, token, lost, weight, is_wanted, inputs, input_bits, out):
    for row in range(token.shape[0]):
        own = values[token[row]]
        if lost > 0:
            _round_row(bits[token[row]], lost, input_bits)
            own = inputs
        for expert in range(weight.shape[0]):
            if is_wanted[row, expert]:
                out[row, expert] = _dot(own, weight[expert])


def wide_logits(
    values: np.ndarray,
    token: np.ndarray,
    lost: int,
    weight: np.ndarray,
    is_wanted: np.ndarray,
    others: np.ndarray,
) -> np.ndarray:
    """Rows of ``weight`` times some tokens' inputs less their last bits, all float32, summed in
    float64 where that is wanted; ``others`` elsewhere.
    """
    values, out = np.ascontiguousarray(values), others.astype(np.float64)
    room, bits = np.empty(values.shape[1], np.float32), values.view(np.uint32)
    _wide_logits(values, bits, token, lost, weight, is_wanted, room, room.view(np.uint32), out)
    return out
