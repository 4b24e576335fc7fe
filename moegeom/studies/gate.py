"""``moegeom check``: measure what is there, compare with the baseline, decide."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.check import measured_results, run_checks
from moegeom.check.baseline import Baseline, baseline_of, read_baseline, write_baseline
from moegeom.check.profile import DEFAULT, Profile
from moegeom.check.profile_file import find_profile, read_profile
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import UsageError
from moegeom.core.finding import Severity
from moegeom.core.registry import unknown_name
from moegeom.core.tokens import Stage
from moegeom.core.verdict import Verdict
from moegeom.metrics import METRICS
from moegeom.pipeline import ScanRequest, Terms, Watch, lint, scan
from moegeom.results.memory import MemoryResults
from moegeom.results.reader import ResultsView, is_results, open_results
from moegeom.router.expert_samples import ExpertSamples, read_expert_samples
from moegeom.router.load import load_routers

#: Where a baseline is written when neither command line nor profile says.
DEFAULT_BASELINE = "moegeom-baseline.json"

#: The check whose judgement can need a look at the experts.
_RENUMBERED = "MGI121"


@dataclass(frozen=True)
class GateRequest(Terms):
    """What was asked for. ``target`` is a checkpoint, or a results directory.

    None leaves a choice to the profile. ``profile`` None looks for ``moegeom.toml`` or
    ``[tool.moegeom]`` in the working directory; ``out`` None keeps no results; ``device`` is that
    of a scan.
    """

    target: str
    tokens: str | None = None
    stage: Stage | None = None
    router_map: Mapping[str, str] = dataclasses.field(default_factory=dict)
    profile: Path | None = None
    baseline: Path | None = None
    update_baseline: bool = False
    select: tuple[str, ...] | None = None
    fail_on: Severity | None = None
    out: Path | None = None
    skip_non_finite: bool = False
    num_workers: int | None = None
    device: str | None = "cpu"


@dataclass(frozen=True)
class Gate:
    """The verdict, the facts of the run it is about, and the baseline that was written."""

    verdict: Verdict
    run: Mapping[str, Any]
    written: Path | None = None


def gate(
    request: GateRequest,
    watch: Watch | None = None,
    announce: Callable[[str], None] = lambda text: None,
) -> Gate:
    """The verdict on a checkpoint or on results.

    ``announce`` is told before bytes of experts are read: the rows of a router are compared with
    those of the baseline, and whether experts moved along with them only the experts can tell.
    """
    profile, baseline_file = read_settings(request)
    baseline = None
    if baseline_file is not None and not request.update_baseline:
        baseline = read_baseline(baseline_file)
    results = measured_target(request, watch)
    verdict = judge_results(request, results, profile, baseline)
    if _needs_experts(verdict, baseline) and not is_results(request.target):
        results = with_expert_samples(results, _samples(request, announce))
        verdict = judge_results(request, results, profile, baseline)
    written = None
    if request.update_baseline:
        written = baseline_file or Path(DEFAULT_BASELINE)
        update_baseline(request, results, written, announce)
    return Gate(verdict, results.run, written)


def read_settings(request: GateRequest) -> tuple[Profile, Path | None]:
    """The profile with what the command line changes in it, and the file of the baseline."""
    path = request.profile or find_profile(Path.cwd())
    profile = DEFAULT if path is None else read_profile(path)
    changes: dict[str, Any] = {}
    if request.select is not None:
        changes["select"] = request.select
    if request.fail_on is not None:
        changes["fail_on"] = request.fail_on
    profile = dataclasses.replace(profile, **changes)
    check_thresholds(profile)
    if request.baseline is not None:
        return profile, request.baseline
    if profile.baseline is None or path is None:
        return profile, None
    return profile, path.parent / profile.baseline


def measured_target(request: GateRequest, watch: Watch | None = None) -> ResultsView:
    """Results of the target: read, measured on tokens, or what its weights tell."""
    if is_results(request.target):
        _refuse_measuring(request)
        return open_results(request.target)
    if request.tokens is None and request.out is None:
        return lint(request.target, request)
    if request.out is not None:
        return open_results(scan(_scan_request(request, request.out), watch))
    with tempfile.TemporaryDirectory(prefix="moegeom-") as folder:
        results = open_results(scan(_scan_request(request, Path(folder) / "results"), watch))
        tables = {name: results.rows(name) for name in ("layers", "experts")}
        return MemoryResults(results.run, tables)


def _refuse_measuring(request: GateRequest) -> None:
    """Results were measured already: an option that says how cannot be meant."""
    default = GateRequest(request.target)
    options = ("tokens", "stage", "router_map", "layers", "out", "stale_inputs", "unverified")
    given = [name for name in options if getattr(request, name) != getattr(default, name)]
    if given:
        flag = "--map" if given[0] == "router_map" else "--" + given[0].replace("_", "-")
        raise UsageError(
            f"{request.target} holds results, which were measured before; {flag} comes too late.",
            f"Leave {flag} out, or name a checkpoint.",
        )


def check_thresholds(profile: Profile) -> None:
    """Raises UsageError when a threshold names no figure of the table ``layers``."""
    known = [
        column.name
        for metric in METRICS.all()
        for column in metric.columns.get("layers", ())
        if column.kind in ("float", "int")
    ]
    for threshold in profile.thresholds:
        if threshold.column not in known:
            raise unknown_name("column of layers", threshold.column, known)


def judge_results(
    request: GateRequest, results: ResultsView, profile: Profile, baseline: Baseline | None
) -> Verdict:
    """The checks of the profile on these results."""
    measured = measured_results(results, request.target, request.tokens or "TOKENS", baseline)
    return run_checks(measured, profile)


def update_baseline(
    request: GateRequest, results: ResultsView, file: Path, announce: Callable[[str], None]
) -> None:
    """Writes the baseline of these results, with a sample of the experts where they are at hand."""
    if "refused" in results.run:
        raise UsageError(
            f"{request.target}: its routers cannot be read, so there is nothing to write down.",
            "`moegeom check` without --update-baseline says what is wrong.",
        )
    if not is_results(request.target):
        results = with_expert_samples(results, _samples(request, announce))
    write_baseline(file, baseline_of(results))


def with_expert_samples(results: ResultsView, samples: ExpertSamples) -> MemoryResults:
    """The same results with a hash of each expert's weights in the rows of ``experts``."""

    def sampled(row: Mapping[str, Any]) -> dict[str, Any]:
        found = samples.digests.get(row["router"])
        return {**row, "expert_sample": found[row["expert"]] if found else None}

    experts = [sampled(row) for row in results.rows("experts")]
    return MemoryResults(results.run, {"layers": results.rows("layers"), "experts": experts})


def _samples(request: GateRequest, announce: Callable[[str], None]) -> ExpertSamples:
    store = open_checkpoint(request.target, request.remote)
    routers = load_routers(store, asked=request.asked).routers
    samples = read_expert_samples(store, routers)
    announce(f"read {samples.bytes_read:,} bytes of headers and expert weights to know experts by")
    return samples


def _needs_experts(verdict: Verdict, baseline: Baseline | None) -> bool:
    has_samples = baseline is not None and any(r.samples for r in baseline.routers.values())
    return has_samples and any(o.code == _RENUMBERED for o in verdict.in_state("failed"))


def _scan_request(request: GateRequest, out: Path) -> ScanRequest:
    return ScanRequest(
        checkpoint=request.target,
        out=out,
        tokens=request.tokens,
        stage=request.stage,
        router_map=request.router_map,
        skip_non_finite=request.skip_non_finite,
        num_workers=request.num_workers,
        device=request.device,
        **request.shared(),
    )
