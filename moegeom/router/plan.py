"""Router modules among the names of a checkpoint, and the plan of each: which tensors make it up,
with dtypes and shapes that agree with its rule and its config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.store import TensorInfo, TensorStore
from moegeom.core.errors import CONFIG_CONTRADICTED, PART_MISSING, RouterError
from moegeom.core.limits import ROUTER_COMPOSED_VALUES
from moegeom.core.router import Norm, Rule, Skipped, TableName
from moegeom.core.text import number_of
from moegeom.router.family import (
    BIAS,
    DESCRIBED,
    LOGARITHM,
    SIZE,
    Family,
    LayersSpec,
    Range,
    Setting,
    StackSpec,
    TensorName,
)
from moegeom.router.plain_names import without_model
from moegeom.router.rule import build_norm, build_rule, has_logit_bias, has_selection_bias
from moegeom.router.settings import Settings
from moegeom.router.storage import Stored, check_plain, find_storage

# ---------------------------------------------------------------------------------- modules by name
_LAYERS_APART = "Let --router-pattern fit only the layers that have one, such as ([1-9][0-9]*)."


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of the checkpoint, and how it lies."""

    name: str
    spec: TensorName


@dataclass(frozen=True)
class Match:
    """One router found by name.

    ``stem`` is the path of its module with the dot, ``leaf`` what the plain weight is called
    behind it. ``tensors`` are those of the module that are neither biases nor known to change
    nothing: the weight, or whatever stores it. ``parts`` are what else decides, by name.
    """

    stack: str
    layer: int
    spec: StackSpec
    stem: str
    weight: TensorName
    tensors: tuple[str, ...]
    parts: Mapping[str, TensorPlace]

    @property
    def leaf(self) -> str:
        return self.weight.leaf

    def names(self) -> Iterator[str]:
        """Every tensor that belongs to the router."""
        yield from self.tensors
        yield from (part.name for part in self.parts.values())

    @property
    def name(self) -> str:
        slot = f"/{self.spec.slot}" if self.spec.slot else ""
        return f"{self.stack}/{self.layer}{slot}"


@dataclass(frozen=True)
class Listed:
    """A router that is there and not loaded, since its choice does not follow from its input."""

    spec: StackSpec
    layer: int
    tensor: str
    reason: str

    @property
    def place(self) -> tuple[str, int]:
        return self.spec.name, self.layer


@dataclass(frozen=True)
class Matches:
    """What the names of a checkpoint hold.

    ``routers`` in natural order; ``skipped``: tensors that are not loaded, with the reason;
    ``listed``: the routers among these, whose choice does not follow from their input; ``tables``
    where it is looked up. ``copies`` are routers that are there again under another name, beside
    the one that counts.
    """

    routers: tuple[Match, ...]
    skipped: tuple[Skipped, ...]
    listed: tuple[Listed, ...] = ()
    tables: tuple[TableName, ...] = ()
    copies: tuple[tuple[Match, Match], ...] = ()


@dataclass(frozen=True)
class _Module:
    """Tensors under one router's path."""

    prefix: str
    layer: int
    stem: str
    weight: TensorName
    tensors: tuple[str, ...]


def without_absent_biases(family: Family, names: Collection[str]) -> Family:
    """The family without the selection bias of stacks that may lack it, where no layer has one."""
    stacks = tuple(
        replace(spec, selection_bias=())
        if spec.may_lack_selection_bias and not _any_layer_has(spec.selection_bias, spec, names)
        else spec
        for spec in family.stacks
    )
    return replace(family, stacks=stacks)


def _any_layer_has(patterns: Iterable[TensorName], spec: StackSpec, names: Collection[str]) -> bool:
    ends = [pattern.name.partition("{layer}") for pattern in patterns]
    bare = {without_model(prefix) for prefix in spec.prefixes}
    spelled = [(prefix + head, tail) for head, _, tail in ends for prefix in bare]
    return any(
        name.startswith(head) and name.endswith(tail) and name[len(head) : -len(tail)].isdigit()
        for name in map(without_model, names)
        for head, tail in spelled
    )


def match_routers(names: Collection[str], family: Family, settings: Settings) -> Matches:
    """All routers in natural order, and tensors that only look like one.

    Raises
    ------
    RouterError
        If a router lacks a bias or norm of its family.
    """
    by_name: dict[str, Match] = {}
    order: dict[str, tuple[bool, int, int, int]] = {}
    skipped: dict[str, str] = {}
    listed: list[Listed] = []
    tables: list[TableName] = []
    copies: list[tuple[Match, Match]] = []
    stacks = list(dict.fromkeys(spec.name for spec in family.stacks))
    for place, spec in enumerate(family.stacks):
        modules, others = _modules(names, spec)
        for other in others:
            skipped.setdefault(other.tensor, other.reason)
        own = settings.under(spec.config_roots)
        mtp_from = own.integer(spec.mtp_from) if spec.mtp_from and modules else None
        for module in modules:
            if reason := _not_a_function(module, spec, names, own):
                tensor = module.stem + module.weight.leaf
                skipped[tensor] = reason
                listed.append(Listed(spec, module.layer, tensor, reason))
                if table := _token_table(module, spec, names):
                    tables.append(TableName(f"{spec.name}/{module.layer}", table, tensor))
                continue
            is_mtp = mtp_from is not None and module.layer >= mtp_from
            try:
                match = _match(module, spec, "mtp" if is_mtp else spec.name, names, family, own)
            except RouterError as error:
                if spec.mtp_from != EVERY_LAYER:
                    raise
                # Modules for further tokens come and go: the model is measured without them.
                skipped[module.stem + module.weight.leaf] = error.message.removesuffix(".")
                continue
            if match.name in by_name:
                copies.append((by_name[match.name], match))
                continue
            by_name[match.name] = match
            # Slots of one layer stand next to each other.
            order[match.name] = (is_mtp, stacks.index(spec.name), match.layer, place)
    matches = _apart(sorted(by_name.values(), key=lambda m: order[m.name]))
    taken = {name for match in matches for name in match.tensors}
    left = tuple(Skipped(name, why) for name, why in skipped.items() if name not in taken)
    return Matches(
        tuple(matches),
        left,
        tuple(sorted(listed, key=lambda r: (stacks.index(r.spec.name), r.layer))),
        tuple(tables),
        tuple(copies),
    )


def _apart(matches: list[Match]) -> list[Match]:
    """Tensors of one module go to the router that names them as its weight."""
    weights = {match.stem + match.leaf for match in matches}
    routers = []
    for match in matches:
        own = match.stem + match.leaf
        tensors = tuple(n for n in match.tensors if n == own or n not in weights)
        routers.append(replace(match, tensors=tensors))
    return routers


def _not_a_function(
    module: _Module, spec: StackSpec, names: Collection[str], settings: Settings
) -> str:
    """Why the choice does not follow from router and input; empty when it does."""
    table = _token_table(module, spec, names)
    if table:
        return f"its experts are looked up by token id in '{table}'; the weight only mixes them"
    for key, why in spec.not_a_function_when.items():
        if settings.says(key):
            return why
    return spec.not_a_function


def _token_table(module: _Module, spec: StackSpec, names: Collection[str]) -> str | None:
    tables = (module.prefix + t.name.format(layer=module.layer) for t in spec.token_table)
    return next((name for name in tables if name in names), None)


def _modules(names: Collection[str], spec: StackSpec) -> tuple[list[_Module], list[Skipped]]:
    """Modules of one stack by path, whatever tensors they hold."""
    bare = {without_model(prefix) for prefix in spec.prefixes}
    modules: dict[tuple[str, int, str], list[str]] = {}
    spelled: dict[tuple[str, int, str], TensorName] = {}
    doubtful: dict[str, str] = {}
    claimed: set[str] = set()
    places: dict[tuple[str, int], str] = {}
    biases = [bias.name for bias in spec.selection_bias]
    # A longer spelling before one that it begins with: router.layer.weight is no part of `router`.
    for pattern in sorted(spec.weight, key=lambda p: -p.name.count(".")):
        path, _, leaf = pattern.name.rpartition(".")
        head, _, tail = path.partition("{layer}")
        # A substring test first: of 90 000 names a few hundred reach the regular expression.
        # A weight with a name of its own shares its path with much that is no router's.
        inner = f"{tail}." if leaf == "weight" else f"{tail}.{leaf}"
        near = [name for name in names if inner in name and name not in claimed]
        own = ".+" if leaf == "weight" else rf"{re.escape(leaf)}(?:[._].+)?"
        shape = re.compile(
            rf"(.*?){re.escape(head)}([0-9]{{1,6}}){re.escape(tail)}\.({own})", re.DOTALL
        )
        for name in near:
            hit = shape.fullmatch(name)
            if hit is None or not (hit[1] in spec.prefixes or without_model(hit[1]) in bare):
                if name.endswith(f"{tail}.{leaf}"):
                    doubtful.setdefault(
                        name,
                        f"'{hit[1]}' in front of its layer is no known prefix"
                        if hit
                        else "its name has no layer number where the family has one",
                    )
                continue
            stem = name.removesuffix(hit[3])
            key = (hit[1], int(hit[2]), f"{stem}{'' if leaf == 'weight' else leaf}")
            own_bias = {hit[1] + bias.format(layer=hit[2]) for bias in biases}
            if places.setdefault(key[:2], key[2]) != key[2] and name in own_bias:
                continue  # it stands beside the module that has the weight
            if key in spelled and spelled[key] != pattern:
                continue  # two spellings of one path: the first one counts
            spelled[key] = pattern
            claimed.add(name)
            modules.setdefault(key, []).append(name)
    # A name that one spelling turns down may be what another spelling is made for.
    taken = {name for tensors in modules.values() for name in tensors}
    skipped = [Skipped(name, why) for name, why in doubtful.items() if name not in taken]
    return [
        _Module(
            prefix, layer, tensors[0][: _stem_length(prefix, spelled[key], layer)], spelled[key],
            tuple(sorted(set(tensors))),
        )
        for key, tensors in modules.items()
        for prefix, layer in [key[:2]]
    ], skipped  # fmt: skip


def _stem_length(prefix: str, pattern: TensorName, layer: int) -> int:
    return len(prefix) + len(pattern.name.format(layer=layer)) - len(pattern.leaf)


def _match(
    module: _Module,
    spec: StackSpec,
    stack: str,
    names: Collection[str],
    family: Family,
    settings: Settings,
) -> Match:
    def spelled(patterns: Iterable[TensorName]) -> list[TensorPlace]:
        return [TensorPlace(module.prefix + p.name.format(layer=module.layer), p) for p in patterns]

    def find(patterns: tuple[TensorName, ...], what: str) -> TensorPlace | None:
        places = spelled(patterns)
        hits = [place for place in places if place.name in names]
        if places and not hits:
            raise RouterError(
                f"router {stack}/{module.layer}: tensor '{places[0].name}' is missing; "
                f"routers of family {family.name} have a {what}.",
                _LAYERS_APART if family.name == DESCRIBED else "",
                code=PART_MISSING,
            )
        return hits[0] if hits else None

    norm, inner = spec.norm, spec.projection
    logit_bias = spec.logit_bias if has_logit_bias(spec, settings) else ()
    selection_bias = spec.selection_bias if has_selection_bias(spec, settings) else ()
    part_patterns = {
        "logit_bias": (logit_bias, "logit bias"),
        "selection_bias": (selection_bias, "selection bias"),
        "gain": (norm.weight if norm else (), "norm in front"),
        "norm_bias": (norm.bias if norm else (), "norm in front, with a bias"),
        "expert_scale": (spec.weights.expert_scale, "scale of its weights"),
        "projection": (inner.weight if inner else (), "projection of their input"),
        "projection_bias": (inner.bias if inner else (), "bias of the projection"),
        "log_scale": (inner.log_scale if inner else (), "logarithm of a scale"),
    }
    parts = {name: hit for name, part in part_patterns.items() if (hit := find(*part)) is not None}
    part_names = {place.name for place in parts.values()}
    part_names |= {place.name for place in spelled(spec.beside + spec.token_table)}
    tensors = tuple(name for name in module.tensors if name not in part_names)
    if not tensors:
        raise RouterError(
            f"router {stack}/{module.layer}: there is no tensor "
            f"'{module.stem}{module.weight.leaf}', only {', '.join(sorted(part_names)[:3])}.",
            code=PART_MISSING,
        )
    return Match(stack, module.layer, spec, module.stem, module.weight, tensors, parts)


# ----------------------------------------------------------------------------------- further tokens
#: ``mtp_from`` of stacks whose layers all predict further tokens.
EVERY_LAYER = Setting(value=0)


def with_mtp_modules(family: Family) -> Family:
    """The family with a stack for the MTP modules of each stack that names some.

    Their routers belong to the stack ``mtp`` and follow the same rule. None of them is expected:
    checkpoints often leave them out.
    """
    pairs = ((stack, _mtp(stack)) if stack.mtp_layers else (stack,) for stack in family.stacks)
    return replace(family, stacks=tuple(stack for pair in pairs for stack in pair))


def _mtp(stack: StackSpec) -> StackSpec:
    def moved(patterns: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
        copies = (
            replace(pattern, name=head + pattern.name.partition("{layer}.")[2])
            for head in stack.mtp_layers
            for pattern in patterns
        )
        return tuple(dict.fromkeys(copies))

    norm, inner = stack.norm, stack.projection
    return replace(
        stack,
        weight=moved(stack.weight),
        logit_bias=moved(stack.logit_bias),
        selection_bias=moved(stack.selection_bias),
        beside=moved(stack.beside),
        token_table=moved(stack.token_table),
        norm=norm and replace(norm, weight=moved(norm.weight), bias=moved(norm.bias)),
        projection=inner
        and replace(
            inner,
            weight=moved(inner.weight),
            bias=moved(inner.bias),
            log_scale=moved(inner.log_scale),
        ),
        weights=replace(stack.weights, expert_scale=moved(stack.weights.expert_scale)),
        mtp_from=EVERY_LAYER,
        layers=LayersSpec(count=Setting(value=0)),
    )


# -------------------------------------------------------------------------------------------- plans
Values = Mapping[str, np.ndarray]

_AGAIN = "Is the config from another revision, or the tensor a slice of a sharded save?"

_ON_ITS_SIDE = (
    'It may lie on its side: describe it in a --family FILE with layout = "transposed" (or '
    "without it, where the family has it)."
)


@dataclass(frozen=True)
class Vector:
    """A tensor that holds one number for each expert or each hidden dimension."""

    info: TensorInfo
    row: int | None

    def values(self, values: Values) -> np.ndarray:
        """The vector in float."""
        tensor = upcast(values[self.info.name])
        return tensor[self.row] if self.row is not None else tensor.reshape(-1)


@dataclass(frozen=True)
class _Size:
    """How many numbers a vector holds, what it is called, the sizes that its largest can have, and
    whether one may stand for all.
    """

    of: Literal["experts", "hidden", "width", "one"]
    what: str
    range: Range
    may_be_one: bool = False


#: Parts of a router that are vectors, by name.
VECTORS = {
    "logit_bias": _Size("experts", "logit bias", BIAS),
    "selection_bias": _Size("experts", "selection bias", BIAS),
    "gain": _Size("hidden", "gain of the norm in front", SIZE),
    "norm_bias": _Size("hidden", "bias of the norm in front", BIAS),
    "expert_scale": _Size("experts", "scale of its weights", SIZE, may_be_one=True),
    "projection_bias": _Size("width", "bias of the projection", BIAS),
    "log_scale": _Size("one", "logarithm of a scale", LOGARITHM, may_be_one=True),
}


@dataclass(frozen=True)
class RouterPlan:
    """One router before its values: tensors, rule and norm agree with each other.

    ``num_experts`` counts the rows that compete, ``num_shared`` those behind them that do not;
    ``width`` is the number of columns of the stored weight. ``projection`` takes the hidden size to
    it; ``vectors`` are the other parts, by name.
    """

    match: Match
    rule: Rule
    stored: Stored
    num_experts: int
    num_shared: int
    width: int
    vectors: Mapping[str, Vector]
    norm: Norm | None
    projection: TensorInfo | None

    def tensors(self) -> Iterator[TensorInfo]:
        """Every tensor to read, the weight first."""
        yield from self.stored.tensors
        if self.projection is not None:
            yield self.projection
        yield from (vector.info for vector in self.vectors.values())

    def weight(self, values: Values) -> np.ndarray:
        """The weight with one row per expert, shared ones last."""
        stem = self.match.stem
        named = {i.name.removeprefix(stem): values[i.name] for i in self.stored.tensors}
        matrix = self.stored.decode(named)
        return _LAYOUTS[self.match.weight.layout].rows(matrix, self.width)


@dataclass(frozen=True)
class _Layout:
    """How many rows and columns a stored shape has, and the way to them; ``text`` is the shape."""

    text: str
    shape: Callable[[tuple[int, ...], int], tuple[int, int] | None]
    rows: Callable[[np.ndarray, int], np.ndarray]


def _flat_shape(shape: tuple[int, ...], rows: int) -> tuple[int, int] | None:
    fits = len(shape) == 1 and rows > 0 and shape[0] % rows == 0
    return (rows, shape[0] // rows) if fits else None


_LAYOUTS: dict[str, _Layout] = {
    "rows": _Layout(
        "(experts, hidden)",
        lambda shape, _: (shape[0], shape[1]) if len(shape) == 2 else None,
        lambda values, _: values,
    ),
    "transposed": _Layout(
        "(hidden, experts)",
        lambda shape, _: (shape[1], shape[0]) if len(shape) == 2 else None,
        lambda values, _: np.ascontiguousarray(values.T),
    ),
    "flat": _Layout(
        "(experts * hidden,)", _flat_shape, lambda values, hidden: values.reshape(-1, hidden)
    ),
}


def plan_router(match: Match, store: TensorStore, settings: Settings) -> RouterPlan:
    """The plan of one router; reads headers, no tensor.

    Raises
    ------
    RouterError
        If shapes, dtypes and config contradict each other.
    """
    router = f"router {match.name}"
    infos = {name.removeprefix(match.stem): store.info(name) for name in match.tensors}
    stored = find_storage(
        infos, settings, router, match.leaf, lambda leaf: store.read(infos[leaf].name)
    )
    settings = settings.under(match.spec.config_roots).at(match.layer)
    num_shared = settings.integer(match.spec.num_shared)
    rows, width = _rows_and_width(stored, match, settings, num_shared)
    num_experts = rows - num_shared
    projection = _projection(store, match, settings, rows, width)
    hidden = projection.shape[1] if projection else width
    sizes = {"experts": num_experts, "hidden": hidden, "width": width, "one": 1}
    vectors = {
        part: _vector(store, match.parts[part], sizes[size.of], size)
        for part, size in VECTORS.items()
        if part in match.parts
    }
    named = {part: vector.info.name for part, vector in vectors.items()}
    norm, gain, norm_bias = match.spec.norm, named.get("gain"), named.get("norm_bias", "")
    return RouterPlan(
        match=match,
        rule=build_rule(match.spec, settings, num_experts, router),
        stored=stored,
        num_experts=num_experts,
        num_shared=num_shared,
        width=width,
        vectors=vectors,
        norm=build_norm(norm, settings, hidden, gain, norm_bias) if norm and gain else None,
        projection=projection,
    )


def _projection(
    store: TensorStore, match: Match, settings: Settings, rows: int, width: int
) -> TensorInfo | None:
    """The projection in front of a router, which takes the hidden size to the weight's columns."""
    if "projection" not in match.parts:
        return None
    info = store.info(match.parts["projection"].name)
    check_plain(info, "projection of the router input")
    shape = f"tensor '{info.name}' (projection of the router input) has shape {info.shape}"
    if len(info.shape) != 2 or info.shape[0] != width or 0 in info.shape:
        raise RouterError(
            f"{info.file}: {shape}; its router compares {width} projected dimensions, expected "
            f"({width}, hidden).",
            "Is one of the two a slice of a sharded save?",
            code=CONFIG_CONTRADICTED,
        )
    hidden = info.shape[1]
    if max(rows * hidden, rows * width, width * hidden) > ROUTER_COMPOSED_VALUES:
        raise RouterError(f"{info.file}: {shape}, too large for a router of {rows} experts.")
    _check_hidden(shape, info, match, settings, hidden)
    return info


def _rows_and_width(
    stored: Stored, match: Match, settings: Settings, num_shared: int
) -> tuple[int, int]:
    """Rows (shared experts included) and columns of a weight; config and shape agree."""
    info, spec = stored.tensors[0], match.spec
    layout = _LAYOUTS[match.weight.layout]
    has_count = settings.has(spec.num_experts)
    claimed = settings.integer(spec.num_experts) if has_count else 0
    sides = layout.shape(stored.shape, claimed + num_shared)
    shape = f"tensor '{info.name}' has shape {stored.shape}"
    if sides is None or 0 in sides:
        raise RouterError(
            f"{info.file}: {shape}, expected {layout.text}.", code=CONFIG_CONTRADICTED
        )
    rows, hidden = sides
    if has_count and claimed + num_shared != rows:
        shared = f" and {num_shared} that always run" if num_shared else ""
        raise RouterError(
            f"{info.file}: {shape}; config.json says {number_of(claimed, 'expert')}{shared}.",
            _ON_ITS_SIDE if hidden == claimed + num_shared else _AGAIN,
            code=CONFIG_CONTRADICTED,
        )
    if rows <= num_shared:
        raise RouterError(f"{info.file}: {shape}, {num_shared} of whose rows do not compete.")
    if spec.projection is None:
        _check_hidden(shape, info, match, settings, hidden)
    return rows, hidden


def _check_hidden(
    shape: str, info: TensorInfo, match: Match, settings: Settings, hidden: int
) -> None:
    """Raises RouterError where the config gives another hidden size."""
    claimed = match.spec.hidden_size
    if settings.has(claimed) and settings.integer(claimed) != hidden:
        raise RouterError(
            f"{info.file}: {shape}; config.json says hidden size {settings.integer(claimed)}.",
            _AGAIN,
            code=CONFIG_CONTRADICTED,
        )


def _vector(store: TensorStore, place: TensorPlace, length: int, size: _Size) -> Vector:
    """A plain float tensor of the given length, or a row of a matrix of such rows."""
    info, row = store.info(place.name), place.spec.row
    check_plain(info, size.what)
    shapes: list[Any] = [(length,), (1, length)]
    needed = f"({length},)"
    if row is not None:
        # the row of a vector would be one number
        shapes = [(max(info.shape[0], row + 1), length)] if info.shape else []
        needed = f"({row + 1} or more rows, {length})"
    if size.may_be_one:
        shapes += [(), (1,)]
    if info.shape not in shapes:
        raise RouterError(
            f"{info.file}: tensor '{place.name}' ({size.what}) has shape {info.shape}; "
            f"its router needs {needed}.",
            "Is one of the two a slice of a sharded save?",
            code=CONFIG_CONTRADICTED,
        )
    return Vector(info, row)
