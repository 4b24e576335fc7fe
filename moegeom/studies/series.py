"""``moegeom track``: a training run checkpoint by checkpoint, each on its own recording.

Read :func:`track`: find the checkpoints, measure what is new, compare neighbours, fit trends.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import MoeGeomError, ResultsError, UsageError
from moegeom.core.populations import ALL
from moegeom.core.router import RouterSet
from moegeom.core.series import SERIES_COLUMNS, Curve, Series, SeriesStep
from moegeom.geometry.effective_rows import effective_rows
from moegeom.geometry.trend import onset, slope
from moegeom.metrics import METRICS
from moegeom.pipeline import ScanRequest, Watch, open_source, scan, select_layers
from moegeom.results.reader import Results, open_results
from moegeom.router.load import load_routers
from moegeom.scan.run_facts import column_versions
from moegeom.studies.series_choices import (
    Choices,
    agreement,
    choices,
    read_choices,
    write_choices,
)
from moegeom.studies.series_drivers import drivers
from moegeom.studies.series_paths import Candidate, find_checkpoints, recording_path

#: Slopes are per this many steps.
PER_STEPS = 1000.0


@dataclass(frozen=True)
class TrackRequest:
    """What was asked for. ``tokens`` is a path with {step} or {name}; None looks at weights alone.

    ``expert`` asks for the load of one expert at every step.
    """

    patterns: tuple[str, ...]
    out: Path
    tokens: str | None = None
    layers: str | None = None
    expert: int | None = None
    stale_inputs: bool = False
    unverified: bool = False
    exclude_first: int = 0
    seed: int = 0
    num_workers: int | None = None


@dataclass(frozen=True, eq=False)
class _Measured:
    """One step: its results, its routers where the checkpoint is at hand, its chosen sets."""

    facts: SeriesStep
    results: Results
    routers: RouterSet | None
    chosen: Choices | None


def track(request: TrackRequest, watch: Watch | None = None) -> Series:
    """The series, measured where it was not measured before; results stay under ``request.out``.

    Raises
    ------
    MoeGeomError
        One of its subclasses, naming the step.
    """
    candidates, skipped = find_checkpoints(request.patterns)
    request.out.mkdir(parents=True, exist_ok=True)
    measured: list[_Measured] = []
    for candidate in candidates:
        step = _one_step(request, candidate, watch, skipped)
        if step is not None:
            measured.append(step)
    if not measured:
        raise UsageError(
            f"{' '.join(request.patterns)}: no finished checkpoint.",
            "; ".join(f"{name}: {reason}" for name, reason in skipped[:3]),
        )
    notes: list[str] = []
    curves = [*_stored_curves(measured), *_drift(measured), *_overlaps(measured, notes)]
    if len(measured) < 3:
        notes.append("Fewer than three steps: no interval of a slope without errors, no onset.")
    steps = np.array([step.facts.step for step in measured])
    ends = (measured[0].results, measured[-1].results)
    return Series(
        name=_common_name(candidates),
        steps=tuple(step.facts for step in measured),
        curves=tuple(_with_trend(curve, steps) for curve in curves),
        drivers=tuple(drivers(*ends)) if len(measured) > 1 else (),
        expert_loads=tuple(_with_trend(c, steps) for c in _expert_loads(measured, request.expert)),
        skipped=tuple(skipped),
        notes=tuple(notes),
    )


def _one_step(
    request: TrackRequest,
    candidate: Candidate,
    watch: Watch | None,
    skipped: list[tuple[str, str]],
) -> _Measured | None:
    """Measures one checkpoint, unless that was done before; None when it cannot be read yet."""
    if (candidate.path / "run.json").exists():
        results = open_results(candidate.path)
        return _Measured(_facts(candidate, results, candidate.path, True), results, None, None)
    out = request.out / f"{candidate.name}.moegeom"
    try:
        routers = load_routers(open_checkpoint(candidate.path))
    except MoeGeomError as error:
        # a checkpoint that is being written lacks files; what else is wrong is said as well
        skipped.append((candidate.name, error.message))
        return None
    asked = ScanRequest(
        checkpoint=str(candidate.path),
        out=out,
        tokens=None if request.tokens is None else recording_path(request.tokens, candidate),
        layers=request.layers,
        exclude_first=request.exclude_first,
        stale_inputs=request.stale_inputs,
        unverified=request.unverified,
        seed=request.seed,
        num_workers=request.num_workers,
    )
    if asked.tokens is not None and not Path(asked.tokens).exists():
        raise UsageError(
            f"{candidate.name}: there is no recording {asked.tokens}.",
            "Each checkpoint needs its own: {step} in --tokens stands for what * matched.",
        )
    try:
        chosen_routers = select_layers(routers, request.layers)
        source = open_source(asked, chosen_routers)
        before = _reusable(out, routers, None if source is None else source.facts, request)
        if before is None:
            scan(asked, watch)
        chosen = None
        kept = out.with_suffix(".choices.npz")
        if source is not None and source.facts.stage != "ids":
            if before is None or not kept.exists():
                write_choices(kept, choices(chosen_routers, source, request.seed))
            chosen = read_choices(kept)
    except MoeGeomError as error:
        error.add_note(f"step {candidate.name}")
        raise
    results = open_results(out)
    facts = _facts(candidate, results, out, before is not None)
    return _Measured(
        facts, results, dataclasses.replace(routers, routers=tuple(chosen_routers)), chosen
    )


def _reusable(out: Path, routers: RouterSet, tokens: Any, request: TrackRequest) -> Results | None:
    """Results of an earlier run that would come out the same; others are moved out of the way."""
    if not out.exists():
        return None
    try:
        results = open_results(out)
    except ResultsError as error:
        raise UsageError(
            f"{out} holds no results that can be read: {error.message}", "Move it away."
        ) from None
    run = results.run
    same = (
        run.get("checkpoint", {}).get("fingerprint") == routers.fingerprint
        and (run.get("tokens") or None)
        == (None if tokens is None else _as_json(dataclasses.asdict(tokens)))
        and run.get("column_versions") == column_versions(METRICS.all())
        and run.get("layers_asked") == request.layers
        and (run.get("exclude_first") or 0) == request.exclude_first
        and run.get("seed") == request.seed
    )
    if same:
        return results
    raise UsageError(
        f"{out} was measured from other inputs or by another version of the metrics.",
        "Choose another --out, or remove it to measure this step again.",
    )


def _as_json(value: Any) -> Any:
    """As it comes back from run.json."""
    import json

    return json.loads(json.dumps(value))


def _facts(candidate: Candidate, results: Results, out: Path, reused: bool) -> SeriesStep:
    tokens = results.run.get("tokens")
    trust = results.run.get("trust") or {}
    return SeriesStep(
        name=candidate.name,
        step=candidate.step,
        results=str(out),
        num_tokens=None if tokens is None else tokens["num_tokens"],
        is_stale=trust.get("fingerprint") == "differs",
        is_reused=reused,
    )


def _stored_curves(measured: Sequence[_Measured]) -> list[Curve]:
    """Curves of every column of a series that the results hold."""
    tables = []
    for step in measured:
        rows = step.results.rows("layers")
        tables.append(
            {
                row["router"]: row
                for row in rows
                if (row["variant"], row["population"]) == ("as_stored", ALL)
            }
        )
    curves = []
    for router in tables[-1]:
        rows = [table.get(router, {}) for table in tables]
        for column in SERIES_COLUMNS:
            values = tuple(_number(row.get(column.name)) for row in rows)
            if any(value is not None for value in values):
                errors = tuple(_number(row.get(f"{column.name}_se")) for row in rows)
                curves.append(Curve(router, column.name, values, errors))
    return curves


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _drift(measured: Sequence[_Measured]) -> list[Curve]:
    """Relative change of each centred effective row since the step before, median and largest."""
    rows = []
    for step in measured:
        found = {} if step.routers is None else {r.name: r for r in step.routers.routers}
        rows.append({name: effective_rows(r.weight, r.gain) for name, r in found.items()})
    curves = []
    for router in rows[-1]:
        medians: list[float | None] = [None]
        largest: list[float | None] = [None]
        for before, after in itertools.pairwise(rows):
            one, other = before.get(router), after.get(router)
            if one is None or other is None or one.centred.shape != other.centred.shape:
                medians.append(None)
                largest.append(None)
                continue
            length = np.linalg.norm(one.centred, axis=1)
            change = np.linalg.norm(other.centred - one.centred, axis=1)
            relative = change[length > 0] / length[length > 0]
            medians.append(float(np.median(relative)) if len(relative) else None)
            largest.append(float(relative.max()) if len(relative) else None)
        nothing = (None,) * len(measured)
        if any(value is not None for value in medians):
            curves.append(Curve(router, "row_drift_median", tuple(medians), nothing))
            curves.append(Curve(router, "row_drift_max", tuple(largest), nothing))
    return curves


def _overlaps(measured: Sequence[_Measured], notes: list[str]) -> list[Curve]:
    """Overlap with the last step, and what changed since the step before, token by token."""
    chosen = [step.chosen for step in measured]
    if len(measured) < 2 or all(found is None for found in chosen):
        return []
    texts = {found.tokens for found in chosen if found is not None}
    if len(texts) > 1 or None in chosen:
        notes.append(
            "Overlap and churn need the same tokens at every step, known by document, position and "
            "token id; these recordings differ."
        )
    last = chosen[-1]
    curves: list[Curve] = []
    for router in {} if last is None else last.chosen:
        with_last = [_agree(one, last, router) for one in chosen]
        pairs = itertools.pairwise(chosen)
        since = [None, *(_agree(one, other, router) for one, other in pairs)]
        for column, found, value, error in (
            ("overlap_with_last", [*with_last[:-1], None], "overlap", "overlap_error"),
            ("coalition_churn", since, "changed", "changed_error"),
            ("overlap_with_previous", since, "overlap", "overlap_error"),
        ):
            values = tuple(None if f is None else getattr(f, value) for f in found)
            errors = tuple(None if f is None else _number(getattr(f, error)) for f in found)
            if any(v is not None for v in values):
                curves.append(Curve(router, column, values, errors))
    return curves


def _agree(one: Choices | None, other: Choices | None, router: str) -> Any:
    return None if one is None or other is None else agreement(one, other, router)


def _expert_loads(measured: Sequence[_Measured], expert: int | None) -> list[Curve]:
    """Load of one expert at every step."""
    if expert is None:
        return []
    wanted = ("as_stored", ALL, expert)
    loads = [
        {
            row["router"]: (_number(row.get("load")), _number(row.get("load_se")))
            for row in step.results.rows("experts")
            if (row["variant"], row["population"], row["expert"]) == wanted
        }
        for step in measured
    ]
    if not loads[-1]:
        raise UsageError(f"--expert {expert}: the last checkpoint has no such expert.")
    curves = []
    for router in loads[-1]:
        found = [at.get(router, (None, None)) for at in loads]
        values, errors = zip(*found, strict=True)
        curves.append(Curve(router, f"load of expert {expert}", values, errors))
    return curves


def _with_trend(curve: Curve, steps: np.ndarray) -> Curve:
    values = np.array([math.nan if v is None else v for v in curve.values])
    errors = np.array([math.nan if e is None else e for e in curve.errors])
    known = np.isfinite(values)
    trend = slope(steps[known], values[known], errors[known])
    begin = onset(values, errors)
    return dataclasses.replace(
        curve,
        slope=_number(trend.value * PER_STEPS),
        slope_half_width=_number(trend.half_width * PER_STEPS),
        onset=None if begin is None else float(steps[begin]),
    )


def _common_name(candidates: Sequence[Candidate]) -> str:
    """Name of the folder that holds the checkpoints, or of the only one."""
    parent = candidates[-1].path.resolve().parent.name
    return parent or candidates[-1].name
