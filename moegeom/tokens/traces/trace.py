"""What an engine or a trainer wrote about its choices, in one form for all dialects.

A trace is what the file says, parsed and not yet believed: padding, rows of layers without a
router and rows that are missing are all still there. ``trace_source`` decides about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Integer

#: Bytes of one trace file, and of the ids of one trace. They are held in memory as stored, and once
#: more in the smallest integers that name the experts.
TRACE_BYTES = 160_000_000

IdsAre = Literal["logical", "physical", "unknown"]


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """The choices of one request: ``ids`` is (rows, layers, k), or flat where no shape is stored.

    Parameters
    ----------
    name
        What the file calls it; else its place in the file.
    ids
        Experts, in the dtype of the file.
    token_ids
        The whole sequence, prompt and generation; with a ``mask``, one per row.
    num_tokens
        Length of the whole sequence where the file counts it without listing it.
    num_prompt
        How many of them are the prompt.
    start
        Position of the first row, where the file says it.
    num_omitted
        Leading positions that the engine was free to leave out because it had them cached.
    mask
        Which rows are tokens, where the file says it.
    """

    name: str
    ids: Integer[np.ndarray, "..."]
    token_ids: Integer[np.ndarray, "tokens"] | None = None
    num_tokens: int | None = None
    num_prompt: int | None = None
    start: int | None = None
    num_omitted: int | None = None
    mask: Bool[np.ndarray, "rows"] | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """What one file, or one folder of a run, holds.

    Parameters
    ----------
    where
        Its name in messages.
    dialect
        Which engine or trainer wrote it.
    requests
        In the order of the file; empty for a log of counts.
    counts
        Slots by step, layer and expert, where that is all that was kept.
    counts_zeros
        False where experts that were never chosen are left out of the counts, at their end too.
    layers
        What the file calls its layers, where it says so.
    has_documents
        False where requests are batches of tokens from several sequences.
    last_is_routed
        True where the last token of a sequence goes through the routers too. An engine never
        forwards the last token that it sampled.
    notes
        What the reader left out already, with counts.
    """

    where: str
    dialect: str
    requests: tuple[RequestTrace, ...] = ()
    counts: Integer[np.ndarray, "steps layers experts"] | None = None
    counts_zeros: bool = True
    layers: tuple[int, ...] | None = None
    ids_are: IdsAre = "unknown"
    has_documents: bool = True
    last_is_routed: bool = False
    notes: tuple[str, ...] = ()
