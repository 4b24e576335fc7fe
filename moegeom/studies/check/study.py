"""``moegeom check``: measure what is there, compare with the baseline, decide."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checkpoint.remote.url import scheme_of
from moegeom.checks import CHECKS, NO_CHECKPOINT, NO_NAME, Measured, measured_results, verdicts_of
from moegeom.checks.baseline import (
    Baseline,
    BaselineRouter,
    baseline_of,
    read_baseline,
    write_baseline,
)
from moegeom.checks.measured import Drift, SinceBaseline
from moegeom.checks.profile import BUILT_IN, DEFAULT, Profile, deviations
from moegeom.checks.profile_file import (
    PROFILE_NAME,
    fail_on,
    find_profile,
    known_code,
    read_profile,
)
from moegeom.core.errors import RouterError, UsageError
from moegeom.core.files import refuse_unwritable
from moegeom.core.loaded_code import lies_in, trees_around
from moegeom.core.registry import unknown_name
from moegeom.core.router import Rule
from moegeom.engine.request import refuse_late, tokens_text
from moegeom.engine.run_facts import refused_facts
from moegeom.engine.session import Session
from moegeom.engine.sources import refuse_no_tokens
from moegeom.metrics import METRICS, read_columns_of
from moegeom.pipeline import ScanRequest, Watch, lint, results_of, scan, with_tokens
from moegeom.results.reader import RUN_FILE, MemoryResults, ResultsView, is_results, results_at
from moegeom.router.expert_samples import read_expert_samples
from moegeom.studies.changes.edit import EDITS
from moegeom.studies.changes.operators.rows import NOT_COMPARED
from moegeom.studies.changes.record import RouterChange, phrase_of
from moegeom.studies.changes.router import ProjectedRouter, compare_projected, projected_routers
from moegeom.studies.changes.row_pair import KINDS, Biases
from moegeom.studies.check.facts import attention_facts, expert_facts, loader_facts
from moegeom.studies.check.record import Gate, GateRequest

#: Parameters that say how results are judged, not how they are measured.
_OF_VERDICT = ("target", "profile", "baseline", "update_baseline", "select", "fail_on")

#: Where a baseline is written when neither command line nor profile says.
DEFAULT_BASELINE = "moegeom-baseline.json"


def gate(request: GateRequest, watch: Watch | None = None) -> Gate:
    """The verdict on a checkpoint or on results.

    ``watch`` hears what was read of experts: where the baseline holds their hashes they are
    compared, because only the experts tell whether they are where they were, and where the request
    says so a sample of each is judged.
    """
    if request.target == "":
        raise UsageError("check needs a checkpoint or results.", "moegeom check CKPT")
    announce = (lambda text: None) if watch is None else watch.say
    profile, baseline_file = read_settings(request)
    if request.update_baseline:
        refuse_unwritable(baseline_file or Path(DEFAULT_BASELINE))
    baseline = None
    if baseline_file is not None and not request.update_baseline:
        baseline = read_baseline(baseline_file)
    results, opened = measured_target(request, watch)
    if opened is not None:
        if baseline is not None and any(router.samples for router in baseline.routers.values()):
            results = with_expert_samples(results, opened, announce)
        facts: dict[str, Any] = {"loaders": loader_facts(opened)}
        if request.experts:
            facts["expert_spread"] = expert_facts(opened, announce)
        if request.attention:
            facts["attention_gates"] = attention_facts(opened, announce)
        tables = {table: results.rows(table) for table in ("layers", "experts")}
        results = MemoryResults({**results.run, **facts}, tables)
    stricter = dataclasses.replace(profile, base="release")
    verdicts = verdicts_of(measured_of(request, results, baseline), profile, stricter)
    verdict, release = next(verdicts), None
    if profile.base == "default" and not verdict.exit_code:
        release = next(verdicts)
    verdict = dataclasses.replace(
        verdict,
        profile=profile_origin(request, profile),
        not_looked_at=(*verdict.not_looked_at, *_other_side(request)),
    )
    written = None
    if request.update_baseline:
        written = baseline_file or Path(DEFAULT_BASELINE)
        if opened is not None:
            results = with_expert_samples(results, opened, announce)
        if "refused" in results.run:
            raise UsageError(
                f"{request.name}: its routers cannot be read, so there is nothing to write down.",
                "`moegeom check` without --update-baseline says what is wrong.",
            )
        write_baseline(written, baseline_of(results))
    return Gate(verdict, results.run, written, release)


def read_settings(request: GateRequest) -> tuple[Profile, Path | None]:
    """The profile with what the command line changes in it, and the file of the baseline."""
    path = profile_path(request)
    profile = DEFAULT if path is None else read_profile(path)
    changes: dict[str, Any] = {}
    if str(request.profile) in BUILT_IN:
        changes["base"] = str(request.profile)
    if request.select is not None:
        codes = ",".join(request.select).split(",")
        changes["select"] = tuple(known_code(code.strip(), "--select") for code in codes)
    if request.fail_on is not None:
        changes["fail_on"] = fail_on(request.fail_on, "--fail-on")
    profile = dataclasses.replace(profile, **changes)
    check_thresholds(profile)
    if request.baseline is not None:
        return profile, request.baseline
    if profile.baseline is None or path is None:
        return profile, None
    return profile, path.parent / profile.baseline


def profile_path(request: GateRequest) -> Path | None:
    """The file that says how to judge: named, or that of a working directory of the user's own.

    A built-in profile has none: what was named counts alone.
    """
    if str(request.profile) in BUILT_IN:
        return None
    if request.profile is not None:
        return request.profile
    here = Path.cwd()
    lies_there = isinstance(request.target, str) and lies_with(here, request.target)
    return None if lies_there else find_profile(here)


def lies_with(folder: Path, target: str) -> bool:
    """True when a folder is, or is in, the one that holds ``target``; links are followed.

    What lies there came with the checkpoint, and a checkpoint does not say how it is judged.
    """
    if scheme_of(target):
        return False
    return any(
        lies_in(folder, place)
        for holder, _ in trees_around(Path(target))
        for place in (holder, Path(os.path.realpath(holder)))
    )


def profile_origin(request: GateRequest, profile: Profile) -> tuple[str, ...]:
    """By which file is judged and what that changes, for the screen; empty where by none."""
    path = profile_path(request)
    if request.profile is not None and path is None:
        return deviations(profile, CHECKS.all())
    if path is not None:
        changes = deviations(profile, CHECKS.all()) or ("all checks as moegeom judges by itself",)
        return (str(path.resolve()), *changes)
    beside = Path.cwd() / PROFILE_NAME
    if beside.exists():
        return (f"{PROFILE_NAME} of the checkpoint's folder is not used; --profile names one",)
    return ()


def _other_side(request: GateRequest) -> tuple[str, ...]:
    """Of a checkpoint the results that lie in it, of results the checkpoint."""
    if not isinstance(request.target, str) or is_results(request.target):
        return ("the checkpoint itself: these are results of a scan",)
    if not (Path(request.target) / RUN_FILE).exists():
        return ()
    return (f"{RUN_FILE} beside the weights: results count in a folder of their own",)


def measured_target(
    request: GateRequest, watch: Watch | None = None
) -> tuple[ResultsView, Session | None]:
    """Results of the target, read, measured on tokens, or what its weights tell; and the target,
    where it is a checkpoint whose routers can be read.
    """
    if (results := results_at(request.target)) is not None:
        refuse_late(request, request.name, *_OF_VERDICT)
        return results, None
    assert isinstance(request.target, str)
    try:
        has_tokens = request.tokens is not None
        if not has_tokens:
            refuse_no_tokens(request)
        opened = Session.of(request.target, request, with_listed=has_tokens, with_varying=True)
        if not has_tokens and request.out is None:
            return lint(request.target, request, opened, watch), opened
        scanned = ScanRequest(
            checkpoint=request.target,
            out=request.out,
            tokens=request.tokens,
            **request.shared_terms(),
        )
        # results in memory leave nothing to go on with
        opened = (
            opened.on(request.tokens)
            if request.out is None
            else with_tokens(scanned, opened, watch)
        )
        return results_of(scanned, watch, functools.partial(scan, opened=opened)), opened
    except RouterError as refusal:
        # a refusal that a check stands for is its finding, with tokens as without
        if not refusal.code:
            raise
        return MemoryResults(refused_facts(refusal), {}), None


def check_thresholds(profile: Profile) -> None:
    """Raises UsageError when a threshold names no figure of the table ``layers``."""
    columns = [
        column.name
        for metric in METRICS.all()
        for column in read_columns_of(metric, "layers")
        if column.kind in ("float", "int")
    ]
    for threshold in profile.thresholds:
        if threshold.column not in columns:
            raise unknown_name("column of layers", threshold.column, columns)


def measured_of(request: GateRequest, results: ResultsView, baseline: Baseline | None) -> Measured:
    """The rows of results, sorted for the checks, and what happened since the baseline."""
    tokens, options = tokens_text(request.tokens) or NO_NAME, request.typed_again()
    typed = request.target if isinstance(request.target, str) else NO_CHECKPOINT
    drifts = None
    if baseline is not None and "refused" not in results.run:
        drifts = drifts_since(results, baseline)
    return measured_results(results, typed, tokens, baseline, options, drifts)


def with_expert_samples(
    results: ResultsView, opened: Session, announce: Callable[[str], None]
) -> MemoryResults:
    """The same results with a hash of each expert's weights in the rows of ``experts``."""
    samples = read_expert_samples(
        opened.store, [router for router in opened.routers.routers if not router.listed]
    )
    announce(f"read {samples.bytes_read:,} bytes of headers and expert weights to know experts by")

    def sampled(row: Mapping[str, Any]) -> dict[str, Any]:
        digests = samples.digests.get(row["router"])
        return {**row, "expert_sample": digests[row["expert"]] if digests else None}

    experts = [sampled(row) for row in results.rows("experts")]
    return MemoryResults(results.run, {"layers": results.rows("layers"), "experts": experts})


def _of_baseline(name: str, before: BaselineRouter, rule: Rule) -> ProjectedRouter:
    """A router of the baseline, with the rule of the results: another is a finding of its own."""
    biases: dict[str, np.ndarray | None] = dict(
        zip(KINDS, (before.selection_bias, before.logit_bias), strict=True)
    )
    digests = {column.removesuffix("_digest"): value for column, value in before.digests.items()}
    return ProjectedRouter(
        name,
        rule,
        (int(before.facts["num_experts"]), int(before.facts["hidden_size"])),
        digests,
        Biases(biases, "F32", rule),
        before.projections.astype(np.float64) + before.mean_projections,
        np.ones_like(before.projections, np.float64) * before.half_step[:, None],
        before.norms.astype(np.float64),
    )


def drifts_since(results: ResultsView, baseline: Baseline) -> Mapping[str, Drift]:
    """The drift of each router of the results that the baseline knows in the same shape.

    Routers whose rows cannot be compared are left out.
    """
    now, drifts = projected_routers(results), {}
    # nothing is judged by the rule of a router that only the baseline has
    before = {
        name: _of_baseline(name, one, now.get(name, first).rule)
        for first in [*now.values()][:1]
        for name, one in baseline.routers.items()
    }
    for name, router in now.items():
        if name in before and before[name].shape == router.shape:
            changed = compare_projected(before, now, name)
            if not any(
                c.word == NOT_COMPARED.name and c.subject == "rows" for c in changed.changes
            ):
                drifts[name] = _drift(changed)
    return drifts


def _drift(changed: RouterChange) -> Drift:
    since = (
        SinceBaseline(
            change.word,
            phrase_of([change]),
            f"{change.meaning}{f' {change.detail}.' if change.detail else ''}",
            change.subject,
            EDITS[change.word].gate(change),
        )
        for change in changed.changes
    )
    place, moved = np.array(changed.place, np.int64), np.array(changed.moved)
    return Drift(place, moved, changed.size, tuple(since))
