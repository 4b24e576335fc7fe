"""Recorded outputs of experts: their kinds, and how their sizes must fit together."""

from __future__ import annotations

from collections.abc import Mapping

from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.tokens import OUTPUT_KINDS


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
