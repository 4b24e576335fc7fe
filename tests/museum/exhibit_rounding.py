"""Incidents of rounding: routers that were quantised or cast."""

from __future__ import annotations

import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np

from tests.museum.checkpoint import F32, Checkpoint, name_of, rounded
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import in_float32, softmax_model, trained

_ALL = ("text/0", "text/1", "text/2", "text/3")


@functools.cache
def wide_model() -> Checkpoint:
    """Rows of 512 entries: four groups of 128."""
    return softmax_model(hidden=512)


def float32_model() -> Checkpoint:
    """Routers with more digits than bfloat16 holds."""
    return in_float32(softmax_model())


def olmoe() -> Checkpoint:
    """A trained checkpoint, with rows of 64 entries."""
    return trained("olmoe-balanced/step_1500")


def quantised(weight: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Symmetric integers, a scale for each group of columns of each row, and back to floats."""
    most = max(2 ** (bits - 1) - 1, 1)
    groups = weight.reshape(len(weight), -1, group)
    scale = np.abs(groups).max(axis=2, keepdims=True) / most
    steps = np.clip(np.rint(groups / scale), -most - 1, most)
    return (steps * scale).reshape(weight.shape)


def _quantised(model: Callable[[], Checkpoint], bits: int, group: int) -> Callable[[], Checkpoint]:
    return lambda: model().edited("weight", lambda w, _: quantised(w, bits, group))


def _quantised_router(
    name: str,
    words: str,
    model: Callable[[], Checkpoint],
    group: int,
    where: tuple[str, ...],
) -> Incident:
    return Incident(
        name,
        ("huggingface/transformers#48801", "intel/auto-round#1776"),
        "A quantiser took the router for one more linear layer; with 4 bits one token in seven, "
        f"with 2 bits nearly half met other experts. {words}",
        "MGN118",
        (
            Case("int8", _quantised(model, 8, group), ("MGN118",), where),
            Case("int4", _quantised(model, 4, group), ("MGN118",), where),
            Case("int2", _quantised(model, 2, group), ("MGN118",), where),
        ),
        (
            Case("the bfloat16 original", model),
            Case("the original written as float32: nothing was lost", lambda: _as_float32(model())),
        ),
    )


def _as_float32(model: Checkpoint) -> Checkpoint:
    return model.edited("weight", lambda w, _: w, dtype=F32)


QUANTISED_128 = _quantised_router(
    "quantised_groups_of_128",
    "Here dequantised and stored in bfloat16, groups of 128.",
    wide_model,
    128,
    _ALL,
)
QUANTISED_32 = _quantised_router(
    "quantised_groups_of_32", "The same in groups of 32.", wide_model, 32, _ALL
)
QUANTISED_TRAINED = _quantised_router(
    "quantised_trained",
    "The same in a trained sample checkpoint, whose rows have only two groups of 32.",
    olmoe,
    32,
    ("text/0", "text/1", "text/2"),
)

QUANTISED_AGAINST_BASELINE = Incident(
    "quantised_against_baseline",
    ("huggingface/transformers#48801",),
    "The same, compared with the baseline of the original: how far the rows moved.",
    "MGG401",
    (
        # fewer values in the same dtype are an error of MGN125, not its warning
        Case("int8", _quantised(wide_model, 8, 128), ("MGN118", "MGN125"), (), (1, 1)),
        Case("int4", _quantised(wide_model, 4, 128), ("MGG401", "MGN118", "MGN125"), _ALL, (1, 1)),
        Case("int2", _quantised(wide_model, 2, 128), ("MGG401", "MGN118", "MGN125"), _ALL, (1, 1)),
    ),
    (Case("the bfloat16 original", wide_model),),
    wide_model,
)


def _cast(layers: tuple[int, ...]) -> Callable[[], Checkpoint]:
    return lambda: float32_model().edited("weight", lambda w, _: rounded(w), layers)


CAST_IN_TRANSFER = Incident(
    "router_cast_in_transfer",
    ("PrimeIntellect-ai/prime-rl#3524",),
    "The trainer kept its routers in float32 and the transfer to the engine rounded them to "
    "bfloat16: 3,866 of 6,396 tokens differed, none once they were sent in float32.",
    "MGN125",
    (
        Case("one layer of four", _cast((1,)), ("MGN125",), ("text/1",)),
        Case("two layers", _cast((1, 3)), ("MGN125",), ("text/1", "text/3")),
        Case("all layers", _cast((0, 1, 2, 3)), ("MGN125",), _ALL),
    ),
    (Case("sent in float32", float32_model),),
    float32_model,
)


def _coarse(dtype: np.dtype, layers: tuple[int, ...]) -> Callable[[], Checkpoint]:
    """Weights as fp8 with a scale for each block of 128 by 128, as DeepSeek's exports have."""

    def build() -> Checkpoint:
        model, new = softmax_model(), {}
        for layer in layers:
            name = name_of("weight", layer)
            weight = model.tensors[name].astype(np.float64)
            rows, columns = (-(-n // 128) for n in weight.shape)
            scale = np.full((rows, columns), np.abs(weight).max() / 400.0)
            new[name] = (weight / scale[0, 0]).astype(dtype)
            new[f"{name}_scale_inv"] = scale.astype(np.float32)
        return model.changed(new)

    return build


_E4M3, _E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)

STORED_AS_FP8 = Incident(
    "router_stored_as_fp8",
    (),
    "An export wrote the routers as 8-bit floats with scales, in a family that keeps them in "
    "bfloat16.",
    "MGN117",
    (
        Case("one layer of four, e4m3", _coarse(_E4M3, (2,)), ("MGN117",), ("text/2",)),
        Case("all layers, e4m3", _coarse(_E4M3, (0, 1, 2, 3)), ("MGN117",), _ALL),
        Case("all layers, e5m2", _coarse(_E5M2, (0, 1, 2, 3)), ("MGN117",), _ALL),
    ),
    (Case("the bfloat16 original", softmax_model),),
)


INCIDENTS = (
    QUANTISED_128,
    QUANTISED_32,
    QUANTISED_TRAINED,
    QUANTISED_AGAINST_BASELINE,
    CAST_IN_TRANSFER,
    STORED_AS_FP8,
)
