"""Faults of loading: rows, biases and gains that are not those of the checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from ml_dtypes import bfloat16

from tests.generator import model
from tests.generator.kinds import EXPERTS, LAYERS, TOKENS, WITH_BIAS, Draw, Kind, Made, kind


# --------------------------------------------------------------------------------------------- rows
def _taken(draw: Draw, index_at: Callable[[int], np.ndarray]) -> Made:
    """Rows by an index for each layer; in half of the cases the bias goes with them."""
    with_bias = bool(draw.rng.integers(2)) and draw.model.rule.bias != "none"

    def change(layer: int, tensors: model.RouterTensors) -> model.RouterTensors:
        index = index_at(layer)
        bias = tensors.bias
        if with_bias and bias is not None:
            bias = bias[index]
        return replace(tensors, weight=tensors.weight[index], bias=bias)

    return change


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
    return _taken(draw, lambda layer: index)


def _shifted(draw: Draw) -> Made:
    shift = draw.choice(1, 2, draw.model.shape.experts // 4, -1)
    index = np.roll(np.arange(draw.model.shape.experts), shift)
    return _taken(draw, lambda layer: index)


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
    def change(layer: int, tensors: model.RouterTensors) -> model.RouterTensors:
        weight = tensors.weight.copy()
        weight[rows] *= factor
        return replace(tensors, weight=weight)

    return change


# ------------------------------------------------------------------------------------------ weights
def of_part(part: str, change: Callable[[int, np.ndarray], np.ndarray]) -> Made:
    """One part of a router, changed by the layer and by what was there."""

    def changed(layer: int, tensors: model.RouterTensors) -> model.RouterTensors:
        new = change(layer, getattr(tensors, part)).astype(np.float32)
        return replace(tensors, **{part: new})

    return changed


def each(part: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Draw], Made]:
    return lambda draw: of_part(part, lambda layer, values: change(values))


def _of_another_layer(draw: Draw) -> Made:
    """The rows of another layer; in half of the cases its bias with them."""
    at = draw.another_layer()
    with_bias = bool(draw.rng.integers(2)) and draw.model.rule.bias != "none"

    def change(layer: int, now: model.RouterTensors) -> model.RouterTensors:
        there = draw.model.routers[at(layer)]
        return replace(now, weight=there.weight, bias=there.bias if with_bias else now.bias)

    return change


def _of_other_files(draw: Draw, tensors: Sequence[model.RouterTensors]) -> Made:
    """Routers of other files: whole (but one gain for all experts), or their rows alone."""
    is_whole = bool(draw.rng.integers(2))
    with_gain = is_whole and draw.reach.experts is None

    def change(layer: int, now: model.RouterTensors) -> model.RouterTensors:
        there = tensors[layer]
        bias = there.bias if is_whole else now.bias
        return model.RouterTensors(there.weight, bias, there.gain if with_gain else now.gain)

    return change


def _at_initialisation(draw: Draw) -> Made:
    def change(layer: int, weight: np.ndarray) -> np.ndarray:
        return model.INITIALISER_RANGE * draw.rng_at(layer).standard_normal(weight.shape)

    return of_part("weight", change)


def _scaled(draw: Draw) -> Made:
    factor = draw.choice(0.25, 0.5, 0.9, 1.1, 2.0, -1.0)
    return of_part("weight", lambda layer, weight: factor * weight)


def _low_rank(draw: Draw) -> Made:
    """An adapter that one side has merged into the rows and the other has not."""
    rank = int(draw.choice(1, 2, 4))
    size = float(draw.choice(0.05, 0.1, 0.3))

    def change(layer: int, weight: np.ndarray) -> np.ndarray:
        rng = draw.rng_at(layer)
        update = rng.standard_normal((len(weight), rank))
        update = update @ rng.standard_normal((rank, weight.shape[1]))
        return weight + update * (size * np.linalg.norm(weight) / np.linalg.norm(update))

    return of_part("weight", change)


# ----------------------------------------------------------------------------------------- rounding
def _fp8(draw: Draw, name: model.Fp8) -> Made:
    scales = draw.choice(None, "row", "column", "block", "tensor")
    return of_part("weight", lambda layer, weight: model.to_fp8(weight, name, scales))


_SIGNED = {8: (127.0, 127.5, 128.0), 4: (7.0, 7.5, 8.0)}


def _integers(draw: Draw, bits: int) -> model.Integers:
    granularity = draw.choice("row", "column", "block", "tensor")
    divisor = draw.choice(*_SIGNED[bits], 0.0)
    return model.Integers(bits, granularity, divisor, is_signed=divisor > 0.0)


def _int(draw: Draw, bits: int) -> Made:
    form = _integers(draw, bits)
    return of_part("weight", lambda layer, weight: model.to_integers(weight, form))


def _bf16_after_int8(draw: Draw) -> Made:
    form = _integers(draw, 8)
    return of_part("weight", lambda layer, weight: model.rounded(model.to_integers(weight, form)))


# --------------------------------------------------------------------------------------------- bias
def _bias_offset(draw: Draw) -> Made:
    offset = float(draw.choice(-0.2, -0.05, 0.05, 0.2))
    return of_part("bias", lambda layer, bias: bias + offset)


def _bias_shifted(draw: Draw) -> Made:
    shift = int(draw.choice(1, 2, draw.model.shape.experts // 4))
    return of_part("bias", lambda layer, bias: np.roll(bias, shift))


def bias_of(tensors: Sequence[model.RouterTensors], at: Callable[[int], int]) -> Made:
    def change(layer: int, bias: np.ndarray) -> np.ndarray:
        there = tensors[at(layer)].bias
        assert there is not None
        return there

    return of_part("bias", change)


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

    return of_part("bias", change)


# --------------------------------------------------------------------------------------------- gain
def _gain_of_another_layer(draw: Draw) -> Made:
    at = draw.another_layer()
    return of_part("gain", lambda layer, gain: draw.model.routers[at(layer)].gain)


ANY = ("all", *LAYERS, *EXPERTS, *TOKENS)
NO_EXPERTS = ("all", *LAYERS, *TOKENS)

load = partial(kind, "load")
load_bias = partial(load, families=WITH_BIAS)


def _gain(make: Callable[[Draw], Made]) -> Kind:
    return load(NO_EXPERTS, make, "gain not folded")


KINDS: Mapping[str, Kind] = {
    "rows_permuted": load(ANY, _permuted, "experts renamed", "rows damaged"),
    "rows_interleaved": load(NO_EXPERTS, _interleaved, "experts renamed", "rows damaged"),
    "rows_shifted": load(NO_EXPERTS, _shifted, "experts renamed", "rows damaged"),
    "rows_duplicated": load(ANY, _duplicated, "rows damaged"),
    "rows_zeroed": load(ANY, _zeroed, "rows damaged"),
    "row_scaled": load(NO_EXPERTS, _row_scaled, "rows damaged"),
    "weights_transposed": load(
        NO_EXPERTS, each("weight", np.transpose), "rows damaged", bend="square"
    ),
    "weights_of_another_layer": load(ANY, _of_another_layer, "rows of another layer"),
    "weights_of_older_checkpoint": load(
        ANY, lambda draw: _of_other_files(draw, draw.model.older), "router stale", loaded="older"
    ),
    "weights_of_another_training": load(
        ANY,
        lambda draw: _of_other_files(draw, draw.model.other),
        *("router stale", "unrelated"),
        loaded="other",
    ),
    "weights_at_initialisation": load(ANY, _at_initialisation, "unrelated", "rows damaged"),
    "weights_scaled": load(ANY, _scaled, "rows damaged", "routing weights differ", "rule differs"),
    "low_rank_update": load(ANY, _low_rank, "rows damaged"),
    "weights_bf16": load(ANY, each("weight", model.rounded), "weights rounded", stored="float32"),
    "weights_fp8_e4m3": load(ANY, lambda draw: _fp8(draw, "e4m3"), "weights rounded"),
    "weights_fp8_e5m2": load(ANY, lambda draw: _fp8(draw, "e5m2"), "weights rounded"),
    "weights_int8": load(ANY, lambda draw: _int(draw, 8), "weights rounded"),
    "weights_int4": load(ANY, lambda draw: _int(draw, 4), "weights rounded"),
    "weights_bf16_after_int8": load(ANY, _bf16_after_int8, "weights rounded"),
    "bias_dropped": load_bias(ANY, each("bias", np.zeros_like), "bias missing"),
    "bias_negated": load_bias(ANY, each("bias", np.negative), "bias differs"),
    "bias_offset": load_bias(EXPERTS, _bias_offset, "bias differs"),
    "bias_shifted": load_bias(NO_EXPERTS, _bias_shifted, "bias differs"),
    "bias_bf16": load_bias(ANY, each("bias", model.rounded), "bias rounded"),
    "bias_of_another_layer": load_bias(
        ANY,
        lambda draw: bias_of(draw.model.routers, draw.another_layer()),
        *("bias stale", "bias differs"),
    ),
    "bias_of_older_checkpoint": load_bias(
        ANY,
        lambda draw: bias_of(draw.model.older, lambda layer: layer),
        *("bias stale", "bias differs"),
        loaded="older",
    ),
    "bias_misread": load_bias(ANY, _bias_misread, "bias differs"),
    "gain_dropped": _gain(each("gain", np.ones_like)),
    "gain_twice": _gain(each("gain", np.square)),
    "gain_plus_one": _gain(each("gain", lambda gain: 1.0 + gain)),
    "gain_of_another_layer": _gain(_gain_of_another_layer),
}
