"""Which family a checkpoint belongs to; where none is known, which tensors may be its routers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from moegeom.checkpoint.dtypes import PLAIN_FLOATS
from moegeom.checkpoint.store import TensorInfo, TensorStore
from moegeom.core.documents import value_at
from moegeom.core.errors import STORAGE_UNKNOWN, CheckpointError, RouterError
from moegeom.core.limits import FAMILY_NAME_LENGTH
from moegeom.core.router import Skipped
from moegeom.core.text import number_of, quoted
from moegeom.router.family import Family, families, family_of, load_family
from moegeom.router.plain_names import ADAPTER
from moegeom.router.plan import Match
from moegeom.router.settings import Settings

#: Tables of a config that describe the language model inside a larger one.
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
_DEEPEST = 4


def recognise_family(store: TensorStore) -> Family:
    """The family that ``model_type`` of the config names, or that of its language model.

    The type of the whole counts where it is known; the rule of an inner one is read in its table.
    """
    model_type = model_type_of(store.config)
    family = family_of(model_type) if isinstance(model_type, str) else None
    if family is not None:
        return family
    inner = {path: model for path, _, model in _inner(store.config) if model is not None}
    if len(inner) == 1:
        (path, model), *_ = inner.items()
        return _moved(model, path)
    if inner:
        models = " and ".join(f"{path} of family {model.name}" for path, model in inner.items())
        raise RouterError(
            f"{store.label}: config.json describes {len(inner)} language models, {models}; which "
            "tensors belong to which is not known.",
            f"--family {next(iter(inner.values())).name} loads the routers of one.",
        )
    if not isinstance(model_type, str):
        adapters = [name for name in store.names() if ADAPTER.search(name)]
        if 2 * len(adapters) > len(store.names()):
            raise RouterError(
                f"{store.label}: {len(adapters)} of {len(store.names())} tensors are of an adapter "
                f"('{adapters[0]}' ...), which is added to the weights of another model.",
                "Merge it into that model (peft: merge_and_unload), and open the result.",
            )
        found_type = f"model_type {quoted(model_type)}" if store.config else "no config.json"
        raise RouterError(
            f"{store.label}: found {found_type}, expected a config.json with a model_type. "
            f"{describe_candidates(store)}",
            f"Put the model's config.json beside its weights.{_or(store)}",
        )
    types = [model_type, *(kind for _, kind, _ in _inner(store.config) if kind != model_type)]
    inside = f" (inside: {', '.join(repr(kind[:60]) for kind in types[1:])})" if types[1:] else ""
    advice = suggest(store)
    choose = f"If that is what they are, say how they choose: {advice.text} " if advice else ""
    raise RouterError(
        f"{store.label}: the selection rule of model_type {model_type[:60]!r}{inside} is not "
        f"known. {describe_candidates(store)}",
        f"{_relatives(types)}{choose}`moegeom list families` lists the {len(families())} "
        "families that are known.",
    )


def placed_family(family: Family, config: Mapping[str, Any]) -> Family:
    """A family that somebody names, reading the table of the config that counts experts chosen.

    Composites keep the settings of their language model in a table of their own.
    """
    spec = family.stacks[0]
    roots = spec.config_roots or family.config_roots
    if Settings(config, roots).has(spec.top_k):
        return family
    places = (_moved(family, path) for path in _tables(config))
    return next(
        (
            moved
            for moved in places
            if Settings(config, moved.stacks[0].config_roots or moved.config_roots).has(spec.top_k)
        ),
        family,
    )


def recognition_notes(config: Mapping[str, Any], family: Family) -> list[str]:
    """A sentence where the rule is that of a language model inside a type that is not known."""
    model_type = model_type_of(config)
    if not isinstance(model_type, str) or model_type in family.model_types:
        return []
    for path, kind, model in _inner(config):
        if model is not None and model.name == family.name:
            reason = f"model_type {model_type[:60]!r} is not known"
            return [f"{reason}: the rule is that of its {path}, {kind[:60]!r}"]
    return []


def _tables(config: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[str]:
    """Paths of the tables that describe a language model, outer ones first."""
    for key in _INNER:
        if isinstance(config.get(key), Mapping) and depth < _DEEPEST:
            yield path + key
            yield from _tables(config[key], f"{path}{key}.", depth + 1)


def _inner(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Family | None]]:
    """Path, type and family of language models inside; none inside of a family that is known."""
    outer_paths: list[str] = []
    for path in _tables(config):
        kind = value_at(config, f"{path}.model_type")
        if not isinstance(kind, str) or any(path.startswith(f"{outer}.") for outer in outer_paths):
            continue
        family = family_of(kind)
        outer_paths += [path] if family is not None else []
        yield path, kind, family


def _moved(family: Family, path: str) -> Family:
    """The family reading its settings at a path of the config."""

    def roots(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{path}.{root}" if root else path for root in old)

    stacks = tuple(replace(s, config_roots=roots(s.config_roots)) for s in family.stacks)
    return replace(family, stacks=stacks, config_roots=roots(family.config_roots))


def _relatives(types: Sequence[str]) -> str:
    """Families whose types are spelled like one of these, as a question."""
    name_of_type = {kind: name for name in families() for kind in load_family(name).model_types}
    near = [
        kind
        for one in types
        for kind in (
            *sorted((t for t in name_of_type if one.startswith(f"{t}_")), key=len, reverse=True),
            *get_close_matches(one[:60], name_of_type, n=2, cutoff=0.75),
        )
    ]
    names = list(dict.fromkeys(name_of_type[kind] for kind in near))[:2]
    if not names:
        return ""
    listed = " or ".join(f"--family {name}" for name in names)
    return f"If it routes like a family of a similar name, say so: {listed}. "


#: Configs without a model type, by the keys that they have: original files of Mistral and Meta
#: (params.json) and of gpt-oss, and arguments of torchscale.
_UNNAMED = {
    frozenset({"moe", "dim"}): "params-moe",
    frozenset({"moe_args", "dim"}): "params-moe-args",
    frozenset({"experts_per_token", "num_experts", "swiglu_limit"}): "gpt-oss-original",
    frozenset({"use_xmoe", "moe_expert_count"}): "xmoe",
}


def model_type_of(config: Mapping[str, Any]) -> object:
    """The model type that families are found by; that of a GGUF file names its architecture."""
    model_type = config.get("model_type")
    if model_type is None:
        return next((name for keys, name in _UNNAMED.items() if keys <= config.keys()), None)
    architecture = config.get("architecture")
    is_gguf = model_type == "gguf" and isinstance(architecture, str)
    return f"gguf-{architecture}" if is_gguf else model_type


def no_routers(store: TensorStore, family: Family, listed: Sequence[Skipped] = ()) -> RouterError:
    """The error for a checkpoint of a known family in which no router was found.

    ``listed`` are routers whose choice does not follow from their input.
    """
    if listed:
        return RouterError(
            f"{store.label}: the {number_of(len(listed), 'router')} of family {family.name} "
            f"('{listed[0].tensor}' ...) cannot be measured: {listed[0].reason}.",
            "What the model chose can be counted: moegeom scan CKPT --tokens REC, a trace of "
            "an engine (docs/capture/engines.md) or ids that RecordingWriter wrote in a loop of "
            "your own (docs/recordings.md); moegeom capture does not record it.",
        )
    patterns = ", ".join(f"'{p.name}'" for stack in family.stacks for p in stack.weight)
    return RouterError(
        f"{store.label}: none of {len(store.names())} tensors is a router of family "
        f"{family.name} ({patterns}). {describe_candidates(store)}",
        "Is this a dense model, or a part of a checkpoint?",
    )


def _or(store: TensorStore) -> str:
    advice = suggest(store)
    if advice is None:
        return " Or say which tensors are routers: --router-pattern REGEX --top-k K --score NAME"
    return f" Or say how the routers choose: {advice.text}"


# ---------------------------------------------------------------------- tensors that may be routers
#: A path component that says gate or router. ``gate_proj``, ``gate_up_proj`` (half of an expert),
#: ``shared_expert_gate`` (one row) and gates of attention are never routers.
_SOUNDS_LIKE_ROUTER = re.compile(r"(?:^|[._])(?:gate|router|router_gate|classifier|wg)(?:[._]|$)")
_NEVER = re.compile(
    r"gate_proj|gate_up_proj|shared_experts?_gate|experts\.[0-9]|lm_head|embed|norm|attn_gate"
    r"|(?:^|\.)(?:optim|optimizer)\."
)
_NUMBER = re.compile(r"(?<![^._])[0-9]+(?=\.)")
#: Keys of a config that count experts, hidden dimensions, chosen experts.
_EXPERTS = re.compile(r"(?:^|\.)(?:[a-z_]*experts?(?:_num)?|expert_count)$")
_HIDDEN = re.compile(r"(?:^|\.)(?:hidden_size|d_model|dim|n_embd|embedding_length)$")
_TOP_K = re.compile(
    r"(?<!index_)top_?k(?!_group|_prob|_method)|experts_per_tok|(?:^|\.)moe_k$|expert_used_count"
)
_DEEPEST_NUMBERS = 6

_FEW = 3
_FEW_SETTINGS = 6

#: Tensors of a router, or beside it, that change what is chosen or what it weighs.
_BESIDE = re.compile(
    r"scale|tid2eid|table|projector|temperature|reduction|keys|correction|router_bias|weight_[0-9]"
)


@dataclass(frozen=True)
class FamilyCandidate:
    """Tensors of one name pattern (``{i}`` for numbers) that may be routers.

    ``evidence`` holds one phrase for each thing that speaks for them.
    """

    pattern: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    evidence: tuple[str, ...]

    @property
    def has_router_name(self) -> bool:
        """True when the name says gate or router."""
        return bool(_SOUNDS_LIKE_ROUTER.search(self.pattern))

    @property
    def regex(self) -> str:
        """A regular expression for the names, the layer number in a group."""
        return name_regex(self.names[0])


def propose_routers(store: TensorStore) -> list[FamilyCandidate]:
    """Candidates, most evidence first; reads the headers of a first, a middle and a last layer."""
    numbers = _numbers(store.config)
    experts = expert_counts(store)
    widths = {value for key, value in numbers if _HIDDEN.search(key)}
    names = [name for name in store.names() if len(name) <= FAMILY_NAME_LENGTH]
    owners = {name.partition("experts")[0] for name in names if "experts" in name}
    candidates = []
    for pattern, group in _by_pattern(names).items():
        shape = _shape(store, pattern, group)
        if shape is None:
            continue
        evidence = list(_evidence(pattern, group, shape, experts, widths, owners))
        # matrices of a hidden size, the same in many layers, are most of a model
        speaks = _SOUNDS_LIKE_ROUTER.search(pattern) or min(shape) in experts
        if speaks and len(evidence) >= 2:
            candidates.append(FamilyCandidate(pattern, tuple(group), shape, tuple(evidence)))
    return sorted(candidates, key=lambda c: -len(c.evidence))


def describe_candidates(store: TensorStore) -> str:
    """A sentence on the tensors that look like routers."""
    candidates = propose_routers(store)
    named = [candidate for candidate in candidates if candidate.has_router_name]
    candidates = (named or candidates)[:_FEW]
    if not candidates:
        return f"No tensor of {len(store.names())} looks like a router."
    listing = "; ".join(f"{c.pattern} {c.shape} ({', '.join(c.evidence)})" for c in candidates)
    return f"Tensors that look like routers: {listing}."


@dataclass(frozen=True)
class Suggestion:
    """Options that load the best candidate, and what they leave unsaid: a phrase for each thing.

    ``K``, ``NAME`` and ``--BIAS`` stand for what is not known.
    """

    options: str
    unsaid: tuple[str, ...]

    @property
    def text(self) -> str:
        """Options, and a sentence with the phrases."""
        return (
            f"{self.options}; --family FILE says more. Not said by these options: "
            f"{'; '.join(self.unsaid)}."
        )


def suggest(store: TensorStore) -> Suggestion | None:
    """What somebody might say of the best candidate; None where no tensor looks like a router."""
    candidates = propose_routers(store)
    if not candidates:
        return None
    first, settings = candidates[0], dict(_settings(store.config))
    numbers = [v for key, v in settings.items() if _TOP_K.search(key) and type(v) in (int, list)]
    is_one = bool(numbers) and all(v == numbers[0] and type(v) is int for v in numbers)
    k = str(numbers[0]) if is_one else "K"
    score = _score(settings)
    biases = list(_biases(store, first))
    options = [f"--router-pattern '{first.regex}'", f"--top-k {k}", f"--score {score or 'NAME'}"]
    flags = [value for key, value in settings.items() if _RENORMALISED.search(key)]
    options += ["--renormalise"] if flags and all(value is True for value in flags) else []
    options += [f"{option} '{regex}'" for option, regex in biases]
    unsaid = [
        *(["K: " + _K_UNKNOWN.format(_listed(settings, _TOP_K) or "nothing")] if k == "K" else []),
        *([] if score else ["NAME: the config names no score"]),
        *([_BIAS_UNKNOWN] if any(option == "--BIAS" for option, _ in biases) else []),
        *(text.format(pairs) for keys, text in _IN_CONFIG if (pairs := _listed(settings, keys))),
        *_in_tensors(store, first, candidates, [regex for _, regex in biases]),
        _WEIGHTS_UNKNOWN,
        "the norm in front",
    ]
    return Suggestion(" ".join(options), tuple(unsaid))


#: Settings of a config that options cannot repeat, and what they are.
_IN_CONFIG = (
    (
        re.compile(
            r"(?:^|[._])(?:n_group|topk_group|num_expert_groups?|expert_groups?)(?:_|$)"
            r"|topk_method|router_(?:num_groups|group_topk)"
        ),
        "groups of experts ({}): only some groups may be kept",
    ),
    (
        re.compile(r"rout\w*_scal\w*|route_scale|expert_weights_scale|router_scaling"),
        "a scale that weights are multiplied by ({})",
    ),
    (
        re.compile(r"soft_?cap|output_multiplier|router\w*_(?:multiplier|temperature)"),
        "a map of the logits ({})",
    ),
    (
        re.compile(r"expert_capacity|capacity_(?:factor|token)"),
        "the number of tokens that an expert takes ({})",
    ),
    (
        re.compile(r"(?:^|[._])(?:n|num)_shared_experts?$|zero_expert"),
        "rows of experts that always run or do nothing, if the router scores them ({})",
    ),
    (
        re.compile(r"jitter|sparse_?mixer"),
        "weights made one expert after the other, sparsemixer ({})",
    ),
    (re.compile(r"expert_selection|router_dtype|second_expert"), "how experts are selected ({})"),
)

_K_UNKNOWN = "the config says {}"
_BIAS_UNKNOWN = (
    "--BIAS: --logit-bias where it is added to the logits, --selection-bias where it only selects"
)
_WEIGHTS_UNKNOWN = (
    "how weights are made: softmax or sigmoid of the chosen, divided by their sum (--renormalise) "
    "or not, a scale without a key, small constants"
)

_RENORMALISED = re.compile(r"norm_topk_prob|moe_renormalize|expert_weights_norm|normalize_gate")
_SCORE = re.compile(
    r"(?:^|\.)(?:scoring_func|score_function|score_func|moe_router_activation_func)$"
)
_SCORES = {"sigmoid": "sigmoid", "softmax": "softmax", "sqrtsoftplus": "sqrt_softplus"}


def _score(settings: Mapping[str, Any]) -> str:
    """The score that the config names; empty where it names none, or two."""
    named = {_SCORES.get(str(value), "") for key, value in settings.items() if _SCORE.search(key)}
    return named.pop() if len(named) == 1 else ""


def _listed(settings: Mapping[str, Any], keys: re.Pattern[str]) -> str:
    """Settings that a pattern fits, as ``key value``; those that change nothing are left out."""
    entries = {
        key.rpartition(".")[2]: str(value)[:40]
        for key, value in settings.items()
        if keys.search(key) and value not in (None, False, 0)
    }
    if all(value in ("1", "1.0") for value in entries.values()) and "shared" not in str(entries):
        return ""
    return ", ".join(f"{key} {value}" for key, value in list(entries.items())[:_FEW_SETTINGS])


def _settings(
    config: Mapping[str, Any], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Every plain setting of the config, and every list, by its dotted key."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            if depth < _DEEPEST_NUMBERS:
                yield from _settings(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _in_tensors(
    store: TensorStore,
    first: FamilyCandidate,
    others: Sequence[FamilyCandidate],
    biases: Sequence[str],
) -> Iterator[str]:
    """What shapes and names show and options do not say."""
    if first.shape[0] > first.shape[1]:
        yield "the weight lies on its side, (hidden, experts): a --family FILE says transposed"
    named = [c for c in others[1:] if c.has_router_name][:_FEW]
    if named:
        yield f"other tensors that look like routers: {', '.join(c.pattern for c in named)}"
    if len({store.info(name).shape for name in first.names}) > 1:
        yield "layers differ in shape"
    regexes = {name_regex(first.names[0]), *biases}
    stem = first.names[0].rpartition(".")[0]
    block = stem.rpartition(".")[0]
    beside = [
        name.removeprefix(f"{stem}.").removeprefix(f"{block}.")
        for name in store.names()
        if name_regex(name) not in regexes
        and (
            name.startswith(f"{stem}.")
            or (name.startswith(f"{block}.") and _BESIDE.search(name.removeprefix(block)))
        )
    ]
    if beside:
        listing = ", ".join(beside[:_FEW])
        yield f"tensors of the router or beside it, such as a scale, a bias or a table: {listing}"


def _biases(store: TensorStore, candidate: FamilyCandidate) -> Iterator[tuple[str, str]]:
    """An option and its regular expression for each bias of the routers that the names show."""
    stem = candidate.pattern.rpartition(".")[0] + "."
    layer = candidate.pattern.partition("{i}.")[0] + "{i}."
    for pattern, group in _by_pattern(store.names()).items():
        is_own = pattern == f"{stem}bias"
        if not pattern.startswith(layer) or not (is_own or sounds_like_choice_bias(pattern)):
            continue
        if has_one_number_for_each(store.info(group[0]), min(candidate.shape)):
            yield "--BIAS" if is_own else "--selection-bias", name_regex(group[0])


def expert_counts(store: TensorStore) -> set[int]:
    """Every number of the config that counts experts."""
    return {v for key, v in _numbers(store.config) if _EXPERTS.search(key) and v > 1}


def _by_pattern(names: Collection[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        if not (_NEVER.search(name) or ADAPTER.search(name)):
            groups.setdefault(_NUMBER.sub("{i}", name), []).append(name)
    # one number is the layer; two are a layer and an expert or a block of a decoder
    return {p: group for p, group in groups.items() if 1 <= p.count("{i}") <= 2}


def _shape(store: TensorStore, pattern: str, names: list[str]) -> tuple[int, ...] | None:
    """The shape of the first, (few, many), when middle and last have the same; else None.

    Routers by their name may have another number of experts in every layer.
    """
    sample = dict.fromkeys((names[0], names[len(names) // 2], names[-1]))
    try:
        shapes = [store.info(name).shape for name in sample]
    except CheckpointError:
        return None  # this is evidence for another error, which must not be hidden
    shape = shapes[0]
    are_matrices = all(len(sides) == 2 and 1 < min(sides) < max(sides) for sides in shapes)
    is_one_width = are_matrices and len({max(sides) for sides in shapes}) == 1
    is_alike = len(set(shapes)) == 1 or bool(_SOUNDS_LIKE_ROUTER.search(pattern))
    return shape if is_one_width and is_alike else None


def _evidence(
    pattern: str,
    names: list[str],
    shape: tuple[int, ...],
    experts: Collection[int],
    widths: Collection[int],
    owners: Collection[str],
) -> Iterator[str]:
    few, many = min(shape), max(shape)
    if _SOUNDS_LIKE_ROUTER.search(pattern):
        yield "its name"
    if few in experts:
        yield f"{number_of(few, 'expert')} in the config"
    if many in widths:
        yield f"hidden size {many} in the config"
    if len(names) > 1:
        yield f"the same in {number_of(len(names), 'layer')}"
    # in the module of the tensor, or in one around it
    if any(owner.count(".") >= 2 and names[0].startswith(owner) for owner in owners):
        yield "experts beside it"


def _numbers(config: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, int]]:
    """Every integer of the config by its dotted key; lists count by their first entry."""
    numbers: list[tuple[str, int]] = []
    for key, value in config.items():
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, Mapping) and depth < _DEEPEST_NUMBERS:
            numbers += _numbers(value, f"{prefix}{key}.", depth + 1)
        elif type(value) is int:
            numbers.append((f"{prefix}{key}", value))
    return numbers


# ---------------------------------------------------------------------- biases that no family names
#: Names of tensors that are added to scores before experts are chosen.
_SOUNDS_LIKE_BIAS = re.compile(
    r"(?:^|[._])(?:experts?_|(?:correction|routing|router|scores?|selection|balanc(?:e|ing))[._])"
    r"bias(?:_E)?$|(?:^|\.)exp_probs_b(?:\.bias)?$"
)

_ONE_OF_MANY = re.compile(r"(?:^|\.)experts?\.[0-9]")


def sounds_like_choice_bias(name: str) -> bool:
    """True for a name such as ``...e_score_correction_bias`` or ``...expert_bias``."""
    return bool(_SOUNDS_LIKE_BIAS.search(name)) and not _ONE_OF_MANY.search(name)


def has_one_number_for_each(info: TensorInfo, num_experts: int) -> bool:
    """True for plain floats, as many as there are experts, in rows if there is more than one."""
    is_vector = 1 <= len(info.shape) <= 2 and info.shape[-1] == num_experts
    return is_vector and info.dtype in PLAIN_FLOATS


def name_regex(name: str) -> str:
    """A regular expression for a name in every layer: its first number stands in a group."""
    first, *others = [re.escape(part) for part in _NUMBER.split(name)]
    return first + "".join(("([0-9]+)" if i == 0 else "[0-9]+") + p for i, p in enumerate(others))


def check_choice_biases(
    store: TensorStore, matches: Sequence[Match], experts: Sequence[int]
) -> None:
    """Raise if a layer holds a bias of the choice that its family knows nothing about.

    ``experts`` are the numbers of experts of ``matches``. Only headers are read, of tensors in a
    layer with a router whose names sound like such a bias.

    Raises
    ------
    RouterError
        If there is one; how to say what it is stands in the hint.
    """
    layers: dict[str, set[int]] = {}
    family_names: set[str] = set()
    for match, num_experts in zip(matches, experts, strict=True):
        head = match.weight.name.partition("{layer}")[0]
        layers.setdefault(f"{_prefix(match)}{head}{match.layer}.", set()).add(num_experts)
        family_names |= {*match.names(), *_spelled(match)}
    for name in store.names():
        # a substring test first: of 90 000 names a few hundred reach the regular expression
        if not ("bias" in name or "exp_probs_b" in name) or name in family_names:
            continue
        stems = (name[: dot.end()] for dot in re.finditer(r"\.", name))
        stem = next((stem for stem in stems if stem in layers), None)
        if stem is None or not sounds_like_choice_bias(name.removeprefix(stem)):
            continue
        info = store.info(name)
        if any(has_one_number_for_each(info, count) for count in layers[stem]):
            raise _not_known(info)


def _not_known(info: TensorInfo) -> RouterError:
    return RouterError(
        f"{info.file}: tensor '{info.name}' has one number for each expert and may change which "
        "are chosen, but the rule does not name it.",
        f"Say what it is: --router-pattern with --selection-bias '{name_regex(info.name)}' (or "
        "--logit-bias), or a --family FILE that names it, under beside if it changes nothing.",
        code=STORAGE_UNKNOWN,
    )


def _prefix(match: Match) -> str:
    own = match.weight.name.format(layer=match.layer)
    return (match.stem + match.leaf).removesuffix(own)


def _spelled(match: Match) -> Iterator[str]:
    """Names that the family knows in the router's layer, those that the config turns off too."""
    spec = match.spec
    for patterns in (spec.selection_bias, spec.logit_bias, spec.beside, spec.weights.expert_scale):
        for pattern in patterns:
            yield _prefix(match) + pattern.name.format(layer=match.layer)
