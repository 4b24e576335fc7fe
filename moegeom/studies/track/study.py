"""``moegeom track``: a training run checkpoint by checkpoint, each on its own recording.

Read :func:`track`: find the checkpoints, measure what is new, compare neighbours, fit trends, judge
the series.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checks.profile_file import fail_on
from moegeom.core.errors import CheckpointError, MoeGeomError, UsageError
from moegeom.core.files import write_whole
from moegeom.core.loaded_code import refuse_code_within
from moegeom.core.row_keys import ALL, is_domain
from moegeom.core.series import SERIES_COLUMNS, Curve, Driver, Series
from moegeom.core.text import number_of
from moegeom.document.model import View
from moegeom.document.place import layers_without_router
from moegeom.document.render import render
from moegeom.document.rule_words import rule_brief, rule_status, rule_trust
from moegeom.engine.out import RUNS
from moegeom.geometry.gram import effective_rows
from moegeom.geometry.statistics import LEAST_STEPS, departures, onset, slope
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.pipeline import Watch
from moegeom.results.reader import finite_column
from moegeom.studies.track.document import document
from moegeom.studies.track.findings import judge_series
from moegeom.studies.track.steps import (
    LeftStep,
    MeasuredStep,
    TrackRequest,
    agreement,
    find_checkpoints,
    history,
    measure_step,
    refuse_missing_recordings,
)

__all__ = ["TrackRequest", "track"]


def track(request: TrackRequest, watch: Watch | None = None) -> Series:
    """The series, measured where it was not measured before; results stay under ``request.out``.

    Raises
    ------
    MoeGeomError
        One of its subclasses, naming the step.
    """
    least = fail_on(request.fail_on or "error", "--fail-on")
    candidates, skipped = find_checkpoints(request.patterns)
    if not candidates:
        raise _nothing_finished(request, skipped)
    refuse_code_within(*(one.path for one in candidates))
    # the folder that holds the checkpoints, or the only one
    last = candidates[-1]
    name = Path(os.path.realpath(last.path)).parent.name or last.name
    folder = request.out or RUNS / f"{name}.track"
    refuse_missing_recordings(request, folder, candidates)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{folder}: cannot be made ({error.strerror})."
        raise UsageError(reason, "Choose another --out.") from None
    measured: list[MeasuredStep] = []
    for candidate in candidates:
        step = measure_step(request, folder, candidate, watch)
        if isinstance(step, str):
            skipped.append(LeftStep(candidate.name, step))
        else:
            measured.append(step)
    if not measured:
        raise _nothing_finished(request, skipped)
    notes = [*_notes(request, measured)]
    run = measured[-1].results.run
    curves = [
        *stored_curves(measured, notes),
        *drift_curves(measured, notes),
        *agreement_curves(measured, notes),
    ]
    axis = [step.facts.step for step in measured]
    series = Series(
        name=name,
        steps=tuple(step.facts for step in measured),
        curves=with_trends(curves, axis),
        drivers=tuple(drivers(measured[0], measured[-1])) if len(measured) > 1 else (),
        expert_loads=with_trends(load_curves(measured, request.expert), axis),
        skipped=tuple((one.name, one.reason) for one in skipped),
        notes=tuple(notes),
        rule=_rule(measured),
        usage=tuple(usage(measured)),
        verdict=judge_series(history(measured, not_comparable(measured), skipped), least),
        run={**run, "checkpoint": {**run["checkpoint"], "name": name}},
    )
    write_series(folder, series)
    return series


def _nothing_finished(request: TrackRequest, skipped: Sequence[LeftStep]) -> MoeGeomError:
    is_early = all(one.is_being_written for one in skipped)
    return (UsageError if is_early else CheckpointError)(
        f"{' '.join(request.patterns)}: no finished checkpoint.",
        "; ".join(f"{one.name}: {one.reason}" for one in skipped[:3]),
    )


def _rule(measured: Sequence[MeasuredStep]) -> str:
    """The rule of the last step, and whether it is verified at each step or assumed."""
    run = measured[-1].results.run
    family, sentence = run["checkpoint"]["family"], run["checkpoint"]["rule"]
    rule = f"{family}: {rule_brief(sentence, run['routers'])}; "
    lacking = [step for step in measured if rule_status(step.results.run) == "assumed"]
    if not lacking:
        return f"{rule}verified by recorded choices at every step"
    assumed = rule_trust(lacking[-1].results.run)
    if len(lacking) == len(measured):
        return f"{rule}{assumed}"
    named = ", ".join(step.facts.name for step in lacking[:4]) + " ..." * (len(lacking) > 4)
    number = f"{len(measured) - len(lacking)} of {len(measured)} steps"
    return f"{rule}verified by recorded choices at {number}, {assumed} at {named}"


def _notes(request: TrackRequest, measured: Sequence[MeasuredStep]) -> Iterator[str]:
    """What so few steps cannot show, recordings that are gone or failed a test, absent layers."""
    if len(measured) < 3:
        yield "Fewer than three steps: no scatter about a line, and no onset."
    elif len(measured) < LEAST_STEPS:
        steps = number_of(len(measured), "step")
        yield f"{steps}: a slope, but no onset, which takes at least {LEAST_STEPS}."
    if gone := ", ".join(step.facts.name for step in measured if step.lacks_recording):
        yield (
            f"The recordings of {gone} are gone: their kept results are shown, measured from a "
            "recording of the same name and this checkpoint."
        )
    waived = [
        step.facts.name
        for step in measured
        if (step.results.run.get("trust") or {}).get("overridden")
    ]
    if waived:
        yield f"NOT TRUSTED: recordings accepted against their tests: {', '.join(waived)}."
    names = (router["name"] for router in measured[-1].results.run["routers"])
    if absent := layers_without_router(request.layers, names):
        yield f"{absent.capitalize()}."


def _series_rows(
    series: Series,
) -> Iterator[tuple[str, float, str, str, float | None, float | None]]:
    """Router, step, checkpoint, column, value and standard error of every figure at every step."""
    for curve in (*series.curves, *series.expert_loads):
        for step, value, error in zip(series.steps, curve.values, curve.errors, strict=True):
            yield curve.router, step.step, step.name, curve.column, value, error


def write_series(folder: Path, series: Series) -> None:
    """series.parquet: a row per router, step and column; usage.parquet: one per router, step and
    expert; series.json: what --format json prints.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from moegeom.results.schema import keyed

    text, number = pa.string(), pa.float64()
    figures = {"router": text, "step": number, "checkpoint": text, "column": text}
    figures |= {"value": number, "value_se": number}
    loads = {"router": text, "step": number, "expert": pa.int64(), "load": number}
    tables = (("series", figures, [*_series_rows(series)]), ("usage", loads, series.usage))
    for name, kinds, rows in tables:
        columns = zip(*rows, strict=True) if rows else ((),) * len(kinds)
        arrays = [pa.array(of, kind) for of, kind in zip(columns, kinds.values(), strict=True)]
        table = keyed(pa.Table.from_arrays(arrays, names=[*kinds]), series.run["routers"])
        with_table = functools.partial(pq.write_table, table)
        write_whole(folder / f"{name}.parquet", with_table)
    write_whole(folder / "series.json", render(document(series, View()), "json"))


#: Column of |A and B| / k of two sets drawn at random, k / E.
CHANCE = "overlap_by_chance"

#: Slopes are per this many steps.
PER_STEPS = 1000.0

#: Probability that any router is given an onset by chance, for each figure.
LEVEL = 0.05

#: Figures of two steps. The overlap with the last grows towards the last by construction, and the
#: others compare neighbours: none of them has a first value to leave.
_OF_TWO_STEPS = ("overlap_with_last", "overlap_with_previous", "expert_set_churn", CHANCE)


def with_trends(curves: Sequence[Curve], steps: Sequence[float]) -> tuple[Curve, ...]:
    """The curves with slope and onset; onsets by Holm's procedure over the routers of a figure."""
    axis = np.array(steps, dtype=np.float64)
    sloped = [_with_slope(curve, axis) for curve in curves]
    for column in dict.fromkeys(curve.column for curve in curves):
        if column not in _OF_TWO_STEPS:
            places = [i for i, curve in enumerate(sloped) if curve.column == column]
            for place, begin in zip(places, _onsets([sloped[i] for i in places]), strict=True):
                if begin is not None:
                    sloped[place] = dataclasses.replace(sloped[place], onset=float(axis[begin]))
    return tuple(sloped)


def _with_slope(curve: Curve, axis: np.ndarray) -> Curve:
    if curve.column == CHANCE:
        return curve
    # what is missing is nan
    trend = slope(axis, np.array(curve.values, np.float64), np.array(curve.errors, np.float64))
    return dataclasses.replace(
        curve,
        slope=number(trend.value * PER_STEPS),
        slope_half_width=number(trend.half_width * PER_STEPS),
    )


def _onsets(curves: Sequence[Curve]) -> list[int | None]:
    """Onset of each router: the i-th clearest of m is held to LEVEL / (m - i + 1)."""
    p_values = [
        departures(
            np.array(curve.values, np.float64), np.array(curve.errors, np.float64), NUM_BLOCKS - 1.0
        )
        for curve in curves
    ]
    onsets: list[int | None] = [None] * len(curves)
    order = sorted(range(len(curves)), key=lambda i: float(p_values[i].min()))
    for rank, index in enumerate(order):
        begin = onset(p_values[index], LEVEL / (len(curves) - rank))
        if begin is None:
            break
        onsets[index] = begin
    return onsets


#: Experts named per router.
NUM_EXPERTS = 3


def drivers(first: MeasuredStep, last: MeasuredStep) -> Iterator[Driver]:
    r"""Experts and domains of each router with the largest part in the change of the load.

    The squared CV of the load is the mean of (x_e - 1)^2 over experts, x in fair shares: an expert
    contributes the change of its term over the sum of all absolute changes. A domain is shown with
    its own MaxVio at both ends, largest change first; it contributes the change of the squared CV
    of its own load over the sum of the absolute changes of the router's domains.
    """
    before, after = (_by_expert(step, "load") for step in (first, last))
    for router, loads in after.items():
        old = before.get(router)
        if old is None or len(old) != len(loads):
            continue
        change = (loads - 1.0) ** 2 - (old - 1.0) ** 2
        total = float(np.abs(change).sum())
        if total > 0.0:
            for expert in np.argsort(-np.abs(change), kind="stable")[:NUM_EXPERTS].tolist():
                ends = float(old[expert]), float(loads[expert])
                yield Driver(router, "expert", str(expert), *ends, float(change[expert]) / total)
    yield from _domains(first, last)


def _by_expert(step: MeasuredStep, column: str) -> dict[str, np.ndarray]:
    """A column of ``experts`` by router, in the order of the experts, where it is known of all."""
    columns = {name: finite_column(at.get(ALL, ()), column) for name, at in step.experts.items()}
    return {router: values for router, values in columns.items() if values is not None}


def _domains(first: MeasuredStep, last: MeasuredStep) -> Iterator[Driver]:
    old, new = _figures(first), _figures(last)
    both = [key for key in new if key in old]
    change = {key: new[key][1] ** 2 - old[key][1] ** 2 for key in both}
    total: dict[str, float] = {}
    for router, domain in both:
        total[router] = total.get(router, 0.0) + abs(change[router, domain])
    for key in sorted(both, key=lambda key: (-abs(new[key][0] - old[key][0]), key)):
        router, domain = key
        share = change[key] / total[router] if total[router] > 0.0 else None
        yield Driver(router, "domain", domain, old[key][0], new[key][0], share)


def _figures(step: MeasuredStep) -> Mapping[tuple[str, str], tuple[float, float]]:
    """MaxVio and CV of the load of each domain."""
    figures = {}
    for router, at in step.layers.items():
        for population, rows in at.items():
            vio, cv = (rows[0].get(name) for name in ("max_vio_global", "load_cv_ddof0"))
            if is_domain(population) and vio is not None and cv is not None:
                figures[router, population.removeprefix("domain=")] = vio, cv
    return figures


Steps = Sequence[MeasuredStep]


def number(value: Any) -> float | None:
    """A finite number, else None."""
    return None if value is None or not math.isfinite(value) else float(value)


def stored_curves(measured: Steps, notes: list[str]) -> list[Curve]:
    """Curves of every column of a series that the results hold."""
    tables = [
        {router: at[ALL][0] for router, at in step.layers.items() if ALL in at} for step in measured
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
    rows = [_rows(step) if is_whole else _by_expert(step, "row_projections") for step in measured]
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
        with_last = [agreement(one, last, router) for one in chosen]
        since = [None, *(agreement(a, b, router) for a, b in itertools.pairwise(chosen))]
        own = []
        for column, means in (
            ("overlap_with_last", [*(one and one.overlap for one in with_last[:-1]), None]),
            ("expert_set_churn", [one and one.changed for one in since]),
            ("overlap_with_previous", [one and one.overlap for one in since]),
        ):
            if any(means):
                values, errors = zip(*(mean or (None, None) for mean in means), strict=True)
                own.append(Curve(router, column, values, tuple(map(number, errors))))
        if own:
            # of two random sets k / E
            facts = [
                {one["name"]: one for one in step.results.run["routers"]}.get(router)
                for step in measured
            ]
            levels = tuple(one and one["top_k"] / one["num_experts"] for one in facts)
            own.append(Curve(router, CHANCE, levels, (None,) * len(levels)))
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


def usage(measured: Steps) -> Iterator[tuple[str, float, int, float]]:
    """Router, step, expert and load over the mean, of every expert at every step."""
    for step in measured:
        for router, at in step.experts.items() if step.facts.num_tokens else ():
            for row in at.get(ALL, ()):
                if row.get("load") is not None:
                    yield router, step.facts.step, row["expert"], row["load"]


def load_curves(measured: Steps, expert: int | None) -> list[Curve]:
    """Load of one expert at every step, in fair shares."""
    if expert is None:
        return []
    loads = [
        {
            router: (number(row.get("load")), number(row.get("load_se")))
            for router, at in step.experts.items()
            for row in at.get(ALL, ())
            if row["expert"] == expert
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
