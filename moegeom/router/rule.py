"""The selection rule of a router, from what the family says and what the config says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import numpy as np

from moegeom.core.errors import CONFIG_CONTRADICTED, RouterError, UsageError
from moegeom.core.limits import LAYER_LIST
from moegeom.core.router import (
    GroupMask,
    LogitMap,
    Norm,
    Projection,
    Router,
    RouterSet,
    Rule,
    Weights,
)
from moegeom.core.text import number_of, quoted
from moegeom.router.family import (
    DESCRIBED,
    RELU,
    Family,
    GroupSpec,
    LayersSpec,
    NormSpec,
    Setting,
    StackSpec,
    WeightsSpec,
    families,
    load_family,
)
from moegeom.router.settings import Settings


def build_rule(stack: StackSpec, settings: Settings, num_experts: int, router: str) -> Rule:
    """The rule of one router with ``num_experts`` rows that compete."""
    top_k = settings.integer(stack.top_k)
    if top_k > num_experts and stack.top_k.value is not None:
        raise UsageError(
            f"{router}: {top_k} experts are to be chosen, as --top-k or the family file says; "
            f"the router has {num_experts}."
        )
    if top_k > num_experts:
        raise RouterError(
            f"{router}: config.json says that {top_k} experts are chosen; "
            f"the router has {num_experts}.",
            code=CONFIG_CONTRADICTED,
        )
    spec = stack.weights
    if (stack.relu_when and settings.says(stack.relu_when)) or stack.score.step == RELU:
        return _relu_rule(stack, settings, top_k, router)
    return Rule(
        top_k=top_k,
        score=settings.choose(stack.score),
        weights=Weights(
            source=cast(Any, settings.choose(spec.source)),
            renormalise=top_k >= spec.renormalise_from and _build_renormalise(spec, settings),
            epsilon=spec.epsilon,
            scale=settings.number(spec.scale),
            floor=settings.number(spec.floor),
            power=settings.number(spec.power) if settings.has(spec.power) else 1.0,
            jitter=settings.number(spec.jitter),
        ),
        has_selection_bias=has_selection_bias(stack, settings),
        has_logit_bias=has_logit_bias(stack, settings)
        or (stack.projection is not None and bool(stack.projection.bias)),
        groups=stack.groups and _build_groups(stack.groups, settings, num_experts, top_k, router),
        logit_map=_build_logit_map(stack, settings),
        capacity=settings.integer(stack.capacity) if settings.has(stack.capacity) else None,
    )


def _relu_rule(stack: StackSpec, settings: Settings, top_k: int, router: str) -> Rule:
    """Every expert with a positive logit, which is its weight; training aims at ``top_k``."""
    for is_there, what in (
        (has_selection_bias(stack, settings), "a selection bias"),
        (stack.projection is not None, "a projection in front of the rows"),
        (_build_logit_map(stack, settings) is not None, "a map of the logits"),
    ):
        if is_there:
            raise RouterError(f"{router}: what {what} does to a ReLU router is not known.")
    return Rule(
        top_k=top_k,
        score="identity",
        weights=Weights("scores", scale=settings.number(stack.weights.scale)),
        has_logit_bias=has_logit_bias(stack, settings),
        pick="threshold",
    )


def has_logit_bias(stack: StackSpec, settings: Settings) -> bool:
    """True when the routers of this checkpoint have a logit bias of their own."""
    return bool(stack.logit_bias) and settings.flag(stack.has_logit_bias)


def has_selection_bias(stack: StackSpec, settings: Settings) -> bool:
    """True when the routers of this checkpoint have a selection bias."""
    return bool(stack.selection_bias) and settings.flag(stack.has_selection_bias)


def _build_renormalise(spec: WeightsSpec, settings: Settings) -> bool:
    """The flag; where weights are divided by a norm, whether there is one."""
    if settings.is_null(spec.power) or not settings.has(spec.power):
        return False
    return settings.flag(spec.renormalise)


def _build_logit_map(stack: StackSpec, settings: Settings) -> LogitMap | None:
    multiplier = settings.number(stack.multiplier)
    cap = settings.number(stack.soft_cap) if settings.has(stack.soft_cap) else 0.0
    if multiplier == 1.0 and cap <= 0.0:
        return None
    return LogitMap(multiplier, cap if cap > 0.0 else np.inf)


#: Group scores of Megatron-Core, which sums the top_k // num_kept largest.
_SUMS = {1: "max", 2: "top2_sum"}


_DEFAULT_GROUPS = (
    "The number of groups is the default of the family's engine, since config.json does not say "
    'it. Is there none? Add "n_group": 1 to config.json.'
)


def _build_groups(
    spec: GroupSpec, settings: Settings, num_experts: int, top_k: int, router: str
) -> GroupMask | None:
    """The group mask, or None when it keeps everything (one group, or all groups kept)."""
    if not _asks_for_groups(spec, settings):
        return None
    num_groups = settings.integer(spec.num_groups)
    num_kept = settings.integer(spec.num_kept)
    if not 0 < num_kept <= num_groups:
        raise RouterError(
            f"{router}: {num_kept} of {num_groups} groups cannot be kept.",
            "Are the two numbers exchanged in config.json?" * (num_kept > num_groups),
            code=CONFIG_CONTRADICTED,
        )
    if num_experts % num_groups:
        raise RouterError(
            f"{router}: {number_of(num_experts, 'expert does', 'experts do')} not divide into "
            f"{num_groups} groups.",
            _DEFAULT_GROUPS if settings.is_default(spec.num_groups) else "",
            code=CONFIG_CONTRADICTED,
        )
    size = num_experts // num_groups
    score = spec.score
    if score == "topn_sum":
        score = _SUMS.get(top_k // num_kept, "")
    if not score:
        raise RouterError(
            f"{router}: groups are compared by the sum of their {top_k // num_kept} largest "
            "scores; only the largest, and the sum of the two largest, are known."
        )
    if score == "top2_sum" and size < 2:
        raise RouterError(
            f"{router}: groups of {size} have no sum of two largest scores.",
            "Kernels that take it anyway read the scores of other tokens.",
            code=CONFIG_CONTRADICTED,
        )
    if num_kept * size < top_k:
        raise RouterError(
            f"{router}: {number_of(num_kept, 'group')} of {number_of(size, 'expert')} to be kept, "
            f"fewer than the {top_k} experts to choose.",
            code=CONFIG_CONTRADICTED,
        )
    if num_kept == num_groups:
        return None
    return GroupMask(num_groups, num_kept, cast(Any, score), spec.fill)


def assumed_values(stack: StackSpec, settings: Settings) -> Iterator[str]:
    """What the rule takes from the family file because the config does not say it, as phrases.

    Values that change nothing, such as a factor of 1, are left out. Engines differ about them.
    """
    spec, groups = stack.weights, stack.groups
    if groups and settings.is_null(groups.num_groups) and groups.num_groups.default is not None:
        yield f"'{groups.num_groups.keys[0]}' is null, no group mask is assumed"
        groups = None
    is_masked = groups and _asks_for_groups(groups, settings)
    numbers = [(groups.num_groups, 1), (groups.num_kept, 0)] if groups and is_masked else []
    numbers += [(stack.top_k, 0), (stack.multiplier, 1), (stack.soft_cap, 0), (spec.scale, 1)]
    numbers += [(spec.renormalise, None), (spec.power, None)]
    for setting, neutral in numbers:
        if settings.is_default(setting) and setting.default != neutral:
            is_flag = isinstance(setting.default, bool)
            text = str(setting.default).lower() if is_flag else f"{setting.default:g}"
            yield f"'{setting.keys[0]}' {text}"
    for choice in (stack.score, spec.source):
        if choice.keys and not settings.has(Setting(choice.keys)):
            yield f"'{choice.keys[0]}' {choice.default}"


def _asks_for_groups(spec: GroupSpec, settings: Settings) -> bool:
    if spec.when:
        if not all(settings.text_is(key, allowed) for key, allowed in spec.when.items()):
            return False
    elif settings.is_null(spec.num_groups) or not settings.has(spec.num_groups):
        return False
    return settings.integer(spec.num_groups) > 1


def build_norm(
    spec: NormSpec, settings: Settings, hidden: int, tensor: str, bias_tensor: str
) -> Norm:
    """The norm in front of a router."""
    is_rms = settings.has(spec.rms_eps)
    return Norm(
        "rms" if is_rms else cast(Any, spec.kind),
        settings.number(spec.rms_eps if is_rms else spec.eps),
        tensor,
        settings.number(spec.gain_offset),
        float(hidden**-0.5) if spec.over_root_hidden else 1.0,
        bias_tensor,
    )


_A_FORK = "A fork with another rule? Describe it with --family FILE or --router-pattern."


def check_required(family: Family, settings: Settings) -> None:
    """Raise if the config asks for another rule than the family's."""
    for key, allowed in family.require.items():
        if not settings.has(Setting((key,))):
            continue
        name, value = settings.get(Setting((key,)))
        if str(value) not in allowed:
            raise RouterError(
                f"config.json: {name} is {str(value)[:60]!r}; the rule of family {family.name} is "
                f"known for {' or '.join(repr(a) for a in allowed)}.",
                _A_FORK,
            )
    for stack in family.stacks:
        _check_score(family, stack, settings.under(stack.config_roots))


#: Keys under which configs name the score, and their words for the scores that a bias tells apart.
_SCORE_KEYS = ("scoring_func", "score_function", "moe_router_activation_func", "score_func")
_SCORE_WORDS = {"sigmoid": "sigmoid", "softmax": "softmax", "sqrtsoftplus": "sqrt_softplus"}


def _check_score(family: Family, stack: StackSpec, settings: Settings) -> None:
    """Raise if the config names another score than the family's, which need not read the key.

    A fork may keep the model type and change the score.
    """
    fixed = stack.score.step
    for key in _SCORE_KEYS:
        setting = Setting((key,))
        name, value = settings.get(setting) if settings.has(setting) else ("", None)
        score = _SCORE_WORDS.get(value) if isinstance(value, str) else None
        if score and fixed in _SCORE_WORDS.values() and score != fixed:
            raise RouterError(
                f"config.json: {name} is {value!r}; the rule of family {family.name} scores by "
                f"{fixed}.",
                _A_FORK,
            )


def expected_layers(spec: LayersSpec | None, settings: Settings) -> frozenset[int] | None:
    """Layers that should have a router, or None if neither family nor config says."""
    if spec is None or not all(settings.has(s) for s in (spec.first, spec.step)):
        return None
    kinds = settings.entries(spec.kinds)
    if not settings.has(spec.count) and kinds is None:
        return None
    count = settings.integer(spec.count) if settings.has(spec.count) else len(kinds or ())
    # where kinds decide, their default is unknown: it is made by the configuration class
    if spec.kinds.keys and not settings.has(spec.kinds) and not spec.first.keys:
        return None
    first = settings.integer(spec.first)
    step = settings.integer(spec.step)
    start = settings.integer(spec.start)
    dense = settings.layer_list(spec.dense)
    layers = range(first, count)
    with_router = frozenset(i for i in layers if (i - start) % step == 0 and i not in dense)
    if settings.has(spec.listed):
        with_router &= settings.layer_list(spec.listed)
    if kinds is not None:
        with_router &= {i for i, kind in enumerate(kinds) if kind in spec.sparse}
    return with_router


def _from(layer: int, first: Any) -> bool:
    return layer >= (min(first) if isinstance(first, list) else first)


def _until(layer: int, last: Any) -> bool:
    last = max(last) if isinstance(last, list) else last
    return last == -1 or layer <= last


def _behind_step(layer: int, step: Any) -> bool:
    return (layer + 1) % step == 0


#: Keys by which an engine takes a layer as dense, and whether it builds a router in one by a value;
#: lists that are spelled as text are lists. Not every engine reads the same ones for a family: read
#: from transformers 5.23 (``modeling_*``), vLLM and SGLang (``deepseek_v2``, ``dots1``,
#: ``kimi_linear``, ``ernie45_moe``, ``hunyuan_v1``, ``qwen3_moe``, ``step3p5``).
_BUILDS_ROUTER: Mapping[str, Callable[[int, Any], bool]] = {
    "moe_layer_freq": lambda layer, step: (
        bool(step[layer]) if isinstance(step, list) else layer % step == 0
    ),
    "first_k_dense_replace": _from,
    "num_dense_layers": _from,
    "moe_layer_num_skipped": _from,
    "moe_layer_start_index": _from,
    "moe_layer_end_index": _until,
    "moe_layer_interval": _behind_step,
    "decoder_sparse_step": _behind_step,
    "interleave_moe_layer_step": _behind_step,
    "mlp_only_layers": lambda layer, dense: layer not in iter(dense),
    "moe_layers": lambda layer, listed: layer in iter(listed),
    "moe_layers_enum": lambda layer, listed: layer in iter(listed),
    "mlp_layer_types": lambda layer, kinds: kinds[layer] != "dense",
}


def dense_elsewhere(
    family: Family, stack: StackSpec, settings: Settings, layers: Sequence[int]
) -> dict[int, tuple[str, str]]:
    """Of layers with a router those in which a key that the family does not read lets an engine
    build none, or that it gives a value which makes no sense; all where the number of experts is
    null. By layer the key and its value.
    """
    specs = [one.layers for one in family.stacks if one.layers]
    named = (getattr(spec, item.name) for spec in specs for item in fields(spec))
    own = {key.rpartition(".")[2] for it in named if isinstance(it, Setting) for key in it.keys}
    settings = settings.under(stack.config_roots)
    dense: dict[int, tuple[str, str]] = {}
    if settings.is_null(stack.num_experts):  # vLLM and SGLang build no router at all
        dense = dict.fromkeys(layers, (stack.num_experts.keys[0], "null"))
    for key, builds_router in _BUILDS_ROUTER.items():
        if key in own or not settings.has(Setting((key,))):
            continue
        value = settings.get(Setting((key,)))[1]
        for layer in layers:
            try:
                is_built = builds_router(layer, _listed(value))
            except (TypeError, ValueError, ArithmeticError, LookupError):
                is_built = False
            if not is_built:
                dense.setdefault(layer, (key, quoted(value, 40)))
    return dense


def _listed(value: Any) -> Any:
    """A value as it stands; a text of numbers, and a list, where it is no longer than any model."""
    if isinstance(value, str):
        value = [int(number) for number in value.split(",", LAYER_LIST)]
    if isinstance(value, list) and len(value) > LAYER_LIST:
        raise ValueError(value[:1])
    return value


def rule_text(family: Family, rule: Rule, num_experts: int, stack: StackSpec) -> str:
    """The family's sentence with the numbers of one router."""
    if rule.pick == "threshold":
        return f"ReLU of logits, those above 0 of {num_experts} (training aims at {rule.top_k})"
    groups = ""
    if rule.groups and stack.groups:
        groups = stack.groups.text.format(
            num_groups=rule.groups.num_groups, num_kept=rule.groups.num_kept
        )
    score = rule.score.replace("_", "-")
    bias = " + selection bias" if rule.has_selection_bias else ""
    return family.text.format(
        num_experts=num_experts, top_k=rule.top_k, groups=groups, score=score, bias=bias
    )


# ----------------------------------------------------------------------- in words and as plain data
def describe_router(router: Router) -> dict[str, Any]:
    """Shape, rule and storage of one router."""
    return {
        "router": router.name,
        "experts": router.num_experts,
        "top_k": router.rule.top_k,
        "hidden": router.hidden_size,
        "stored": router.provenance.stored_dtype.lower(),
        "selection": router.rule.selection_score_unit,
        "boundaries": "none"
        if router.listed
        else "linear"
        if router.rule.is_linear
        else "non-linear",
        "rule": rule_in_words(router),
        "finite": not router.non_finite_rows.size,
        "tensor": router.provenance.tensors[0],
        "file": router.provenance.file,
    }


def rule_in_words(router: Router) -> str:
    """How the router chooses and weighs, step by step: ``sigmoid + bias, 4 of 8 groups, ...``."""
    rule, weights = router.rule, router.rule.weights
    if router.listed:
        return f"top {rule.top_k}, only counted: {router.listed}"
    steps = ["logits" if rule.score == "identity" else rule.score.replace("_", "-")]
    if rule.has_logit_bias:
        steps[0] += " of biased logits" if rule.score != "identity" else " + bias"
    if rule.has_selection_bias:
        steps[0] += " + selection bias"
    if router.projection is not None:
        steps.insert(0, _projection_in_words(router.projection))
    if rule.logit_map is not None:
        steps.insert(0, map_in_words(rule.logit_map))
    if rule.groups is not None:
        steps.append(groups_in_words(rule.groups))
    is_whole = rule.top_k == router.num_experts
    if rule.pick == "threshold":
        return f"ReLU of {steps[0]}, every expert above 0 (training aims at {rule.top_k})"
    steps.append(f"{'all' if is_whole else 'top'} {rule.top_k}")
    weighing = _WEIGHTS[weights.source]
    steps += [weighing] if weighing else []
    # a softmax over the chosen sums to 1 in any case
    is_news = weights.renormalise and weights.source != "softmax_of_selected_logits"
    steps += ["weights sum to 1"] if is_news else []
    steps += [f"x {weights.scale:g}"] if weights.scale != 1.0 else []
    return ", ".join(steps)


_WEIGHTS = {
    "scores": "",
    "softmax_of_selected_logits": "softmax over the chosen",
    "sigmoid_of_selected_logits": "sigmoid of each chosen",
    "sparsemixer": "sparsemixer",
}


def _projection_in_words(projection: Projection) -> str:
    size = len(projection.weight)
    if projection.scale is None:
        return f"unit rows on {size} projected dimensions"
    return f"cosines in {size} projected dimensions x {projection.scale:g}"


def groups_in_words(groups: GroupMask) -> str:
    """How many groups are kept: ``4 of 8 groups (fill -inf)``."""
    return f"{groups.num_kept} of {groups.num_groups} groups (fill {groups.fill:g})"


def map_in_words(logit_map: LogitMap) -> str:
    """What happens to every logit: ``logits x 0.5, soft cap 30``."""
    steps = [] if logit_map.multiplier == 1.0 else [f"logits x {logit_map.multiplier:g}"]
    steps += [] if np.isinf(logit_map.soft_cap) else [f"soft cap {logit_map.soft_cap:g}"]
    return ", ".join(steps)


def name_patterns(router_set: RouterSet) -> dict[str, int]:
    """Names of the router weights with ``{i}`` for the layer, and how many there are of each."""
    patterns: dict[str, int] = {}
    for router in router_set.routers:
        name = router.provenance.tensors[0]
        pattern = re.sub(rf"(?<![^._]){router.layer}(?=\.)", "{i}", name, count=1)
        patterns[pattern] = patterns.get(pattern, 0) + 1
    return patterns


def rule_origin(family: str) -> str:
    """What says how routers choose: ``options``, ``the family file``, or else ``config``.

    ``config`` is that of the checkpoint, read by a family that is known.
    """
    if family == DESCRIBED:
        return "options"
    return "config" if family in families() else "the family file"


def describe_routers(router_set: RouterSet) -> dict[str, Any]:
    """All routers of a checkpoint with totals, as plain data.

    ``rule_status`` is ``assumed``: only recorded choices verify a rule. ``rule_origin`` says from
    what.
    """
    facts = {
        field.name: getattr(router_set, field.name)
        for field in dataclasses.fields(router_set)
        if field.name not in ("routers", "skipped")
    }
    return facts | {
        "rule_status": "assumed",
        "rule_origin": rule_origin(router_set.family),
        "routers": [describe_router(router) for router in router_set.routers],
        "skipped": [dataclasses.asdict(skipped) for skipped in router_set.skipped],
    }


def describe_families() -> list[dict[str, Any]]:
    """Name, model types, rule and source of every family."""
    return [
        {
            "family": family.name,
            "model types": ", ".join(family.model_types),
            "rule": family.text.replace("{num_experts}", "E")
            .replace("{top_k}", "k")
            .replace("{groups}", "best g of G groups, ")
            .replace("{score}", "score by the config")
            .replace("{bias}", " + selection bias, if any"),
            "checked against": family.source,
        }
        for family in map(load_family, families())
    ]
