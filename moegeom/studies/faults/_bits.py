"""Bits of sets at several scales of noise, from one compiled product of probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numba import njit

from moegeom.core.shapes import Float64
from moegeom.geometry.set_code import FAR, OUTRIGHT, SetDistances
from moegeom.kernels.cpu import COUNTLESS, UNCOUNTED, kernel
from moegeom.kernels.cpu.exponential import power_of_e

#: Each scale of a ladder is so many times the next.
STEP = 8.0

#: Bits of naming a set up to which chances are normal numbers.
_MOST_OUTRIGHT = 900.0


def bits_by_chance(
    sets: SetDistances, largest: float, steps: int
) -> Sequence[Float64[np.ndarray, "tokens"]]:
    """As ``sets.bits`` with ties broken by chance, for scales ``largest``, ``largest`` / 8, ...

    Those are float32 numbers, these are within 1e-9 of the bits of their definition.
    """
    if sets.outright > _MOST_OUTRIGHT:
        return [sets.bits(largest / STEP**step) for step in range(steps)]
    tokens, experts = sets.wrong.shape
    bits, powers = np.empty((steps, tokens)), np.empty(experts)
    _ladder(sets.wrong, 1.0 / largest, OUTRIGHT * 2.0**-sets.outright, powers, bits)
    bits.flags.writeable = False
    return list(bits)


@njit(**UNCOUNTED)
def _first_powers(wrong, rate, powers):
    for expert in range(wrong.shape[0]):
        powers[expert] = power_of_e(np.float64(wrong[expert]) * rate)


# No number is nan; any order of factors will do.
@njit(**UNCOUNTED, fastmath={"reassoc", "contract", "nnan"})
def _product(powers, most):
    """Of 1 + e^x, and every power taken to its eighth."""
    product = 1.0
    for expert in range(powers.shape[0]):
        power = powers[expert]
        power = most if power > most else power
        product *= 1.0 + power
        square = power * power
        fourth = square * square
        powers[expert] = fourth * fourth
    return product


@kernel(**COUNTLESS)
def _ladder(wrong, rate, outright, powers, bits):
    most = math.exp(FAR)
    for token in range(wrong.shape[0]):
        _first_powers(wrong[token], rate, powers)
        for step in range(bits.shape[0]):
            # a product beyond the numbers leaves a chance of 0
            chance = (1.0 - OUTRIGHT) / _product(powers, most) + outright
            bits[step, token] = max(-math.log2(chance), 0.0)
