"""What stands in the blocks behind routers: experts by number, shared experts and their gate.

Names and what open headers say, and no further byte. What a block should hold is said by its
router (one expert a row), by its family (copies, lots, a gate of shared experts), by the config
(shared experts), and by the other blocks of the stack.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from moegeom.checkpoint.dtypes import PLAIN_FLOATS
from moegeom.checkpoint.reading import no_collection
from moegeom.checkpoint.store import TensorStore
from moegeom.core.router import format_layers
from moegeom.router.expert_names import (
    EXPERT_DIGITS,
    LAYER,
    LEAVES,
    SHARED,
    SHARED_GATE,
    SPELLINGS,
    layer_names,
    parted,
)
from moegeom.router.family import Setting, StackSpec
from moegeom.router.settings import Settings

#: Share of the blocks of a stack, or of the experts of a block, that have what all should have.
_SHARE = 2 / 3

#: Fewer blocks say nothing of each other.
_FEWEST = 3

#: What belongs to a block wherever it stands in the layer.
_MEMBER = re.compile(rf"(?:^|[._])experts?(?:[._]|$)|_exps\b|{SHARED.pattern}")

#: Keys of a config that say whether there are shared experts: how many, or how wide.
_SHARED_KEYS = Setting(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts",
                        "shared_expert_intermediate_size"))  # fmt: skip

#: Leaves of a matrix that is stored as it is.
_PLAIN = ({"weight"}, {"weight", "bias"}, {""}, {"", "_bias"})


@dataclass(frozen=True)
class RouterPlace:
    """A router whose block is looked at: its rows, the path of its module (the name of its weight
    where that has none of its own), and the tensors that it is made of.
    """

    name: str
    num_rows: int
    spec: StackSpec
    path: str
    tensors: frozenset[str]
    layer: int


@dataclass(frozen=True)
class Flaw:
    """Something of the blocks behind ``routers`` that is not as it should be.

    ``kind``: ``missing`` or ``surplus`` experts, ``none`` of them, a module or tensor that is
    ``lost``, one that is ``alone`` in a few blocks, shapes that ``differ``. ``experts`` are numbers
    as ``0-3,7`` (empty: not of single experts), ``num_experts`` how many there should be.
    """

    kind: str
    routers: tuple[str, ...]
    module: str = ""
    experts: str = ""
    count: int = 0
    num_experts: int = 0


@dataclass(frozen=True)
class Blocks:
    """The blocks of a checkpoint: what they hold, by routers that hold the same, and flaws.

    ``parts`` by module: numbers of its experts, or "" where it is one for the block. ``gates`` are
    names of the gates of shared experts, by router.
    """

    parts: tuple[tuple[tuple[str, ...], Mapping[str, str]], ...]
    flaws: tuple[Flaw, ...]
    gates: Mapping[str, str]

    @property
    def has_experts(self) -> bool:
        """Whether any block has experts: a file of routers has none."""
        return any(map(is_of_experts, (m for _, modules in self.parts for m in modules)))

    def facts(self) -> dict[str, Any]:
        """For ``run.json``."""
        return {
            "has_experts": self.has_experts,
            "parts": [{"routers": list(r), "modules": dict(m)} for r, m in self.parts],
            "flaws": [asdict(flaw) for flaw in self.flaws],
        }


@dataclass(eq=False)
class _Block:
    """Tensors of one block: by module and leaf, by number of the expert (-1: of all).

    ``lots`` are the experts of each router that have tensors; ``num_rows`` those that may have.
    """

    routers: tuple[RouterPlace, ...]
    lots: tuple[range, ...]
    num_rows: int
    names: dict[str, dict[str, dict[int, str]]] = field(default_factory=dict)

    @property
    def stack(self) -> str:
        return self.routers[0].name.split("/")[0]

    @cached_property
    def experts(self) -> frozenset[int]:
        """Numbers of the experts that have tensors."""
        return frozenset(number for lot in self.lots for number in lot)

    @property
    def of(self) -> tuple[str, ...]:
        return tuple(router.name for router in self.routers)

    def numbers(self, module: str) -> frozenset[int]:
        """Experts that have a tensor of the module."""
        return frozenset(n for by_expert in self.names[module].values() for n in by_expert)

    def of_experts(self) -> list[str]:
        """Modules of routed experts: beside numbered ones a dense layer may have their names."""
        modules = [module for module in self.names if is_of_experts(module)]
        is_numbered = any("{}" in module for module in modules)
        return [m for m in modules if not is_numbered or "expert" in m]


def is_of_experts(module: str) -> bool:
    """Whether a module holds routed experts, by its name."""
    leaf = module.rpartition(".")[2]
    return not SHARED.search(module) and ("{}" in module or leaf in LEAVES)


@no_collection()
def blocks_of(store: TensorStore, routers: Sequence[RouterPlace], settings: Settings) -> Blocks:
    """The blocks behind routers; ``store`` has plain names."""
    blocks = _blocks(store, routers, settings)
    parts: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for block in blocks:
        modules = ((m, _ranges(block.numbers(m))) for m in sorted(block.names))
        parts.setdefault(tuple(modules), []).extend(block.of)
    flaws: dict[Flaw, list[str]] = {}
    if any(block.of_experts() for block in blocks):
        for stack in dict.fromkeys(block.stack for block in blocks):
            alike = [block for block in blocks if block.stack == stack]
            for block, flaw in _flaws(store, alike, settings):
                flaws.setdefault(flaw, []).extend(block.of)
    gates = {
        router: leaves["weight"][-1]
        for block in blocks
        for module, leaves in block.names.items()
        for router in block.of
        if SHARED_GATE.fullmatch(module) and -1 in leaves.get("weight", {})
    }
    return Blocks(
        tuple((tuple(of), dict(modules)) for modules, of in parts.items()),
        tuple(
            Flaw(**{**vars(flaw), "routers": tuple(dict.fromkeys(of))})
            for flaw, of in flaws.items()
        ),
        gates,
    )


def _ranges(numbers: Iterable[int]) -> str:
    return format_layers({number for number in numbers if number >= 0})


# ---------------------------------------------------------------------------------- what there is
def _blocks(store: TensorStore, routers: Sequence[RouterPlace], settings: Settings) -> list[_Block]:
    by_start: dict[str, list[RouterPlace]] = {}
    for router in routers:
        layer = LAYER.match(router.path)
        if layer:
            by_start.setdefault(layer[0], []).append(router)
    blocks = {start: _block(of, settings) for start, of in by_start.items()}
    folders = {
        start: tuple(filter(None, (_folder(start, one) for one in of)))
        for start, of in by_start.items()
    }
    own = {start: tuple(f"{one.path}." for one in of) for start, of in by_start.items()}
    beside = {name for router in routers for name in router.tensors}

    for start, layer in layer_names(store.names()).items() if blocks else ():
        for alike, by_expert in layer.items() if start in blocks else ():
            relative = alike[len(start) :]
            is_inside = alike.startswith(folders[start]) or _MEMBER.search(relative)
            if is_inside and not alike.startswith(own[start]):
                module, part = parted(relative)
                there = {n: name for n, name in by_expert.items() if name not in beside}
                leaves = blocks[start].names.setdefault(module, {}) if there else {}
                leaves.setdefault(part, {}).update(there)
    return list(blocks.values())


def _block(routers: Sequence[RouterPlace], settings: Settings) -> _Block:
    """The block of the routers of a layer: experts that copy their input need no tensors."""
    lots: list[range] = []
    for router in routers:
        spec, own = router.spec.experts, settings.under(router.spec.config_roots).at(router.layer)
        num = router.num_rows - (own.integer(spec.copies) if own.has(spec.copies) else 0)
        # of a layer without rows the config says how many
        num = min(max(num, 0), 10**EXPERT_DIGITS)
        lots.append(range(spec.lot * num, (spec.lot + 1) * num))
    last = max(lot.stop + r.num_rows - len(lot) for lot, r in zip(lots, routers, strict=True))
    return _Block(tuple(routers), tuple(lots), last)


#: What routers and modules around them are called.
_ROUTER = re.compile(r"(?:^|[._])(?:router|gate|wg)")


def _folder(start: str, router: RouterPlace) -> str:
    """Where the block stands: what holds the router, unless that is the layer or its attention."""
    path = router.path[len(start) :]
    own = _ROUTER.search(path)
    folder = path[: own.start()] if own else path.rpartition(".")[0]
    return f"{start}{folder}." if folder and "attention" not in folder else ""


# ----------------------------------------------------------------------------- what there should be
def _flaws(
    store: TensorStore, blocks: Sequence[_Block], settings: Settings
) -> Iterator[tuple[_Block, Flaw]]:
    whole = [block for block in blocks if block.of_experts()]
    for block in blocks if whole or blocks[0].stack == "mtp" else ():
        if block not in whole:
            yield block, Flaw("none", (), num_experts=len(block.experts))
    count = Counter(module for block in whole for module in block.names)
    leaves = _usual_leaves(whole)
    for block in whole:
        flaws = list(_of_experts(store, block))
        flaws += _of_shared(block, settings)
        lost = {flaw.module for flaw in flaws}
        if len(whole) >= _FEWEST:
            for module, number in count.items():
                if module not in block.names and number >= _SHARE * len(whole):
                    flaws += [Flaw("lost", (), module)] * (module not in lost)
                elif module in block.names and number <= (1 - _SHARE) * len(whole):
                    flaws.append(Flaw("alone", (), module))
        for module in block.names.keys() & leaves.keys():
            flaws += _of_leaves(store, block, module, leaves[module])
        yield from ((block, flaw) for flaw in dict.fromkeys(flaws))


def _of_experts(store: TensorStore, block: _Block) -> Iterator[Flaw]:
    """Experts by number and by the first axis of what holds all, and matrices without another."""
    modules, num = block.of_experts(), len(block.experts)
    numbered = [module for module in modules if "{}" in module]
    numbers = frozenset[int]().union(*map(block.numbers, numbered))
    if numbered:
        surplus = {number for number in numbers if number >= block.num_rows}
        for kind, those in (("missing", block.experts - numbers), ("surplus", surplus)):
            if those:
                yield Flaw(kind, (), "", _ranges(those), len(those), num)
    for module in modules:
        if "{}" in module:
            lack = (numbers & block.experts) - block.numbers(module)
            if lack and len(lack) < (1 - _SHARE) * len(numbers):
                yield Flaw("lost", (), module, _ranges(lack), len(lack), num)
        for by_expert in block.names[module].values():
            yield from _of_whole(store, block, module, by_expert)
            for lot in block.lots:
                yield from _of_each(store, module, {n: by_expert[n] for n in lot if n in by_expert})
    by_folder: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        folder, _, leaf = module.rpartition(".")
        if any(not key.endswith("bias") for key in block.names[module]):
            by_folder[folder].add(leaf)
    for folder, there in by_folder.items():
        spelled = [{*first, last} for first, last in SPELLINGS]
        if there & set(LEAVES) and not any(each <= there for each in spelled):
            near = min(spelled, key=lambda each: (len(each - there), len(each)))
            for leaf in sorted(near - there):
                yield Flaw("lost", (), f"{folder}.{leaf}".removeprefix("."))


def _of_whole(
    store: TensorStore, block: _Block, module: str, by_expert: Mapping[int, str]
) -> Iterator[Flaw]:
    """The first axis of a tensor of all experts, or its rows, one below the other."""
    if -1 not in by_expert or not store.is_open(by_expert[-1]):
        return
    shape, num = store.info(by_expert[-1]).shape, len(block.experts)
    sizes = {num, block.num_rows, *map(len, block.lots), *(r.num_rows for r in block.routers)}
    is_flat = len(shape) == 2 and any(shape[0] % size == 0 for size in sizes)
    if len(shape) > 1 and shape[0] not in sizes and not is_flat:
        yield Flaw("missing" if shape[0] < num else "surplus", (), module, "",
                   abs(shape[0] - num), num)  # fmt: skip


def _of_each(store: TensorStore, module: str, by_expert: Mapping[int, str]) -> Iterator[Flaw]:
    """Experts of another shape than most."""
    if store.are_alike(by_expert.values()):
        return
    shapes = {n: store.info(name).shape for n, name in by_expert.items() if store.is_open(name)}
    if len(set(shapes.values())) > 1:
        usual = Counter(shapes.values()).most_common(1)[0][0]
        odd = [number for number, shape in shapes.items() if shape != usual]
        yield Flaw("differ", (), module, _ranges(odd), len(odd), len(by_expert))


def _of_shared(block: _Block, settings: Settings) -> Iterator[Flaw]:
    """Shared experts that the config promises, and the gate that the family has beside them."""
    router = block.routers[0]
    own = settings.under(router.spec.config_roots).at(router.layer)
    shared = [module for module in block.names if SHARED.search(module)]
    has_weights = any(not SHARED_GATE.fullmatch(module) for module in shared)
    number = own.get(_SHARED_KEYS)[1] if own.has(_SHARED_KEYS) else 0
    if type(number) is int and number > 0 and not has_weights:
        yield Flaw("lost", (), "shared experts")
    is_gated = any(SHARED_GATE.fullmatch(module) for module in shared)
    if has_weights and router.spec.experts.has_shared_gate and not is_gated:
        yield Flaw("lost", (), "shared_expert_gate")


def _usual_leaves(blocks: Sequence[_Block]) -> dict[str, frozenset[str]]:
    """By module, the tensors that most experts of most blocks have of it."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for block in blocks:
        for module, leaves in block.names.items():
            counts[module].update({leaf: len(each) for leaf, each in leaves.items()})
    return {
        module: frozenset(leaf for leaf, n in count.items() if n >= _SHARE * max(count.values()))
        for module, count in counts.items()
    }


def _of_leaves(
    store: TensorStore, block: _Block, module: str, usual: frozenset[str]
) -> Iterator[Flaw]:
    """Tensors of a module that some of its experts, or this block, lack: what is stored plain
    needs no scales.
    """
    leaves = block.names[module]
    for leaf in sorted(usual):
        lack = block.numbers(module) - leaves.get(leaf, {}).keys()
        packed = [
            n for n in lack if not _is_plain(store, {k: v[n] for k, v in leaves.items() if n in v})
        ]
        if packed:
            numbers = _ranges(packed)
            yield Flaw("lost", (), f"{module}.{leaf}" if leaf[:1] != "_" else module + leaf,
                       numbers, len(packed) if numbers else 0, len(block.experts))  # fmt: skip


def _is_plain(store: TensorStore, names: Mapping[str, str]) -> bool:
    """Whether a module is a matrix of plain floats, as far as headers that are open tell."""
    if set(names) not in _PLAIN:
        return False
    return all(not store.is_open(n) or store.info(n).dtype in PLAIN_FLOATS for n in names.values())
