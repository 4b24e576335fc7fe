"""Names in the columns ``router``, ``population`` and ``variant`` of results, and their order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moegeom.core.text import natural

# ------------------------------------------------------------------------------------------- router


def layer_of(router: str) -> int | None:
    """31 of ``text/31`` and ``text/31/second``; None where no number stands there."""
    number = re.match(r"[^/]*/([0-9]{1,9})(?:/|$)", router)
    return None if number is None else int(number[1])


def slug(router: str) -> str:
    """The name in file names: ``text/0`` is ``text.0``."""
    return router.replace("/", ".")


# --------------------------------------------------------------------------------------- population
#: Every token of a recording.
ALL = "all"

#: Tokens whose router input is far longer or shorter than usual, such as attention sinks.
OUTLIERS = "outliers"


def is_domain(population: str) -> bool:
    """True for the tokens of one domain."""
    return population.startswith("domain=")


# ------------------------------------------------------------------------------------------ variant
#: The routers as the checkpoint stores them, and their random router.
AS_STORED, RANDOM = "as_stored", "random"

#: What another run chose for the same tokens.
RUN_B = "run-b"

#: What the routers of a second checkpoint choose on the same inputs.
CHECKPOINT_B = "checkpoint-b"

#: Variants that are choices of somebody else, and no arithmetic of these routers.
SIDES = (RUN_B, CHECKPOINT_B)


def is_stored_whole(row: Mapping[str, Any]) -> bool:
    """True for a row of the router as stored, of everything that was measured together."""
    return row["variant"] == AS_STORED and row["population"] == ALL


def under_random(variant: str) -> str:
    """The random router under the same arithmetic as ``variant``."""
    return f"{RANDOM}+{variant}"


def is_random(variant: str) -> bool:
    """Whether a variant is a random router, under whatever arithmetic."""
    return variant == RANDOM or variant.startswith(f"{RANDOM}+")


# -------------------------------------------------------------------------------------------- order
def row_order(name: str) -> tuple[int, list[tuple[str, int]], bool]:
    """The key that sorts variants, and populations: as stored, and the whole, first; then what
    others chose; each random router behind what it stands beside; outliers last; numbers by their
    value.
    """
    base = name.removeprefix(RANDOM).removeprefix("+") or AS_STORED if is_random(name) else name
    first = (AS_STORED, *SIDES)
    place = first.index(base) if base in first else len(first) + (base == OUTLIERS)
    return 0 if base == ALL else place, natural(base), is_random(name)
