"""The steps of a series: which there are, each measured or read again, all as checks see them."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moegeom.checkpoint.remote.url import scheme_of, shown
from moegeom.checks import measured_results, run_checks
from moegeom.checks.profile import DEFAULT
from moegeom.core.digest import digest_of
from moegeom.core.documents import parse_json
from moegeom.core.errors import (
    CheckpointError,
    MoeGeomError,
    NonFiniteError,
    ResultsError,
    UsageError,
)
from moegeom.core.files import read_regular
from moegeom.core.finding import Finding
from moegeom.core.limits import CHOICES_BYTES, MOST_JSON
from moegeom.core.router import Router
from moegeom.core.row_keys import ALL, AS_STORED, is_domain
from moegeom.core.series import SeriesStep
from moegeom.core.shapes import Float, Float64, Int16
from moegeom.core.text import spelled
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
from moegeom.results.reader import Results, finite_column, is_results, open_results
from moegeom.results.run_file import num_non_finite
from moegeom.router.expert_values import sample_some
from moegeom.studies.track.record import TrackRequest
from moegeom.tokens.files import TokenFiles, are_there, name_of, paths_of
from moegeom.tokens.foreign.npy import read_sealed, write_sealed
from moegeom.tokens.memory import NAME as HELD_NAME
from moegeom.tokens.memory import HeldArrays
from moegeom.tokens.traces.source import CountedSource

#: Names that say "not finished yet".
_UNFINISHED = (".partial", ".tmp", ".temp", ".incomplete")

#: Ends of the names of weight files, those that are not read yet included: these are refused with
#: their own sentence, not passed over as unfinished.
_WEIGHTS = (
    ".safetensors .safetensors.index.json .gguf .bin .pt .pth .ckpt .distcp .npz .h5 .msgpack"
).split()

#: Names that are listed where none matches.
_MOST_BESIDE = 6

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Candidate:
    """A directory or file that matches, and what ``{step}`` stands for in the recording's path."""

    path: Path
    step_text: str

    @property
    def name(self) -> str:
        return spelled(self.path.name)

    @property
    def step(self) -> float:
        """The number in the step text, by which the series is ordered; 0 where there is none."""
        return float((_NUMBER.findall(self.step_text) or ["0"])[-1])

    def recording(self, template: str) -> str:
        """The template with {step} and {name} filled in."""
        return template.replace("{step}", self.step_text).replace("{name}", self.name)


class LeftStep(NamedTuple):
    """A step that is not in the series, and why: somebody writes it, or it cannot be read."""

    name: str
    reason: str
    is_being_written: bool = False


def find_checkpoints(patterns: Sequence[str]) -> tuple[list[Candidate], list[LeftStep]]:
    """Candidates in natural order (step_2 before step_10), and those skipped with the reason.

    ``{step}`` is the text that the first ``*`` of the pattern matched; for a path without one, the
    last number of its name. A path without wildcards is taken as it is.

    Raises
    ------
    UsageError
        For a URL; when nothing matches, one of several names holds no number, or two have the same
        one.
    """
    matches: dict[Path, str] = {}
    for pattern in patterns:
        if scheme_of(pattern):
            raise UsageError(
                f"{shown(pattern)}: is a URL; a series is made of paths.",
                "Download the checkpoints, or compare two of them with `moegeom diff`.",
            )
        # Path.glob refuses absolute patterns
        paths = [pattern] if Path(pattern).exists() else glob.glob(pattern)  # noqa: PTH207
        for path in paths:
            matches.setdefault(Path(path), _matched(pattern, path))
    if not matches:
        raise UsageError(f"{' '.join(patterns)}: no checkpoint matches.", _beside(patterns[0]))
    candidates, skipped = [], []
    for path, text in matches.items():
        half = _being_written(path)
        if reason := half or _unreadable(path):
            skipped.append(LeftStep(path.name, reason, bool(half)))
            continue
        candidate = Candidate(path, text)
        if len(matches) > 1 and not _NUMBER.search(text):
            raise UsageError(
                f"{path}: there is no step number in '{text}'.",
                "A series is ordered by the number in each name, such as step_1000.",
            )
        candidates.append(candidate)
    candidates.sort(key=lambda candidate: (candidate.step, candidate.name))
    for one, other in itertools.pairwise(candidates):
        if one.step == other.step:
            raise UsageError(
                f"{one.path} and {other.path} have the same step, {one.step:g}.",
                "Narrow the pattern.",
            )
    return candidates, sorted(skipped)


def _beside(pattern: str) -> str:
    """A hint for a pattern without matches: the missing folder, or names that do not match."""
    whole = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parent.parts)
    folder = Path(*whole)
    if not folder.is_dir():
        return f"There is no folder {folder}."
    names = sorted(child.name for child in folder.iterdir() if not child.name.startswith("."))
    listed = f"{', '.join(names[:_MOST_BESIDE])}{' ...' if len(names) > _MOST_BESIDE else ''}"
    where = "The current folder" if folder == Path() else str(folder)
    return (
        f"{where} holds {listed or 'nothing'}. A pattern is relative to it: 'checkpoints/step_*'."
    )


def _being_written(path: Path) -> str:
    """The sign that the directory is being written; empty where there is none."""
    if path.name.endswith(_UNFINISHED):
        return "its name says that it is being written"
    names = sorted(child.name for child in path.iterdir()) if path.is_dir() else []
    half = next((name for name in names if name.endswith(_UNFINISHED)), None)
    return f"{half} is being written" if half and not is_results(path) else ""


def _unreadable(path: Path) -> str:
    """Why a directory is no whole checkpoint; empty for one that may be."""
    if not path.is_dir() or is_results(path):
        return ""
    names = sorted(child.name for child in path.iterdir())
    if not names:
        return "it is empty"
    if not any(name.endswith(tuple(_WEIGHTS)) for name in names):
        return "it holds no weights"
    if "config.json" not in names:
        return "it holds no config.json"
    reasons = (_missing_files(path / n) for n in names if n.endswith(".safetensors.index.json"))
    return next((reason for reason in reasons if reason), "")


def _missing_files(index: Path) -> str:
    try:
        files = set(parse_json(read_regular(index, MOST_JSON, follows=True))["weight_map"].values())
        missing = sorted(name for name in files if not (index.parent / name).exists())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return ""  # opening it says what is wrong with it
    if not missing:
        return ""
    return f"{index.name} names {missing[0]}, which is not there ({len(missing)} of {len(files)})"


def _matched(pattern: str, path: str) -> str:
    """What the first star of the pattern stands for; else the last number of the name."""
    expression = "".join(
        "(.*?)" if part == "*" else "." if part == "?" else re.escape(part)
        for part in re.split(r"([*?])", pattern)
    )
    match = re.fullmatch(expression, path)
    if match and match.groups():
        return match[1]
    numbers = _NUMBER.findall(Path(path).name)
    return numbers[-1] if numbers else Path(path).name


# ----------------------------------------------------------------------------------------- one step
#: Rows of a table of results, by population.
ByPopulation = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """Results of the step at ``path``; routers and chosen sets where these are at hand.

    ``lacks_recording`` is true where results were kept and the recording is gone.
    ``expert_samples`` are digests of samples of some experts, by router and expert.
    """

    facts: SeriesStep
    path: Path
    results: Results
    routers: tuple[Router, ...] | None
    chosen: Choices | None
    lacks_recording: bool = False
    expert_samples: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

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
        for row in sorted(self.results.rows(table), key=lambda row: row.get("expert") or 0):
            population = row["population"]
            if row["variant"] == AS_STORED and (population == ALL or is_domain(population)):
                by_router.setdefault(row["router"], {}).setdefault(population, []).append(row)
        return by_router


def measure_step(
    request: TrackRequest, folder: Path, candidate: Candidate, watch: Watch | None
) -> MeasuredStep | str:
    """Measures one checkpoint, unless that was done before; the reason when it cannot be read yet.

    Files in ``folder``: <name>.moegeom, the results; <name>.choices.npz, chosen sets of a sample.
    """
    if is_results(candidate.path):  # measured before
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
    facts = _facts(candidate, results, out, is_same)
    samples = {name: some.digests for name, some in sample_some(opened.store, routers).items()}
    return MeasuredStep(facts, candidate.path, results, routers, chosen, is_gone, samples)


def tokens_of(request: TrackRequest, candidate: Candidate) -> Tokens | None:
    """The tokens of a step; None where the weights alone are followed.

    Raises
    ------
    UsageError
        When there are tokens, and none for this step.
    """
    if request.tokens is None or is_results(candidate.path):
        return None
    if isinstance(request.tokens, str):
        return candidate.recording(request.tokens)
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
        f"{candidate.name}: there is no recording {candidate.recording(request.tokens)}.",
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


# -------------------------------------------------------------------------------------- all of them
#: Numbers by step and expert.
ByExpert = Float64[np.ndarray, "steps experts"]


@dataclass(frozen=True, eq=False)
class Concentration:
    """Effective number of experts that carry the load of one population, at each step.

    ``num_blocks`` is the least number of blocks of documents of any step.
    """

    effective: Float64[np.ndarray, "steps"]
    errors: Float64[np.ndarray, "steps"]
    num_blocks: int


@dataclass(frozen=True, eq=False)
class RouterHistory:
    """One router of the same shape at every step.

    ``rows`` are its weights, or what results keep of them; empty where a step has neither.
    ``row_digests`` and ``bias_digests`` tell bits apart. ``bias`` is the selection bias, ``loads``
    are in fair shares, ``z_loss`` is of all tokens; None where a step lacks one.
    ``concentrations`` are by population. ``experts`` are digests of samples of the experts that
    were sampled at every step, by their number.
    """

    name: str
    rows: tuple[Float[np.ndarray, "experts width"], ...]
    row_digests: tuple[str, ...]
    bias: ByExpert | None
    bias_digests: tuple[str, ...]
    loads: ByExpert | None
    concentrations: Mapping[str, Concentration]
    z_loss: Float64[np.ndarray, "steps"] | None = None
    experts: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def grams(self) -> Float64[np.ndarray, "experts steps steps"] | None:
        """Inner products of the states of each row, all states of one length, their mean out.

        A common factor says nothing of where the rows point. None without rows.
        """
        if not self.rows:
            return None
        lengths = np.array([np.linalg.norm(rows) for rows in self.rows], np.float64)
        if not np.isfinite(lengths).all() or lengths.min() == 0.0:
            return None
        products = np.empty((len(self.rows[0]), len(lengths), len(lengths)))
        for expert in range(len(products)):
            states = np.stack([rows[expert] for rows in self.rows]) / lengths[:, None]
            states -= states.mean(axis=0)
            products[expert] = states @ states.T
        return products

    @cached_property
    def bias_rates(self) -> Float64[np.ndarray, "intervals"] | None:
        """Change of the biases over their largest spread, a common offset taken out."""
        if self.bias is None:
            return None
        centred = self.bias - self.bias.mean(axis=1, keepdims=True)
        most = float(np.linalg.norm(centred, axis=1).max())
        moved = np.linalg.norm(np.diff(centred, axis=0), axis=1)
        return moved / most if most > 0.0 else np.zeros(len(moved))


@dataclass(frozen=True, eq=False)
class History:
    """A series as its findings see it.

    ``other_text`` says why loads of different steps may be those of different texts; empty where
    the tokens are the same at every step. ``left_out`` are routers that not every step has alike.
    ``unread`` are steps that cannot be read, with the reason, and ``broken`` those that a check of
    integrity fails, with the path as a shell takes it and the findings.
    """

    steps: Float64[np.ndarray, "steps"]
    routers: tuple[RouterHistory, ...]
    has_tokens: bool
    other_text: str = ""
    left_out: tuple[str, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    broken: tuple[tuple[str, str, tuple[Finding, ...]], ...] = ()

    def step(self, index: int) -> str:
        """The number of a step, as it is printed."""
        return f"{self.steps[index]:.15g}"


#: Checks of one checkpoint that every step is held to.
INTEGRITY = dataclasses.replace(DEFAULT, select=("MGI",))


def history(
    measured: Sequence[MeasuredStep], other_text: str, skipped: Sequence[LeftStep] = ()
) -> History:
    """The routers that are at every step, in the order of the last."""
    layers, experts = [step.layers for step in measured], [step.experts for step in measured]
    weights = [{router.name: router.weight for router in step.routers or ()} for step in measured]
    routers, left_out = [], []
    for name in layers[-1]:
        sizes = {len(at.get(name, {}).get(ALL, ())) for at in experts}
        if len(sizes) == 1 and sizes != {0} and all(name in at for at in layers):
            own, inside = ([at[name] for at in table] for table in (layers, experts))
            samples = [step.expert_samples.get(name, {}) for step in measured]
            routers.append(_router(name, own, inside, [at.get(name) for at in weights], samples))
        else:
            left_out.append(name)
    steps = np.array([step.facts.step for step in measured], dtype=np.float64)
    has_tokens = all(step.facts.num_tokens for step in measured)
    unread = tuple((one.name, one.reason) for one in skipped if not one.is_being_written)
    return History(
        *(steps, tuple(routers), has_tokens, other_text, tuple(left_out)),
        unread,
        tuple(_broken(measured)),
    )


def _broken(measured: Sequence[MeasuredStep]) -> Iterator[tuple[str, str, tuple[Finding, ...]]]:
    for step in measured:
        judged = measured_results(step.results, str(step.path))
        verdict = run_checks(judged, INTEGRITY)
        if failed := tuple(f for f in verdict.findings if f.severity == "error"):
            yield step.facts.name, judged.checkpoint, failed


def _router(
    name: str,
    layers: Sequence[ByPopulation],
    experts: Sequence[ByPopulation],
    weights: Sequence[np.ndarray | None],
    samples: Sequence[Mapping[int, str]],
) -> RouterHistory:
    rows = _alike(weights) or _alike([finite_column(at[ALL], "row_projections") for at in experts])
    digests = [
        tuple(at[ALL][0].get(f"{part}_digest") or "" for at in layers)
        for part in ("weight", "selection_bias")
    ]
    z_loss = np.array([at[ALL][0].get("z_loss") for at in layers], np.float64)  # nan where missing
    populations = [p for p in layers[-1] if all(p in at for at in layers)]
    concentrations = {p: _concentration([at[p][0] for at in layers]) for p in populations}
    return RouterHistory(
        name,
        rows,
        digests[0],
        _stacked(experts, "selection_bias"),
        digests[1],
        _stacked(experts, "load"),
        {population: one for population, one in concentrations.items() if one is not None},
        z_loss if np.isfinite(z_loss).all() else None,
        {e: tuple(at[e] for at in samples) for e in samples[0] if all(e in at for at in samples)},
    )


def _alike(states: Sequence[np.ndarray | None]) -> tuple[np.ndarray, ...]:
    """The states in the order of steps, when there is one at every step, of one shape."""
    arrays = [state for state in states if state is not None and state.size]
    alike = len(arrays) == len(states) and len({state.shape for state in arrays}) == 1
    return tuple(arrays) if alike else ()


def _stacked(experts: Sequence[ByPopulation], column: str) -> ByExpert | None:
    states = _alike([finite_column(at[ALL], column) for at in experts])
    return np.stack(states) if states else None


def _concentration(rows: Sequence[Mapping[str, Any]]) -> Concentration | None:
    names = ("effective_experts", "effective_experts_se", "num_blocks")
    figures = np.array([[row.get(name) for row in rows] for name in names], dtype=np.float64)
    if not np.isfinite(figures).all():  # what is missing is nan
        return None
    return Concentration(figures[0], figures[1], int(figures[2].min()))
