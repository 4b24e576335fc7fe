"""Faults of loading: rows, biases and gains that are not those of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from ml_dtypes import bfloat16

from tests.generator.kinds import WITH_BIAS, Draw, Kind, Made
from tests.generator.model import INITIALISER_RANGE, RouterTensors, rounded
from tests.generator.rounding import Fp8, Integers, to_fp8, to_integers
from tests.generator.scopes import EXPERTS, LAYERS, TOKENS
from tests.generator.words import Operator, Scope


# --------------------------------------------------------------------------------------------- rows
def _taken(draw: Draw, index_at: Callable[[int], np.ndarray], **drawn: str) -> Made:
    """Rows by an index for each layer; in half of the cases the bias goes with them."""
    with_bias = bool(draw.rng.integers(2)) and draw.model.rule.bias != "none"

    def change(layer: int, tensors: RouterTensors) -> RouterTensors:
        index = index_at(layer)
        bias = tensors.bias
        if with_bias and bias is not None:
            bias = bias[index]
        return replace(tensors, weight=tensors.weight[index], bias=bias)

    return change, drawn | {"with_bias": str(with_bias)}


def _permuted(draw: Draw) -> Made:
    def index_at(layer: int) -> np.ndarray:
        index = np.arange(draw.model.shape.experts)
        index[draw.experts] = draw.rng_at(layer).permutation(draw.experts)
        return index

    return _taken(draw, index_at)


def _interleaved(draw: Draw) -> Made:
    """Ranks give their rows in turn, where one after the other was meant."""
    ranks = draw.choice(2, 4)
    index = np.arange(draw.model.shape.experts).reshape(ranks, -1).T.ravel()
    return _taken(draw, lambda layer: index, ranks=str(ranks))


def _shifted(draw: Draw) -> Made:
    shift = draw.choice(1, 2, draw.model.shape.experts // 4, -1)
    index = np.roll(np.arange(draw.model.shape.experts), shift)
    return _taken(draw, lambda layer: index, shift=str(shift))


def _duplicated(draw: Draw) -> Made:
    """The second half of the rows that are touched is loaded from the first."""
    experts = draw.experts
    half = len(experts) // 2
    index = np.arange(draw.model.shape.experts)
    index[experts[len(experts) - half :]] = experts[:half]
    return _taken(draw, lambda layer: index)


def _some_rows(draw: Draw, most: int) -> np.ndarray:
    """The experts of the scope; of a scope without experts a few."""
    if draw.reach.experts is not None:
        return draw.experts
    return draw.rng.permutation(draw.experts)[: int(draw.rng.integers(1, most + 1))]


def _zeroed(draw: Draw) -> Made:
    rows = _some_rows(draw, max(1, draw.model.shape.experts // 4))
    return _row_factor(rows, 0.0)


def _row_scaled(draw: Draw) -> Made:
    return _row_factor(_some_rows(draw, 1)[:1], draw.choice(0.5, 0.8, 1.25, 2.0))


def _row_factor(rows: np.ndarray, factor: float) -> Made:
    def change(layer: int, tensors: RouterTensors) -> RouterTensors:
        weight = tensors.weight.copy()
        weight[rows] *= factor
        return replace(tensors, weight=weight)

    return change, {"rows": " ".join(map(str, np.sort(rows))), "factor": str(factor)}


# ------------------------------------------------------------------------------------------ weights
def _of_weight(
    change: Callable[[int, np.ndarray], np.ndarray], **drawn: str
) -> tuple[Callable[[int, RouterTensors], RouterTensors], dict[str, str]]:
    def changed(layer: int, tensors: RouterTensors) -> RouterTensors:
        return replace(tensors, weight=change(layer, tensors.weight).astype(np.float32))

    return changed, drawn


def _transposed(draw: Draw) -> Made:
    return _of_weight(lambda layer, weight: weight.T)


def _of_another_layer(draw: Draw) -> Made:
    """The rows of another layer; in half of the cases its bias with them."""
    at = draw.another_layer()
    with_bias = bool(draw.rng.integers(2)) and draw.model.rule.bias != "none"

    def change(layer: int, now: RouterTensors) -> RouterTensors:
        there = draw.model.routers[at(layer)]
        return replace(now, weight=there.weight, bias=there.bias if with_bias else now.bias)

    return change, {"with_bias": str(with_bias)}


def _of_other_files(draw: Draw, tensors: Sequence[RouterTensors]) -> Made:
    """Routers of other files: whole, or their rows alone, as where only one tensor is renewed.

    Experts that are loaded one by one share the gain of all.
    """
    is_whole = bool(draw.rng.integers(2))
    with_gain = is_whole and draw.reach.experts is None

    def change(layer: int, now: RouterTensors) -> RouterTensors:
        there = tensors[layer]
        bias = there.bias if is_whole else now.bias
        return RouterTensors(there.weight, bias, there.gain if with_gain else now.gain)

    return change, {"whole": str(is_whole), "with_gain": str(with_gain)}


def _at_initialisation(draw: Draw) -> Made:
    def change(layer: int, weight: np.ndarray) -> np.ndarray:
        return INITIALISER_RANGE * draw.rng_at(layer).standard_normal(weight.shape)

    return _of_weight(change)


def _scaled(draw: Draw) -> Made:
    factor = draw.choice(0.25, 0.5, 0.9, 1.1, 2.0, -1.0)
    return _of_weight(lambda layer, weight: factor * weight, factor=str(factor))


def _low_rank(draw: Draw) -> Made:
    """An adapter that one side has merged into the rows and the other has not."""
    rank = int(draw.choice(1, 2, 4))
    size = float(draw.choice(0.05, 0.1, 0.3))

    def change(layer: int, weight: np.ndarray) -> np.ndarray:
        rng = draw.rng_at(layer)
        update = rng.standard_normal((len(weight), rank))
        update = update @ rng.standard_normal((rank, weight.shape[1]))
        return weight + update * (size * np.linalg.norm(weight) / np.linalg.norm(update))

    return _of_weight(change, rank=str(rank), relative_size=str(size))


# ----------------------------------------------------------------------------------------- rounding
def _bf16(draw: Draw) -> Made:
    return _of_weight(lambda layer, weight: rounded(weight))


def _fp8(draw: Draw, name: Fp8) -> Made:
    scales = draw.choice(None, "row", "column", "block", "tensor")
    return _of_weight(lambda layer, weight: to_fp8(weight, name, scales), scales=str(scales))


_SIGNED = {8: (127.0, 127.5, 128.0), 4: (7.0, 7.5, 8.0)}


def _integers(draw: Draw, bits: int) -> tuple[Integers, dict[str, str]]:
    granularity = draw.choice("row", "column", "block", "tensor")
    divisor = draw.choice(*_SIGNED[bits], 0.0)
    form = Integers(bits, granularity, divisor, is_signed=divisor > 0.0)
    convention = f"amax / {divisor:g}" if form.is_signed else "unsigned"
    return form, {"scales": granularity, "convention": convention}


def _int(draw: Draw, bits: int) -> Made:
    form, drawn = _integers(draw, bits)
    return _of_weight(lambda layer, weight: to_integers(weight, form), **drawn)


def _bf16_after_int8(draw: Draw) -> Made:
    form, drawn = _integers(draw, 8)
    return _of_weight(lambda layer, weight: rounded(to_integers(weight, form)), **drawn)


# --------------------------------------------------------------------------------------------- bias
def _of_bias(change: Callable[[int, np.ndarray], np.ndarray], **drawn: str) -> Made:
    def changed(layer: int, tensors: RouterTensors) -> RouterTensors:
        assert tensors.bias is not None
        return replace(tensors, bias=change(layer, tensors.bias).astype(np.float32))

    return changed, drawn


def _bias_dropped(draw: Draw) -> Made:
    return _of_bias(lambda layer, bias: np.zeros_like(bias))


def _bias_negated(draw: Draw) -> Made:
    return _of_bias(lambda layer, bias: -bias)


def _bias_offset(draw: Draw) -> Made:
    offset = float(draw.choice(-0.2, -0.05, 0.05, 0.2))
    return _of_bias(lambda layer, bias: bias + offset, offset=str(offset))


def _bias_shifted(draw: Draw) -> Made:
    shift = int(draw.choice(1, 2, draw.model.shape.experts // 4))
    return _of_bias(lambda layer, bias: np.roll(bias, shift), shift=str(shift))


def _bias_bf16(draw: Draw) -> Made:
    return _of_bias(lambda layer, bias: rounded(bias))


def _bias_of(tensors: Sequence[RouterTensors], at: Callable[[int], int]) -> Made:
    def change(layer: int, bias: np.ndarray) -> np.ndarray:
        there = tensors[at(layer)].bias
        assert there is not None
        return there

    return _of_bias(change)


def _bias_misread(draw: Draw) -> Made:
    """Bytes of float32 taken for bfloat16, or of bfloat16 for float32; nothing for no number."""
    as_bf16 = bool(draw.rng.integers(2))

    def change(layer: int, bias: np.ndarray) -> np.ndarray:
        if as_bf16:
            read = bias.view(bfloat16)[: len(bias)].astype(np.float32)
        else:
            stored = np.concatenate([bias.astype(bfloat16), np.zeros(len(bias), bfloat16)])
            read = stored.view(np.float32)
        return np.nan_to_num(np.clip(read, -1e4, 1e4), nan=0.0)

    return _of_bias(change, read_as="bfloat16" if as_bf16 else "float32")


# --------------------------------------------------------------------------------------------- gain
def _of_gain(change: Callable[[int, np.ndarray], np.ndarray]) -> Made:
    def changed(layer: int, tensors: RouterTensors) -> RouterTensors:
        return replace(tensors, gain=change(layer, tensors.gain).astype(np.float32))

    return changed, {}


def _gain_of_another_layer(draw: Draw) -> Made:
    at = draw.another_layer()
    return _of_gain(lambda layer, gain: draw.model.routers[at(layer)].gain)


_ANY = (Scope.ALL, *LAYERS, *EXPERTS, *TOKENS)
_NO_EXPERTS = (Scope.ALL, *LAYERS, *TOKENS)

KINDS: Mapping[Operator, Kind] = {
    Operator.ROWS_PERMUTED: Kind("load", _ANY, _permuted),
    Operator.ROWS_INTERLEAVED: Kind("load", _NO_EXPERTS, _interleaved),
    Operator.ROWS_SHIFTED: Kind("load", _NO_EXPERTS, _shifted),
    Operator.ROWS_DUPLICATED: Kind("load", _ANY, _duplicated),
    Operator.ROWS_ZEROED: Kind("load", _ANY, _zeroed),
    Operator.ROW_SCALED: Kind("load", _NO_EXPERTS, _row_scaled),
    Operator.WEIGHTS_TRANSPOSED: Kind("load", _NO_EXPERTS, _transposed, bend="square"),
    Operator.WEIGHTS_OF_ANOTHER_LAYER: Kind("load", _ANY, _of_another_layer),
    Operator.WEIGHTS_OF_OLDER_CHECKPOINT: Kind(
        "load", _ANY, lambda draw: _of_other_files(draw, draw.model.older)
    ),
    Operator.WEIGHTS_OF_ANOTHER_TRAINING: Kind(
        "load", _ANY, lambda draw: _of_other_files(draw, draw.model.other)
    ),
    Operator.WEIGHTS_AT_INITIALISATION: Kind("load", _ANY, _at_initialisation),
    Operator.WEIGHTS_SCALED: Kind("load", _ANY, _scaled),
    Operator.LOW_RANK_UPDATE: Kind("load", _ANY, _low_rank),
    Operator.WEIGHTS_BF16: Kind("load", _ANY, _bf16, stored="float32"),
    Operator.WEIGHTS_FP8_E4M3: Kind("load", _ANY, lambda draw: _fp8(draw, "e4m3")),
    Operator.WEIGHTS_FP8_E5M2: Kind("load", _ANY, lambda draw: _fp8(draw, "e5m2")),
    Operator.WEIGHTS_INT8: Kind("load", _ANY, lambda draw: _int(draw, 8)),
    Operator.WEIGHTS_INT4: Kind("load", _ANY, lambda draw: _int(draw, 4)),
    Operator.WEIGHTS_BF16_AFTER_INT8: Kind("load", _ANY, _bf16_after_int8),
    Operator.BIAS_DROPPED: Kind("load", _ANY, _bias_dropped, WITH_BIAS),
    Operator.BIAS_NEGATED: Kind("load", _ANY, _bias_negated, WITH_BIAS),
    Operator.BIAS_OFFSET: Kind("load", EXPERTS, _bias_offset, WITH_BIAS),
    Operator.BIAS_SHIFTED: Kind("load", _NO_EXPERTS, _bias_shifted, WITH_BIAS),
    Operator.BIAS_BF16: Kind("load", _ANY, _bias_bf16, WITH_BIAS),
    Operator.BIAS_OF_ANOTHER_LAYER: Kind(
        "load", _ANY, lambda draw: _bias_of(draw.model.routers, draw.another_layer()), WITH_BIAS
    ),
    Operator.BIAS_OF_OLDER_CHECKPOINT: Kind(
        "load", _ANY, lambda draw: _bias_of(draw.model.older, lambda layer: layer), WITH_BIAS
    ),
    Operator.BIAS_MISREAD: Kind("load", _ANY, _bias_misread, WITH_BIAS),
    Operator.GAIN_DROPPED: Kind(
        "load", _NO_EXPERTS, lambda draw: _of_gain(lambda layer, gain: np.ones_like(gain))
    ),
    Operator.GAIN_TWICE: Kind(
        "load", _NO_EXPERTS, lambda draw: _of_gain(lambda layer, gain: gain * gain)
    ),
    Operator.GAIN_PLUS_ONE: Kind(
        "load", _NO_EXPERTS, lambda draw: _of_gain(lambda layer, gain: 1.0 + gain)
    ),
    Operator.GAIN_OF_ANOTHER_LAYER: Kind("load", _NO_EXPERTS, _gain_of_another_layer),
}
