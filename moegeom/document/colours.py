"""One colour for each meaning, in light and in dark; ramps for heat maps.

Colours of meanings and of groups are told apart by red-blind and green-blind readers too: a test
computes what they see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

#: Meaning to colour on white and on black.
ROLES: Mapping[str, tuple[str, str]] = {
    "tokens": ("#1f6fb4", "#6cb6ff"),
    "random": ("#80868f", "#9aa1ab"),
    "limit": ("#b3261e", "#ff8a80"),
    "other": ("#c76a00", "#ffb454"),
    "dim": ("#b9bec5", "#4b5159"),
}

#: Groups without a meaning of their own, in their order; the last, grey, suits all others.
GROUPS: Sequence[str] = (
    "#1f6fb4", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8a3b12", "#2b2b80", "#b4b4b4",
)  # fmt: skip

#: The same on black: those that are too dark there are lighter.
GROUPS_ON_BLACK: Sequence[str] = (
    "#1f6fb4", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#c0673a", "#8f8fff", "#b4b4b4",
)  # fmt: skip


def of_role(role: str) -> str:
    """The colour of a meaning, or of a group such as ``g3``, on white."""
    return ROLES[role][0] if role in ROLES else GROUPS[int(role[1:]) % len(GROUPS)]


#: Stops of the ramps: one direction from pale to dark, and two of them that part at a pale middle.
_ONE = ("#f7f7f5", "#9cc3e4", "#3a7fbd", "#0b2e5c")
_TWO = ("#0b4a8f", "#7fb2dc", "#f7f7f5", "#f0a58a", "#a31525")


@cache
def ramp(parts: bool) -> tuple[tuple[int, int, int], ...]:
    """255 colours, low to high; with ``parts`` blue over pale to red."""
    stops = np.array([parsed(stop) for stop in (_TWO if parts else _ONE)], np.float64)
    at = np.linspace(0.0, len(stops) - 1.0, 255)
    channels = [np.rint(np.interp(at, range(len(stops)), stops[:, i])) for i in range(3)]
    return tuple((int(r), int(g), int(b)) for r, g, b in zip(*channels, strict=True))


def is_dark(colour: tuple[int, int, int]) -> bool:
    """Whether a text on this colour has to be light."""
    red, green, blue = colour
    return 0.3 * red + 0.59 * green + 0.11 * blue < 140


def parsed(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of ``#rrggbb``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
