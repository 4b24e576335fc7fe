"""Whether near-ties explain what flips: said of enough flips only."""

from __future__ import annotations

import pytest

from moegeom.studies.boundary.document import near_ties
from moegeom.studies.boundary.record import VariantFlips


def variant(share: float, tokens: int, near: float) -> VariantFlips:
    row = {"flipped_share": share, "num_tokens": tokens, "flipped_near_share": near}
    return VariantFlips("run-b", {}, [row, row], [], [], {})


@pytest.mark.parametrize(
    ("flips", "said"),
    [
        (1, "2 flips are too few to tell whether near-ties explain them"),
        (9, "18 flips are too few to tell whether near-ties explain them"),
        (10, "only 0 % of the flips are among the 10 % of tokens with the least margin"),
    ],
)
def test_few_flips_tell_nothing_of_where_they_lie(flips: int, said: str) -> None:
    assert near_ties(variant(flips / 1000, 1000, 0.0)).startswith(said)
