"""What stands in the blocks behind routers: experts by number, shared experts and their gate.

Names and what open headers say, and no further byte. What a block should hold is said by its
router (one expert a row), by its family (copies, lots, a gate of shared experts), by the config
(shared experts), and by the other blocks of the stack.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

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

#: What is said where a layer lacks all its shared experts.
_ALL_SHARED = "shared experts"

#: Spellings of experts without a gate.
_UNGATED = (("up_proj", "down_proj"), ("ffn_up_exps", "ffn_down_exps"), ("fc1", "fc2"))

#: Tensors of which a matrix is made, however few have them.
_OF_STORAGE = re.compile("weight|scale|zero|block|packed|absmax|g_idx")

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

    def parts(self, module: str) -> dict[frozenset[str], list[int]]:
        """Experts by the tensors that they have of the module."""
        leaves = self.names[module]
        first = next(iter(leaves.values()), {}).keys()
        if all(by_expert.keys() == first for by_expert in leaves.values()):
            return {frozenset(leaves): [*first]}
        experts: dict[frozenset[str], list[int]] = defaultdict(list)
        for number in sorted(self.numbers(module)):
            experts[frozenset(leaf for leaf, of in leaves.items() if number in of)].append(number)
        return experts

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
    of_most, of_few = set[str](), set[str]()
    if len(whole) >= _FEWEST:
        of_most = {module for module, n in count.items() if n >= _SHARE * len(whole)}
        of_few = {module for module, n in count.items() if n <= (1 - _SHARE) * len(whole)}
    leaves: dict[_Folder, set[frozenset[str]]] = defaultdict(set)
    parts: dict[str, Counter[frozenset[str]]] = defaultdict(Counter)
    for block in whole:
        for folder, there in _matrices(block).items():
            leaves[folder].add(there)
        for module in block.names:
            for part, numbers in block.parts(module).items():
                parts[module][part] += len(numbers)
    for block in whole:
        flaws = [*_of_experts(store, block), *_of_shared(block, settings, count, of_most)]
        for folder, there in _matrices(block).items():
            flaws += _of_matrices(store, block, folder, there, leaves[folder])
        lost = {flaw.module for flaw in flaws if not flaw.experts}
        for module in count:
            if module in of_most and module not in block.names:
                is_one = _ALL_SHARED in lost and _is_shared(module)
                flaws += [Flaw("lost", (), module)] * (module not in lost and not is_one)
            elif module in of_few and module in block.names:
                flaws.append(Flaw("alone", (), module))
        for module in block.names:
            flaws += _of_parts(store, block, module, parts[module])
        yield from ((block, flaw) for flaw in dict.fromkeys(flaws))


def _of_experts(store: TensorStore, block: _Block) -> Iterator[Flaw]:
    """Experts by number and by the first axis of what holds all, and matrices that some lack."""
    modules, num = block.of_experts(), len(block.experts)
    numbered = {m: n for m in modules if (n := block.numbers(m) - {-1})}
    numbers = frozenset[int]().union(*numbered.values())
    if numbered:
        surplus = {number for number in numbers if number >= block.num_rows}
        for kind, those in (("missing", block.experts - numbers), ("surplus", surplus)):
            if those:
                yield Flaw(kind, (), "", _ranges(those), len(those), num)
    for module in modules:
        if module in numbered:
            lack = (numbers & block.experts) - numbered[module]
            # what is no matrix and stands beside a few experts got in there
            is_due = module.rpartition(".")[2] in LEAVES or 2 * len(lack) <= len(numbers)
            if lack and is_due:
                yield Flaw("lost", (), module, _ranges(lack), len(lack), num)
        for by_expert in block.names[module].values():
            yield from _of_whole(store, block, module, by_expert)
            for lot in block.lots:
                yield from _of_each(store, module, {n: by_expert[n] for n in lot if n in by_expert})


class _Folder(NamedTuple):
    """Where matrices of one kind of expert stand: in GGUF shared ones have the same folder."""

    front: str
    is_shexp: bool

    def module(self, leaf: str) -> str:
        return self.front + (leaf.replace("_exps", "_shexp") if self.is_shexp else leaf)


def _matrices(block: _Block) -> dict[_Folder, frozenset[str]]:
    """Leaves of the matrices of routed and of shared experts, as ``SPELLINGS`` has them; without
    shared experts that are spelled in a way of their own.
    """
    by_folder: dict[_Folder, set[str]] = defaultdict(set)
    for module in (*block.of_experts(), *filter(_is_shared, block.names)):
        front, dot, leaf = module.rpartition(".")
        if not all(map(_is_bias, block.names[module])) and "norm" not in leaf:
            folder = _Folder(front + dot, leaf.endswith("_shexp"))
            by_folder[folder].add(leaf.replace("_shexp", "_exps"))
    return {
        folder: frozenset(leaves)
        for folder, leaves in by_folder.items()
        if leaves <= set(LEAVES) or not any(_is_shared(folder.module(leaf)) for leaf in leaves)
    }


def _of_matrices(
    store: TensorStore,
    block: _Block,
    folder: _Folder,
    there: frozenset[str],
    of_layers: Iterable[frozenset[str]],
) -> Iterator[Flaw]:
    """Matrices that another layer has beside those that are there, or every spelling that the
    family may have; and biases that the family gives to each.
    """
    spec, due = block.routers[0].spec.experts, there & set(LEAVES)
    for other in of_layers:
        due |= other & set(LEAVES) if there < other else set()
    spelled = [(*first, last) for first, last in SPELLINGS]
    if not spec.may_lack_gate and _lacks_gate(store, block, folder, there):
        spelled = [each for each in spelled if each not in _UNGATED]
    if due and not any(map(due.issuperset, spelled)):
        # experts of their own have a tensor for each matrix
        is_apart = "{}" in folder.front or _is_shared(folder.module(min(there)))
        is_apart |= any(leaf.endswith("_exps") for leaf in there)
        sign = -1 if is_apart and not spec.may_lack_gate else 1
        due = due.union(min(spelled, key=lambda e: (not due.issubset(e), sign * len(e))))
    for leaf in sorted(due - there):
        yield Flaw("lost", (), folder.module(leaf))
    for leaf in sorted(there & due) if spec.has_biases else ():
        module = folder.module(leaf)
        if not any(map(_is_bias, block.names[module])):
            is_joined = "" in block.names[module] or any(k[:1] == "_" for k in block.names[module])
            yield Flaw("lost", (), f"{module}{'_' if is_joined else '.'}bias")


def _lacks_gate(store: TensorStore, block: _Block, folder: _Folder, there: frozenset[str]) -> bool:
    """Whether a single first matrix has no more numbers than the last: it is not gate and up."""
    first, last = next((pair for pair in _UNGATED if there.issuperset(pair)), ("", ""))
    sizes = []
    for leaf in filter(None, (first, last)):
        leaves = block.names[folder.module(leaf)]
        names = [
            next(iter(of.values())) for part, of in leaves.items() if not _is_bias(part) and of
        ]
        if not all(map(store.is_open, names)):
            return first != "fc1"  # which many formats write for both
        sizes.append(max(math.prod(store.info(name).shape[-2:]) for name in names))
    return bool(sizes) and sizes[0] <= sizes[1]


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


def _of_shared(
    block: _Block, settings: Settings, modules: Iterable[str], of_most: Iterable[str]
) -> Iterator[Flaw]:
    """Shared experts that the config promises, or most layers have, and the gate that the family
    has beside them, by the name in ``modules`` of all layers.
    """
    router = block.routers[0]
    own = settings.under(router.spec.config_roots).at(router.layer)
    has_weights = any(map(_is_shared, block.names))
    number = own.get(_SHARED_KEYS)[1] if own.has(_SHARED_KEYS) else 0
    is_due = (type(number) is int and number > 0) or any(map(_is_shared, of_most))
    if is_due and not has_weights:
        yield Flaw("lost", (), _ALL_SHARED)
    is_gated = any(map(SHARED_GATE.fullmatch, block.names))
    if has_weights and router.spec.experts.has_shared_gate and not is_gated:
        name = next(filter(SHARED_GATE.fullmatch, modules), "shared_expert_gate")
        yield Flaw("lost", (), name)


def _of_parts(
    store: TensorStore, block: _Block, module: str, of_others: Mapping[frozenset[str], int]
) -> Iterator[Flaw]:
    """Tensors of a module that some of its experts, or this block, lack: those that most have, and
    those that another has beside the same ones. What is stored plain needs no scales.
    """
    count = Counter[str]()
    for parts, number in of_others.items():
        count.update(dict.fromkeys(parts, number))
    usual = {part for part, number in count.items() if number >= _SHARE * max(count.values())}
    lost: dict[str, list[int]] = defaultdict(list)
    for own, numbers in block.parts(module).items():
        due = usual.union(*(parts for parts in of_others if own < parts)) - own
        for number in numbers if due else ():
            names = {part: block.names[module][part][number] for part in own}
            is_plain = _is_plain(store, names)
            for part in due:
                is_stored = part in usual or _OF_STORAGE.search(part) or part == ""
                if _is_bias(part) or (is_stored and not is_plain):
                    lost[part].append(number)
    for part in sorted(lost):
        name = module + part if part[:1] in ("_", "") else f"{module}.{part}"
        if ranges := _ranges(lost[part]):
            yield Flaw("lost", (), name, ranges, len(lost[part]), len(block.experts))
        else:
            yield Flaw("lost", (), name)


def _is_shared(module: str) -> bool:
    """Whether a module belongs to shared experts themselves."""
    return bool(SHARED.search(module)) and not SHARED_GATE.fullmatch(module)


def _is_bias(part: str) -> bool:
    return part.removesuffix("{}").endswith("bias")


def _is_plain(store: TensorStore, names: Mapping[str, str]) -> bool:
    """Whether a module is a matrix of plain floats, as far as headers that are open tell."""
    if set(names) not in _PLAIN:
        return False
    return all(not store.is_open(n) or store.info(n).dtype in PLAIN_FLOATS for n in names.values())
