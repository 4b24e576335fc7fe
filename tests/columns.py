"""Columns of tokens, as recordings and sources of the tests hold them, and such recordings."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from moegeom.core.tokens import TokenColumns
from moegeom.tokens.recording.writer import RecordingWriter


def columns_of(document: ArrayLike, token_id: ArrayLike = -1, domain: ArrayLike = -1):
    """Of tokens by their ascending document; positions count from the first token of each."""
    document = np.asarray(document, np.int64)
    position = np.arange(len(document)) - np.searchsorted(document, document)
    ids, domains = (np.broadcast_to(one, document.shape) for one in (token_id, domain))
    return TokenColumns(
        document, position.astype(np.int32), ids.astype(np.int32), domains.astype(np.int16)
    )


def recording_of(
    path: Path, stage, columns: TokenColumns, values, chosen=None, outputs=None, **facts: Any
) -> Path:
    """A recording of one shard, by router of its values or choices; ``facts`` are a writer's."""
    with RecordingWriter(path, stage, tuple(values or chosen), **facts) as writer:
        writer.append(columns, values, chosen, outputs=outputs)
    return path
