"""Incidents of copies: experts that share a row, or nearly so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.museum.checkpoint import Checkpoint, name_of
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import sigmoid_model, softmax_model

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

INCIDENTS = (COPIED_EXPERTS, NEARLY_COPIED, COPIED_BUT_BIAS, COPIED_ROUTER)
