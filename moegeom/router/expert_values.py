"""Samples of some kilobytes of each expert: equal, alike, zero, broken, uncalibrated, as drawn."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, as_array, numpy_dtype, upcast
from moegeom.checkpoint.formats.gguf import BLOCK_DTYPES, GGML_TYPES, decode
from moegeom.checkpoint.store import TensorStore
from moegeom.core.digest import digest_of
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float64, Int64, Shaped
from moegeom.geometry.experts import MatrixSample, near_copies
from moegeom.geometry.rows import drawn_law, multiples
from moegeom.router.expert_names import SHARED, SHARED_GATE, layer_names
from moegeom.router.expert_tensors import ExpertTensors, layer_of, open_experts
from moegeom.router.plain_names import with_plain_names
from moegeom.router.storage import unpack_e2m1
from moegeom.router.storages.four_bit_floats import FP4

#: Bytes that are read of each tensor of each expert: its beginning.
SAMPLE_BYTES = 4096

#: What stands for a matrix where parts are biases.
BIASES = "biases"

#: Names of scales that calibration writes: what the inputs of an expert are divided by.
_CALIBRATED = ("input_scale", "input_global_scale", "act_scale")

#: Floats of eight bits, and the unit roundoff of all floats.
_EIGHT_BITS = frozenset({"F8_E4M3", "F8_E5M2"})
_UNITS = {"F8_E5M2": 2.0**-3, "F8_E4M3": 2.0**-4, "BF16": 2.0**-8, "F16": 2.0**-11,
          "F32": 2.0**-24, "F64": 2.0**-53}  # fmt: skip

#: Storages whose four bits are a sign and a magnitude.
_OF_E2M1 = ("mxfp4", "nvfp4")

#: Fewer numbers of an expert tell nothing of whether it is like another.
_LEAST_ALIKE = 512

#: Columns that share a scale, at most: numbers of eight bits are compared within so many.
_RUN = 128

#: Fewer numbers tell nothing of their law.
_LEAST = 4096

#: What rounding to eight bits adds to a kurtosis.
_OF_ROUNDING = 0.05


@dataclass(frozen=True)
class _Part:
    """A stored tensor of one matrix of every expert: spans by expert (name, first byte, bytes).

    ``bits`` are those of a number, 0 in what stands beside the numbers of the matrix; ``columns``
    0 where they do not lie in rows; ``storage`` the name of the scheme and of its dtype.
    """

    matrix: str
    key: str
    dtype: str
    columns: int
    bits: float
    storage: tuple[str, str]
    spans: Sequence[tuple[str, int, int]]


@dataclass(frozen=True, eq=False)
class ExpertValues:
    """What will be read of the experts of a router."""

    tensors: ExpertTensors
    parts: Sequence[_Part]
    shared: Sequence[str] = ()

    @property
    def size(self) -> int:
        """Bytes that ``facts`` reads."""
        shared = (min(self.tensors.store.info(n).size_bytes, SAMPLE_BYTES) for n in self.shared)
        return self._size + sum(shared)

    @property
    def _size(self) -> int:
        return sum(min(size, SAMPLE_BYTES) for part in self.parts for _, _, size in part.spans)

    def facts(self) -> dict[str, Any]:
        """What the samples show, experts by number.

        ``equal``: groups of experts whose samples are the same bytes; ``alike``: by matrix, groups
        that share it and are not equal; ``zero``: experts with a matrix whose sample is all 0;
        ``digests``: of its samples by matrix;
        ``not_finite``; ``uncalibrated``: scales of inputs that are not finite, 0, or 1 beside
        others; ``drawn``: matrices whose numbers are as an initialisation draws them, and
        ``is_drawn_judged`` whether that could be told; ``copies``: groups of experts that differ by
        no more than noise, and in ``not_compared`` why that could not be told.
        """
        experts = range(self.tensors.num_experts)
        digests: list[list[str]] = [[] for _ in experts]
        by_matrix: dict[str, list[str]] = {}
        is_zero = np.zeros(len(experts), bool)
        not_finite: set[int] = set()
        uncalibrated: set[int] = set()
        random_matrices: list[str] = []
        judged = 0
        matrices: dict[str, Sequence[np.ndarray]] = {}
        for part in self.parts:
            samples = list(self._read(part))
            if part.key.endswith(_CALIBRATED):
                uncalibrated |= _uncalibrated(self._numbers(part, samples))
                continue
            own = [digest_of(sample) for sample in samples]
            if part.matrix != BIASES:
                for expert, digest in enumerate(own):
                    digests[expert].append(digest)
            numbers = [np.frombuffer(sample, np.uint8) for sample in samples]
            if part.dtype in _UNITS:
                numbers = self._numbers(part, samples)
                not_finite |= {e for e, one in enumerate(numbers) if not np.isfinite(one).all()}
                if part.columns and not not_finite:
                    state = _is_drawn(numbers, part)
                    judged += state is not None
                    random_matrices += [part.matrix] * bool(state)
            if part.bits:
                matrices[part.matrix] = numbers
                is_none = [not one.any() for one in numbers]
                by_matrix[part.matrix] = [
                    "" if zero else digest for zero, digest in zip(is_none, own, strict=True)
                ]
                is_zero |= is_none
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for expert, digest in enumerate(digests):
            if digest and not is_zero[expert]:
                groups[tuple(digest)].append(expert)
        broken = not_finite | {*np.flatnonzero(is_zero)}
        single = [group[0] for group in groups.values() if group[0] not in broken]
        copies, not_compared = self._copies(matrices, single)
        return {
            "num_experts": len(experts),
            "bytes_each": self._size // len(experts),
            "equal": [group for group in groups.values() if len(group) > 1],
            "alike": _alike(by_matrix, digests),
            "digests": by_matrix,
            "zero": np.flatnonzero(is_zero).tolist() if self.parts else [],
            "not_finite": sorted(not_finite),
            "uncalibrated": sorted(uncalibrated),
            "drawn": random_matrices if len(random_matrices) == judged else [],
            "is_drawn_judged": judged > 0,
            "copies": copies,
            "not_compared": not_compared,
            **self._shared(),
        }

    def _shared(self) -> dict[str, list[str]]:
        """Matrices of shared experts that are all 0, and tensors that are not finite."""
        store = self.tensors.store
        zero: list[str] = []
        broken: list[str] = []
        for name in self.shared:
            info = store.info(name)
            raw = bytes(store.read_bytes(name, 0, min(info.size_bytes, SAMPLE_BYTES)))
            numbers: np.ndarray = np.frombuffer(raw, np.uint8)
            if info.dtype in _UNITS:
                dtype = numpy_dtype(info.dtype, name)
                numbers = upcast(as_array(raw, dtype, (len(raw) // dtype.itemsize,), name))
                broken += [name] * (not np.isfinite(numbers).all())
            zero += [name] * (len(info.shape) > 1 and not numbers.any())
        return {"shared_zero": zero, "shared_not_finite": broken}

    def _copies(
        self, matrices: Mapping[str, Sequence[np.ndarray]], single: Sequence[int]
    ) -> tuple[list[dict[str, Any]], str]:
        """Groups among experts of which none are equal, and why there are none."""
        parts = {part.matrix: part for part in self.parts if part.bits}
        if len(single) < 2:
            return [], "fewer than two are whole and differ"
        try:
            samples = []
            for name, those in matrices.items():
                least = min(map(len, those))  # experts of unlike sizes are counted with the blocks
                raw = np.stack([those[expert][:least] for expert in single])
                samples.append(_codes(parts[name], raw))
        except (CheckpointError, RouterError) as error:
            return [], error.message.rstrip(".")
        few = min((sample.numbers.shape[1] for sample in samples), default=0)
        if few < _LEAST_ALIKE:
            return [], f"a sample of {few} numbers of each tells too little"
        groups = near_copies(samples)
        return [
            dataclasses.asdict(one) | {"experts": [single[e] for e in one.experts]}
            for one in groups
        ], ""

    def read_numbers(self, part: _Part) -> list[Float[np.ndarray, "numbers"]]:
        """The beginnings of a stored tensor of plain floats, by expert."""
        return self._numbers(part, list(self._read(part)))

    def _read(self, part: _Part) -> Iterator[bytes]:
        for name, start, size in part.spans:
            yield bytes(self.tensors.store.read_bytes(name, start, min(size, SAMPLE_BYTES)))

    def _numbers(self, part: _Part, samples: Sequence[bytes]) -> list[Float[np.ndarray, "numbers"]]:
        dtype = numpy_dtype(part.dtype, part.key)
        return [
            upcast(as_array(raw, dtype, (len(raw) // dtype.itemsize,), part.key)) for raw in samples
        ]


def expert_values(tensors: ExpertTensors) -> ExpertValues:
    """The stored tensors of the experts of a router; reads headers alone."""
    store, parts = tensors.store, []
    leaves = {"gate": tensors.first[0], "down": tensors.last}
    leaves |= {"up": tensors.first[1]} if len(tensors.first) > 1 else {}
    for matrix, tensor in leaves.items():
        keys = tensor.stacked if tensor.names is None else tensor.names[0]
        for key, name in keys.items():
            info = store.info(name)
            num = tensors.num_experts
            if tensor.names is None:
                each = info.size_bytes // tensor.num_stacked
                spans = [(name, expert * each, each) for expert in range(num)]
                shape = info.shape[1:] if len(info.shape) > 2 else info.shape
            else:
                names = [tensor.names[expert].get(key, "") for expert in range(num)]
                if not all(names):
                    continue  # counted with the blocks
                spans = [(one, 0, store.info(one).size_bytes) for one in names]
                shape = info.shape
            is_first = info.name == tensor.stored.tensors[0].name
            columns = math.prod(shape[1:]) if len(shape) == 2 and is_first else 0
            bits = 8.0 * spans[0][2] / math.prod(tensor.stored.shape) if is_first else 0.0
            storage = (tensor.stored.scheme, tensor.stored.dtype)
            parts.append(_Part(matrix, key, info.dtype, columns, bits, storage, spans))
    for bias in (*tensors.first_biases, tensors.last_bias):
        keys = {} if bias is None else bias.stacked if bias.names is None else bias.names[0]
        for key, name in keys.items():
            assert bias is not None
            info = store.info(name)
            each, names = info.size_bytes, [name] * tensors.num_experts
            starts = [0] * len(names)
            if bias.names is None:
                each //= bias.num_stacked
                starts = [expert * each for expert in range(len(names))]
            else:
                names = [bias.names[expert][key] for expert in range(len(names))]
            spans = [(one, start, each) for one, start in zip(names, starts, strict=True)]
            parts.append(_Part(BIASES, key, info.dtype, 0, 0.0, ("", ""), spans))
    return ExpertValues(tensors, parts)


def _alike(
    by_matrix: Mapping[str, Sequence[str]], digests: Sequence[Sequence[str]]
) -> dict[str, list[list[int]]]:
    """By matrix, the groups of experts that share its sample and differ in another."""
    alike: dict[str, list[list[int]]] = {}
    for matrix, own in by_matrix.items():
        groups: dict[str, list[int]] = defaultdict(list)
        for expert, digest in enumerate(own):
            if digest:
                groups[digest].append(expert)
        several = [g for g in groups.values() if len({tuple(digests[e]) for e in g}) > 1]
        alike |= {matrix: several} if several else {}
    return alike


def equal_across(
    values: Mapping[str, ExpertValues], samples: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Pairs of routers whose experts have matrices with the same samples: which matrices, and how
    many experts of the second. Experts that two routers share are no copies.
    """
    places: dict[tuple[str, str], list[tuple[str, int, tuple[str, int, int]]]] = defaultdict(list)
    for one in samples:
        spans = {p.matrix: p.spans for p in values[one["router"]].parts if p.bits}
        for matrix, digests in one["digests"].items():
            for expert, digest in enumerate(digests):
                place = (one["router"], expert, spans[matrix][expert])
                places[matrix, digest].append(place) if digest else None
    pairs: dict[tuple[str, str], dict[str, set[int]]] = {}
    for (matrix, _), those in places.items():
        for (first, _, span), (second, expert, other) in pairwise(those):
            if first != second and span != other:
                pairs.setdefault((first, second), defaultdict(set))[matrix].add(expert)
    return [
        {"routers": list(pair), "matrices": sorted(by), "count": len(set().union(*by.values()))}
        for pair, by in pairs.items()
    ]


def values_of(
    store: TensorStore, routers: Iterable[Router]
) -> dict[str, ExpertValues | CheckpointError | RouterError]:
    """The stored tensors of the experts by router, or why they are not known."""
    names = layer_names((store := with_plain_names(store)).names())
    values: dict[str, ExpertValues | CheckpointError | RouterError] = {}
    for router in routers:
        try:
            one = expert_values(open_experts(store, router, False, names))
            start, _ = layer_of(router)
            beside = names.get(start, {}) if start else {}
            shared = [
                name
                for alike, by_number in beside.items()
                for name in by_number.values()
                if SHARED.search(part := alike[len(start) :])
                and not SHARED_GATE.fullmatch(part.rpartition(".")[0])
            ]
            values[router.name] = dataclasses.replace(one, shared=shared)
        except (CheckpointError, RouterError) as error:
            values[router.name] = error
    return values


#: Experts of a checkpoint that are sampled, evenly over its routers, and bytes of each.
SOME_EXPERTS, SOME_BYTES = 512, 1024


@dataclass(frozen=True)
class SomeExperts:
    """Digests of the beginning of one matrix of some experts by number, and how it is stored."""

    storage: tuple[str, ...]
    digests: Mapping[int, str]


def sample_some(store: TensorStore, routers: Sequence[Router]) -> dict[str, SomeExperts]:
    """The same experts of checkpoints of the same routers, by router.

    Routers whose experts are not there, or not known, are left out: checks of the block say why.
    """
    samples: dict[str, SomeExperts] = {}
    for router, values in zip(routers, values_of(store, routers).values(), strict=True):
        if not isinstance(values, ExpertValues) or not values.parts:
            continue
        first, num = values.parts[0], router.num_experts
        number = min(max(SOME_EXPERTS // len(routers), 1), num)
        experts = np.linspace(0, num - 1, number).round().astype(int).tolist()
        digests = {}
        for expert in experts:
            name, start, size = first.spans[expert]
            digests[expert] = digest_of(store.read_bytes(name, start, min(size, SOME_BYTES)))
        storage = (*first.storage, first.key, first.dtype, str(first.spans[0][2]))
        samples[router.name] = SomeExperts(storage, digests)
    return samples


def down_ratios(
    a: ExpertValues, b: ExpertValues, place: Int64[np.ndarray, "experts"]
) -> Float64[np.ndarray, "experts"] | None:
    """What each expert of B writes, over what expert ``place`` of A did, by samples.

    Multiples of the beginning of the last matrix; None where that is no plain float.
    """
    sides = []
    for values in (a, b):
        part = next((p for p in values.parts if p.matrix == "down" and p.columns), None)
        if part is None or part.dtype not in PLAIN_FLOATS:
            return None
        sides.append(values.read_numbers(part))
    size = min(len(numbers) for side in sides for numbers in side)
    first, second = (np.stack([one[:size] for one in side]).astype(np.float64) for side in sides)
    return multiples(first[place], second)


def _codes(part: _Part, raw: Shaped[np.ndarray, "experts numbers"]) -> MatrixSample:
    """Numbers up to the scales beside them, of which those of copies are alike."""
    if part.dtype in BLOCK_DTYPES:
        kind = next(one for one in GGML_TYPES.values() if one.name == part.dtype)
        count = raw.shape[1] // kind.block_bytes
        shape = (len(raw), count * kind.block_size)
        whole = raw[:, : count * kind.block_bytes].tobytes()
        return MatrixSample(decode(whole, kind, shape, part.key), bits=part.bits)
    if part.dtype in _UNITS:
        numbers = raw.astype(np.float64)
        numbers = np.ldexp(numbers, -int(np.frexp(np.abs(numbers).max())[1]))
        if part.dtype in _EIGHT_BITS:
            return MatrixSample(_over_runs(numbers, part)[0], _UNITS[part.dtype])
        return MatrixSample(numbers, _UNITS[part.dtype], columns=part.columns)
    bits, (scheme, dtype) = round(part.bits), part.storage
    if bits not in (1, 2, 4, 8):
        raise RouterError(f"numbers of {bits} bits lie across words.")
    if bits == 4 and scheme in _OF_E2M1:
        numbers = unpack_e2m1(raw)
    elif bits == 8:
        numbers = raw.view(np.int8 if part.dtype == "I8" else np.uint8)
    else:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (raw[:, :, None] >> shifts).reshape(len(raw), -1) & (2**bits - 1)
        numbers = np.asarray(FP4)[codes] if dtype == "fp4" else codes
    numbers = numbers.astype(np.float32)
    return MatrixSample(numbers - numbers.mean(axis=1, keepdims=True), bits=bits)


def _uncalibrated(scales: Sequence[Float[np.ndarray, "numbers"]]) -> set[int]:
    """Experts whose scale is no scale, or the 1 that it began with where others have another."""
    firsts = [float(one[0]) if one.size else math.nan for one in scales]
    odd = {e for e, scale in enumerate(firsts) if not math.isfinite(scale) or scale == 0.0}
    ones = {expert for expert, scale in enumerate(firsts) if scale == 1.0}
    return odd | (ones if len(ones) + len(odd) < len(firsts) else set())


def _is_drawn(numbers: Sequence[Float[np.ndarray, "numbers"]], part: _Part) -> bool | None:
    """Whether the beginnings of a matrix are independent numbers of one law; None: too few."""
    length = min(len(one) for one in numbers)
    run = _RUN if part.dtype in _EIGHT_BITS else part.columns
    if length >= run:
        length -= length % run
    if len(numbers) < 2 or length * len(numbers) < _LEAST:
        return None
    rows: Float64[np.ndarray, "experts numbers"] = np.stack(
        [one[:length].astype(np.float64) for one in numbers]
    )
    rounding = 0.0
    if part.dtype in _EIGHT_BITS and length >= run:
        rows, run = _over_runs(rows, part)
        rounding = _OF_ROUNDING + 6.0 / run
    return bool(drawn_law(rows, rounding))


def _over_runs(
    rows: Float64[np.ndarray, "experts numbers"], part: _Part
) -> tuple[Float64[np.ndarray, "experts numbers"], int]:
    """Numbers over the root mean square of their run, which shares a scale; 0 where that is 0."""
    run = min(_RUN if part.dtype in _EIGHT_BITS else part.columns, rows.shape[1])
    runs = rows[:, : rows.shape[1] // run * run].reshape(len(rows), -1, run)
    sizes = np.sqrt((runs**2).mean(axis=2, keepdims=True))
    return np.divide(runs, sizes, out=np.zeros_like(runs), where=sizes > 0.0).reshape(
        len(rows), -1
    ), run
