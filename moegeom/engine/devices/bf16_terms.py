"""Router rows as bfloat16, so that tensor cores can multiply them without losing a bit."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, UInt16


def bf16_terms(
    weight: Float32[np.ndarray, "experts hidden"],
) -> list[UInt16[np.ndarray, "experts hidden"]]:
    r"""Rows that add up to ``weight``, as the bits of bfloat16: one, or three of falling size.

    A bfloat16 keeps 8 of the 24 bits of a float32. One term where nothing is cut off; else each
    term is what the ones before it leave, cut off after 8 bits: :math:`W = T_1 + T_2 + T_3`
    exactly for weights of at least 2^-110 in size, and within 2^-133 below. Products of bfloat16
    are exact in float32, so a sum of the three products has the accuracy of a float32 one.
    """
    terms, rest = [], np.ascontiguousarray(weight)
    while len(terms) < 3:
        bits = rest.view(np.uint32)
        terms.append((bits >> 16).astype(np.uint16))
        rest = rest - (bits & np.uint32(0xFFFF0000)).view(np.float32)
        if not rest.any():
            break
    if len(terms) == 2:  # the kernel knows one term and three
        terms.append(np.zeros_like(terms[0]))
    return terms
