"""One step of a series: measured, or read from results of the same plan; its chosen sets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moegeom.core.digest import digest_of
from moegeom.core.errors import (
    CheckpointError,
    MoeGeomError,
    NonFiniteError,
    ResultsError,
    UsageError,
)
from moegeom.core.limits import CHOICES_BYTES
from moegeom.core.router import Router
from moegeom.core.row_keys import ALL, AS_STORED, is_domain
from moegeom.core.series import SeriesStep
from moegeom.core.shapes import Float64, Int16
from moegeom.core.tokens import TokenSource
from moegeom.engine.out import believes_results, is_answered_unread
from moegeom.engine.request import ComputeOptions, Tokens
from moegeom.engine.run_facts import column_versions
from moegeom.engine.sample import draw_sample, drawn_tokens
from moegeom.engine.session import Session
from moegeom.geometry.load import overlap_share
from moegeom.geometry.statistics import jackknife_error
from moegeom.metrics import METRICS
from moegeom.pipeline import ScanRequest, Watch, scan
from moegeom.results.reader import Results, open_results
from moegeom.results.run_file import num_non_finite
from moegeom.studies.track.paths import Candidate, recording_path
from moegeom.studies.track.record import TrackRequest
from moegeom.tokens.files import TokenFiles, are_there, name_of, paths_of
from moegeom.tokens.foreign.npy import read_sealed, write_sealed
from moegeom.tokens.memory import NAME as HELD_NAME
from moegeom.tokens.memory import HeldArrays
from moegeom.tokens.traces.source import CountedSource

#: Rows of a table of results, by population.
ByPopulation = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """Results of the step at ``path``; routers and chosen sets where these are at hand.

    ``lacks_recording`` is true where results were kept and the recording is gone.
    """

    facts: SeriesStep
    path: Path
    results: Results
    routers: tuple[Router, ...] | None
    chosen: Choices | None
    lacks_recording: bool = False

    @cached_property
    def layers(self) -> dict[str, ByPopulation]:
        """Rows of the routers as stored, by router and population."""
        return self._by_router("layers")

    @cached_property
    def experts(self) -> dict[str, ByPopulation]:
        """Rows of their experts, in the order of these."""
        return self._by_router("experts")

    def _by_router(self, table: str) -> dict[str, ByPopulation]:
        by_router: dict[str, ByPopulation] = {}
        for row in self.results.rows(table):
            population = row["population"]
            if row["variant"] == AS_STORED and (population == ALL or is_domain(population)):
                by_router.setdefault(row["router"], {}).setdefault(population, []).append(row)
        for populations in by_router.values():
            for rows in populations.values():
                rows.sort(key=lambda row: row.get("expert") or 0)
        return by_router


def measure_step(
    request: TrackRequest, folder: Path, candidate: Candidate, watch: Watch | None
) -> MeasuredStep | str:
    """Measures one checkpoint, unless that was done before; the reason when it cannot be read yet.

    Files in ``folder``: <name>.moegeom, the results; <name>.choices.npz, chosen sets of a sample.
    """
    if candidate.is_results:
        results = open_results(candidate.path)
        facts = _facts(candidate, results, candidate.path, True)
        return MeasuredStep(facts, candidate.path, results, None, None)
    tokens = tokens_of(request, candidate)
    try:
        try:
            opened = Session.of(
                candidate.path, request, with_listed=tokens is not None, with_varying=True
            )
        except CheckpointError as error:
            return error.message  # a file that is cut short: it is being written, or broken
        return _measured(request, folder, candidate, opened, tokens, watch)
    except MoeGeomError as error:
        error.add_note(f"step {candidate.name}")
        raise


def _measured(
    request: TrackRequest,
    folder: Path,
    candidate: Candidate,
    opened: Session,
    tokens: Tokens | None,
    watch: Watch | None,
) -> MeasuredStep:
    out, chosen_file = (folder / f"{candidate.name}.{end}" for end in ("moegeom", "choices.npz"))
    scanned = ScanRequest(
        str(candidate.path), out=out, tokens=tokens, engine=request.engine, **request.shared_terms()
    )
    is_gone = _is_gone(tokens)
    old = _kept_results(out)
    is_same = believes_results(scanned, folder) and _is_same(out, old, opened, scanned)
    if is_gone and not is_same:
        raise missing_recording(candidate, request)
    chosen = read_choices(chosen_file, old) if old and is_same and tokens is not None else None
    if not is_same or (tokens is not None and not is_gone and chosen is None):
        opened = opened.on(tokens)
    if not is_same:
        _measure_again(scanned, opened, out, watch)
    routers = tuple(router for router in opened.chosen if not router.listed)
    # counts say nothing of any token
    if opened.source is not None and not isinstance(opened.source, CountedSource):
        chosen = choices(routers, opened.source, request)
        write_choices(chosen_file, chosen, open_results(out))
    results = open_results(out)
    return MeasuredStep(
        _facts(candidate, results, out, is_same), candidate.path, results, routers, chosen, is_gone
    )


def tokens_of(request: TrackRequest, candidate: Candidate) -> Tokens | None:
    """The tokens of a step; None where the weights alone are followed.

    Raises
    ------
    UsageError
        When there are tokens, and none for this step.
    """
    if request.tokens is None or candidate.is_results:
        return None
    if isinstance(request.tokens, str):
        return recording_path(request.tokens, candidate)
    if candidate.name not in request.tokens:
        raise missing_recording(candidate, request)
    return request.tokens[candidate.name]


def missing_recording(candidate: Candidate, request: TrackRequest) -> UsageError:
    """The error for a checkpoint without its recording."""
    assert request.tokens is not None
    if not isinstance(request.tokens, str):
        return UsageError(
            f"{candidate.name}: --tokens holds none of it, only of {', '.join(request.tokens)}.",
            "Each checkpoint needs its own, by the name of the checkpoint.",
        )
    return UsageError(
        f"{candidate.name}: there is no recording {recording_path(request.tokens, candidate)}.",
        "Each checkpoint needs its own: {step} in --tokens stands for what * matched, {name} for "
        "the name. Without --tokens the weights alone are followed.",
    )


def refuse_missing_recordings(
    request: TrackRequest, folder: Path, candidates: Sequence[Candidate]
) -> None:
    """Raises the error for a step with neither a recording nor earlier results."""
    for candidate in candidates:
        is_gone = _is_gone(tokens_of(request, candidate))
        if is_gone and not (folder / f"{candidate.name}.moegeom").exists():
            raise missing_recording(candidate, request)


def _is_gone(tokens: Tokens | None) -> bool:
    """Whether the tokens name a file that does not exist."""
    return isinstance(tokens, str | TokenFiles) and not are_there(tokens)


def _measure_again(request: ScanRequest, opened: Session, out: Path, watch: Watch | None) -> None:
    """Results at ``out``; earlier ones stay until the new ones are whole."""
    if not out.exists():
        scan(request, watch, opened)
        return
    new, old = (out.with_name(f"{out.name}.{end}") for end in ("new", "old"))
    for left in (new, old):  # whole results of a run that was stopped between two renames
        shutil.rmtree(left, ignore_errors=True)
    scan(replace(request, out=new), watch, opened)
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


def _is_same(out: Path, results: Results | None, opened: Session, request: ScanRequest) -> bool:
    """True when a scan would give these results again; a recording that is gone has its name."""
    before = None if results is None else results.run.get("plan")
    if results is None or not isinstance(before, Mapping):
        return False
    # listed routers of which those tokens held no choices are none of that plan
    rules, every = before.get("rules") or (), opened.routers.routers
    heard = tuple(router for router in every if not router.listed or router.name in rules)
    routers = replace(opened.routers, routers=heard)
    taken = ("tokens", "device", *("token_files",) * _is_gone(request.tokens))
    return (
        _is_allowed(results.run.get("trust") or {}, request)
        and (results.run.get("tokens") or {}).get("name") == _name(request.tokens)
        and is_answered_unread(out, request, routers, column_versions(METRICS.all()), taken)
    )


def _is_allowed(trust: Mapping[str, Any], request: ScanRequest) -> bool:
    """False where the recording failed a test that is not waived now: the scan then refuses it."""
    is_stale = trust.get("fingerprint") == "differs"
    num_other = len(trust.get("overridden") or ()) - is_stale
    return (request.stale_inputs or not is_stale) and (request.unverified or num_other <= 0)


def _name(tokens: Tokens | None) -> str | None:
    """What results call them."""
    if tokens is None:
        return None
    if isinstance(tokens, str | TokenFiles):
        return name_of(paths_of(tokens))
    return str(HELD_NAME) if isinstance(tokens, HeldArrays) else tokens.facts.name


def _facts(candidate: Candidate, results: Results, out: Path, is_reused: bool) -> SeriesStep:
    tokens = results.run.get("tokens")
    trust = results.run.get("trust") or {}
    return SeriesStep(
        name=candidate.name,
        step=candidate.step,
        results=str(out),
        num_tokens=None if tokens is None else tokens["num_tokens"],
        num_left_out=results.run.get("num_first", 0) + num_non_finite(results.run),
        is_stale=trust.get("fingerprint") == "differs",
        is_reused=is_reused,
    )


#: What tells texts apart, token by token.
_TEXT = ("document", "position", "token_id")


@dataclass(frozen=True, eq=False)
class Choices:
    """Sorted chosen experts of the sampled tokens, by router; ``tokens`` tells the texts apart.

    ``tokens`` is a hash of document, position and token id of each sampled token: two steps can be
    compared token by token only where it is the same. Empty where the recording does not say all
    three: nothing then tells that two steps saw the same text.
    """

    tokens: str
    block: Int16[np.ndarray, "tokens"]
    chosen: Mapping[str, Int16[np.ndarray, "tokens k"]]


class Agreement(NamedTuple):
    """Mean of |A and B| / k and share of tokens with another set, each with its standard error."""

    overlap: tuple[float, float]
    changed: tuple[float, float]


def choices(routers: Sequence[Router], source: TokenSource, options: ComputeOptions) -> Choices:
    """Chosen sets of a sample of the tokens, computed again from the recording.

    Without routers at which one of them is not finite: rows of different steps would no longer
    stand side by side.
    """
    token, chosen, labels = drawn_tokens(source, options), {}, None
    for router in routers:
        if router.name not in source.facts.routers:
            continue
        try:
            sample = draw_sample(router, source, options, ("chosen", "block", *_TEXT), at=token)
        except NonFiniteError:
            continue
        if not sample.num_non_finite:
            chosen[router.name] = np.sort(sample.chosen, axis=1).astype(np.int16)
            labels = sample
    if labels is None:
        return Choices("", np.empty(0, np.int16), {})
    text = [getattr(labels, name) for name in _TEXT]
    is_known = all((values >= 0).all() for values in text)
    return Choices(digest_of(*text) if is_known else "", labels.block.astype(np.int16), chosen)


def write_choices(path: Path, sample: Choices, results: Results) -> None:
    """Writes the file whole or not at all, beside the results of the same routers and tokens."""
    facts = {"tokens": sample.tokens, "plan": _plan(results)}
    write_sealed(path, facts, {"block": sample.block, **sample.chosen})


def read_choices(path: Path, results: Results) -> Choices | None:
    """What :func:`write_choices` wrote for these results; None when nothing is there, or something
    else, such as what a run left that was stopped between the two.
    """
    facts, chosen = read_sealed(path, CHOICES_BYTES) or ({}, {})
    if not chosen or facts["plan"] != _plan(results):
        return None
    return Choices(facts["tokens"], chosen.pop("block"), chosen)


def _plan(results: Results) -> str:
    """The digest of the plan: everything that determines the results."""
    return digest_of(json.dumps(results.run["plan"], sort_keys=True))


def agreement(one: Choices | None, other: Choices | None, router: str) -> Agreement | None:
    """How far two steps choose alike; None where they cannot be compared token by token.

    Standard errors by leaving out one of the 16 blocks of documents.
    """
    if one is None or other is None:
        return None
    first, second = one.chosen.get(router), other.chosen.get(router)
    if not one.tokens or one.tokens != other.tokens or first is None or second is None:
        return None
    if first.shape != second.shape:
        return None
    overlap = overlap_share(first.astype(np.int32), second.astype(np.int32))
    changed = (overlap < 1.0).astype(np.float64)
    return Agreement(_mean(overlap, one.block), _mean(changed, one.block))


def _mean(
    values: Float64[np.ndarray, "tokens"], block: Int16[np.ndarray, "tokens"]
) -> tuple[float, float]:
    """The mean and its error by leaving out one block after the other; nan for one block."""
    number = np.bincount(block)
    total = np.bincount(block, values)
    present = number > 0
    left = (values.sum() - total[present]) / np.maximum(len(values) - number[present], 1)
    return float(values.mean()), float(jackknife_error(left))
