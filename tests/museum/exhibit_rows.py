"""Incidents of rows: patched in, partly zero, or of too few directions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.museum.checkpoint import Checkpoint
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import softmax_model

_LAYER = ("text/1",)


def _row(change: Callable[[np.ndarray], np.ndarray], hidden: int = 256) -> Callable[[], Checkpoint]:
    """Row 6 of layer 1, changed."""

    def patched(weight: np.ndarray, _: int) -> np.ndarray:
        weight[6] = change(weight[6])
        return weight

    return lambda: softmax_model(hidden=hidden).edited("weight", patched, (1,))


ROW_TOO_LONG = Incident(
    "row_too_long",
    (),
    "The row of one expert was patched in from elsewhere and is longer than those beside it.",
    "MGG203",
    (
        Case("twice as long", _row(lambda row: 2.0 * row), ("MGG205",)),
        Case("four times", _row(lambda row: 4.0 * row), ("MGG203",), _LAYER),
        Case("ten times", _row(lambda row: 10.0 * row), ("MGG203",), _LAYER),
    ),
    (Case("as trained", softmax_model),),
)


def _partly_zero(share: float) -> Callable[[], Checkpoint]:
    def zeroed(row: np.ndarray) -> np.ndarray:
        return np.where(np.arange(row.size) < share * row.size, 0.0, row)

    return _row(zeroed, hidden=512)


ROW_PARTLY_ZERO = Incident(
    "row_partly_zero",
    (),
    "A part of one row was never written and is zero.",
    "MGG205",
    (
        Case("a quarter of the row", _partly_zero(0.25), ("MGG205",), _LAYER),
        Case("half of it", _partly_zero(0.5), ("MGG205",), _LAYER),
        Case("nine tenths of it", _partly_zero(0.9), ("MGG205",), _LAYER),
    ),
    (Case("as trained", lambda: softmax_model(hidden=512)),),
)


def _low_rank(rank: int) -> Callable[[], Checkpoint]:
    def cut(weight: np.ndarray, _: int) -> np.ndarray:
        left, values, right = np.linalg.svd(weight, full_matrices=False)
        return (left[:, :rank] * values[:rank]) @ right[:rank]

    return lambda: softmax_model().edited("weight", cut, (1,))


LOW_RANK = Incident(
    "router_of_low_rank",
    (),
    "A low-rank update was merged as if it were the whole router, or training collapsed.",
    "MGG202",
    (
        Case("rank 16 of 31", _low_rank(16), ("MGG202",), _LAYER),
        Case("rank 8", _low_rank(8), ("MGG202", "MGG205"), _LAYER),
        Case("rank 2", _low_rank(2), ("MGG201", "MGG202", "MGG204", "MGG205"), _LAYER),
    ),
    (Case("as trained", softmax_model),),
)


def _crowded(share: float) -> Callable[[], Checkpoint]:
    """Four groups of eight rows whose cosine within a group is ``share``."""

    def crowded(weight: np.ndarray, layer: int) -> np.ndarray:
        hidden = weight.shape[1]
        common = np.random.default_rng([15, layer]).standard_normal((4, hidden)) / np.sqrt(hidden)
        return np.sqrt(share) * common.repeat(8, axis=0) + np.sqrt(1.0 - share) * weight

    return lambda: softmax_model().edited("weight", crowded, (1,))


ROWS_CROWD = Incident(
    "rows_crowd",
    (),
    "Experts of one device share most of their direction: few of them are told apart.",
    "MGG204",
    (
        Case("cosine 0.3 within four groups", _crowded(0.3)),
        Case("cosine 0.7", _crowded(0.7), ("MGG204", "MGG205"), _LAYER),
        Case("cosine 0.95", _crowded(0.95), ("MGG204", "MGG205"), _LAYER),
    ),
    (Case("as trained", softmax_model),),
)


INCIDENTS = (ROW_TOO_LONG, ROW_PARTLY_ZERO, LOW_RANK, ROWS_CROWD)
