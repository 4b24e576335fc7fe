r"""Mean square of a mixture and its gradient in one pass over samples, for descents.

What it computes is defined in ``geometry.hmoe``. Samples go through in blocks whose arrays
stay in the cache, and every loop is over the samples of one block, in vector registers: therefore
the exponential function is a polynomial here. No loop writes to an array that it reads under
another name, which would keep it out of these registers.

Source: docs/theory.md C2, C6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numba import njit

from moegeom.core.shapes import Float64
from moegeom.geometry.hmoe import Inputs, Mixture, Objective, Position
from moegeom.kernels.cpu import UNCOUNTED, kernel
from moegeom.kernels.cpu.exponential import power_of_e

#: Products are added without rounding in between ("contract"); in sums the order is free as well
#: ("reassoc"), so that they run in vector registers.
_FUSED = {**UNCOUNTED, "fastmath": {"contract"}}
_ANY_ORDER = {**UNCOUNTED, "fastmath": {"contract", "reassoc"}}

#: Samples of a block.
_BLOCK = 256

#: What the sigmoid is applied to.
_NOTHING, _VALUES, _ATTENTION = range(3)
_PLACES: Mapping[Position, int] = {"none": _NOTHING, "value": _VALUES, "sdpa": _ATTENTION}


class _Samples(NamedTuple):
    """Blocks of samples, the last one filled up with zeros."""

    x: np.ndarray
    """(blocks, dims, samples)"""
    products: np.ndarray
    """Of pairs of coordinates; (blocks, pairs, samples)."""
    targets: np.ndarray
    """(blocks, samples)"""
    count: int


class _Parts(NamedTuple):
    """Parameters, or derivatives in them."""

    weights: np.ndarray
    """(heads, channels)"""
    scores: np.ndarray
    """(heads, experts, pairs)"""
    experts: np.ndarray
    """(heads, experts, channels, dims)"""


class _Work(NamedTuple):
    """Intermediate values of a block of samples, which are the last axis."""

    mixing: np.ndarray
    value: np.ndarray
    inner: np.ndarray
    outer: np.ndarray
    score: np.ndarray
    apart: np.ndarray
    factor: np.ndarray
    part: np.ndarray


# ------------------------------------------------------------------------------------ of one block
@njit(**_FUSED)
def _fill(value, out):
    for n in range(_BLOCK):
        out[n] = value


@njit(**_FUSED)
def _copy(values, out):
    for n in range(_BLOCK):
        out[n] = values[n]


@njit(**_FUSED)
def _scaled(factor, values, out):
    for n in range(_BLOCK):
        out[n] = factor * values[n]


@njit(**_FUSED)
def _add(factor, values, out):
    for n in range(_BLOCK):
        out[n] += factor * values[n]


@njit(**_FUSED)
def _product(left, right, out):
    for n in range(_BLOCK):
        out[n] = left[n] * right[n]


@njit(**_FUSED)
def _add_product(left, right, out):
    for n in range(_BLOCK):
        out[n] += left[n] * right[n]


@njit(**_FUSED)
def _add_spread(factor, value, mean, out):
    for n in range(_BLOCK):
        out[n] += factor[n] * (value[n] - mean[n])


@njit(**_FUSED)
def _multiply_by_slope(sigmoid, out):
    for n in range(_BLOCK):
        out[n] *= sigmoid[n] * (1.0 - sigmoid[n])


@njit(**_FUSED)
def _linear(row, x, out):
    """``out`` = row . x, two coordinates at a time."""
    if row.shape[0] % 2 == 1:
        _scaled(row[0], x[0], out)
    else:
        _fill(0.0, out)
    for a in range(row.shape[0] % 2, row.shape[0], 2):
        first, second, left, right = row[a], row[a + 1], x[a], x[a + 1]
        for n in range(_BLOCK):
            out[n] += first * left[n] + second * right[n]


@njit(**_ANY_ORDER)
def _dot(left, right):
    total = 0.0
    for n in range(_BLOCK):
        total += left[n] * right[n]
    return total


@njit(**_FUSED)
def _sigmoid(z):
    """In place."""
    for n in range(_BLOCK):
        z[n] = 1.0 / (1.0 + power_of_e(-z[n]))


@njit(**_FUSED)
def _softmax_of_two(p, q):
    """In place, with one power of e."""
    for n in range(_BLOCK):
        ratio = power_of_e(q[n] - p[n])
        p[n] = 1.0 / (1.0 + ratio)
        q[n] = ratio * p[n]


@njit(**_FUSED)
def _softmax(p, total):
    """In place, over the first axis."""
    if p.shape[0] == 2:
        _softmax_of_two(p[0], p[1])
        return
    _copy(p[0], total)
    for i in range(1, p.shape[0]):
        score = p[i]
        for n in range(_BLOCK):
            total[n] = score[n] if score[n] > total[n] else total[n]
    for i in range(p.shape[0]):
        score = p[i]
        for n in range(_BLOCK):
            score[n] = power_of_e(score[n] - total[n])
    _copy(p[0], total)
    for i in range(1, p.shape[0]):
        _add(1.0, p[i], total)
    for n in range(_BLOCK):
        total[n] = 1.0 / total[n]
    for i in range(p.shape[0]):
        score = p[i]
        for n in range(_BLOCK):
            score[n] *= total[n]


# ---------------------------------------------------------------------------------- of one mixture
@njit(**_FUSED)
def _forward(samples, block, place, parts, work):
    """``apart``: what the mixture gives less the targets; 0 behind the last sample."""
    heads, experts, channels, _ = parts.experts.shape
    apart = work.apart
    _scaled(-1.0, samples.targets[block], apart)
    for h in range(heads):
        mixing = work.mixing[h]
        for i in range(experts):
            _linear(parts.scores[h, i], samples.products[block], mixing[i])
        _softmax(mixing, work.factor)
        for k in range(channels):
            out = work.inner[h, k]
            for i in range(experts):
                value = work.value[h, i, k]
                _linear(parts.experts[h, i, k], samples.x[block], value)
                if place == _VALUES:
                    _sigmoid(value)
                if i == 0:
                    _product(mixing[i], value, out)
                else:
                    _add_product(mixing[i], value, out)
            if place == _ATTENTION:
                _copy(out, work.outer[h, k])
                out = work.outer[h, k]
                _sigmoid(out)
            _add(parts.weights[h, k], out, apart)
    for n in range(min(samples.count - block * _BLOCK, _BLOCK), _BLOCK):
        apart[n] = 0.0


@njit(**_FUSED)
def _backward(samples, block, place, parts, work, slopes):
    heads, experts, channels, dims = parts.experts.shape
    factor, part = work.factor, work.part
    for h in range(heads):
        for i in range(experts):
            _fill(0.0, work.score[i])
        for k in range(channels):
            inner = work.inner[h, k]
            out = work.outer[h, k] if place == _ATTENTION else inner
            slopes.weights[h, k] += _dot(work.apart, out)
            _scaled(parts.weights[h, k], work.apart, factor)
            if place == _ATTENTION:
                _multiply_by_slope(out, factor)
            for i in range(experts):
                value = work.value[h, i, k]
                _product(factor, work.mixing[h, i], part)
                _add_spread(part, value, inner, work.score[i])
                if place == _VALUES:
                    _multiply_by_slope(value, part)
                for a in range(dims):
                    slopes.experts[h, i, k, a] += _dot(part, samples.x[block, a])
        for i in range(experts):
            for pair in range(parts.scores.shape[2]):
                products = samples.products[block, pair]
                slopes.scores[h, i, pair] += _dot(work.score[i], products)


@njit(**_FUSED)
def _sums(samples, place, parts, work, slopes):
    total = 0.0
    for block in range(samples.x.shape[0]):
        _forward(samples, block, place, parts, work)
        total += _dot(work.apart, work.apart)
        _backward(samples, block, place, parts, work, slopes)
    return total


@kernel(error_model="numpy")
def _sum_of_squares(samples, place, parts, work, slopes):
    """The sum; half of its gradient is added to ``slopes``."""
    return _sums(samples, place, parts, work, slopes)


def mean_square(
    inputs: Inputs, targets: Float64[np.ndarray, "samples"], position: Position = "none"
) -> Objective:
    r"""What least squares make small: :math:`\frac1n \sum (f(x) - y)^2`, and its gradient in all
    parameters but gates, with the sigmoid in a position of descents: ``none``, ``value``, ``sdpa``.

    Unit of the targets, squared; the same on one machine. Entries of a score matrix count as
    parameters of their own. Source: S2 section 5; docs/theory.md C6. Oracle in tests: torch.
    """
    place = _PLACES[position]
    rows, columns = np.triu_indices(inputs.shape[1])
    x = _in_blocks(inputs.T)
    products = _in_blocks((inputs[:, rows] * inputs[:, columns]).T)
    samples = _Samples(x, products, _in_blocks(targets[None])[:, 0], len(targets))
    is_twice = rows != columns

    def at(mixture: Mixture) -> tuple[float, Mixture]:
        scores, shape = mixture.scores, mixture.experts.shape
        by_pair = scores[:, :, rows, columns] + is_twice * scores[:, :, columns, rows]
        parts = _Parts(*map(np.ascontiguousarray, (mixture.weights, by_pair, mixture.experts)))
        slopes = _Parts(*(np.zeros(part.shape) for part in parts))
        total = _sum_of_squares(samples, place, parts, _work_for(*shape[:3]), slopes)
        scale = 2.0 / samples.count
        of_scores = np.empty(scores.shape)
        of_scores[:, :, rows, columns] = of_scores[:, :, columns, rows] = scale * slopes.scores
        gradient = Mixture(scale * slopes.weights, of_scores, scale * slopes.experts)
        return total / samples.count, gradient

    return at


def _in_blocks(
    rows: Float64[np.ndarray, "rows samples"],
) -> Float64[np.ndarray, "blocks rows block_samples"]:
    count, samples = rows.shape
    out = _aligned(-(-samples // _BLOCK), count, _BLOCK)
    padded = np.pad(rows, ((0, 0), (0, -samples % _BLOCK)))
    out[:] = padded.reshape(count, -1, _BLOCK).swapaxes(0, 1)
    return out


def _work_for(heads: int, experts: int, channels: int) -> _Work:
    return _Work(
        _aligned(heads, experts, _BLOCK),
        _aligned(heads, experts, channels, _BLOCK),
        _aligned(heads, channels, _BLOCK),
        _aligned(heads, channels, _BLOCK),
        _aligned(experts, _BLOCK),
        *_aligned(3, _BLOCK),
    )


def _aligned(*shape: int) -> np.ndarray:
    """Not filled; begins with a line of the cache, or every vector would lie in two of them."""
    count = math.prod(shape)
    room = np.empty(count + 8)
    first = -room.ctypes.data % 64 // room.itemsize
    return room[first : first + count].reshape(shape)
