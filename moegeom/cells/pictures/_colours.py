"""A colour for each cell, by its coalition, unlike those of its neighbours."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from moegeom.cells.pictures._picture import Coalition

#: Light colours, any two of them apart in OKLab also as red-blind and green-blind people see them.
PALETTE = (
    "#98afba",
    "#fad779",
    "#feb4f7",
    "#ce8545",
    "#b97fc6",
    "#8aeebb",
    "#aabf64",
    "#49af7e",
    "#b3a7fb",
    "#f6af97",
    "#ebdff4",
    "#43d5dc",
    "#dbfbbb",
    "#709de7",
)

#: Steps that visit all colours: without a factor in common with their number.
_STEPS = (1, 3, 5, 9, 11, 13)

INK = "#1a1a1a"
FAINT = "#8c8c8c"
PALE = "#eeeeee"
ACCENT = "#d55e00"

#: Colours of domains, dark enough for a mark on any of the palette.
DOMAIN_INKS = ("#1a1a1a", "#b0003a", "#00429d", "#00544a", "#6a3d00", "#5b1a8b", "#7a7a00")


def preferred(coalition: Coalition) -> list[int]:
    """All colours in the order in which the coalition would have them: from its digest alone."""
    digest = hashlib.blake2b(",".join(map(str, coalition)).encode(), digest_size=4).digest()
    start, step = digest[0] + 256 * digest[1], _STEPS[digest[2] % len(_STEPS)]
    return [(start + step * i) % len(PALETTE) for i in range(len(PALETTE))]


def cell_colours(
    coalitions: Sequence[Coalition], walls: Int64[np.ndarray, "walls 2"]
) -> Int64[np.ndarray, "cells"]:
    """The place in the palette for each cell: the first in its own order that no neighbour has.

    Of two neighbours the coalition that is smaller as a tuple chooses first, so that the numbers of
    the cells do not matter. Beyond as many neighbours as there are colours, the first choice.
    """
    neighbours: list[list[int]] = [[] for _ in coalitions]
    for one, other in walls.tolist():
        neighbours[one].append(other)
        neighbours[other].append(one)
    chosen = np.full(len(coalitions), -1, np.int64)
    for cell in sorted(range(len(coalitions)), key=lambda cell: coalitions[cell]):
        taken = {int(chosen[other]) for other in neighbours[cell]}
        order = preferred(coalitions[cell])
        chosen[cell] = next((colour for colour in order if colour not in taken), order[0])
    return chosen


def shaded(colour: str, share: float) -> str:
    """The colour with a share of ink mixed in."""
    mixed = (
        round((1 - share) * int(colour[i : i + 2], 16) + share * int(INK[i : i + 2], 16))
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{value:02x}" for value in mixed)
