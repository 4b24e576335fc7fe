"""How many routers there should be, and where names and config disagree."""

from __future__ import annotations

from collections.abc import Sequence, Set

from moegeom.router.family import Family
from moegeom.router.match import Match
from moegeom.router.notes import layer_notes
from moegeom.router.rule import expected_layers
from moegeom.router.settings import Settings


def count_expected(
    family: Family,
    matches: Sequence[Match],
    listed: Set[tuple[str, int]],
    settings: Settings,
    wanted: frozenset[int] | None,
) -> tuple[int | None, list[str]]:
    """The expected number of routers in the ``wanted`` layers, and a note for each surprise.

    ``listed`` routers are there and not loaded: none is expected in their place.
    None when the family or the config does not say. Routers of the stack ``mtp`` are often left
    out on purpose: those that are there count as expected.
    """
    total = sum(match.stack != match.spec.name for match in matches)
    notes: list[str] = []
    is_known = True
    for spec in family.stacks:
        expected = expected_layers(spec.layers, settings.under(spec.config_roots))
        if expected is None:
            is_known = False
            continue
        expected -= {layer for stack, layer in listed if stack == spec.name}
        expected = expected if wanted is None else expected & wanted
        found = {m.layer for m in matches if m.spec is spec and m.stack == spec.name}
        total += len(expected)
        notes += layer_notes(spec.name, found, expected)
    return (total if is_known else None), notes
