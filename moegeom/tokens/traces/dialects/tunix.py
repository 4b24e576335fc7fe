"""tunix: ``routed_experts`` of a payload of its trainer, (sequences, padded length, layers, k).

The arrays of an ``RLTrainerPayload`` saved as npz, safetensors or a dictionary of ``torch.save``,
beside ``prompt_ids``, ``prompt_mask``, ``completion_ids`` and ``completion_mask``. Prompts are
padded on the left, completions on the right. -1 is written where no expert was captured: in
padding, and for the last token. The mask of a completion may leave out tokens that are not trained
(answers of tools); they have been routed all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from moegeom.core.errors import RecordingError
from moegeom.tokens.traces.dialects._batch_arrays import (
    IDS,
    batch_rows,
    holds_ids,
    ranges_of,
    read_rows,
    refuse_other_shape,
    shape_of,
)
from moegeom.tokens.traces.trace import (
    Dialect,
    Pieces,
    Place,
    RequestTrace,
    Trace,
)

_PROMPT, _COMPLETION = "prompt_ids", "completion_ids"
_PROMPT_MASK, _COMPLETION_MASK, _SEGMENTS = "prompt_mask", "completion_mask", "segment_ids"


def recognises(path: Path) -> bool:
    """True for arrays with ids of four dimensions, prompts and completions."""
    return holds_ids(path, _PROMPT, _COMPLETION)


def pieces(path: Path, place: Place) -> Pieces:
    """Sequences by pieces."""
    arrays = batch_rows(path, (_PROMPT, _COMPLETION, _SEGMENTS), (_PROMPT_MASK, _COMPLETION_MASK))
    missing = sorted({_PROMPT, _COMPLETION, _PROMPT_MASK, _COMPLETION_MASK} - set(arrays))
    if missing:
        raise RecordingError(
            f"{path.name}: lacks {', '.join(missing)}; expected them beside {IDS}.",
            "Save these arrays of the payload too: without them nothing says which rows are "
            "tokens.",
        )
    num, length = shape_of(arrays[IDS])[:2]
    width = arrays[_PROMPT].row_shape[0] if len(arrays[_PROMPT].row_shape) == 1 else -1
    for name in (_PROMPT, _PROMPT_MASK):
        refuse_other_shape(path, arrays, name, (num, width))
    for name in (_COMPLETION, _COMPLETION_MASK):
        refuse_other_shape(path, arrays, name, (num, length - width))
    refuse_other_shape(path, arrays, _SEGMENTS, (num, length))
    for start, stop in ranges_of(path, arrays[IDS], place[0]):
        held = {name: read_rows(rows, start, stop) for name, rows in arrays.items()}
        _refuse_packed(path, held, start)
        tokens = np.concatenate([held[_PROMPT], held[_COMPLETION]], axis=1)
        requests = [
            RequestTrace(
                str(start + number),
                ids,
                token_ids=tokens[number],
                mask=_is_token(held, number, width),
                is_place=True,
            )
            for number, ids in enumerate(held[IDS])
        ]
        yield Trace(path.name, "tunix", tuple(requests)), (stop, 0) if stop < num else None


def _refuse_packed(path: Path, held: Mapping[str, np.ndarray], start: int) -> None:
    for number, row in enumerate(held.get(_SEGMENTS, ()), start=start):
        if len(np.unique(row[row > 0])) > 1:
            raise RecordingError(
                f"{path.name}: row {number} of {_SEGMENTS} holds several sequences; expected one "
                "sequence to a row.",
                "Save payloads before they are packed.",
            )


def _is_token(
    held: Mapping[str, np.ndarray], number: int, width: int
) -> Bool[np.ndarray, "tokens"]:
    """Prompt by its mask; completion up to its last token that is trained."""
    trained = np.flatnonzero(held[_COMPLETION_MASK][number])
    end = int(trained[-1]) + 1 if len(trained) else 0
    completion = np.arange(held[IDS].shape[1] - width) < end
    return np.concatenate([held[_PROMPT_MASK][number] != 0, completion])


DIALECT = Dialect(
    name="tunix",
    versions="tunix PR 2046 as merged (2026-08-31)",
    source="tunix RLTrainerPayload (routed_experts, UNSET_ROUTED_EXPERT) and its padded batch "
    "assembly",
    recognises=recognises,
    pieces=pieces,
)
