"""``moegeom check``: measure what is there, compare with the baseline, decide."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdaptedStore
from moegeom.checkpoint.formats.gguf import FORMAT as GGUF
from moegeom.checkpoint.formats.gguf import model_files
from moegeom.checkpoint.loaders import LoadedFiles, answers_of, own_code
from moegeom.checkpoint.open import FORMATS, open_answer
from moegeom.checkpoint.ranks import difference_of, of_rank_folders
from moegeom.checkpoint.reading import Folder, Location
from moegeom.checkpoint.remote.url import scheme_of
from moegeom.checkpoint.shards import ShardedStore
from moegeom.checkpoint.store import TensorStore
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
from moegeom.core.errors import CheckpointError, MoeGeomError, RouterError, UsageError
from moegeom.core.extras import refuse_absent
from moegeom.core.files import refuse_unwritable
from moegeom.core.loaded_code import lies_in, trees_around
from moegeom.core.registry import unknown_name
from moegeom.core.router import Router, Rule
from moegeom.document.header import size
from moegeom.engine.request import refuse_late, tokens_text
from moegeom.engine.run_facts import refused_facts
from moegeom.engine.session import Session
from moegeom.engine.sources import refuse_no_tokens
from moegeom.metrics import METRICS
from moegeom.pipeline import ScanRequest, Watch, lint, results_of, scan, with_tokens
from moegeom.results.reader import RUN_FILE, MemoryResults, ResultsView, is_results, results_at
from moegeom.router.attention.tensors import (
    AttentionTensors,
    HeadShapeError,
    attention_layers,
    recognise_attention,
)
from moegeom.router.expert_samples import read_expert_samples
from moegeom.router.expert_values import ExpertValues, equal_across, values_of
from moegeom.router.family import family_of_class
from moegeom.router.load import load_routers
from moegeom.router.requested_family import NOTHING_ASKED
from moegeom.studies.changes.edit import EDITS
from moegeom.studies.changes.operators.rows import NOT_COMPARED
from moegeom.studies.changes.record import RouterChange, phrase_of
from moegeom.studies.changes.router import ProjectedRouter, compare_projected, projected_routers
from moegeom.studies.changes.row_pair import KINDS, Biases
from moegeom.studies.check.record import Gate, GateRequest
from moegeom.studies.check.text_parts import domain_facts, text_part_facts

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
            facts |= expert_facts(opened, announce)
            read = {"bytes_read": opened.store.bytes_read}
            facts["checkpoint"] = {**results.run["checkpoint"], **read}
        if request.attention:
            facts["attention_gates"] = attention_facts(opened, announce)
        if opened.source is not None:
            parts = (*text_part_facts(opened), *domain_facts(results.rows("layers")))
            facts["text_parts"] = list(parts)
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
        for column in metric.columns.get("layers", ())
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


# ------------------------------------------------------------- what is judged beside the results
#: Characters of a name in the config that count.
_NAME = 200

#: An answer that is the judged one.
_NONE: dict[str, Any] = {"routers": [], "not_finite": [], "files": [], "reason": ""}


def loader_facts(opened: Session) -> dict[str, Any]:
    """``judged`` is the loader whose answer the checkpoint was opened by ("" where a file was
    named, or no loader takes the folder), ``entry`` the file or index that it begins with.

    ``others`` hold every further answer with the ``routers`` that differ there, of them those that
    are ``not_finite``, and the ``files`` that hold them, or the ``reason`` for which it is not
    known. ``agree`` names the loaders whose routers are the same; ``adapter`` names routers that
    transformers with PEFT changes, ``code`` the modules of the checkpoint's own,
    ``class_of_others`` the class of another family by which engines load it; ``left`` modules that
    an adapter changes and that are judged without it.
    """
    location, folder = opened.location, opened.location.folder
    facts: dict[str, Any] = {"judged": "", "entry": location.file or "", "others": [], "agree": []}
    facts |= {"code": list(own_code(opened.store.config)), "adapter": None}
    facts["class_of_others"] = _class_of_others(opened)
    if isinstance(opened.store, AdaptedStore):
        facts["left"] = list(opened.store.left)
    if location.file is not None:
        return facts
    answers = list(answers_of(folder))
    if answers:
        facts |= {"judged": answers[0].loader, "entry": answers[0].entry}
        facts["adapter"] = _adapter(folder, opened)
    by_files: dict[tuple[str, ...], list[LoadedFiles]] = {}
    for answer in answers:
        by_files.setdefault((answer.config, answer.inner, *answer.files), []).append(answer)
    for same in by_files.values():
        loaders = [answer.loader for answer in same]
        difference = _compared(opened, same[0], facts["entry"])
        if any(difference.values()):
            is_default = any(answer.is_default for answer in same)
            facts["others"].append(
                {"loaders": loaders, "is_default": is_default, "inner": same[0].inner, **difference}
            )
        else:
            facts["agree"].extend(loaders)
    facts["others"].extend(_of_other_formats(opened, facts["entry"]))
    return facts


def _compared(opened: Session, answer: LoadedFiles, judged: str) -> dict[str, Any]:
    """How the routers of an answer differ from those that are judged."""
    folder = opened.location.folder
    if missing := [name for name in answer.files if not folder.has(name)]:
        share = f"{len(missing)} of {len(answer.files)} files are missing"
        return {**_NONE, "reason": f"{share}, {missing[0]} first", "is_missing": True}
    if answer.files == (judged,) and answer.config == "config.json" and not answer.inner:
        return _NONE
    return _difference_from(opened, functools.partial(open_answer, folder, answer))


def _difference_from(opened: Session, opening: Callable[[], TensorStore]) -> dict[str, Any]:
    judged = opened.store
    try:
        store = opening()
        if (
            isinstance(store, ShardedStore)
            and isinstance(judged, ShardedStore)
            and (store.shard_of, store.config) == (judged.shard_of, judged.config)
        ):
            return _NONE
        routers = {
            r.name: r
            for r in load_routers(store, requested_family=opened.terms.requested_family).routers
        }
    except MoeGeomError as error:
        return {**_NONE, "reason": error.message.rstrip(".")}
    ours = {r.name: r for r in opened.routers.routers if not r.listed}
    names = [n for n in {**ours, **routers} if not _are_equal(ours.get(n), routers.get(n))]
    there = [routers[name] for name in names if name in routers]
    broken = [router.name for router in there if router.non_finite_rows.size]
    files = sorted({router.provenance.file for router in there})
    return {**_NONE, "routers": names, "not_finite": broken, "files": files}


def _are_equal(one: Router | None, other: Router | None) -> bool:
    """Whether both are there, with the same numbers bit for bit, and choose by one rule.

    How weights follow from a choice is left out: engines of one model differ in floors there.
    """
    if one is None or other is None or one.listed != other.listed:
        return False
    if one.rule != dataclasses.replace(other.rule, weights=one.rule.weights):
        return False
    ours, theirs = (
        {
            name: getattr(router, name)
            for name, value in vars(router).items()
            if hasattr(value, "shape")
        }
        for router in (one, other)
    )
    return ours.keys() == theirs.keys() and not any(
        difference_of(values, theirs[name]) for name, values in ours.items()
    )


def _of_other_formats(opened: Session, judged: str) -> Iterator[dict[str, Any]]:
    """Routers of the same folder in formats, or folders of ranks, that were not opened."""
    location = opened.location
    places = [location, *of_rank_folders(location)]
    holders = [(p, f) for p in places for f in FORMATS.all() if f.recognises(p)]
    others = holders[1:]  # the first was opened, unless a file was
    if judged:
        file = Location(location.folder, judged)
        others = [(p, f) for p, f in holders if not f.recognises(file)]
    if not GGUF.recognises(location):  # beside safetensors
        others += [(Location(location.folder, n), GGUF) for n in model_files(location.files)]
    for place, kind in others:
        difference = _difference_from(opened, functools.partial(kind.open, place))
        if any(difference.values()):
            loaders = [f"llama.cpp (-m {place.file})" if place.file else f"readers of {kind.name}"]
            yield {"loaders": loaders, "is_default": False, **difference}


def _class_of_others(opened: Session) -> dict[str, str] | None:
    """The class that ``architectures`` names, where its family is not that of ``model_type``:
    transformers goes by the type, vLLM and SGLang by the class.
    """
    if opened.terms.requested_family != NOTHING_ASKED:
        return None
    config = opened.store.config
    names, model_type = config.get("architectures"), str(config.get("model_type"))[:_NAME]
    for name in names if isinstance(names, list) else ():
        family = family_of_class(str(name)[:_NAME], model_type)
        if family is not None:
            is_same = family.name == opened.routers.family
            return None if is_same else {"class": str(name)[:_NAME], "family": family.name}
    return None


def _adapter(folder: Folder, opened: Session) -> dict[str, Any] | None:
    """Routers that an adapter in the folder changes: PEFT lays it over them in transformers."""
    if not folder.has(ADAPTER_CONFIG):
        return None
    file = next((name for name in ADAPTER_WEIGHTS if folder.has(name)), "")
    if not file:
        return {
            "file": ADAPTER_CONFIG,
            "routers": [],
            "reason": "its weights are not in the folder",
        }
    try:
        names = open_answer(folder, LoadedFiles("", (file,))).names()
    except MoeGeomError as error:
        return {"file": file, "routers": [], "reason": error.message.rstrip(".")}
    dotted, changed = [f".{name}." for name in names], []
    for router in opened.routers.routers:
        modules = {tensor.rpartition(".")[0] for tensor in router.provenance.tensors} - {""}
        if any(f".{module}." in name for module in modules for name in dotted):
            changed.append(router.name)
    return {"file": file, "routers": changed, "reason": ""}


def expert_facts(opened: Session, announce: Callable[[str], None]) -> dict[str, Any]:
    """What samples of all experts show; ``left_out`` are routers without, ``is_kind`` for how their
    experts are made or stored. ``announce`` is told how much is read before it is.
    """
    refuse_absent("scipy", "", "check --experts")
    every = values_of(opened.store, [router for router in opened.chosen if not router.listed])
    values = {name: one for name, one in every.items() if isinstance(one, ExpertValues)}
    left_out = [
        _left_out(name, one) for name, one in every.items() if not isinstance(one, ExpertValues)
    ]
    announce(f"reads {size(sum(one.size for one in values.values()))} of experts")
    samples: list[dict[str, Any]] = []
    for name, one in values.items():
        try:
            samples.append({"router": name, **one.facts()})
        except (CheckpointError, RouterError) as error:
            left_out.append(_left_out(name, error))
    across = equal_across(values, samples)
    for one in samples:
        del one["digests"]
    return {"expert_values": {"samples": samples, "left_out": left_out, "across": across}}


def _left_out(router: str, error: MoeGeomError) -> dict[str, Any]:
    reason = error.message.rstrip(".")
    return {"router": router, "reason": reason, "is_kind": isinstance(error, RouterError)}


def attention_facts(opened: Session, announce: Callable[[str], None]) -> list[dict[str, Any]]:
    """One entry for each gate and each row of sinks; empty where none is known.

    ``refused`` says why a tensor cannot be used by the heads (``is_shape``: for its shape), the
    others are numbers of heads: with values that are not finite, and whose gate rows and biases are
    all zero. ``announce`` is told how much is read before it is.
    """
    family = recognise_attention(opened.store.config)
    if family is None:
        return []
    chosen = {router.layer for router in opened.chosen}
    layers = attention_layers(opened.store, family, None if opened.terms.layers is None else chosen)
    announce(f"reads {size(sum(map(_gate_bytes, layers)))} of gates and sinks of attention")
    facts = []
    for layer in layers:
        if layer.gate is not None:
            facts.append(_fact(layer, layer.gate.name, _gate))
        if layer.sinks is not None:
            facts.append(_fact(layer, layer.sinks, _sinks))
    return facts


def _gate_bytes(layer: AttentionTensors) -> int:
    try:
        return layer.gate_bytes
    except (CheckpointError, RouterError):
        return 0


def _fact(
    layer: AttentionTensors, tensor: str, look: Callable[[AttentionTensors], dict[str, Any]]
) -> dict[str, Any]:
    fact: dict[str, Any] = {"layer": layer.name, "tensor": layer.start + tensor, "refused": ""}
    try:
        return fact | {"num_heads": layer.num_heads} | look(layer)
    except (CheckpointError, RouterError) as error:
        is_shape = isinstance(error, HeadShapeError)
        return fact | {"refused": error.message.rstrip("."), "is_shape": is_shape}


def _gate(layer: AttentionTensors) -> dict[str, Any]:
    gate = layer.read_gate()
    parts = np.concatenate([gate.rows, gate.bias[:, :, None]], axis=2)
    return {
        "not_finite": _heads(~np.isfinite(parts).all(axis=(1, 2))),
        "zero": _heads((parts == 0.0).all(axis=(1, 2))),
    }


def _sinks(layer: AttentionTensors) -> dict[str, Any]:
    """A logit of minus infinity is a head without a sink, and zero is one like others."""
    sinks = layer.read_sinks()
    return {"not_finite": _heads(np.any(np.isnan(sinks) | np.isposinf(sinks), axis=1)), "zero": []}


def _heads(mask: Any) -> list[int]:
    return np.flatnonzero(mask).tolist()
