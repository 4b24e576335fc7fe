"""Powers of e for loops that run in vector registers, which those over ``math.exp`` do not."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from moegeom.kernels.cpu import UNCOUNTED

#: ln 2 in two parts: multiples of the first are exact.
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
_PER_LN2 = 1.0 / math.log(2.0)
#: Added to a number of less than 2^51, leaves it rounded to an integer in the low bits.
_ROUNDER = 1.5 * 2.0**52
#: Numbers are held between these, where a power of e is a normal number.
LEAST, MOST = -708.0, 709.0
#: Where an exponent stands in the bits of a number, and what is added to it there.
_SHIFT, _BIAS = np.int64(52), np.int64(1023)


# Never with "reassoc", which would take the rounding to an integer away.
@njit(**UNCOUNTED, fastmath={"contract"})
def power_of_e(z: float) -> float:
    r"""Power of e of a number that is held in [-708, 709].

    :math:`e^z = 2^k e^r` with :math:`|r| \le \ln 2 / 2` and 13 terms of the series of :math:`e^r`.
    The next is less than :math:`(\ln 2 / 2)^{13} / 13! < 2^{-52}`; with rounding the error stays
    below 4 units in the last place.
    """
    clamped = LEAST if z < LEAST else z
    clamped = MOST if clamped > MOST else clamped
    whole = np.float64(clamped * _PER_LN2 + _ROUNDER)
    k = whole - _ROUNDER
    r = (clamped - k * _LN2_HIGH) - k * _LN2_LOW
    p = 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    power = np.int64((whole.view(np.int64) + _BIAS) << _SHIFT)
    return (1.0 + (r + r * r * p)) * power.view(np.float64)
