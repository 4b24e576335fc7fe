"""``moegeom track``: a training run checkpoint by checkpoint, each on its own recording.

Read :func:`track`: find the checkpoints, measure what is new, compare neighbours, fit trends, judge
the series.
"""

from __future__ import annotations

import dataclasses
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
from moegeom.core.series import Curve, Driver, Series
from moegeom.core.text import number_of
from moegeom.document.model import View
from moegeom.document.render import render
from moegeom.document.requested_layers import layers_without_router
from moegeom.document.rule_brief import rule_brief
from moegeom.document.rule_trust import rule_status, rule_trust
from moegeom.engine.out import RUNS
from moegeom.geometry.statistics import LEAST_STEPS, departures, onset, slope
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.pipeline import Watch
from moegeom.results.reader import Results
from moegeom.studies.track.curves import (
    CHANCE,
    agreement_curves,
    drift_curves,
    load_curves,
    not_comparable,
    number,
    stored_curves,
    usage,
)
from moegeom.studies.track.document import document
from moegeom.studies.track.export import requested_exports
from moegeom.studies.track.history import history
from moegeom.studies.track.measure import (
    MeasuredStep,
    TrackRequest,
    measure_step,
    refuse_missing_recordings,
)
from moegeom.studies.track.paths import Candidate, LeftStep, find_checkpoints
from moegeom.studies.track.series_check import judge_series

__all__ = ["TrackRequest", "track"]


def track(request: TrackRequest, watch: Watch | None = None) -> Series:
    """The series, measured where it was not measured before; results stay under ``request.out``.

    Raises
    ------
    MoeGeomError
        One of its subclasses, naming the step.
    """
    least = fail_on(request.fail_on or "error", "--fail-on")
    exports = tuple(requested_exports(request))
    candidates, skipped = find_checkpoints(request.patterns)
    if not candidates:
        raise _nothing_finished(request, skipped)
    for export, _ in exports:
        refuse_code_within(*(one.path for one in candidates), settings=export.settings)
    name = _common_name(candidates)
    folder = request.out or RUNS / f"{name}.track"
    refuse_missing_recordings(request, folder, candidates)
    _make(folder)
    measured: list[MeasuredStep] = []
    for candidate in candidates:
        step = measure_step(request, folder, candidate, watch)
        if isinstance(step, str):
            skipped.append(LeftStep(candidate.name, step))
        else:
            measured.append(step)
    if not measured:
        raise _nothing_finished(request, skipped)
    notes = [
        *trend_notes(len(measured)),
        *_gone(measured),
        *_waived(measured),
        *_absent_layers(request, measured[-1]),
    ]
    run = measured[-1].results.run
    curves = [
        *stored_curves(measured, notes),
        *drift_curves(measured, notes),
        *agreement_curves(measured, notes),
    ]
    axis = [step.facts.step for step in measured]
    ends = (measured[0].results, measured[-1].results)
    series = Series(
        name=name,
        steps=tuple(step.facts for step in measured),
        curves=with_trends(curves, axis),
        drivers=tuple(drivers(*ends)) if len(measured) > 1 else (),
        expert_loads=with_trends(load_curves(measured, request.expert), axis),
        skipped=tuple((one.name, one.reason) for one in skipped),
        notes=tuple(notes),
        rule=_rule(measured),
        usage=tuple(usage(measured)),
        verdict=judge_series(history(measured, not_comparable(measured), skipped), least),
        run={**run, "checkpoint": {**run["checkpoint"], "name": name}},
    )
    write_series(folder, series)
    for export, target in exports:
        export.write(series, target)
        if watch:
            watch.say(f"written: {target}")
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


def _gone(measured: Sequence[MeasuredStep]) -> list[str]:
    """A note on steps whose results stand although their recording is gone."""
    names = [step.facts.name for step in measured if step.lacks_recording]
    if not names:
        return []
    note = f"The recordings of {', '.join(names)} are gone: their kept results are shown, measured "
    return [note + "from a recording of the same name and this checkpoint."]


def _waived(measured: Sequence[MeasuredStep]) -> list[str]:
    """A note on steps whose recording failed a test and was accepted all the same."""
    names = [
        step.facts.name
        for step in measured
        if (step.results.run.get("trust") or {}).get("overridden")
    ]
    if not names:
        return []
    return [f"NOT TRUSTED: recordings accepted against their tests: {', '.join(names)}."]


def _absent_layers(request: TrackRequest, last: MeasuredStep) -> list[str]:
    """A note on layers that were asked for and are not in the last checkpoint."""
    names = (router["name"] for router in last.results.run["routers"])
    absent = layers_without_router(request.layers, names)
    return [f"{absent.capitalize()}."] if absent else []


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot be made ({error.strerror}).", "Choose another --out."
        ) from None


def _common_name(candidates: Sequence[Candidate]) -> str:
    """Name of the folder that holds the checkpoints, or of the only one."""
    parent = Path(os.path.realpath(candidates[-1].path)).parent.name
    return parent or candidates[-1].name


def write_series(folder: Path, series: Series) -> None:
    """series.parquet: a row per router, step and column; usage.parquet: one per router, step and
    expert; series.json: what --format json prints.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        (curve.router, step.step, step.name, curve.column, value, error)
        for curve in (*series.curves, *series.expert_loads)
        for step, value, error in zip(series.steps, curve.values, curve.errors, strict=True)
    ]
    names = ("router", "step", "checkpoint", "column", "value", "value_se")
    kinds = (pa.string(), pa.float64(), pa.string(), pa.string(), pa.float64(), pa.float64())
    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    arrays = [pa.array(column, type=kind) for column, kind in zip(columns, kinds, strict=True)]
    table = pa.Table.from_arrays(arrays, names=list(names))
    write_whole(folder / "series.parquet", lambda file: pq.write_table(table, file))
    loads = zip(*series.usage, strict=True) if series.usage else ((),) * 4
    kinds = (pa.string(), pa.float64(), pa.int64(), pa.float64())
    columns = [pa.array(column, type=kind) for column, kind in zip(loads, kinds, strict=True)]
    shares = pa.Table.from_arrays(columns, names=["router", "step", "expert", "load"])
    write_whole(folder / "usage.parquet", lambda file: pq.write_table(shares, file))
    write_whole(folder / "series.json", render(document(series, View()), "json"))


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
    trend = slope(axis, _array(curve.values), _array(curve.errors))
    return dataclasses.replace(
        curve,
        slope=number(trend.value * PER_STEPS),
        slope_half_width=number(trend.half_width * PER_STEPS),
    )


def _onsets(curves: Sequence[Curve]) -> list[int | None]:
    """Onset of each router: the i-th clearest of m is held to LEVEL / (m - i + 1)."""
    p_values = [
        departures(_array(curve.values), _array(curve.errors), NUM_BLOCKS - 1.0) for curve in curves
    ]
    onsets: list[int | None] = [None] * len(curves)
    order = sorted(range(len(curves)), key=lambda i: float(p_values[i].min()))
    for rank, index in enumerate(order):
        begin = onset(p_values[index], LEVEL / (len(curves) - rank))
        if begin is None:
            break
        onsets[index] = begin
    return onsets


def trend_notes(num_steps: int) -> list[str]:
    """Notes on what so few steps cannot show."""
    if num_steps < 3:
        return ["Fewer than three steps: no scatter about a line, and no onset."]
    if num_steps < LEAST_STEPS:
        steps = number_of(num_steps, "step")
        return [f"{steps}: a slope, but no onset, which takes at least {LEAST_STEPS}."]
    return []


def _array(values: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


#: Experts named per router.
NUM_EXPERTS = 3


def drivers(first: Results, last: Results) -> Iterator[Driver]:
    r"""Experts and domains of each router with the largest part in the change of the load.

    The squared CV of the load is the mean of (x_e - 1)^2 over experts, x in fair shares: an expert
    contributes the change of its term over the sum of all absolute changes. A domain is shown with
    its own MaxVio at both ends, largest change first; it contributes the change of the squared CV
    of its own load over the sum of the absolute changes of the router's domains.
    """
    before, after = _loads(first), _loads(last)
    for router, loads in after.items():
        old = before.get(router)
        if old is None or len(old) != len(loads):
            continue
        change = (loads - 1.0) ** 2 - (old - 1.0) ** 2
        total = float(np.abs(change).sum())
        if total > 0.0:
            for expert in np.argsort(-np.abs(change), kind="stable")[:NUM_EXPERTS].tolist():
                yield Driver(
                    router,
                    "expert",
                    str(expert),
                    float(old[expert]),
                    float(loads[expert]),
                    float(change[expert]) / total,
                )
    yield from _domains(first, last)


def _loads(results: Results) -> dict[str, np.ndarray]:
    """Loads in fair shares by router, in the order of the experts."""
    by_router: dict[str, dict[int, float]] = {}
    for row in results.rows("experts"):
        if (row["variant"], row["population"]) == ("as_stored", ALL) and row.get(
            "load"
        ) is not None:
            by_router.setdefault(row["router"], {})[row["expert"]] = row["load"]
    return {
        router: np.array([loads[expert] for expert in sorted(loads)])
        for router, loads in by_router.items()
    }


def _domains(first: Results, last: Results) -> Iterator[Driver]:
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


def _figures(results: Results) -> Mapping[tuple[str, str], tuple[float, float]]:
    """MaxVio and CV of the load of each domain."""
    rows: list[dict[str, Any]] = results.rows("layers")
    return {
        (row["router"], row["population"].removeprefix("domain=")): (
            row["max_vio_global"],
            row["load_cv_ddof0"],
        )
        for row in rows
        if row["variant"] == "as_stored"
        and is_domain(row["population"])
        and row.get("max_vio_global") is not None
        and row.get("load_cv_ddof0") is not None
    }
