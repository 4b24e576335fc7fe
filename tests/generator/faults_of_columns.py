"""Faults of loading that go along the columns of a router, or meet a part of its bias."""

from collections.abc import Mapping
from functools import partial

import numpy as np
from scipy.linalg import hadamard

from tests.generator import kinds
from tests.generator.faults_of_weights import (
    ANY,
    NO_EXPERTS,
    bias_of,
    each,
    load,
    load_bias,
    of_part,
)
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


def _scaled(draw: kinds.Draw, *factors: float) -> kinds.Made:
    """An eighth to a half of the columns times a factor: a run of them, or every nth."""
    hidden, n = draw.model.shape.hidden, draw.choice(8, 4, 2)
    by = np.ones(hidden)
    first = int(draw.rng.integers(hidden - hidden // n + 1))
    run = (
        slice(first % n, None, n) if draw.choice(True, False) else slice(first, first + hidden // n)
    )
    by[run] = draw.choice(*factors)
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
def _cast(draw: kinds.Draw) -> kinds.Made:
    """A bias as bfloat16, as whole numbers, or in 8 bits without a scale or with one."""
    cast = draw.choice(
        *(rounded, np.trunc, lambda bias: to_fp8(bias[None], "e4m3", None)[0]),
        lambda bias: to_fp8(bias[None], "e5m2", "tensor")[0],
    )
    return of_part("bias", lambda layer, bias: cast(bias))


def _reversed(draw: kinds.Draw) -> kinds.Made:
    """Of the experts that are touched the first has the bias of the last."""
    order = np.arange(draw.model.shape.experts)
    order[draw.experts] = draw.experts[::-1]
    return of_part("bias", lambda layer, bias: bias[order])


def _scaled_bias(draw: kinds.Draw) -> kinds.Made:
    factor = float(draw.choice(0.5, 0.9, 1.5, 2.0, 10.0))
    return of_part("bias", lambda layer, bias: factor * bias)


_DAMAGED = ("columns damaged", "rows damaged")
# rows times a matrix of columns are those that were stored, which read other inputs
_columns = partial(load, ANY, unseen=("inputs differ",))
_bias = partial(load_bias, NO_EXPERTS, in_part=True)
_OTHER_BIAS = ("bias damaged", "bias differs")

KINDS: Mapping[str, kinds.Kind] = {
    "columns_permuted": _columns(_permuted, *_DAMAGED),
    "columns_zeroed": _columns(lambda draw: _scaled(draw, 0.0), *_DAMAGED),
    "columns_scaled": _columns(lambda draw: _scaled(draw, 2.0, 0.5, -1.0, 1.5), *_DAMAGED),
    "columns_repeated": _columns(_repeated, *_DAMAGED),
    "rows_rotated": _columns(_rotated, *_DAMAGED),
    "buffer_transposed": load(NO_EXPERTS, _transposed, *_DAMAGED),
    "block_scales_exchanged": load(ANY, _scales_exchanged, *_DAMAGED),
    "rows_times_gain": load(ANY, _times_gain, "gain not folded", *_DAMAGED),
    "gain_moved": load(NO_EXPERTS, _gain_moved, "gain not folded"),
    "bias_part_zeroed": _bias(each("bias", np.zeros_like), *_OTHER_BIAS, "bias missing"),
    "bias_part_negated": _bias(each("bias", np.negative), *_OTHER_BIAS),
    "bias_part_cast": _bias(_cast, *_OTHER_BIAS, "bias rounded"),
    "bias_part_scaled": _bias(_scaled_bias, *_OTHER_BIAS),
    "bias_part_reversed": _bias(_reversed, *_OTHER_BIAS),
    "bias_part_stale": _bias(
        lambda draw: bias_of(draw.model.older, lambda layer: layer),
        *(*_OTHER_BIAS, "bias stale"),
        loaded="older",
    ),
    "bias_scaled": _bias(_scaled_bias, *_OTHER_BIAS, in_part=False),
}
