"""One step of a series: measured now, or taken from results that would come out the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.documents import MOST_JSON, DocumentError, parse_json
from moegeom.core.errors import CheckpointError, MoeGeomError, ResultsError, UsageError
from moegeom.core.files import read_regular, write_whole
from moegeom.core.router import Router, RouterSet
from moegeom.core.series import SeriesStep
from moegeom.engine.run_facts import column_versions, file_identity
from moegeom.engine.session import select_layers
from moegeom.engine.sources import open_source
from moegeom.metrics import metrics_of_scan
from moegeom.pipeline import ScanRequest, Watch, scan
from moegeom.results.reader import Results, open_results
from moegeom.router.load import load_routers
from moegeom.studies.track.choices import Choices, choices, read_choices, write_choices
from moegeom.studies.track.paths import Candidate, recording_path
from moegeom.studies.track.record import TrackRequest
from moegeom.tokens.traces.counted import CountedSource


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """Results of a step; its routers where the checkpoint is at hand; its chosen sets where kept.

    ``lacks_recording`` is true where results were kept and the recording is gone.
    """

    facts: SeriesStep
    results: Results
    routers: tuple[Router, ...] | None
    chosen: Choices | None
    lacks_recording: bool = False


def measure_step(
    request: TrackRequest, folder: Path, candidate: Candidate, watch: Watch | None
) -> MeasuredStep | str:
    """Measures one checkpoint, unless that was done before; the reason when it cannot be read yet.

    Files in ``folder``: <name>.moegeom, the results; <name>.choices.npz, chosen sets of a sample;
    <name>.inputs.json, which files were recorded, so that another recording is noticed.
    """
    if candidate.is_results:
        results = open_results(candidate.path)
        return MeasuredStep(_facts(candidate, results, candidate.path, True), results, None, None)
    try:
        routers = load_routers(open_checkpoint(candidate.path, request.remote), asked=request.asked)
    except CheckpointError as error:
        return error.message  # a file that is cut short: it is being written, or broken
    except MoeGeomError as error:
        error.add_note(f"step {candidate.name}")
        raise
    try:
        return _measured(request, folder, candidate, routers, watch)
    except MoeGeomError as error:
        error.add_note(f"step {candidate.name}")
        raise


def _measured(
    request: TrackRequest,
    folder: Path,
    candidate: Candidate,
    routers: RouterSet,
    watch: Watch | None,
) -> MeasuredStep:
    chosen_routers = select_layers(routers, request.layers)
    out = folder / f"{candidate.name}.moegeom"
    kept, inputs = (folder / f"{candidate.name}.{end}" for end in ("choices.npz", "inputs.json"))
    recording = None if request.tokens is None else Path(recording_path(request.tokens, candidate))
    is_gone = recording is not None and not recording.exists()
    before = _kept_results(out)
    is_same = before is not None and _is_same(before, routers, recording, request)
    if is_same and recording is not None and not is_gone:
        is_same = _read(inputs) == _identity(recording)
    if is_gone and not is_same:
        raise missing_recording(candidate, recording)
    if not is_same:
        _measure_again(request, candidate, recording, out, watch)
    found = read_choices(kept) if is_same and recording is not None else None
    if recording is not None and not is_gone and found is None:
        asked = _scan_request(request, candidate, recording, out)
        source = open_source(asked, chosen_routers, routers.routers)
        assert source is not None, "there is a recording"
        if not isinstance(source, CountedSource):  # counts say nothing of any token
            found = choices(chosen_routers, source, request.seed, request.exclude_first)
            write_choices(kept, found)
        write_whole(inputs, json.dumps(_identity(recording)))
    results = open_results(out)
    return MeasuredStep(
        _facts(candidate, results, out, is_same),
        results,
        tuple(chosen_routers),
        found,
        is_gone,
    )


def missing_recording(candidate: Candidate, recording: Path | None) -> UsageError:
    """The error for a checkpoint without its recording."""
    return UsageError(
        f"{candidate.name}: there is no recording {recording}.",
        "Each checkpoint needs its own: {step} in --tokens stands for what * matched, {name} for "
        "the name. Without --tokens the weights alone are followed.",
    )


def refuse_missing_recordings(
    request: TrackRequest, folder: Path, candidates: Sequence[Candidate]
) -> None:
    """Before anything is measured: a recording for each step, or results of an earlier run."""
    for candidate in candidates:
        if request.tokens is None or candidate.is_results:
            continue
        recording = Path(recording_path(request.tokens, candidate))
        if not recording.exists() and not (folder / f"{candidate.name}.moegeom").exists():
            raise missing_recording(candidate, recording)


def _scan_request(
    request: TrackRequest, candidate: Candidate, recording: Path | None, out: Path
) -> ScanRequest:
    return ScanRequest(
        checkpoint=str(candidate.path),
        out=out,
        tokens=None if recording is None else str(recording),
        exclude_first=request.exclude_first,
        **request.shared(),
    )


def _measure_again(
    request: TrackRequest,
    candidate: Candidate,
    recording: Path | None,
    out: Path,
    watch: Watch | None,
) -> None:
    """Results at ``out``; earlier ones stay until the new ones are whole."""
    if not out.exists():
        scan(_scan_request(request, candidate, recording, out), watch)
        return
    new, old = (out.with_name(f"{out.name}.{end}") for end in ("new", "old"))
    for left in (new, old):  # whole results of a run that was stopped between two renames
        shutil.rmtree(left, ignore_errors=True)
    scan(_scan_request(request, candidate, recording, new), watch)
    out.rename(old)
    new.rename(out)
    shutil.rmtree(old)


def _kept_results(out: Path) -> Results | None:
    if not out.exists():
        return None
    try:
        return open_results(out)
    except ResultsError as error:
        raise UsageError(
            f"{out} holds no results that can be read: {error.message}", "Move it away."
        ) from None


def _is_same(
    results: Results, routers: RouterSet, recording: Path | None, request: TrackRequest
) -> bool:
    """True when a scan would give these results again, as far as the checkpoint and options go."""
    run = results.run
    tokens = run.get("tokens")
    return (
        _is_allowed(run.get("trust") or {}, request)
        and run.get("checkpoint", {}).get("fingerprint") == routers.fingerprint
        and (tokens or {}).get("name") == (None if recording is None else recording.name)
        and run.get("column_versions") == column_versions(metrics_of_scan())
        and run.get("layers_requested") == request.layers
        and (run.get("exclude_first") or 0) == request.exclude_first
        and run.get("seed") == request.seed
    )


def _is_allowed(trust: Mapping[str, Any], request: TrackRequest) -> bool:
    """False where the recording failed a test that is not waived now: the scan then refuses it."""
    is_stale = trust.get("fingerprint") == "differs"
    num_other = len(trust.get("overridden") or ()) - is_stale
    return (request.stale_inputs or not is_stale) and (request.unverified or num_other <= 0)


def _identity(recording: Path) -> list[list[Any]]:
    """What tells the files of a recording from others, as it is read back."""
    return json.loads(json.dumps(file_identity(recording)))


def _read(path: Path) -> Any:
    try:
        return parse_json(read_regular(path, MOST_JSON))
    except (OSError, DocumentError):
        return None


def _facts(candidate: Candidate, results: Results, out: Path, is_reused: bool) -> SeriesStep:
    tokens = results.run.get("tokens")
    trust = results.run.get("trust") or {}
    return SeriesStep(
        name=candidate.name,
        step=candidate.step,
        results=str(out),
        num_tokens=None if tokens is None else tokens["num_tokens"],
        is_stale=trust.get("fingerprint") == "differs",
        is_reused=is_reused,
    )
