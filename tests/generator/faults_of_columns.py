"""Faults of loading that go along the columns of a router, or meet a part of its bias."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from scipy.linalg import hadamard

from tests.generator import kinds
from tests.generator.faults_of_weights import ANY, NO_EXPERTS, load, load_bias, of_part
from tests.generator.model import rounded, to_fp8


# ------------------------------------------------------------------------------------------ columns
def order_of(draw: kinds.Draw, number: int) -> np.ndarray:
    """Blocks that are reversed, exchanged by halves, (de-)interleaved, moved: inside or whole."""
    width = draw.choice(*(one for one in (8, 16, number // 2, number) if one <= number))
    block = np.arange(width)
    halves = (block.reshape(2, -1).T.ravel(), block.reshape(-1, 2).T.ravel())
    inside = draw.choice(block[::-1], np.roll(block, width // 2), *halves, np.roll(block, 1))
    if draw.choice(True, False):
        return (np.arange(0, number, width)[:, None] + inside).ravel()
    return np.arange(number).reshape(width, -1)[inside].ravel()


def _permuted(draw: kinds.Draw) -> kinds.Made:
    order = order_of(draw, draw.model.shape.hidden)
    return of_part("weight", lambda layer, weight: weight[:, order])


def columns_of(draw: kinds.Draw) -> np.ndarray:
    """An eighth to a half of the columns: a run of them, or every nth."""
    hidden = draw.model.shape.hidden
    n = draw.choice(8, 4, 2)
    if draw.choice(True, False, False):
        return np.arange(int(draw.rng.integers(n)), hidden, n)
    return int(draw.rng.integers(hidden - hidden // n + 1)) + np.arange(hidden // n)


def _scaled(draw: kinds.Draw, *factors: float) -> kinds.Made:
    columns, factor = columns_of(draw), float(draw.choice(*factors))
    by = np.where(np.isin(np.arange(draw.model.shape.hidden), columns), factor, 1.0)
    return of_part("weight", lambda layer, weight: weight * by)


def _repeated(draw: kinds.Draw) -> kinds.Made:
    """A run of columns is loaded once more in the place of the run behind it."""
    hidden = draw.model.shape.hidden
    size = hidden // draw.choice(8, 4, 2)
    at = int(draw.rng.integers(hidden - 2 * size + 1)) + size + np.arange(size)
    order = np.arange(hidden)
    order[at] -= size
    return of_part("weight", lambda layer, weight: weight[:, order])


def _rotated(draw: kinds.Draw) -> kinds.Made:
    """Rows in the basis of rotated inputs, which nobody has rotated."""
    size = draw.choice(4, 8, 16, 32)
    signs = draw.rng.choice([-1.0, 1.0], size) if draw.choice(True, False) else np.ones(size)
    rotation = signs[:, None] * hadamard(size) / np.sqrt(size)

    def change(layer: int, weight: np.ndarray) -> np.ndarray:
        return (weight.reshape(len(weight), -1, size) @ rotation).reshape(weight.shape)

    return of_part("weight", change)


def _transposed(draw: kinds.Draw) -> kinds.Made:
    """The buffer of W^T read as that of W, or that of W as that of W^T."""
    if draw.choice(True, False):
        return of_part("weight", lambda layer, weight: weight.T.reshape(weight.shape))
    return of_part("weight", lambda layer, weight: weight.reshape(weight.T.shape).T)


def _scales_exchanged(draw: kinds.Draw) -> kinds.Made:
    """Integers of blocks of rows and columns, times the scales of other blocks."""
    tall, wide = draw.choice(1, 2, 4), draw.choice(4, 8, 16)
    how = draw.choice("moved", "reversed", "transposed")

    def change(layer: int, weight: np.ndarray) -> np.ndarray:
        blocks = weight.reshape(len(weight) // tall, tall, -1, wide)
        scale = np.abs(blocks).max(axis=(1, 3)) / 127.0
        scale = np.where(scale > 0, scale, 1.0)
        integers = np.round(blocks / scale[:, None, :, None])
        others = {
            "moved": np.roll(scale, 1, axis=1),
            "reversed": scale[:, ::-1],
            "transposed": scale.T.reshape(scale.shape),
        }
        return (integers * others[how][:, None, :, None]).reshape(weight.shape)

    return of_part("weight", change)


# --------------------------------------------------------------------------------------------- gain
def _times_gain(draw: kinds.Draw) -> kinds.Made:
    """The gain of this norm, or of that of another layer, folded into rows that have no need."""
    power, at = draw.choice(1.0, -1.0, 0.5), draw.another_layer()
    is_own = draw.choice(True, False)

    def change(layer: int, weight: np.ndarray) -> np.ndarray:
        gain = draw.model.routers[layer if is_own else at(layer)].gain
        return weight * gain**power

    return of_part("weight", change)


def _gain_moved(draw: kinds.Draw) -> kinds.Made:
    hidden = draw.model.shape.hidden
    if draw.choice(True, False):
        order = np.roll(np.arange(hidden), draw.choice(1, 2, 8, -1))
    else:
        order = order_of(draw, hidden)
    return of_part("gain", lambda layer, gain: gain[order])


# --------------------------------------------------------------------------------------------- bias
def _part(
    draw: kinds.Draw, change: Callable[[int, np.ndarray], np.ndarray], whole: bool = False
) -> kinds.Made:
    """The bias of a half, a block, a few or one of the experts (or of the ``whole``), changed."""
    every = np.arange(draw.model.shape.experts)
    which = draw.choice(*kinds.EXPERTS, "one", *(("whole",) if whole else ()))
    if which in kinds.EXPERTS:
        some = kinds.EXPERTS[which](draw.ground)
    else:
        some = every if which == "whole" else draw.rng.permutation(every)[:1]
    is_some = np.isin(every, some)
    return of_part("bias", lambda layer, bias: np.where(is_some, change(layer, bias), bias))


def _cast(draw: kinds.Draw) -> kinds.Made:
    casts: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
        rounded,
        np.trunc,
        lambda bias: to_fp8(bias[None], "e4m3", None)[0],
        lambda bias: to_fp8(bias[None], "e5m2", "tensor")[0],
    )
    cast = draw.choice(*casts)
    return _part(draw, lambda layer, bias: cast(bias))


def _bias_scaled(draw: kinds.Draw) -> kinds.Made:
    factor = float(draw.choice(0.5, 0.9, 1.5, 2.0, 10.0))
    return _part(draw, lambda layer, bias: factor * bias, whole=True)


def _bias_older(draw: kinds.Draw) -> kinds.Made:
    def older(layer: int, bias: np.ndarray) -> np.ndarray:
        there = draw.model.older[layer].bias
        assert there is not None
        return there

    return _part(draw, older)


def _reversed(draw: kinds.Draw) -> kinds.Made:
    """A block of the bias stands in reverse."""
    index = np.arange(draw.model.shape.experts)
    some = kinds.EXPERTS[draw.choice("expert_block", "expert_half")](draw.ground)
    index[some] = some[::-1]
    return of_part("bias", lambda layer, bias: bias[index])


_columns = partial(load, ANY)
_DAMAGED = ("columns damaged", "rows damaged")
_bias = partial(load_bias, NO_EXPERTS)

KINDS: Mapping[str, kinds.Kind] = {
    "columns_permuted": _columns(_permuted, *_DAMAGED, unseen=("inputs differ",)),
    "columns_zeroed": _columns(
        lambda draw: _scaled(draw, 0.0), *_DAMAGED, unseen=("inputs differ",)
    ),
    "columns_scaled": _columns(
        lambda draw: _scaled(draw, 2.0, 0.5, -1.0, 1.5), *_DAMAGED, unseen=("inputs differ",)
    ),
    "columns_repeated": _columns(_repeated, *_DAMAGED, unseen=("inputs differ",)),
    "rows_rotated": _columns(_rotated, *_DAMAGED, unseen=("inputs differ",)),
    "buffer_transposed": load(NO_EXPERTS, _transposed, *_DAMAGED),
    "block_scales_exchanged": _columns(_scales_exchanged, *_DAMAGED),
    "rows_times_gain": _columns(_times_gain, "gain not folded", *_DAMAGED),
    "gain_moved": load(NO_EXPERTS, _gain_moved, "gain not folded"),
    "bias_part_zeroed": _bias(
        lambda draw: _part(draw, lambda layer, bias: np.zeros_like(bias)),
        *("bias damaged", "bias differs", "bias missing"),
    ),
    "bias_part_cast": _bias(_cast, "bias rounded", "bias damaged", "bias differs"),
    "bias_scaled": _bias(_bias_scaled, "bias damaged", "bias differs"),
    "bias_part_negated": _bias(
        lambda draw: _part(draw, lambda layer, bias: -bias), "bias damaged", "bias differs"
    ),
    "bias_part_stale": _bias(
        _bias_older, "bias stale", "bias damaged", "bias differs", loaded="older"
    ),
    "bias_part_reversed": _bias(_reversed, "bias damaged", "bias differs"),
}
