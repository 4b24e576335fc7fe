"""``moegeom track``: a training run checkpoint by checkpoint, each on its own recording.

Read :func:`track`: find the checkpoints, measure what is new, compare neighbours, fit trends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moegeom.core.errors import UsageError
from moegeom.core.series import Series
from moegeom.document.asked_layers import layers_without_router
from moegeom.document.rule_brief import rule_brief
from moegeom.document.rule_trust import rule_status, rule_trust
from moegeom.pipeline import Watch
from moegeom.studies.track.curves import (
    agreement_curves,
    drift_curves,
    load_curves,
    stored_curves,
)
from moegeom.studies.track.drivers import drivers
from moegeom.studies.track.files import write_series
from moegeom.studies.track.measure import (
    MeasuredStep,
    TrackRequest,
    measure_step,
    refuse_missing_recordings,
)
from moegeom.studies.track.paths import Candidate, find_checkpoints
from moegeom.studies.track.trends import trend_notes, with_trends

__all__ = ["TrackRequest", "track"]


def track(request: TrackRequest, watch: Watch | None = None) -> Series:
    """The series, measured where it was not measured before; results stay under ``request.out``.

    Raises
    ------
    MoeGeomError
        One of its subclasses, naming the step.
    """
    candidates, skipped = find_checkpoints(request.patterns)
    if not candidates:
        raise _nothing_finished(request, skipped)
    name = _common_name(candidates)
    folder = request.out or Path("runs") / f"{name}.track"
    refuse_missing_recordings(request, folder, candidates)
    _make(folder)
    measured: list[MeasuredStep] = []
    for candidate in candidates:
        step = measure_step(request, folder, candidate, watch)
        if isinstance(step, str):
            skipped.append((candidate.name, step))
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
        skipped=tuple(skipped),
        notes=tuple(notes),
        rule=_rule(measured),
    )
    write_series(folder, series)
    return series


def _nothing_finished(request: TrackRequest, skipped: Sequence[tuple[str, str]]) -> UsageError:
    return UsageError(
        f"{' '.join(request.patterns)}: no finished checkpoint.",
        "; ".join(f"{name}: {reason}" for name, reason in skipped[:3]),
    )


def _rule(measured: Sequence[MeasuredStep]) -> str:
    """The rule of the last step, and whether it is verified at each step or assumed."""
    run = measured[-1].results.run
    family, sentence = run["checkpoint"]["family"], run["checkpoint"]["rule"]
    said = f"{family}: {rule_brief(sentence, run['routers'])}; "
    lacking = [step for step in measured if rule_status(step.results.run) == "assumed"]
    if not lacking:
        return f"{said}verified by recorded choices at every step"
    assumed = rule_trust(lacking[-1].results.run)
    if len(lacking) == len(measured):
        return f"{said}{assumed}"
    named = ", ".join(step.facts.name for step in lacking[:4]) + " ..." * (len(lacking) > 4)
    number = f"{len(measured) - len(lacking)} of {len(measured)} steps"
    return f"{said}verified by recorded choices at {number}, {assumed} at {named}"


def _gone(measured: Sequence[MeasuredStep]) -> list[str]:
    """A note on steps whose results stand although their recording is gone."""
    names = [step.facts.name for step in measured if step.lacks_recording]
    if not names:
        return []
    said = f"The recordings of {', '.join(names)} are gone: their kept results are shown, measured "
    return [said + "from a recording of the same name and this checkpoint."]


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
    parent = candidates[-1].path.resolve().parent.name
    return parent or candidates[-1].name
