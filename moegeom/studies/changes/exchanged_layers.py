"""Routers that are those of another layer: found by a few projections of their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float64

from moegeom.core.router import Rule
from moegeom.document.verdict_text import places
from moegeom.studies.changes.effective import UNRELATED
from moegeom.studies.changes.words import change
from moegeom.studies.diff.record import RouterChange

#: A router is that of another layer when it is nearer to it than this share of its own length: rows
#: that have nothing to do with each other are 1.4 lengths apart.
_NEAR = 0.5

#: Projections of the rows of a router, by its name.
Projections = Mapping[str, Float64[np.ndarray, "experts count"]]


def with_exchanged_layers(
    compared: Sequence[RouterChange],
    sides: tuple[Projections, Projections],
    rules: Mapping[str, Rule],
    compare: Callable[[str, str], RouterChange],
) -> list[RouterChange]:
    """The same changes; of an unrelated router that is another one of A, the change from that one.

    ``sides`` hold the projected rows of A and of B, ``compare`` compares a router of A with
    one of B.
    """
    a, b = sides
    found = []
    for router in compared:
        is_unrelated = any(one.word == UNRELATED for one in router.changes)
        source = _nearest(router.router, a, b) if is_unrelated else None
        if source is None:
            found.append(router)
            continue
        rest = compare(source, router.router)
        moved = change(
            "another layer",
            rules[router.router],
            kind=f"of B is {places([source], {'routers': [{'name': name} for name in a]})} of A",
            source=source,
        )
        found.append(dataclasses.replace(rest, changes=(moved, *rest.changes)))
    return found


def _nearest(name: str, a: Projections, b: Projections) -> str | None:
    """The router of A that is nearest, where it is near and another one."""
    rows = b.get(name)
    if rows is None:
        return None
    apart = {
        other: float(np.linalg.norm(values - rows) / length)
        for other, values in a.items()
        if values.shape == rows.shape and (length := np.linalg.norm(values)) > 0.0
    }
    best = min(apart, key=lambda other: apart[other], default=name)
    return best if best != name and apart[best] < _NEAR else None
