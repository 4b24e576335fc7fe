"""What became of the experts beside a router, by samples of every tensor of them.

Where a gain of the norm in front changed, the first matrices of the experts may have changed
inversely: then they are the same function, and no other weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, as_array, numpy_dtype, upcast
from moegeom.checkpoint.store import TensorStore
from moegeom.core.digest import digest_of
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.router import Router, mantissa_bits
from moegeom.core.shapes import Float
from moegeom.core.text import all_of, number_of
from moegeom.geometry.number_formats import CASTS
from moegeom.router.expert_names import SHARED, LayerNames, layer_names
from moegeom.router.expert_tensors import ExpertTensors, experts_spec, layer_of
from moegeom.router.expert_values import SAMPLE_BYTES, SOME_BYTES, ExpertValues, values_of
from moegeom.router.plain_names import with_plain_names
from moegeom.studies.changes.operators.matrices import FOLDED, NOT_IN_EXPERTS
from moegeom.studies.changes.operators.rows import LEFT_BEHIND, MOVED_ALONE
from moegeom.studies.changes.record import Change, ExpertsChange, RouterChange
from moegeom.studies.faults.scope import listed

#: Tensors of experts that are sampled where not all are asked for, evenly over the routers.
SOME_TENSORS = 512

#: Samples that are held in memory while those of one expert are looked at.
_MOST_HELD = 64

#: Names of scales that calibration writes: no weights.
_CALIBRATED = ("input_scale", "input_global_scale", "act_scale")

#: Casts to the coarser of two dtypes, by its mantissa bits.
_COARSER = {7: CASTS["bf16"], 10: CASTS["fp16"]}

#: Two roundings to bfloat16; gains that differ by less tell nothing.
_ROUNDING, _OTHER_GAIN = 2.0**-7, 2.0**-5


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor of every expert: spans (name, first byte, bytes) by expert, and how it is stored.

    ``columns`` are those of its rows where it reads what the router reads, negative where a row
    holds one input of all neurons; else 0.
    """

    dtype: str
    storage: tuple[str, ...]
    columns: int
    spans: Sequence[tuple[str, int, int]]


def _tensors(experts: ExpertTensors) -> Iterator[tuple[str, _Tensor]]:
    """The stored tensors by name; halves of a fused matrix by themselves where they lie so."""
    is_fused = experts.is_gated and len(experts.first) == 1
    names = ("gate", "up") if len(experts.first) == 2 else ("gate and up" if is_fused else "up",)
    first = zip(names, experts.first, strict=True)
    biases = zip((*names, "down"), (*experts.first_biases, experts.last_bias), strict=True)
    every = [*first, ("down", experts.last), *((f"{n} bias", t) for n, t in biases if t)]
    for name, tensor in every:
        for key, of_first in (tensor.stacked if tensor.names is None else tensor.names[0]).items():
            info, numbers = experts.store.info(of_first), range(experts.num_experts)
            if tensor.names is None:
                each = info.size_bytes // tensor.num_stacked
                spans = [(of_first, expert * each, each) for expert in numbers]
            else:
                named = [tensor.names[expert].get(key, "") for expert in numbers]
                if not all(named):
                    continue
                spans = [(one, 0, experts.store.info(one).size_bytes) for one in named]
            if key.endswith(_CALIBRATED):
                continue
            is_plain = info.dtype in PLAIN_FLOATS
            is_matrix = info.name == tensor.stored.tensors[0].name
            shape = tensor.stored.shape
            side = -1 if tensor.is_transposed else 1
            columns = side * shape[-1] if is_matrix and is_plain and name in names else 0
            of = _Tensor(info.dtype, (tensor.stored.scheme, info.dtype), columns, spans)
            can_part = is_fused and is_plain and not tensor.is_transposed
            if not name.startswith("gate and up") or experts.is_interleaved or not can_part:
                yield name if is_matrix else f"{name} {key}", of
                continue
            for half, part in enumerate(("gate", "up")):
                halves = [(one, at + half * (n // 2), n // 2) for one, at, n in spans]
                yield name.replace("gate and up", part), dataclasses.replace(of, spans=halves)


class ExpertPair:
    """Samples of the experts beside a router on both sides, read where they are asked for.

    ``names`` are the tensors that can be held against each other; where there are none, ``reason``
    says why.
    """

    def __init__(self, a: ExpertValues, b: ExpertValues) -> None:
        self.values: tuple[ExpertValues, ExpertValues] = (a, b)
        both = [dict(_tensors(one.tensors)) for one in self.values]
        common = [name for name in both[0] if name in both[1]]
        self._pairs = {
            n: (both[0][n], both[1][n]) for n in common if _is_alike(both[0][n], both[1][n])
        }
        self._last: dict[tuple[str, int, int, int], np.ndarray] = {}
        self._digests: dict[tuple[int, int, int], tuple[str, ...]] = {}
        self.names: tuple[str, ...] = (*self._pairs,)
        self.reason: str = ""
        if not self.names:
            kinds = [", ".join(sorted({t.dtype.lower() for t in one.values()})) for one in both]
            self.reason = f"stored as {kinds[0]} in A, as {kinds[1]} in B"
            if kinds[0] == kinds[1]:
                self.reason = f"laid out as {listing(both[0])} in A, as {listing(both[1])} in B"

    def raw(self, name: str, side: int, expert: int, size: int) -> np.ndarray:
        """The beginning of a tensor, as many numbers (or bytes) as both sides have of ``size``."""
        if (key := (name, side, expert, size)) not in self._last:
            if len(self._last) > _MOST_HELD:
                self._last.clear()
            self._last[key] = self._read(*key)
        return self._last[key]

    def _read(self, name: str, side: int, expert: int, size: int) -> np.ndarray:
        pair = self._pairs[name]
        tensor = pair[side]
        at, first, _ = tensor.spans[expert]
        least = min(one.spans[0][2] // _width(one) for one in pair)
        count = min(least, size // max(map(_width, pair)))
        store = self.values[side].tensors.store
        read = store.read_bytes(at, first, count * _width(tensor))
        if tensor.dtype not in PLAIN_FLOATS:
            return np.frombuffer(bytes(read), np.uint8)
        return upcast(as_array(bytes(read), numpy_dtype(tensor.dtype, at), (count,), at))

    def digests(self, side: int, expert: int, size: int) -> tuple[str, ...]:
        """Of each tensor by ``names``; of plain floats those of numbers in the coarser dtype."""
        if (key := (side, expert, size)) not in self._digests:
            self._digests[key] = tuple(self._digest(name, *key) for name in self.names)
        return self._digests[key]

    def _digest(self, name: str, side: int, expert: int, size: int) -> str:
        values, pair = self.raw(name, side, expert, size), self._pairs[name]
        if pair[0].dtype != pair[1].dtype:
            bits = min(mantissa_bits(one.dtype) or 0 for one in pair)
            with np.errstate(over="ignore", invalid="ignore"):
                values = values.astype(np.float32)
                values = _COARSER[bits](values) if bits in _COARSER else values
        return digest_of((values + 0.0 if values.dtype.kind == "f" else values).tobytes())

    def has_followed(
        self, gains: Sequence[Float[np.ndarray, "hidden"]], experts: tuple[int, int], size: int
    ) -> Mapping[str, bool]:
        """Whether each first matrix changed as the gain did, inversely; without those that do not
        tell.
        """
        followed = {}
        for name, (one, other) in self._pairs.items():
            if not one.columns or (one.columns > 0) is not (other.columns > 0):
                continue
            before, after = (self.raw(name, side, experts[side], size) for side in (0, 1))
            place = np.arange(len(before))
            width = abs(one.columns)
            column = place % width if one.columns > 0 else place // width
            if column.max(initial=0) >= len(gains[0]):
                continue
            expected, own = before * gains[0][column], after * gains[1][column]
            apart = np.abs(gains[0] - gains[1])[column]
            if (apart > _OTHER_GAIN * np.abs(gains[0])[column]).any() and expected.any():
                allowed = _ROUNDING * np.abs(expected) + np.finfo(np.float32).tiny
                followed[name] = bool((np.abs(own - expected) <= allowed).all())
        return followed


def _width(tensor: _Tensor) -> int:
    """Bytes of a number; 1 where it is no plain float."""
    return numpy_dtype(tensor.dtype, "").itemsize if tensor.dtype in PLAIN_FLOATS else 1


def _is_alike(a: _Tensor, b: _Tensor) -> bool:
    """Whether samples of the two can be held against each other."""
    if (a.columns < 0) is not (b.columns < 0):
        return False
    if a.dtype in PLAIN_FLOATS and b.dtype in PLAIN_FLOATS:
        return a.storage[0] == b.storage[0]
    return a.storage == b.storage and a.spans[0][2] == b.spans[0][2]


def listing(names: Mapping[str, object]) -> str:
    """``gate, up and down``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


# ------------------------------------------------------------------------------------ of a side
@dataclass(frozen=True)
class NoPair:
    """Why no experts can be compared; ``miscount`` where B has other numbers of them than rows."""

    reason: str
    miscount: str = ""


@dataclass(frozen=True, eq=False)
class ExpertsOfSide:
    """The experts beside all routers of one side."""

    store: TensorStore
    routers: Sequence[Router]

    @cached_property
    def values(self) -> Mapping[str, ExpertValues | CheckpointError | RouterError]:
        """What can be read, or why nothing can."""
        return values_of(self.store, self.routers)

    @cached_property
    def names(self) -> LayerNames:
        return layer_names(with_plain_names(self.store).names())

    def miscount(self, router: Router) -> str:
        """How many numbered or stacked experts stand beside rows of another number; else empty."""
        layer = self.names.get(layer_of(router)[0], {})
        for alike, by_number in layer.items():
            if "experts." not in alike or SHARED.search(alike):
                continue
            shape = self.store.info(by_number[-1]).shape if -1 in by_number else ()
            many = shape[0] if len(shape) == 3 else len(by_number) if -1 not in by_number else 0
            top = max(by_number) + 1 if -1 not in by_number else many
            if many and (many, top) != (router.num_experts, router.num_experts):
                rows = number_of(router.num_experts, "row")
                if many == router.num_experts:
                    return f"experts numbered up to {top - 1} beside {rows}"
                return f"{number_of(many, 'expert')} beside {rows}"
        return ""


def pairs_of(a: ExpertsOfSide, b: ExpertsOfSide) -> dict[str, ExpertPair | NoPair]:
    """What can be compared beside each router of both, or why nothing can."""
    pairs: dict[str, ExpertPair | NoPair] = {}
    by_name = {router.name: router for router in b.routers if router.name in a.values}
    for name, router in by_name.items():
        one, other = a.values[name], b.values[name]
        if isinstance(one, ExpertValues) and isinstance(other, ExpertValues):
            pair = ExpertPair(one, other)
            pairs[name] = pair if pair.names else NoPair(pair.reason)
        elif isinstance(one, ExpertValues):
            miscount = b.miscount(router)
            why = miscount or getattr(other, "message", "").rstrip(".")
            pairs[name] = NoPair(f"B: {why}", miscount)
        else:
            pairs[name] = NoPair(f"A: {getattr(one, 'message', '')}".rstrip("."))
    return pairs


def number_of_experts(pair: ExpertPair | NoPair, num_routers: int) -> int:
    """How many experts of each router are sampled, where not all are asked for."""
    tensors = 1 if isinstance(pair, NoPair) else len(pair.names)
    return max(SOME_TENSORS // (tensors * num_routers), 1)


# ------------------------------------------------------------------------------------ of a router
def with_experts(
    change: RouterChange,
    a: Router,
    b: Router,
    pair: ExpertPair | NoPair | None,
    number: int | None = None,
) -> RouterChange:
    """The change of a router with that of its experts: ``number`` of them, evenly, or all."""
    if pair is None or (not change.place and a.num_experts != b.num_experts):
        return change
    if isinstance(pair, NoPair):
        experts = ExpertsChange(reason=pair.reason, miscount=pair.miscount)
        return dataclasses.replace(change, experts=experts)
    place = [*(change.place or range(b.num_experts))]
    total = min(len(place), pair.values[1].tensors.num_experts)
    experts = compared(pair, a, b, place[:total], number)
    has_moved = place != [*range(a.num_experts)]
    changes = [*change.changes, *_changes(experts, b, has_moved, FOLDED.name in _words(change))]
    beside = (*change.beside, *_notes(experts, has_moved))
    return dataclasses.replace(change, changes=tuple(changes), beside=beside, experts=experts)


def _words(change: RouterChange) -> set[str]:
    return {one.word for one in change.changes}


def compared(
    pair: ExpertPair, a: Router, b: Router, place: Sequence[int], number: int | None
) -> ExpertsChange:
    """Expert i of B beside expert ``place[i]`` of A."""
    total, size = len(place), SAMPLE_BYTES if number is None else SOME_BYTES
    some = min(number or total, total)
    sampled = np.unique(np.linspace(0, total - 1, some).round().astype(int)).tolist()
    sampled = [i for i in sampled if place[i] < pair.values[0].tensors.num_experts]
    after = {i: pair.digests(1, i, size) for i in sampled}
    other: dict[int, tuple[str, ...]] = {}
    folded: list[int] = []
    unfolded: list[int] = []
    gains = _gains(a, b)
    for i in sampled:
        before = pair.digests(0, place[i], size)
        differ = [n for n, x, y in zip(pair.names, before, after[i], strict=True) if x != y]
        followed = pair.has_followed(gains, (place[i], i), size) if gains else {}
        if followed and all(followed.values()):
            folded.append(i)
            differ = [name for name in differ if name not in followed]
        elif followed and not differ:
            unfolded.append(i)
        if differ:
            other[i] = tuple(differ)
    sources: dict[int, int] = {}
    if other:
        every = range(pair.values[0].tensors.num_experts) if number is None else sampled
        places = {pair.digests(0, j, size): j for j in every}
        sources = {i: places[after[i]] for i in other if after[i] in places}
    return ExpertsChange(
        total, size, tuple(sampled), pair.names, other, sources, tuple(folded), tuple(unfolded)
    )


def _gains(a: Router, b: Router) -> list[np.ndarray]:
    """Both gains where they differ and experts read the same norm as the router; else none."""
    spec = experts_spec(b)
    if spec.gain or spec.latent or (a.gain is None and b.gain is None):
        return []
    gains = [np.ones(r.hidden_size) if r.gain is None else r.gain.astype(float) for r in (a, b)]
    return [] if np.array_equal(gains[0], gains[1]) else gains


def _changes(
    experts: ExpertsChange, b: Router, has_moved: bool, is_folded: bool
) -> Iterator[Change]:
    sampled = len(experts.sampled)
    if experts.sources:
        edit = LEFT_BEHIND if has_moved else MOVED_ALONE
        some = list(experts.sources.items())[:4]
        stands = ", ".join(f"{expert} is A's {source}" for expert, source in some)
        rest = len(experts.sources) - len(some)
        more = f" and {rest} more" if rest else ""
        yield edit.change(
            b.rule,
            subject="experts",
            kind=f"({len(experts.sources)} of {sampled})",
            detail=f"samples of experts: {stands}{more}",
            stayed=sampled - len(experts.other),
        )
    if is_folded and experts.unfolded:
        yield NOT_IN_EXPERTS.change(
            b.rule,
            subject="experts",
            kind=f"({len(experts.unfolded)} of {sampled})",
            detail=f"experts {listed(np.array(experts.unfolded))} are those of A",
        )


def _notes(experts: ExpertsChange, has_moved: bool) -> Iterator[str]:
    sampled, total = len(experts.sampled), experts.num_experts
    if not sampled:
        return
    whole = sampled == total
    some = all_of(total, "expert") if whole else f"{sampled} of {total} experts, sampled,"
    if len(experts.folded) == sampled:
        yield f"{some} folded alike"
    elif experts.folded:
        yield f"{len(experts.folded)} of {sampled} experts folded alike"
    if not experts.other and (has_moved or not experts.folded):
        where = "moved along" if has_moved else "where they were" if total > 1 else "where it was"
        yield f"{some} {where}"
    if experts.changed:
        of = f"{len(experts.changed)} of {sampled}{'' if whole else ' sampled'} experts"
        yield f"{of} with other weights: {experts.in_words}"
