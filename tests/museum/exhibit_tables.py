"""Incidents of tables that look experts up by token id."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tests.museum.checkpoint import BF16, Checkpoint, name_of
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import sigmoid_model

_TABLE = "model.layers.1.mlp.gate.tid2eid"


@functools.cache
def hashed_model(experts: int) -> Checkpoint:
    """A deepseek_v4 whose layer 1 looks 4 of so many experts up for each of 2,000 tokens."""
    random = np.random.default_rng([159, experts])
    wide = random.standard_normal((experts, 256)) / 16.0
    table = np.stack([random.choice(experts, 4, replace=False) for _ in range(2000)])
    return sigmoid_model().changed(
        {
            name_of("bias", 1): None,
            name_of("weight", 1): wide.astype(BF16),
            _TABLE: table.astype(np.int64),
        },
        {"model_type": "deepseek_v4"},
    )


def _cast(experts: int) -> Callable[[], Checkpoint]:
    def cast() -> Checkpoint:
        model = hashed_model(experts)
        return model.changed({_TABLE: model.tensors[_TABLE].astype(BF16).astype(np.int64)})

    return cast


def _repeated() -> Checkpoint:
    table = hashed_model(384).tensors[_TABLE].copy()
    table[:3, 1] = table[:3, 0]
    return hashed_model(384).changed({_TABLE: table})


#: A layer that looks its experts up is not measured, which the profile release asks for.
_LEFT_OUT = (0, 4)

TABLE_CAST = Incident(
    "token_table_cast",
    ("ISEEKYAN/mbridge#159", "verl-project/verl-ascend-recipe#126"),
    "A cast of the whole checkpoint to bfloat16 took the table of experts by token id with it: "
    "above 256 the odd ids became even ones, and the largest became an expert that does not exist.",
    "MGI111",
    (
        Case("three of 2,000 rows name an expert twice", _repeated, ("MGI111",), ("text/1",)),
        Case("320 experts, through bfloat16", _cast(320), ("MGI111",), ("text/1",)),
        Case("384 experts, through bfloat16", _cast(384), ("MGI111",), ("text/1",)),
    ),
    (
        Case("the table as it was", lambda: hashed_model(384), exits=_LEFT_OUT),
        Case("256 experts, through bfloat16, which holds every id", _cast(256), exits=_LEFT_OUT),
    ),
)

INCIDENTS = (TABLE_CAST,)
