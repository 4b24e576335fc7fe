"""Orders in which engines add up a logit: their error bounds, and sums in a known order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32

#: Products that one instruction of a matrix unit adds up; all of its sums are taken as sequential.
_BLOCK = 16

#: Threads and lanes of the kernel whose order is known.
_THREADS, _LANES, _RUN = 128, 32, 8


@dataclass(frozen=True)
class SummationOrder:
    """``depth(D)`` roundings at most on the way of any of D products into the sum.

    ``sums`` computes in that order, in float32; None where the order is not known.
    """

    name: str
    depth: Callable[[int], int]
    sums: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None


def gamma(depth: int, unit: float) -> float:
    r"""The classical :math:`\gamma_n = n u / (1 - n u)`; inf where n u reaches 1.

    A sum of products in floating point is off by at most :math:`\gamma_n \sum_d |w_d y_d|` where
    each product takes part in at most n roundings. Source: docs/theory.md E4.
    """
    terms = depth * unit
    return terms / (1.0 - terms) if terms < 1.0 else float("inf")


def _sequential(
    values: Float[np.ndarray, "tokens hidden"], weight: Float[np.ndarray, "experts hidden"]
) -> Float32[np.ndarray, "tokens experts"]:
    total = np.zeros((len(values), len(weight)), np.float32)
    for d in range(values.shape[1]):
        total += values[:, d, None] * weight[None, :, d]
    return total


def _float64(
    values: Float[np.ndarray, "tokens hidden"], weight: Float[np.ndarray, "experts hidden"]
) -> Float32[np.ndarray, "tokens experts"]:
    """Float64 accumulation, narrowed at the end."""
    return (values.astype(np.float64) @ weight.T.astype(np.float64)).astype(np.float32)


def _pairwise(
    values: Float[np.ndarray, "tokens hidden"], weight: Float[np.ndarray, "experts hidden"]
) -> Float32[np.ndarray, "tokens experts"]:
    out = np.empty((len(values), len(weight)), np.float32)
    for token, row in enumerate(values):  # one at a time: the products of all are too many
        products = row * weight
        while products.shape[1] > 1:
            if products.shape[1] % 2:
                products = np.concatenate([products, np.zeros_like(products[:, :1])], axis=1)
            products = products[:, 0::2] + products[:, 1::2]
        out[token] = products[:, 0]
    return out


def _strided(
    values: Float[np.ndarray, "tokens hidden"], weight: Float[np.ndarray, "experts hidden"]
) -> Float32[np.ndarray, "tokens experts"]:
    """128 threads take runs of 8 in turn; a butterfly adds 32 lanes, then come 4 warps in order."""
    width = -(-values.shape[1] // (_THREADS * _RUN)) * _THREADS * _RUN
    padding = ((0, 0), (0, width - values.shape[1]))
    y, w = (np.pad(a, padding).reshape(len(a), -1, _THREADS, _RUN) for a in (values, weight))
    lanes = np.zeros((len(values), len(weight), _THREADS), np.float32)
    for i in range(y.shape[1]):
        for r in range(_RUN):
            lanes += y[:, None, i, :, r] * w[None, :, i, :, r]
    lanes = lanes.reshape(*lanes.shape[:2], _THREADS // _LANES, _LANES)
    for step in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., np.arange(_LANES) ^ step]
    total = np.zeros(lanes.shape[:2], np.float32)
    for warp in range(lanes.shape[2]):
        total = total + lanes[:, :, warp, 0]
    return total


#: Orders by the name that presets use. Depths count the rounding of a product as one.
SUMMATION_ORDERS: dict[str, SummationOrder] = {
    order.name: order
    for order in (
        SummationOrder("any", lambda width: width),
        # blocks of 16 products one after the other: what matrix units do, whichever the tiling
        SummationOrder("blocks_of_16", lambda width: -(-width // _BLOCK) + _BLOCK + 1),
        SummationOrder("sequential", lambda width: width, _sequential),
        SummationOrder("float64", lambda width: 1, _float64),
        SummationOrder("pairwise", lambda width: max(width - 1, 1).bit_length() + 1, _pairwise),
        SummationOrder(
            "strided_128",
            lambda width: -(-width // _THREADS) + _RUN + 5 + _THREADS // _LANES + 1,
            _strided,
        ),
    )
}


def ordered_sums(
    values: Float[np.ndarray, "tokens hidden"],
    weight: Float[np.ndarray, "experts hidden"],
    order: str,
) -> Float32[np.ndarray, "tokens experts"]:
    r"""Logits :math:`W y` in float32, every product rounded and then added in the order ``order``.

    Products of two bfloat16 numbers are exact, so that a fused multiply-add gives the same. The
    sums differ from the exact ones by at most :math:`\gamma_n \sum_d |w_d y_d|`, n the depth of
    the order (``float64``: rounded once, at the end). Slow: meant for the few tokens that a bound
    leaves open.

    Raises
    ------
    KeyError
        For an order that is not known.
    ValueError
        For one that has a bound only.

    Source: docs/theory.md E4. Oracle in tests: sums of Fractions, the order written out in Python.
    """
    sums = SUMMATION_ORDERS[order].sums
    if sums is None:
        raise ValueError(f"order {order} has a bound and no sums")
    return sums(values.astype(np.float32), weight.astype(np.float32))
