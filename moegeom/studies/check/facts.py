"""What checks judge beside results: what loaders take, experts by sample, gates of attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from moegeom.checkpoint.formats.gguf import FORMAT as GGUF
from moegeom.checkpoint.formats.gguf import model_files
from moegeom.checkpoint.loaders import LoadedFiles, answers_of, own_code
from moegeom.checkpoint.open import FORMATS, open_answer
from moegeom.checkpoint.ranks import difference_of, of_rank_folders
from moegeom.checkpoint.reading import Folder, Location
from moegeom.checkpoint.shards import ShardedStore
from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import CheckpointError, MoeGeomError, RouterError
from moegeom.core.extras import refuse_absent
from moegeom.core.router import Router
from moegeom.document.header import size
from moegeom.engine.session import Session
from moegeom.router.attention.tensors import (
    AttentionTensors,
    HeadShapeError,
    attention_layers,
    recognise_attention,
)
from moegeom.router.expert_samples import Beginning, expert_beginnings
from moegeom.router.expert_tensors import open_experts
from moegeom.router.family import family_of_class
from moegeom.router.load import load_routers
from moegeom.router.requested_family import NOTHING_ASKED

#: Characters of a name in the config that count.
_NAME = 200

_ADAPTER = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

#: An answer that is the judged one.
_NONE: dict[str, Any] = {"routers": [], "not_finite": [], "files": [], "reason": ""}


def loader_facts(opened: Session) -> dict[str, Any]:
    """``judged`` is the loader whose answer the checkpoint was opened by ("" where a file was
    named, or no loader takes the folder), ``entry`` the file or index that it begins with.

    ``others`` hold every further answer with the ``routers`` that differ there, of them those that
    are ``not_finite``, and the ``files`` that hold them, or the ``reason`` for which it is not
    known. ``agree`` names the loaders whose routers are the same; ``adapter`` names routers that
    transformers with PEFT changes, ``code`` the modules of the checkpoint's own,
    ``class_of_others`` the class of another family by which engines load it.
    """
    location, folder = opened.location, opened.location.folder
    facts: dict[str, Any] = {"judged": "", "entry": location.file or "", "others": [], "agree": []}
    facts |= {"code": list(own_code(opened.store.config)), "adapter": None}
    facts["class_of_others"] = _class_of_others(opened)
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
    return _difference_from(opened, partial(open_answer, folder, answer))


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
    broken = [router.name for router in there if not np.isfinite(router.weight).all()]
    files = sorted({router.provenance.file for router in there})
    return {**_NONE, "routers": names, "not_finite": broken, "files": files}


def _are_equal(one: Router | None, other: Router | None) -> bool:
    """Whether both are there, with the same numbers bit for bit, and choose by one rule.

    How weights follow from a choice is left out: engines of one model differ in floors there.
    """
    if one is None or other is None or one.listed != other.listed:
        return False
    if one.rule != replace(other.rule, weights=one.rule.weights):
        return False
    ours, theirs = (
        {name: value for name, value in vars(router).items() if isinstance(value, np.ndarray)}
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
        difference = _difference_from(opened, partial(kind.open, place))
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
    if not folder.has(_ADAPTER):
        return None
    file = next((name for name in _ADAPTER_WEIGHTS if folder.has(name)), "")
    if not file:
        return {"file": _ADAPTER, "routers": [], "reason": "its weights are not in the folder"}
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
    """``matrices`` with what ``expert_spread`` finds in each, and routers that are left out.

    What is not known is None. ``announce`` is told how much is read before it is.
    """
    from moegeom.geometry.experts import expert_spread

    refuse_absent("scipy", "", "check --experts")
    left_out: list[dict[str, str]] = []
    beginnings_by_router: list[tuple[str, Beginning]] = []
    for router in (router for router in opened.chosen if not router.listed):
        try:
            if router.num_experts < 2:
                raise RouterError("one expert lies apart from none.")
            beginnings = expert_beginnings(open_experts(opened.store, router))
            beginnings_by_router += [(router.name, beginning) for beginning in beginnings]
        except (CheckpointError, RouterError) as error:
            left_out.append({"router": router.name, "reason": error.message.rstrip(".")})
    announce(f"reads {sum(one.size for _, one in beginnings_by_router):,} bytes of experts")
    matrices: list[dict[str, Any]] = []
    for name, beginning in beginnings_by_router:
        try:
            spread = expert_spread(beginning.read(), beginning.unit)
        except (CheckpointError, RouterError) as error:
            left_out.append({"router": name, "reason": error.message.rstrip(".")})
            continue
        facts = dataclasses.asdict(spread) | {"farthest": spread.farthest}
        finite = {key: None if value != value else value for key, value in facts.items()}
        matrices.append({"router": name, "matrix": beginning.matrix, **finite})
    return {"matrices": matrices, "left_out": left_out}


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
