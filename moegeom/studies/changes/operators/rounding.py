"""Coarser number formats: casts, and grids with scales."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.core.router import Router, mantissa_bits
from moegeom.core.text import percent
from moegeom.geometry.number_formats import CASTS, cast_of, grid_of
from moegeom.studies.changes.edit import Edit, EditFit, Exported, Judgement
from moegeom.studies.changes.record import Change
from moegeom.studies.changes.row_pair import BiasPair, RowPair, row_pair, stored_bits

#: Bits that each value saves which is told to the last digit.
_EXACT_BITS = 16.0


#: What is told of biases that are finer than those of A.
_NO_LONGER = "no longer rounded to"


def _rounded(pair: RowPair) -> Iterator[EditFit]:
    if pair.is_projected or not pair.is_stored:
        return
    first, second = pair.routers
    parts = {"weight": (first.weight[pair.place], second.weight)}
    if first.gain is not None and second.gain is not None:
        parts["gain"] = (first.gain[None], second.gain[None])
    elif first.gain is not second.gain:
        return
    for later, names in ((1, "B is A"), (0, "A is B")):
        casts = _casts(parts, later, second)
        if casts:
            what = " and ".join(f"{part} to {cast}" for part, cast in casts.items())
            only = "" if "weight" in casts else "gain "
            yield _exact(
                pair,
                f"{names}, {only}rounded to {' and '.join(sorted(set(casts.values())))}",
                f"{what}, all values",
                casts,
            )
            return
    stored = [router.provenance.stored_dtype for router in pair.routers]
    same_gain = "gain" not in parts or np.array_equal(*parts["gain"])
    if pair.is_rounding and same_gain and stored_bits(stored[1]) < stored_bits(stored[0]):
        yield _exact(
            pair, f"B is A, rounded to {stored[1].lower()}, not always to the nearest", "", {}
        )


def _exact(pair: RowPair, kind: str, detail: str, casts: dict[str, str]) -> EditFit:
    with np.errstate(over="ignore", invalid="ignore"):
        moved = pair.change_size
    return EditFit(
        pair.b,
        7.0,
        kind=kind,
        detail=f"{detail}{'; ' if detail else ''}rows moved by {percent(moved)}",
        size=moved,
        evidence={"dtypes": casts, "rms_change": moved},
        saved=_EXACT_BITS * pair.b.size,
    )


def _casts(
    parts: dict[str, tuple[np.ndarray, np.ndarray]], later: int, b: Router
) -> dict[str, str] | None:
    """The cast of each part that is not the same; None unless all are casts this way round."""
    casts = {}
    for part, pair in parts.items():
        if np.array_equal(*pair):
            continue
        finer, coarser = pair[1 - later], pair[later]
        name = cast_of(finer, coarser)
        if name is None and part == "weight":
            bits = mantissa_bits(b.provenance.stored_dtype) or 0
            # scaled storage is multiplied out in float32, whatever it is stored as
            precision = 2.0 ** -(bits + 1) if bits in (7, 10) else 1e-6
            name = grid_of(finer, coarser, precision)
        if name is None:
            return None
        casts[part] = name
    return casts


def rounding_of_broken(a: Router, b: Router) -> Iterator[EditFit]:
    """Casts of routers with non-finite values, for which no other edit is tried."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield from _rounded(row_pair(a, b, np.arange(a.num_experts)))


def _bias_rounded(pair: BiasPair) -> Iterator[EditFit]:
    moved = pair.b != pair.a
    for finer, coarser, to in ((pair.a, pair.b, "rounded to"), (pair.b, pair.a, _NO_LONGER)):
        cast = cast_of(*(side[None, moved].astype(np.float32) for side in (finer, coarser)))
        if cast is None:
            continue
        every = CASTS.get(cast)
        # what the others would be, where it is A that was rounded
        rows = pair.b if every is None or finer is pair.b else every(pair.a.astype(np.float32))
        largest = float(np.abs(pair.b - pair.a).max())
        yield EditFit(
            rows.astype(np.float64),
            3.0,
            f"{pair.kind} {to} {cast}",
            f"largest change {largest:.2g}, spread of the bias {pair.spread:.2g}",
            {"largest_change": largest, "spread": pair.spread},
            allows_subset=True,
        )


def _judge(change: Change, pair: Exported) -> Judgement:
    if change.subject != "rows":
        return Judgement("failed", change.meaning)
    moved = pair.moved()
    movement = f"W diag(g) moved by {percent(moved)}; " if 0.0 < moved < np.inf else ""
    return Judgement("failed", f"{movement}{change.meaning}")


ROUNDED = Edit(
    "rounded",
    "{kind}",
    "tokens within rounding of a boundary may flip; bf16_flip_share of a scan says how many.",
    _judge,
    _rounded,
    _bias_rounded,
    # against a baseline only biases are exact; biases finer than its own are no error
    gate=lambda change: None if _NO_LONGER in change.phrase else "error",
)
