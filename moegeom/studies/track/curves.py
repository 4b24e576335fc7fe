"""Curves of a series: figures of the results, drift of rows, agreement of chosen sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.row_keys import ALL
from moegeom.core.series import SERIES_COLUMNS, Curve
from moegeom.geometry.gram import effective_rows
from moegeom.studies.track.choices import Choices, agreement
from moegeom.studies.track.measure import MeasuredStep

Steps = Sequence[MeasuredStep]

#: Column of |A and B| / k of two sets drawn at random, k / E.
CHANCE = "overlap_by_chance"


def number(value: Any) -> float | None:
    """A finite number, else None."""
    return None if value is None or not math.isfinite(value) else float(value)


def stored_curves(measured: Steps, notes: list[str]) -> list[Curve]:
    """Curves of every column of a series that the results hold."""
    tables = [
        {
            row["router"]: row
            for row in step.results.rows("layers")
            if (row["variant"], row["population"]) == ("as_stored", ALL)
        }
        for step in measured
    ]
    routers = list(dict.fromkeys(router for table in reversed(tables) for router in table))
    if any(len(table) != len(routers) for table in tables):
        notes.append("Not every step has every router: the figures missing are unknown, not zero.")
    curves = []
    for router in routers:
        rows = [table.get(router, {}) for table in tables]
        for column in SERIES_COLUMNS:
            values = tuple(number(row.get(column.name)) for row in rows)
            if any(value is not None for value in values):
                errors = tuple(number(row.get(f"{column.name}_se")) for row in rows)
                curves.append(Curve(router, column.name, values, errors))
    return curves


def drift_curves(measured: Steps, notes: list[str]) -> list[Curve]:
    r"""Relative change of each row since the step before, median and largest.

    :math:`|r_t - r_{t-1}| / |r_{t-1}|` of the centred effective rows, from the weights where both
    checkpoints are at hand, else from the 32 projections in the results, which change a distance
    by about 12 %. Rows of length 0 are left out; missing where shapes differ.
    """
    is_whole = all(step.routers is not None for step in measured)
    if not is_whole and len(measured) > 1:
        notes.append(
            "Drift is approximate, to about 12 % a row: at least one step is a results directory, "
            "which keeps 32 projections of each row."
        )
    rows = [_rows(step) if is_whole else _projections(step) for step in measured]
    nothing = (None,) * len(measured)
    curves = []
    for router in rows[-1]:
        changes = [_change(a.get(router), b.get(router)) for a, b in itertools.pairwise(rows)]
        for name, of in (("row_drift_median", np.median), ("row_drift_max", np.max)):
            values = (None, *(None if c is None else float(of(c)) for c in changes))
            if any(value is not None for value in values):
                curves.append(Curve(router, name, values, nothing))
    return curves


def _change(before: np.ndarray | None, after: np.ndarray | None) -> np.ndarray | None:
    if before is None or after is None or before.shape != after.shape:
        return None
    length = np.linalg.norm(before, axis=1)
    rows = length > 0.0
    return np.linalg.norm(after - before, axis=1)[rows] / length[rows] if rows.any() else None


def _rows(step: MeasuredStep) -> dict[str, np.ndarray]:
    """Centred effective rows by router; a router with a row that is not finite is left out."""
    by_router = {r.name: effective_rows(r.weight, r.gain) for r in step.routers or ()}
    return {name: rows.centred for name, rows in by_router.items() if rows.finite.all()}


def _projections(step: MeasuredStep) -> dict[str, np.ndarray]:
    """The centred rows in 32 projections, from the results."""
    projections: dict[str, dict[int, Any]] = {}
    for row in step.results.rows("experts"):
        if (row["variant"], row["population"]) == ("as_stored", ALL):
            projections.setdefault(row["router"], {})[row["expert"]] = row.get("row_projections")
    return {
        router: np.array([by_expert[expert] for expert in sorted(by_expert)], dtype=np.float64)
        for router, by_expert in projections.items()
        if all(values is not None for values in by_expert.values())
    }


def agreement_curves(measured: Steps, notes: list[str]) -> list[Curve]:
    """Overlap with the last step, and what changed since the step before, token by token."""
    chosen = [step.chosen for step in measured]
    if len(measured) < 2 or not any(step.facts.num_tokens for step in measured):
        return []
    reason = not_comparable(measured)
    if reason:
        notes.append(f"Overlap and churn are not known for every step: {reason}.")
    last = chosen[-1]
    curves: list[Curve] = []
    for router in {} if last is None else last.chosen:
        with_last = [_agree(one, last, router) for one in chosen]
        since = [None, *(_agree(a, b, router) for a, b in itertools.pairwise(chosen))]
        own = []
        for column, agreements, value, error in (
            ("overlap_with_last", [*with_last[:-1], None], "overlap", "overlap_error"),
            ("expert_set_churn", since, "changed", "changed_error"),
            ("overlap_with_previous", since, "overlap", "overlap_error"),
        ):
            values = tuple(None if f is None else getattr(f, value) for f in agreements)
            errors = tuple(None if f is None else number(getattr(f, error)) for f in agreements)
            if any(v is not None for v in values):
                own.append(Curve(router, column, values, errors))
        if own:
            own.extend(_chance(measured, router))
        curves.extend(own)
    return curves


def not_comparable(measured: Steps) -> str:
    """Why some steps cannot be compared token by token; empty when all can."""
    if any(step.chosen is None for step in measured):
        lacking = next(step.facts.name for step in measured if step.chosen is None)
        return f"no chosen sets of {lacking} are at hand (results directories keep none)"
    texts = [step.chosen.tokens for step in measured if step.chosen is not None]
    if "" in texts:
        unknown = measured[texts.index("")].facts.name
        return f"the recording of {unknown} does not say document, position and token id"
    other = next((i for i, text in enumerate(texts) if text != texts[-1]), None)
    if other is None:
        return ""
    names = f"{measured[other].facts.name} and {measured[-1].facts.name}"
    return f"{names} were recorded on other tokens (document, position or token id differ)"


def _agree(one: Choices | None, other: Choices | None, router: str) -> Any:
    return None if one is None or other is None else agreement(one, other, router)


def _chance(measured: Steps, router: str) -> Iterator[Curve]:
    """|A and B| / k of two random sets, at every step: k / E."""
    levels = []
    for step in measured:
        facts = {r["name"]: r for r in step.results.run["routers"]}.get(router)
        levels.append(None if facts is None else facts["top_k"] / facts["num_experts"])
    yield Curve(router, CHANCE, tuple(levels), (None,) * len(levels))


def usage(measured: Steps) -> Iterator[tuple[str, float, int, float]]:
    """Router, step, expert and load over the mean, of every expert at every step."""
    columns = ("router", "expert", "load")
    for step in measured:
        if step.facts.num_tokens:
            table = step.results.columns("experts", columns, variant="as_stored", population=ALL)
            for router, expert, load in zip(*table.values(), strict=True):
                if load is not None:
                    yield router, step.facts.step, expert, load


def load_curves(measured: Steps, expert: int | None) -> list[Curve]:
    """Load of one expert at every step, in fair shares."""
    if expert is None:
        return []
    key = ("as_stored", ALL, expert)
    loads = [
        {
            row["router"]: (number(row.get("load")), number(row.get("load_se")))
            for row in step.results.rows("experts")
            if (row["variant"], row["population"], row["expert"]) == key
        }
        for step in measured
    ]
    if not loads[-1]:
        raise UsageError(f"--expert {expert}: the last checkpoint has no such expert.")
    curves = []
    for router in loads[-1]:
        points = [at.get(router, (None, None)) for at in loads]
        values, errors = zip(*points, strict=True)
        curves.append(Curve(router, f"load of expert {expert}", values, errors))
    if all(value is None for curve in curves for value in curve.values):
        raise UsageError(
            f"--expert {expert}: weights alone say nothing about load.", "Add --tokens."
        )
    return curves
