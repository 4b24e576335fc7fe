"""Incidents of storage: missing parts, unknown scales, and rows that are no numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.museum.checkpoint import PARTS, Checkpoint, name_of
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import sigmoid_model, softmax_model


def _without_bias(layers: tuple[int, ...]) -> Callable[[], Checkpoint]:
    return lambda: sigmoid_model().changed({name_of("bias", layer): None for layer in layers})


PART_MISSING = Incident(
    "selection_bias_missing",
    (),
    "A conversion kept parameters and dropped buffers: the selection bias is gone, and loaders "
    "put zeros in its place.",
    "MGI107",
    (
        Case("in one layer of four", _without_bias((2,)), ("MGI107",)),
        Case("in two layers", _without_bias((1, 2)), ("MGI107",)),
        Case("in all layers", _without_bias((0, 1, 2, 3)), ("MGI107",)),
    ),
    (Case("all parts there", sigmoid_model),),
)


def _beside(leaf: str, shape: tuple[int, ...], layers: tuple[int, ...]) -> Checkpoint:
    stem = PARTS["weight"].removesuffix("weight")
    ones = {f"{stem.format(layer=layer)}{leaf}": np.ones(shape, np.float32) for layer in layers}
    return softmax_model().changed(ones)


def _gptq() -> Checkpoint:
    """Routers packed as GPTQ packs them, eight 4-bit numbers in an int32, and no plain weight."""
    new: dict[str, np.ndarray | None] = {}
    for layer in softmax_model().layers:
        stem = name_of("weight", layer).removesuffix("weight")
        new[f"{stem}weight"] = None
        new[f"{stem}qweight"] = np.zeros((32, 32), np.int32)
        new[f"{stem}qzeros"] = np.zeros((2, 4), np.int32)
        new[f"{stem}scales"] = np.ones((2, 32), np.float16)
        new[f"{stem}g_idx"] = np.arange(256, dtype=np.int32) // 128
    return softmax_model().changed(new)


STORAGE_UNKNOWN = Incident(
    "storage_unknown",
    ("intel/auto-round#1776",),
    "Routers in the storage of a quantiser, or with a tensor beside them that may be a scale: "
    "without it the numbers in the file are not the weights.",
    "MGI106",
    (
        Case(
            "an unknown scale beside the router of one layer",
            lambda: _beside("channel_scale", (32, 1), (1,)),
            ("MGI106",),
        ),
        Case(
            "an unknown scale beside every router",
            lambda: _beside("input_scale", (1,), (0, 1, 2, 3)),
            ("MGI106",),
        ),
        Case("GPTQ: qweight, qzeros, scales and g_idx, no weight", _gptq, ("MGI106",)),
    ),
    (Case("plain weights", softmax_model),),
)


def _rows(value: float, rows: int, columns: int = 256) -> Callable[[], Checkpoint]:
    """The first ``columns`` of the first ``rows`` rows of layer 2, overwritten."""

    def overwritten(weight: np.ndarray, _: int) -> np.ndarray:
        weight[:rows, :columns] = value
        return weight

    return lambda: softmax_model().edited("weight", overwritten, (2,))


_LAYER = ("text/2",)

ZERO_ROWS = Incident(
    "zero_rows",
    (),
    "Rows that were never written: an expert added, or a slice lost, and zeros left.",
    "MGI103",
    (
        Case("one row of 32", _rows(0.0, 1), ("MGI103",), _LAYER),
        Case("four rows", _rows(0.0, 4), ("MGI103", "MGI104"), _LAYER),
        Case(
            "half of the rows",
            _rows(0.0, 16),
            ("MGG204", "MGG205", "MGI103", "MGI104"),
            _LAYER,
        ),
    ),
    (Case("every row written", softmax_model),),
)

NON_FINITE_ROWS = Incident(
    "non_finite_rows",
    (),
    "Training diverged, or bytes were damaged: rows with nan or infinity.",
    "MGI101",
    (
        Case("one nan in one row", _rows(np.nan, 1, 1), ("MGI101",), _LAYER),
        Case("one row infinite", _rows(np.inf, 1), ("MGI101",), _LAYER),
        Case("every row nan", _rows(np.nan, 32), ("MGI101",), _LAYER),
    ),
    (Case("every row finite", softmax_model),),
)


def _gain(value: float, count: int) -> Callable[[], Checkpoint]:
    def overwritten(gain: np.ndarray, _: int) -> np.ndarray:
        gain[:count] = value
        return gain

    return lambda: softmax_model().edited("gain", overwritten, (2,))


NON_FINITE_GAIN = Incident(
    "non_finite_gain",
    (),
    "The gain of the norm in front holds nan or infinity, and with it every router input.",
    "MGI102",
    (
        Case("one entry infinite", _gain(np.inf, 1), ("MGI102",), _LAYER),
        Case("one entry nan", _gain(np.nan, 1), ("MGI102",), _LAYER),
        Case("every entry nan", _gain(np.nan, 256), ("MGI102",), _LAYER),
    ),
    (Case("every entry finite", softmax_model),),
)

INCIDENTS = (PART_MISSING, STORAGE_UNKNOWN, ZERO_ROWS, NON_FINITE_ROWS, NON_FINITE_GAIN)
