"""FLAME-MoE's published traces: a folder ``actives/iter_<n>`` with a Parquet file to a layer.

``layer_<nn>.parquet`` holds a token of the training data to a row, its experts in ``indices``
(lists of k numbers), best first, and their probabilities in ``scores``. Layers count from 1, as in
Megatron-LM. Row i of each is row i of all files of ``samples`` beside ``actives``, which hold token
ids and do not say where a sequence begins.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from moegeom.core.documents import DocumentError
from moegeom.core.errors import RecordingError, first_line
from moegeom.core.limits import FLAME_FILES, TRACE_BYTES
from moegeom.core.parquet import parquet_facts
from moegeom.core.shapes import Int32
from moegeom.core.text import number_of
from moegeom.tokens.foreign.parquet_rows import ParquetTable
from moegeom.tokens.stages import EXPERT_DTYPES
from moegeom.tokens.traces.trace import Dialect, RequestTrace, Trace

_FILES, _IDS = "layer_*.parquet", "indices"

_NUMBER = re.compile(r"layer_(\d{1,4})")


def recognises(path: Path) -> bool:
    """True for a folder with such files that is no recording."""
    if not path.is_dir() or (path / "recording.json").exists():
        return False
    return any(_NUMBER.fullmatch(file.stem) for file in path.glob(_FILES))


def read(path: Path) -> Trace:
    """All tokens, as one batch."""
    named = [(m, file) for file in path.glob(_FILES) if (m := _NUMBER.fullmatch(file.stem))]
    files = sorted((int(m[1]), file) for m, file in named)
    layers = [layer for layer, _ in files]
    if not files or len(files) > FLAME_FILES or len(set(layers)) < len(layers):
        raise RecordingError(
            f"{path.name}: {number_of(len(files), 'file')} called {_FILES}, of "
            f"{number_of(len(set(layers)), 'layer')}; expected one of each layer."
        )
    tables = [_table(file) for _, file in files]
    sizes = sorted({table.starts[-1] for table in tables})
    if len(sizes) > 1:
        raise RecordingError(
            f"{path.name}: files of layers have {sizes[0]:,} to {sizes[-1]:,} rows; expected as "
            "many in each.",
            "A file is truncated, or of another capture.",
        )
    columns = [table.rows(_IDS, tuple(EXPERT_DTYPES.values()), False) for table in tables]
    widths = sorted({column.width for column in columns})
    if len(widths) > 1:
        raise RecordingError(f"{path.name}: layers have {widths} experts a token; expected one k.")
    size = 4 * sizes[0] * widths[0] * len(files)
    if size > TRACE_BYTES:
        raise RecordingError(
            f"{path.name}: {size:,} bytes of ids, more than the {TRACE_BYTES:,} allowed.",
            "Write the first row groups of every layer into a folder of their own.",
        )
    _check_samples(path, sizes[0])
    ids: Int32[np.ndarray, "tokens layers slots"] = np.empty(
        (sizes[0], len(files), widths[0]), np.int32
    )
    of_layer = np.empty((sizes[0], widths[0]), np.int32)
    for number, column in enumerate(columns):
        column.read_into(0, of_layer)
        ids[:, number] = of_layer
    return Trace(
        path.name,
        "FLAME-MoE",
        (RequestTrace(path.name, ids, is_place=True),),
        layers=tuple(layers),
        ids_are="logical",
        has_documents=False,
    )


def _table(file: Path) -> ParquetTable:
    table = ParquetTable(file)
    if _IDS not in table.schema.names:
        raise RecordingError(
            f"{file.name}: has the columns {', '.join(table.schema.names[:8])}; expected '{_IDS}'."
        )
    return table


def _check_samples(path: Path, num_rows: int) -> None:
    """Raises RecordingError where the tokens are there too, and are not as many."""
    files = sorted((path.absolute().parents[1] / "samples").glob("*.parquet"))
    if not files or len(files) > FLAME_FILES:
        return
    try:
        num_tokens = sum(sum(parquet_facts(file).sizes) for file in files)
    except (DocumentError, OSError) as error:
        raise RecordingError(f"{path.name}: samples: {first_line(error)}.") from None
    if num_tokens != num_rows:
        raise RecordingError(
            f"{path.name}: layers have {number_of(num_rows, 'row')}; the samples have "
            f"{number_of(num_tokens, 'token')}.",
            "A file of samples is missing, or of another capture.",
        )


DIALECT = Dialect(
    name="flame",
    versions="the data set as of 2026",
    source="card of the data set CMU-FLAME/FLAME-MoE-Traces; scripts/empirical_analysis of "
    "cmu-flame/FLAME-MoE e9b2fe2df3",
    recognises=recognises,
    read=read,
    files=lambda folder: [folder],
)
