"""Which tensors a recording holds at each stage, as a table, and which outputs of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import ml_dtypes
import numpy as np

from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.registry import unknown_name
from moegeom.core.tokens import OUTPUT_KINDS, Stage

#: What a float tensor may be stored as; all are read as float32.
FLOAT_DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

#: What expert numbers may be stored as; all are read as int32.
EXPERT_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(name)
    for name in ("uint8", "int8", "uint16", "int16", "int32", "uint32", "int64", "uint64")
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor per router and shard: its name and the prefix of the file that holds it.

    ``row`` names its dimensions after the first, which is tokens.
    """

    name: str
    file_prefix: str
    is_float: bool
    row: tuple[str, ...] = ("width",)

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The dtypes that it may be stored as, by name."""
        return FLOAT_DTYPES if self.is_float else EXPERT_DTYPES


CHOSEN = StoredTensor("chosen", "chosen", is_float=False)
TOP_LOGITS = StoredTensor("logits", "top_logits", is_float=True)
TOP_EXPERT = StoredTensor("expert", "top_logits", is_float=False)

#: The tensors of each stage. Stage ``ids`` is the chosen experts themselves.
STAGE_TENSORS: dict[Stage, tuple[StoredTensor, ...]] = {
    "router_input": (StoredTensor("router_input", "router_input", is_float=True),),
    "pre_norm": (StoredTensor("pre_norm", "pre_norm", is_float=True),),
    "logits": (StoredTensor("logits", "logits", is_float=True),),
    "top_logits": (TOP_LOGITS, TOP_EXPERT),
    "ids": (CHOSEN,),
}

#: The tensor of each kind of output; it has files of its own, named after the kind.
OUTPUT_TENSORS: dict[str, StoredTensor] = {
    kind: StoredTensor(
        kind,
        kind,
        is_float=True,
        row=("experts", "width") if kind == "expert_output" else ("width",),
    )
    for kind in OUTPUT_KINDS
}

#: Stages that hold what a router reads, behind the norm or in front of it.
INPUT_STAGES: frozenset[Stage] = frozenset({"router_input", "pre_norm"})

#: Stages whose rows are read by ``TokenSource.read_values``.
VALUE_STAGES: frozenset[Stage] = frozenset({"router_input", "pre_norm", "logits"})


def stage_of(text: str | None) -> Stage | None:
    """The stage of that name; UsageError where there is none."""
    if text is not None and text not in STAGE_TENSORS:
        raise unknown_name("stage", text, STAGE_TENSORS)
    return cast("Stage | None", text)


def stored_tensors(
    stage: Stage, has_chosen: bool, outputs: tuple[str, ...]
) -> tuple[StoredTensor, ...]:
    """Every tensor that a recording holds for each router."""
    tensors = STAGE_TENSORS[stage]
    if has_chosen and CHOSEN not in tensors:
        tensors = (*tensors, CHOSEN)
    return (*tensors, *(OUTPUT_TENSORS[kind] for kind in outputs))


def has_floats(stage: Stage, outputs: tuple[str, ...]) -> bool:
    """Whether a recording holds floats, which all have one dtype: not so for ids alone."""
    return stage != "ids" or bool(outputs)


def check_output_kind(kind: str) -> None:
    """Raise unless there is such a kind of output; asking for another is a bug of ours."""
    if kind not in OUTPUT_KINDS:
        raise InternalError(f"output {kind!r}; expected one of {', '.join(OUTPUT_KINDS)}.")


def check_output_shapes(row_shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise unless the shared and the routed output of one router, where both are there, add up.

    ``row_shapes`` has the shape of one token by name of the tensor; other tensors do not matter.
    """
    shared, routed = row_shapes.get("shared_output"), row_shapes.get("routed_output")
    if shared and routed and shared != routed:
        raise RecordingError(
            f"{where}: shared_output has {shared[0]} columns, routed_output {routed[0]}; "
            "expected the same width, since the output of the block is their sum.",
            "Record both where the block adds them.",
        )
