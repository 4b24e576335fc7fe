"""An update of low rank, as an adapter leaves it that was merged."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.text import percent
from moegeom.geometry.description import low_rank_part, number_bits
from moegeom.geometry.rows import size
from moegeom.studies.changes.edit import Edit, RowFit, always, says
from moegeom.studies.changes.row_pair import RowPair, share

#: Ranks that are tried: up to this part of the smaller side.
_PART = 4


def _low_rank(pair: RowPair) -> Iterator[RowFit]:
    most = min(pair.a.shape) // _PART
    if pair.is_projected or most < 1 or LOW_RANK.name in pair.named:
        return
    finest = float((pair.finest**2).sum()) ** 0.5
    # what is common to all rows may be a part of the update
    apart = number_bits(pair.a.shape[1], pair.a.size, 1.0, 1.0) if pair.shift.any() else 0.0
    for change, common in ((pair.b - pair.a, 0.0), (pair.left, apart)):
        part = low_rank_part(change, finest, most)
        if part is not None:
            yield RowFit(
                pair.a + part.change,
                part.bits + common,
                kind=str(part.rank),
                detail=f"{percent(part.share)} of the squared change has rank {part.rank}",
                size=share(size(part.change), pair.length),
                evidence={"rank": part.rank, "share": part.share},
            )


LOW_RANK = Edit(
    "update of low rank",
    "update of rank {kind} by {size}",
    says(
        "the change lives in few directions, as a merged adapter leaves it: tokens near a boundary "
        "flip; how many only tokens can tell."
    ),
    always("failed"),
    _low_rank,
)
