"""Incidents of quantisers: routers that were rounded, gains that were divided by a scale without
them.
"""

import re
from collections.abc import Sequence
from functools import partial

import ml_dtypes
import numpy as np

from tests.museum.checkpoint import F32, Build, Checkpoint, edited, name_of, rounded
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import in_float32, olmoe, softmax_model

_ALL = range(4)

#: Rows of 512 entries: four groups of 128.
wide_model = partial(softmax_model, hidden=512)


def float32_model() -> Checkpoint:
    """Routers with more digits than bfloat16 holds."""
    return in_float32(softmax_model())


def quantised(weight: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Symmetric integers, a scale for each group of columns of each row, and back to floats."""
    most = max(2 ** (bits - 1) - 1, 1)
    groups = weight.reshape(len(weight), -1, group)
    scale = np.abs(groups).max(axis=2, keepdims=True) / most
    steps = np.clip(np.rint(groups / scale), -most - 1, most)
    return (steps * scale).reshape(weight.shape)


def _quantised(model: Build, bits: int, group: int = 128) -> Build:
    return edited(model, "weight", lambda w, _: quantised(w, bits, group))


def _quantised_router(
    name: str, words: str, model: Build, group: int, layers: range = _ALL
) -> Incident:
    as_float32 = edited(model, "weight", lambda w, _: w, dtype=F32)
    return Incident(
        name,
        "A quantiser took the router for one more linear layer; with 4 bits one token in seven, "
        f"with 2 bits nearly half met other experts. {words}",
        "MGN118",
        Case("int8", _quantised(model, 8, group), layers),
        Case("int4", _quantised(model, 4, group), layers),
        Case("int2", _quantised(model, 2, group), layers),
        (
            Case("the bfloat16 original", model),
            Case("the original written as float32: nothing was lost", as_float32),
        ),
        threads=("huggingface/transformers#48801", "intel/auto-round#1776"),
    )


QUANTISED_128 = _quantised_router(
    "quantised_groups_of_128",
    "Here dequantised and stored in bfloat16, groups of 128.",
    wide_model,
    128,
)

QUANTISED_32 = _quantised_router(
    "quantised_groups_of_32", "The same in groups of 32.", wide_model, 32
)

QUANTISED_TRAINED = _quantised_router(
    "quantised_trained",
    "The same in a trained sample checkpoint, whose rows have only two groups of 32.",
    olmoe,
    32,
    range(3),
)

#: Fewer values in the same dtype are an error of MGN125, not its warning.
_FAILS = (1, 1)

QUANTISED_AGAINST_BASELINE = Incident(
    "quantised_against_baseline",
    "The same, compared with the baseline of the original: how far the rows moved.",
    "MGG401",
    Case("int8", _quantised(wide_model, 8), (), ("MGN118", "MGN125"), _FAILS, is_missed=True),
    Case("int4", _quantised(wide_model, 4), _ALL, ("MGN118", "MGN125"), _FAILS),
    Case("int2", _quantised(wide_model, 2), _ALL, ("MGN118", "MGN125"), _FAILS),
    (Case("the bfloat16 original", wide_model),),
    wide_model,
    threads=("huggingface/transformers#48801",),
)


def _cast(*layers: int) -> Build:
    return edited(float32_model, "weight", lambda w, _: rounded(w), layers)


CAST_IN_TRANSFER = Incident(
    "router_cast_in_transfer",
    "The trainer kept its routers in float32 and the transfer to the engine rounded them to "
    "bfloat16: 3,866 of 6,396 tokens differed, none once they were sent in float32.",
    "MGN125",
    Case("one layer of four", _cast(1), (1,)),
    Case("two layers", _cast(1, 3), (1, 3)),
    Case("all layers", _cast(*_ALL), _ALL),
    (Case("sent in float32", float32_model),),
    float32_model,
    threads=("PrimeIntellect-ai/prime-rl#3524",),
)


def _in_fp8(dtype: type, layers: Sequence[int]) -> Checkpoint:
    """Weights as fp8 with a scale for each block of 128 by 128, as DeepSeek's exports have."""
    model, new = softmax_model(), {}
    for layer in layers:
        name = name_of("weight", layer)
        weight = model.tensors[name].astype(np.float64)
        scale = np.abs(weight).max() / 400.0
        blocks = [-(-n // 128) for n in weight.shape]
        new[name] = (weight / scale).astype(dtype)
        new[f"{name}_scale_inv"] = np.full(blocks, scale, np.float32)
    return model.changed(new)


_E4M3, _E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2

STORED_AS_FP8 = Incident(
    "router_stored_as_fp8",
    "An export wrote the routers as 8-bit floats with scales, in a family that keeps them in "
    "bfloat16.",
    "MGN117",
    Case("one layer of four, e4m3", partial(_in_fp8, _E4M3, (2,)), (2,)),
    Case("all layers, e4m3", partial(_in_fp8, _E4M3, _ALL), _ALL),
    Case("all layers, e5m2", partial(_in_fp8, _E5M2, _ALL), _ALL),
    (Case("the bfloat16 original", softmax_model),),
)


def smoothed(model: Checkpoint, spread: float, is_followed: bool) -> Checkpoint:
    """The gain over scales from 1 / ``spread`` to ``spread``, and what reads it times it, or not."""

    def scales(layer: int, size: int) -> np.ndarray:
        return spread ** np.random.default_rng([2451, layer]).uniform(-1.0, 1.0, size)

    divided = model.edited("gain", lambda g, layer: g / scales(layer, g.size))
    if not is_followed:
        return divided
    experts = {
        name: (weight.astype(np.float64) * scales(int(of[1]), weight.shape[1])).astype(weight.dtype)
        for name, weight in model.tensors.items()
        if (of := _READING.fullmatch(name))
    }
    followed = divided.edited("weight", lambda w, layer: w * scales(layer, w.shape[1]))
    return followed.changed(experts)


#: Matrices of experts that read the norm.
_READING = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(?:gate|up)_proj\.weight")


def _smoothed(spread: float, is_followed: bool = False) -> Build:
    return lambda: smoothed(softmax_model(), spread, is_followed)


SMOOTHED_ALONE = Incident(
    "gain_smoothed_alone",
    "AWQ and SmoothQuant divide the gain of a norm by a scale and multiply what reads it; with the "
    "router left out of the list its file is bit for bit the same, and it reads other inputs.",
    "MGI122",
    Case("scales spread by 1.02", _smoothed(1.02), range(4)),
    Case("by 1.2", _smoothed(1.2), range(4)),
    Case("by 3", _smoothed(3.0), range(4)),
    tuple(
        Case(f"scales spread by {spread:g}, router multiplied", _smoothed(spread, True))
        for spread in (1.02, 1.2, 3.0)
    ),
    softmax_model,
    threads=("vllm-project/llm-compressor#2451", "vllm-project/llm-compressor#1455"),
)
