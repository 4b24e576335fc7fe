"""SGLang's first recorder, ``expert_distribution_rank<n>_timestamp<t>.csv``: a count to a line.

``layer_id,expert_id,count`` of what one rank saw; experts that were never chosen are not in it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.limits import COUNTS
from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._csv_numbers import csv_numbers, first_lines
from moegeom.tokens.traces.trace import Trace

_NAMES = ("layer_id", "expert_id", "count")

#: More slots than any run has; sums of many stay exact.
_MOST = 2**40

#: Layers and experts of any model.
_MOST_LAYERS, _MOST_EXPERTS = 4096, 65_536


def recognises(path: Path) -> bool:
    """True for a table with exactly these three columns."""
    return first_lines(path, 1) == [",".join(_NAMES).encode()]


def read(path: Path) -> Trace:
    """The counts as one step."""
    found = csv_numbers(path, _NAMES, num_headers=1)
    if not len(found):
        raise RecordingError(f"{path.name}: every count is 0: nothing was recorded.")
    most = (_MOST_LAYERS - 1, _MOST_EXPERTS - 1, _MOST)
    if (found < 0).any() or (found > most).any():
        raise RecordingError(
            f"{path.name}: values from {found.min(axis=0).tolist()} to "
            f"{found.max(axis=0).tolist()}; expected layers, experts and counts."
        )
    layers, layer = np.unique(found[:, 0], return_inverse=True)
    num_experts = int(found[:, 1].max()) + 1
    if len(layers) * num_experts > COUNTS:
        raise RecordingError(f"{path.name}: {len(layers)} x {num_experts:,} layers and experts.")
    key = layer * num_experts + found[:, 1]
    if len(np.unique(key)) < len(key):
        raise RecordingError(
            f"{path.name}: an expert of a layer stands twice in it.",
            "Are these files of several ranks, one behind the other?",
        )
    counts = np.zeros((1, len(layers), num_experts), np.int64)
    counts[0, layer, found[:, 1]] = found[:, 2]
    return Trace(
        path.name,
        "SGLang's first recorder (one rank)",
        counts=counts,
        layers=tuple(layers.tolist()),
        counts_zeros=False,
        ids_are="logical",
    )


DIALECT = Dialect(
    name="sglang_csv",
    versions="0.4.4 to 0.4.5",
    source="python/sglang/srt/managers/expert_distribution.py (dump_record); issue 5275",
    recognises=recognises,
    read=read,
)
