"""SGLang's expert distribution recorder, mode ``stat``: counts by step, layer and expert.

``logical_count`` is (steps, layers, experts) in a file of ``torch.save``; the buffer is dumped
whole, so steps that were not used are zeros. Ranks of tensor parallelism are added up: shares are
right, totals may be multiples. Mode ``per_token`` holds physical ids without requests.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._torch_file import has_keys, open_torch_file
from moegeom.tokens.traces.trace import Trace

#: More slots than any step has; sums of many stay exact.
_MOST = 2**40

_COUNTS, _RECORDS = "logical_count", "records"


def recognises(path: Path) -> bool:
    """True for the dictionaries that the recorder dumps."""
    return has_keys(path, _COUNTS) or has_keys(path, _RECORDS, "last_physical_to_logical_map")


def read(path: Path) -> Trace:
    """The counts; RecordingError for the other modes."""
    file = open_torch_file(path)
    root = file.root if isinstance(file.root, dict) else {}
    if _COUNTS not in root:
        raise RecordingError(
            f"{path.name}: records of single passes: physical ids of the tokens of a batch, "
            "without requests.",
            "Use return_routed_experts of the server, or the recorder's mode stat.",
        )
    counts = file.array(root[_COUNTS], f"{path.name}: {_COUNTS}")
    if counts.ndim != 3 or 0 in counts.shape or counts.min() < 0 or counts.max() > _MOST:
        raise RecordingError(
            f"{path.name}: {_COUNTS} has shape {counts.shape} and values from "
            f"{counts.min(initial=0)} to {counts.max(initial=0)}; expected counts (steps, layers, "
            "experts)."
        )
    used = counts.any(axis=(1, 2))
    if not used.any():
        raise RecordingError(f"{path.name}: every count is 0: nothing was recorded.")
    unused = int((~used).sum())
    return Trace(
        path.name,
        "SGLang recorder",
        counts=counts[used].astype(np.int64),
        ids_are="logical",
        notes=(f"steps of the buffer that were not used, left out: {unused:,}",) if unused else (),
    )


DIALECT = Dialect(
    name="sglang_recorder",
    versions="0.5.23",
    source="sglang/srt/eplb/expert_distribution.py",
    recognises=recognises,
    read=read,
)
