"""A trained model as a checkpoint that is read with ``--family CKPT/family.toml``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moegeom.core.errors import UsageError
from moegeom.core.files import move_folder, new_folder, refuse_existing, remove, writing
from moegeom.trainable.continuous import ReLURouter, SmoothCosineRouter, SmoothTopKRouter
from moegeom.trainable.router import RouterModule
from moegeom.trainable.top_k import (
    LARGEST_SCALE,
    LEAST_SUM,
    CentredRouter,
    CosineRouter,
    TopKRouter,
)

#: The files of a checkpoint.
WEIGHTS_FILE, CONFIG_FILE, FAMILY_FILE = "model.safetensors", "config.json", "family.toml"

#: Where a router that is no part of a model is put.
_ALONE = "layers.0.router"

_NUMBER = re.compile(r"(?<![^.])[0-9]{1,6}(?=\.)")


@dataclass(frozen=True)
class _Rule:
    """What a family file says of one router: its stack, tables of the stack, and the sentence.

    ``parts`` are keys that name tensors, with the names of the module; the first is the weight.
    """

    parts: Mapping[str, str]
    keys: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    words: str = ""


def export_checkpoint(model: nn.Module, folder: str | Path) -> Path:
    """Writes all tensors of a model, or of one router, into a new folder, and returns it.

    Beside ``model.safetensors`` stand ``config.json`` (what the modules are, nothing that a loader
    of torch needs) and ``family.toml``, the rules of the routers: those of a smoothed router are
    its top-k, without the experts that fade.

    Raises
    ------
    UsageError
        Where the folder exists, there is no router, a name does not say the layer, routers of one
        name differ from layer to layer, or a rule cannot be said in a family file.
    """
    from safetensors.torch import save_file

    path = Path(folder)
    refuse_existing(path, "Choose another folder.")
    model = model if not isinstance(model, RouterModule) else _alone(model)
    stacks = _stacks(model)
    tensors = {name: value.detach().contiguous() for name, value in _tensors(model)}
    first = next(iter(stacks.values()))[1]
    config = {
        "model_type": "moegeom_trainable",
        "hidden_size": first.hidden,
        "num_experts": first.num_experts,
        "num_experts_per_tok": first.top_k,
        "routers": {pattern: type(router).__name__ for pattern, (_, router) in stacks.items()},
    }
    work = new_folder(path)
    try:
        with writing(path):
            save_file(tensors, work / WEIGHTS_FILE)
            (work / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
            (work / FAMILY_FILE).write_text("\n".join(_family(stacks, tensors)) + "\n", "utf-8")
            move_folder(work, path)
    except BaseException:
        remove(work)
        raise
    return path


def _alone(router: RouterModule) -> nn.Module:
    holder = nn.Module()
    parent = holder
    *above, last = _ALONE.split(".")
    for name in above:
        parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(last, router)
    return holder


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state once: a file of safetensors holds no tensor under two names."""
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _stacks(model: nn.Module) -> dict[str, tuple[_Rule, RouterModule]]:
    """Rules by the name of a router with ``{layer}`` for its number."""
    stacks: dict[str, tuple[_Rule, RouterModule]] = {}
    inner = {id(m.router) for m in model.modules() if isinstance(m, CentredRouter)}
    for name, router in model.named_modules():
        if not isinstance(router, RouterModule) or id(router) in inner:
            continue
        numbers = list(_NUMBER.finditer(name))
        if len(numbers) != 1:
            raise UsageError(
                f"export_checkpoint: router '{name}' has {len(numbers)} numbers in its name, "
                "expected one, the layer.",
                "Name it by its layer, such as layers.3.router.",
            )
        begin, end = numbers[0].span()
        pattern = f"{name[:begin]}{{layer}}{name[end:]}"
        rule = _rule_of(router)
        first = stacks.setdefault(pattern, (rule, router))[0]
        if first != rule:
            raise UsageError(
                f"export_checkpoint: routers '{pattern}' differ in their rule from layer to layer.",
                "Name routers of another kind in another way.",
            )
    if not stacks:
        raise UsageError("export_checkpoint: there is no router of moegeom.trainable in the model.")
    return stacks


# --------------------------------------------------------------------------------------- the rules
def _rule_of(router: RouterModule) -> _Rule:
    if type(router) not in _RULES:
        raise UsageError(
            f"export_checkpoint: no rule is known for {type(router).__name__}.",
            f"Known: {', '.join(sorted(kind.__name__ for kind in _RULES))}.",
        )
    return _RULES[type(router)](router)


def _top_k(router: TopKRouter) -> _Rule:
    parts = {"weight": "weight"}
    if router.bias is not None:
        parts["logit_bias"] = "bias"
    bias = ""
    if router.selection_bias is not None:
        parts["selection_bias"], bias = "selection_bias", " + selection bias"
    weights: dict[str, Any] = {"source": "scores", "renormalise": router.renormalise}
    weights |= {"epsilon": LEAST_SUM, "scale": router.scale}
    return _Rule(
        parts, {"score": router.score}, {"weights": weights},
        f"{router.score}{bias}, top {{top_k}} of {{num_experts}}",
    )  # fmt: skip


def _fading(rule: _Rule) -> _Rule:
    return _Rule(rule.parts, rule.keys, rule.tables, f"{rule.words}, without those that fade")


def _cosine(router: CosineRouter) -> _Rule:
    if router.bias is not None or router.selection_bias is not None:
        raise UsageError(
            "export_checkpoint: a bias beside cosines cannot be said in a family file."
        )
    rule = _top_k(router)
    projection = {"weight": "projection", "log_scale": "log_scale", "largest_scale": LARGEST_SCALE}
    tables = {**rule.tables, "projection": projection}
    return _Rule(rule.parts, rule.keys, tables, f"cosines, {rule.words}")


def _relu(router: ReLURouter) -> _Rule:
    parts = {"weight": "weight"} | ({} if router.bias is None else {"logit_bias": "bias"})
    weights = {"source": "scores", "renormalise": False}
    words = "every expert with a positive logit of {num_experts}, {top_k} in the mean"
    return _Rule(parts, {"score": "relu"}, {"weights": weights}, words)


def _centred(router: CentredRouter) -> _Rule:
    rule = _rule_of(router.router)
    if "projection" in rule.tables or "logit_bias" in rule.parts:
        raise UsageError(
            f"export_checkpoint: {type(router.router).__name__} in CentredRouter has a bias or "
            "cosines already, beside which the mean cannot be said in a family file."
        )
    parts = {key: f"router.{name}" for key, name in rule.parts.items()}
    parts["logit_bias"] = "logit_bias"
    return _Rule(parts, rule.keys, rule.tables, f"centred, {rule.words}")


_RULES: dict[type, Callable[[Any], _Rule]] = {
    TopKRouter: _top_k,
    SmoothTopKRouter: lambda router: _fading(_top_k(router)),
    CosineRouter: _cosine,
    SmoothCosineRouter: lambda router: _fading(_cosine(router)),
    ReLURouter: _relu,
    CentredRouter: _centred,
}


# ---------------------------------------------------------------------------------------- the file
def _family(
    stacks: Mapping[str, tuple[_Rule, RouterModule]], tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """Lines of the family file."""
    words = dict.fromkeys(rule.words for rule, _ in stacks.values())
    yield f"text = {json.dumps('; '.join(words))}"
    for place, (pattern, (rule, router)) in enumerate(stacks.items()):
        named = {f"{pattern}.{name}" for name in rule.parts.values()}
        named |= {f"{pattern}.{name}" for name in rule.tables.get("projection", {}).values()}
        yield "\n[[stacks]]"
        yield f"name = {json.dumps('text' if len(stacks) == 1 else f'text{place}')}"
        yield 'prefixes = [""]'
        for key, name in rule.parts.items():
            yield f"{key} = [{json.dumps(f'{pattern}.{name}')}]"
        beside = sorted(_patterns_under(pattern, tensors) - named)
        if beside:
            yield f"beside = {json.dumps(beside)}"
        yield f"top_k = {router.top_k}"
        yield f"num_experts = {router.num_experts}"
        yield f"hidden_size = {router.hidden}"
        for key, value in rule.keys.items():
            yield f"{key} = {json.dumps(value)}"
        for table, entries in rule.tables.items():
            yield f"\n[stacks.{table}]"
            for key, value in entries.items():
                is_name = table == "projection" and isinstance(value, str)
                entry = [f"{pattern}.{value}"] if is_name else value
                yield f"{key} = {json.dumps(entry)}"


def _patterns_under(pattern: str, tensors: Mapping[str, Tensor]) -> set[str]:
    """Names of the tensors of such routers, with ``{layer}``."""
    head, _, tail = pattern.partition("{layer}")
    own = re.compile(rf"{re.escape(head)}[0-9]{{1,6}}{re.escape(tail)}\.(.+)", re.DOTALL)
    hits = (own.fullmatch(name) for name in tensors)
    return {f"{pattern}.{hit[1]}" for hit in hits if hit}
