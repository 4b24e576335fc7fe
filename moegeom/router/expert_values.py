"""Samples of some kilobytes of each expert: equal, zero, not finite, never calibrated, as drawn."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, as_array, numpy_dtype, upcast
from moegeom.core.digest import digest_of
from moegeom.core.shapes import Float, Float64
from moegeom.geometry.rows import drawn_errors
from moegeom.router.expert_tensors import ExpertTensors

#: Bytes that are read of each tensor of each expert: its beginning.
SAMPLE_BYTES = 4096

#: Names of scales that calibration writes: what the inputs of an expert are divided by.
_CALIBRATED = ("input_scale", "input_global_scale", "act_scale")

_EIGHT_BITS = frozenset({"F8_E4M3", "F8_E5M2"})

#: Columns that share a scale, at most: numbers of eight bits are compared within so many.
_RUN = 128

#: Standard errors within which figures of drawn numbers lie, and fewer numbers that tell nothing.
_ERRORS, _LEAST = 4.0, 4096

#: Excess kurtosis of normal numbers, and of uniform ones.
_KURTOSES = (0.0, -1.2)

#: What rounding to eight bits adds to a kurtosis.
_OF_ROUNDING = 0.05


@dataclass(frozen=True)
class _Part:
    """A stored tensor of one matrix of every expert: spans by expert (name, first byte, bytes)."""

    matrix: str
    key: str
    dtype: str
    columns: int
    spans: Sequence[tuple[str, int, int]]


@dataclass(frozen=True, eq=False)
class ExpertValues:
    """What will be read of the experts of a router."""

    tensors: ExpertTensors
    parts: Sequence[_Part]

    @property
    def size(self) -> int:
        """Bytes that ``facts`` reads."""
        return sum(min(size, SAMPLE_BYTES) for part in self.parts for _, _, size in part.spans)

    def facts(self) -> dict[str, Any]:
        """What the samples show, experts by number.

        ``equal``: groups of experts whose samples are the same bytes; ``zero``: all of them 0;
        ``not_finite``; ``uncalibrated``: scales of inputs that are not finite, 0, or 1 beside
        others; ``drawn``: matrices whose numbers are as an initialisation draws them, and
        ``is_drawn_judged`` whether that could be told.
        """
        experts = range(self.tensors.num_experts)
        digests: list[list[str]] = [[] for _ in experts]
        is_zero = np.ones(len(experts), bool)
        not_finite: set[int] = set()
        uncalibrated: set[int] = set()
        random_matrices: list[str] = []
        judged = 0
        for part in self.parts:
            samples = list(self._read(part))
            if part.key.endswith(_CALIBRATED):
                uncalibrated |= _uncalibrated(self._numbers(part, samples))
                continue
            for expert, sample in enumerate(samples):
                digests[expert].append(digest_of(sample))
                is_zero[expert] &= not any(sample)
            if part.dtype in PLAIN_FLOATS | _EIGHT_BITS:
                numbers = self._numbers(part, samples)
                not_finite |= {e for e, one in enumerate(numbers) if not np.isfinite(one).all()}
                if part.columns and not not_finite:
                    state = _is_drawn(numbers, part)
                    judged += state is not None
                    random_matrices += [part.matrix] * bool(state)
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for expert, digest in enumerate(digests):
            if digest and not is_zero[expert]:
                groups[tuple(digest)].append(expert)
        return {
            "num_experts": len(experts),
            "bytes_each": self.size // len(experts),
            "equal": [group for group in groups.values() if len(group) > 1],
            "zero": np.flatnonzero(is_zero).tolist() if self.parts else [],
            "not_finite": sorted(not_finite),
            "uncalibrated": sorted(uncalibrated),
            "drawn": random_matrices if len(random_matrices) == judged else [],
            "is_drawn_judged": judged > 0,
        }

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
            is_matrix = len(shape) == 2 and info.name == tensor.stored.tensors[0].name
            columns = math.prod(shape[1:]) if is_matrix else 0
            parts.append(_Part(matrix, key, info.dtype, columns, spans))
    return ExpertValues(tensors, parts)


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
        runs = rows.reshape(len(rows), -1, run)
        sizes = np.sqrt((runs**2).mean(axis=2, keepdims=True))
        if not sizes.all():
            return False
        rows, rounding = (runs / sizes).reshape(rows.shape), _OF_ROUNDING + 6.0 / run
    if not rows.any(axis=1).all():
        return False
    return any(
        max(map(abs, drawn_errors(rows, kurtosis, rounding))) <= _ERRORS for kurtosis in _KURTOSES
    )
