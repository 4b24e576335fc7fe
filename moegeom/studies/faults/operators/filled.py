"""Expert capacity exceeded: overflow tokens go to the best expert with room."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Bool, Float, Int32, Int64
from moegeom.geometry.set_code import chosen_mask
from moegeom.studies.faults.operator import Operator, Proposal, Site

#: Batches in which places are counted, beside all tokens and each document: tokens in a row.
_IN_A_ROW = tuple(2**power for power in range(5, 15))

#: Experts that stop at the highest load of their batch, beyond the one that has it anyway: share
#: of all that a kind of batch needs, and kinds that are tried. Heuristic.
_STOPPED, _TRIED = 0.1, 3

#: Bits that say how many places an expert of one batch has.
_PLACES = 8.0


def _filled(site: Site) -> Iterator[Proposal]:
    """Overflow by order or by score, in batches whose loads stop at one capacity."""
    if not site.has_logits:
        return
    experts, tokens = len(site.matching), len(site.theirs)
    kinds: dict[str, Int64[np.ndarray, "tokens"]] = {"all tokens": np.zeros(tokens, np.int64)}
    kinds["each document"] = np.unique(site.columns.document, return_inverse=True)[1].ravel()
    for size in _IN_A_ROW:
        if size < tokens:
            kinds[f"each batch of {size:,}"] = np.arange(tokens) // size
    stopped = {words: _stopped(site.theirs, batch, experts) for words, batch in kinds.items()}
    likely = sorted(kinds, key=lambda words: -stopped[words])[:_TRIED]
    for words in likely:
        if stopped[words] < _STOPPED:
            continue
        batch = kinds[words]
        bits = _PLACES * (int(batch.max()) + 1) + math.log2(len(kinds))
        for order, is_full in (
            ("later", _full_before(site.theirs, batch, experts)),
            ("weaker", _full_above(site.theirs, batch, site.selection)),
        ):
            if not is_full.any():
                continue

            def scores(
                there: Site,
                rows: np.ndarray,
                is_full: Bool[np.ndarray, "tokens experts"] = is_full,
            ) -> Float[np.ndarray, "rows experts"]:
                own = there.selection[rows]
                return np.where(is_full[rows], own.dtype.type(-np.inf), own)

            text = f"experts full within {words}, the {order} ones sent to the next best"
            yield Proposal(
                f"filled {order} {words}", text, "capacity", own_bits=bits, scores=scores
            )


FILLED = Operator("filled", _filled)


def _loads(
    theirs: Int32[np.ndarray, "tokens k"], batch: Int64[np.ndarray, "tokens"], experts: int
) -> Int64[np.ndarray, "batches experts"]:
    number = batch[:, None] * experts + theirs
    counts = np.bincount(number.ravel(), minlength=(int(batch.max()) + 1) * experts)
    return counts.reshape(-1, experts)


def _stopped(
    theirs: Int32[np.ndarray, "tokens k"], batch: Int64[np.ndarray, "tokens"], experts: int
) -> float:
    """Share of the experts with the highest load of their batch, beside the one of each batch."""
    load = _loads(theirs, batch, experts)
    most = load == load.max(axis=1, keepdims=True)
    return float((most.sum() - len(load)) / (len(load) * max(experts - 1, 1)))


def _full_before(
    theirs: Int32[np.ndarray, "tokens k"], batch: Int64[np.ndarray, "tokens"], experts: int
) -> Bool[np.ndarray, "tokens experts"]:
    """Experts that earlier tokens of the batch have filled to its highest load."""
    order = np.argsort(batch, kind="stable")
    is_chosen = chosen_mask(theirs[order], experts)
    load = _loads(theirs, batch, experts)
    until = np.cumsum(is_chosen, axis=0) - is_chosen  # of all batches so far
    before = np.cumsum(load, axis=0) - load
    is_full = np.empty(is_chosen.shape, bool)
    there = batch[order]
    is_full[order] = until - before[there] >= load.max(axis=1)[there][:, None]
    return is_full


def _full_above(
    theirs: Int32[np.ndarray, "tokens k"],
    batch: Int64[np.ndarray, "tokens"],
    selection: Float[np.ndarray, "tokens experts"],
) -> Bool[np.ndarray, "tokens experts"]:
    """Experts at the highest load of the batch, for tokens below all that they have taken."""
    experts = selection.shape[1]
    is_chosen = chosen_mask(theirs, experts)
    load = _loads(theirs, batch, experts)
    lowest = np.full(load.shape, np.inf)
    np.minimum.at(lowest, batch, np.where(is_chosen, selection, np.inf))
    is_at_most = load == load.max(axis=1, keepdims=True)
    return is_at_most[batch] & ~is_chosen & (selection < lowest[batch])
