"""Incidents of copies: experts that share a row, or nearly so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.museum.checkpoint import F32, Checkpoint, name_of
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import in_float32, sigmoid_model, softmax_model

_LAYER = ("text/1",)


def _copied(pairs: int, noise: float = 0.0) -> Callable[[], Checkpoint]:
    """Rows 0 ... over the rows behind them, with noise of a share of their length."""

    def copied(weight: np.ndarray, _: int) -> np.ndarray:
        rows = weight[:pairs]
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        normal = np.random.default_rng(10).standard_normal(rows.shape) / np.sqrt(rows.shape[1])
        weight[pairs : 2 * pairs] = rows + noise * length * normal
        return weight

    return lambda: softmax_model().edited("weight", copied, (1,))


COPIED_EXPERTS = Incident(
    "experts_copied",
    (),
    "A merge or a conversion wrote experts twice: equal rows, so that no token tells the two "
    "apart.",
    "MGI104",
    (
        Case("one pair of 32", _copied(1), ("MGI104",), _LAYER),
        Case("four pairs", _copied(4), ("MGI104",), _LAYER),
        Case("half of the experts are copies", _copied(16), ("MGI104",), _LAYER),
    ),
    (Case("every row its own", softmax_model),),
)

NEARLY_COPIED = Incident(
    "experts_nearly_copied",
    (),
    "A copied expert that was trained on for a while, or that noise was added to.",
    "MGG201",
    (
        Case("a copy with noise of 10 % of its length", _copied(1, 0.1), ("MGG201",), _LAYER),
        Case("with noise of 1 %", _copied(1, 0.01), ("MGG201",), _LAYER),
        Case("with noise of 0.1 %", _copied(1, 0.001), ("MGG201",), _LAYER),
    ),
    (Case("every row its own", softmax_model),),
)


def _copied_rows_only(pairs: int) -> Callable[[], Checkpoint]:
    def copied(weight: np.ndarray, _: int) -> np.ndarray:
        weight[pairs : 2 * pairs] = weight[:pairs]
        return weight

    return lambda: sigmoid_model().edited("weight", copied, (1,))


COPIED_BUT_BIAS = Incident(
    "experts_copied_but_their_bias",
    (),
    "Copied rows whose selection biases moved apart afterwards: the rows are equal, the experts "
    "are told apart by the bias alone.",
    "MGG201",
    (
        Case("one pair of 64", _copied_rows_only(1), ("MGG201",), _LAYER),
        Case("four pairs", _copied_rows_only(4), ("MGG201",), _LAYER),
        Case("half of the experts", _copied_rows_only(32), ("MGG201",), _LAYER),
    ),
    (Case("every row its own", sigmoid_model),),
)


def _over(copies: int) -> Callable[[], Checkpoint]:
    """The router of layer 0 over those of the layers behind it; their gains stay their own."""

    def copied() -> Checkpoint:
        model = softmax_model()
        first = model.tensors[name_of("weight", 0)]
        return model.changed({name_of("weight", layer): first for layer in range(1, copies + 1)})

    return copied


COPIED_ROUTER = Incident(
    "router_copied_to_other_layers",
    (),
    "A loop over layers wrote one router to several of them; every one is sound by itself.",
    "MGI112",
    (
        Case("two layers of four", _over(1), ("MGI112",), ("text/0", "text/1")),
        Case("three layers", _over(2), ("MGI112",), ("text/0", "text/1", "text/2")),
        Case("all four", _over(3), ("MGI112",), ("text/0", "text/1", "text/2", "text/3")),
    ),
    (Case("every router its own", softmax_model),),
)


def _block(rows: int) -> Callable[[], Checkpoint]:
    """The first rows of layer 0 over those of layer 2."""

    def copied(weight: np.ndarray, _: int) -> np.ndarray:
        weight[:rows] = softmax_model().tensors[name_of("weight", 0)][:rows].astype(np.float64)
        return weight

    return lambda: softmax_model().edited("weight", copied, (2,))


_PAIR = ("text/0", "text/2")

COPIED_BLOCK = Incident(
    "rows_copied_to_another_layer",
    (),
    "A merge of slices wrote the rows of one rank of a layer into another layer too.",
    "MGI112",
    (
        Case("two rows of 32", _block(2), ("MGI112",), _PAIR),
        Case("half of the rows", _block(16), ("MGI112",), _PAIR),
        Case("all but one", _block(31), ("MGI112",), _PAIR),
    ),
    (Case("every row its own", softmax_model),),
)


def _cast_from(layers: tuple[int, ...], factor: float, dtype: np.dtype) -> Callable[[], Checkpoint]:
    """The router of layer 0, times a factor and through a dtype, over others; in float32."""

    def copied() -> Checkpoint:
        model = in_float32(softmax_model())
        cast = (factor * model.tensors[name_of("weight", 0)]).astype(dtype).astype(np.float32)
        return model.changed({name_of("weight", layer): cast for layer in layers})

    return copied


COPIED_CAST = Incident(
    "router_copied_and_changed",
    (),
    "One router in several layers again, after a cast or a factor: no byte is equal any more.",
    "MGI112",
    (
        Case("times 1.5", _cast_from((2,), 1.5, F32), ("MGI112",), _PAIR),
        Case("as it was in two of four layers", _cast_from((1, 2), 1.0, F32), ("MGI112",),
             ("text/0", "text/1", "text/2")),
        Case("times 0.9 in all four", _cast_from((1, 2, 3), 0.9, F32), ("MGI112",),
             ("text/0", "text/1", "text/2", "text/3")),
    ),
    (Case("every router its own", lambda: in_float32(softmax_model())),),
)  # fmt: skip


def _twice(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[], Checkpoint]:
    """Layer 1 under a second name, as another rank would have it."""

    def stored() -> Checkpoint:
        model = softmax_model()
        again = {
            f"language_model.{name}": change(tensor) if "gate" in name else tensor
            for name, tensor in model.tensors.items()
            if ".layers.1." in name
        }
        return model.changed(again)

    return stored


def _one_row(weight: np.ndarray) -> np.ndarray:
    changed = weight.copy()
    changed[5] *= changed.dtype.type(1.01)
    return changed


COPIES_DIFFER = Incident(
    "replicas_drifted_apart",
    ("pytorch/torchtitan#2387", "NVIDIA/Megatron-LM#599"),
    "The gradient of the router was not summed over tensor-parallel ranks: after one step every "
    "rank had a router of its own.",
    "MGI114",
    (
        Case("one row of 32 by a hundredth", _twice(_one_row), ("MGI114",)),
        Case("every row by a hundredth", _twice(lambda w: w * w.dtype.type(1.01)), ("MGI114",)),
        Case("another router altogether", _twice(lambda w: w[::-1].copy()), ("MGI114",)),
    ),
    (Case("stored twice, and equal", _twice(lambda w: w)),),
)

INCIDENTS = (
    COPIED_EXPERTS,
    NEARLY_COPIED,
    COPIED_BUT_BIAS,
    COPIED_ROUTER,
    COPIED_BLOCK,
    COPIED_CAST,
    COPIES_DIFFER,
)
