"""The arrays of one shard on their way into a recording: checked against the shards before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.registry import unknown_name
from moegeom.core.tokens import Stage, TokenColumns, TopLogits
from moegeom.tokens.columns import DTYPES
from moegeom.tokens.stages import (
    CHOSEN,
    FLOAT_DTYPES,
    STAGE_TENSORS,
    TOP_EXPERT,
    TOP_LOGITS,
    StoredTensor,
    stored_tensors,
)

ByRouter = dict[str, dict[str, np.ndarray]]


def check_columns(columns: TokenColumns, num_domains: int, where: str) -> int:
    """The number of tokens, when all four columns agree on it and the domains have names."""
    lengths = {name: np.shape(getattr(columns, name)) for name in DTYPES}
    num_tokens = len(columns.document)
    if num_tokens < 1 or any(shape != (num_tokens,) for shape in lengths.values()):
        raise RecordingError(f"{where}: columns have shapes {lengths}; expected one length, >= 1.")
    if columns.domain.max() >= num_domains:
        raise RecordingError(
            f"{where}: domain number {columns.domain.max()}; only {num_domains} domains are named."
        )
    return num_tokens


def shard_tensors(
    stage: Stage, values: Mapping[str, Any] | None, chosen: Mapping[str, Any] | None
) -> ByRouter:
    """What was handed to ``append``, by router and tensor name."""
    tensors: ByRouter = {}
    for router, value in (values or {}).items():
        found = tensors.setdefault(router, {})
        if isinstance(value, TopLogits):
            found.update({TOP_LOGITS.name: value.logits, TOP_EXPERT.name: value.expert})
        else:
            found[STAGE_TENSORS[stage][0].name] = np.asarray(value)
    for router, ids in (chosen or {}).items():
        tensors.setdefault(router, {})[CHOSEN.name] = np.asarray(ids)
    return tensors


@dataclass
class ShapeBook:
    """What the first shard fixed: the float dtype, the widths, and whether choices are known."""

    stage: Stage
    routers: tuple[str, ...]
    dtype: str | None
    has_chosen: bool = False
    widths: dict[tuple[str, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.stage not in STAGE_TENSORS:
            raise unknown_name("stage", self.stage, STAGE_TENSORS)
        if self.stage == "ids":
            self.dtype = None
        elif self.dtype is not None and self.dtype not in FLOAT_DTYPES:
            raise unknown_name("dtype", self.dtype, FLOAT_DTYPES)

    def accept(self, tensors: ByRouter, num_tokens: int, where: str) -> ByRouter:
        """The arrays as they are to be stored; an error when they do not fit the first shard."""
        if set(tensors) != set(self.routers):
            raise RecordingError(
                f"{where}: arrays for routers {sorted(tensors)}; expected {sorted(self.routers)}."
            )
        has_chosen = any(CHOSEN.name in arrays for arrays in tensors.values())
        if not self.widths:
            self.has_chosen = has_chosen
        expected = stored_tensors(self.stage, self.has_chosen)
        return {
            router: self._accept_router(router, tensors[router], expected, num_tokens, where)
            for router in self.routers
        }

    def _accept_router(
        self,
        router: str,
        arrays: dict[str, np.ndarray],
        expected: tuple[StoredTensor, ...],
        num_tokens: int,
        where: str,
    ) -> dict[str, np.ndarray]:
        names = [tensor.name for tensor in expected]
        if set(arrays) != set(names):
            raise RecordingError(
                f"{where}: router {router} has {sorted(arrays)}; expected {sorted(names)} "
                f"at stage {self.stage}, as in every shard."
            )
        where = f"{where}: router {router}"
        for name in names:
            self._check_shape(router, name, arrays[name].shape, num_tokens, where)
        return {
            tensor.name: self._storable(tensor, arrays[tensor.name], f"{where}: {tensor.name}")
            for tensor in expected
        }

    def _check_shape(
        self, router: str, name: str, shape: tuple[int, ...], num_tokens: int, where: str
    ) -> None:
        width = shape[1] if len(shape) == 2 else 0
        first = self.widths.setdefault((router, name), width)
        if width != first or width < 1 or shape[0] != num_tokens:
            raise RecordingError(
                f"{where}: {name} has shape {shape}; expected ({num_tokens}, {first or 'width'})."
            )

    def _storable(self, tensor: StoredTensor, array: np.ndarray, where: str) -> np.ndarray:
        if not tensor.is_float:
            return _expert_numbers(array, where)
        if self.dtype is None:
            self.dtype = str(array.dtype)
        if str(array.dtype) not in FLOAT_DTYPES or self.dtype not in FLOAT_DTYPES:
            raise RecordingError(
                f"{where} is {array.dtype}; expected one of {', '.join(FLOAT_DTYPES)}."
            )
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(array, FLOAT_DTYPES[self.dtype])
        if stored.dtype != array.dtype and (np.isinf(stored) & np.isfinite(array)).any():
            raise UsageError(
                f"{where}: values up to {np.abs(array[np.isfinite(array)]).max():.3g} do not fit "
                f"{self.dtype}.",
                "Record as bfloat16 or float32.",
            )
        return stored


def _expert_numbers(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype.kind not in "iu":
        raise RecordingError(f"{where} is {array.dtype}; expected integers.")
    if array.dtype.itemsize < 4:
        return np.ascontiguousarray(array)
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if low < -1 or high > np.iinfo(np.int32).max:
        raise RecordingError(f"{where} holds {low} to {high}; expected expert numbers, or -1.")
    return np.ascontiguousarray(array, np.int32)
