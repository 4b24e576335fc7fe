"""Sentences about loaded routers that are no errors: somebody else decides what they mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import numpy as np

from moegeom.core.router import Router, format_layers
from moegeom.router.family import Family
from moegeom.router.match import Match
from moegeom.router.rule import assumed_values
from moegeom.router.settings import Settings


def non_finite_notes(router: Router) -> Iterator[str]:
    """One sentence for each part of a router that holds NaN or infinity."""
    # One product tells whether a closer look is needed: nan and infinity survive it.
    flat = router.weight.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        is_clean = np.isfinite(np.dot(flat, flat))
    rows = np.empty(0) if is_clean else np.flatnonzero(~np.isfinite(router.weight).all(axis=1))
    if rows.size:
        verb = "row holds" if rows.size == 1 else "rows hold"
        yield f"{router.name}: {rows.size} {verb} non-finite values, first row {rows[0]}"
    vectors = {
        "the logit bias": router.logit_bias,
        "the selection bias": router.selection_bias,
        "the gain of the norm in front": router.gain,
    }
    for what, values in vectors.items():
        if values is None:
            continue
        places = np.flatnonzero(~np.isfinite(values))
        if places.size:
            noun = "value" if places.size == 1 else "values"
            yield (
                f"{router.name}: {what} holds {places.size} non-finite {noun}, "
                f"first at index {places[0]}"
            )


def layer_notes(stack: str, with_router: Set[int], expected: Set[int]) -> Iterator[str]:
    """Sentences about layers where names and config disagree on whether there is a router."""
    if missing := set(expected - with_router):
        yield f"{stack}: no router in {_layers(missing)}, where config.json implies one"
    if surplus := set(with_router - expected):
        yield f"{stack}: routers in {_layers(surplus)}, where config.json implies none"


def _layers(layers: Set[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {format_layers(set(layers))}"


def assumption_notes(matches: Sequence[Match], family: Family, settings: Settings) -> Iterator[str]:
    """What is said of a setting, and the values of each stack that the config does not give."""
    yield from (text for condition, text in family.notes_when.items() if settings.says(condition))
    specs = {(match.spec.name, match.spec.slot): match.spec for match in matches}
    for (stack, _), spec in specs.items():
        defaults = ", ".join(assumed_values(spec, settings.under(spec.config_roots)))
        if defaults:
            engine = " ".join(family.source.split()[:2])
            yield (
                f"{stack}: config.json does not say all of the rule; assumed are the defaults of "
                f"{engine}: {defaults}. Another engine may take others"
            )
