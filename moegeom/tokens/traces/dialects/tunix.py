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
from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._batch_arrays import (
    IDS,
    batch_arrays,
    holds_ids,
    refuse_other_shape,
)
from moegeom.tokens.traces.trace import RequestTrace, Trace

_PROMPT, _COMPLETION = "prompt_ids", "completion_ids"
_PROMPT_MASK, _COMPLETION_MASK, _SEGMENTS = "prompt_mask", "completion_mask", "segment_ids"


def recognises(path: Path) -> bool:
    """True for arrays with ids of four dimensions, prompts and completions."""
    return holds_ids(path, _PROMPT, _COMPLETION)


def read(path: Path) -> Trace:
    """Every sequence of the payload; those without any captured row are kept, for the cleaning."""
    arrays = batch_arrays(path, (_PROMPT, _COMPLETION, _PROMPT_MASK, _COMPLETION_MASK, _SEGMENTS))
    ids = arrays[IDS]
    missing = sorted({_PROMPT, _COMPLETION, _PROMPT_MASK, _COMPLETION_MASK} - set(arrays))
    if missing:
        raise RecordingError(
            f"{path.name}: lacks {', '.join(missing)}; expected them beside {IDS}.",
            "Save these arrays of the payload too: without them nothing says which rows are "
            "tokens.",
        )
    width = arrays[_PROMPT].shape[1] if arrays[_PROMPT].ndim == 2 else -1
    for name in (_PROMPT, _PROMPT_MASK):
        refuse_other_shape(path, arrays, name, (len(ids), width))
    for name in (_COMPLETION, _COMPLETION_MASK):
        refuse_other_shape(path, arrays, name, (len(ids), ids.shape[1] - width))
    _refuse_packed(path, arrays)
    tokens = np.concatenate([arrays[_PROMPT], arrays[_COMPLETION]], axis=1)
    return Trace(
        path.name,
        "tunix",
        tuple(
            RequestTrace(
                str(number),
                ids[number],
                token_ids=tokens[number],
                mask=_is_token(arrays, number, width),
            )
            for number in range(len(ids))
        ),
    )


def _refuse_packed(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    segments = arrays.get(_SEGMENTS)
    if segments is None:
        return
    refuse_other_shape(path, arrays, _SEGMENTS, arrays[IDS].shape[:2])
    packed = sum(len(np.unique(row[row > 0])) > 1 for row in segments)
    if packed:
        raise RecordingError(
            f"{path.name}: {packed} of {len(segments)} rows of {_SEGMENTS} hold several sequences; "
            "expected one sequence to a row.",
            "Save payloads before they are packed.",
        )


def _is_token(
    arrays: Mapping[str, np.ndarray], number: int, width: int
) -> Bool[np.ndarray, "tokens"]:
    """Prompt by its mask; completion up to its last token that is trained."""
    trained = np.flatnonzero(arrays[_COMPLETION_MASK][number])
    end = int(trained[-1]) + 1 if len(trained) else 0
    completion = np.arange(arrays[IDS].shape[1] - width) < end
    return np.concatenate([arrays[_PROMPT_MASK][number] != 0, completion])


DIALECT = Dialect(
    name="tunix",
    versions="tunix PR 2046 as merged (2026-08-31)",
    source="tunix RLTrainerPayload (routed_experts, UNSET_ROUTED_EXPERT) and its padded batch "
    "assembly",
    recognises=recognises,
    read=read,
)
