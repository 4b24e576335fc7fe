"""The arrays of one shard on their way into a recording: checked against the shards before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, structs

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.registry import unknown_name
from moegeom.core.tokens import OUTPUT_KINDS, OutputKind, Stage, TokenColumns, TopLogits
from moegeom.tokens.recording.columns import DTYPES
from moegeom.tokens.stages import (
    CHOSEN,
    FLOAT_DTYPES,
    STAGE_TENSORS,
    TOP_EXPERT,
    TOP_LOGITS,
    StoredTensor,
    check_output_shapes,
    has_floats,
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


def output_kinds(outputs: Mapping[str, Any] | None) -> tuple[OutputKind, ...]:
    """The kinds in ``outputs``, in the order of the format whatever the order of the mapping."""
    for kind in outputs or {}:
        if kind not in OUTPUT_KINDS:
            raise unknown_name("kind of output", kind, OUTPUT_KINDS)
    return tuple(kind for kind in OUTPUT_KINDS if kind in (outputs or {}))


def shard_tensors(
    stage: Stage,
    values: Mapping[str, Any] | None,
    chosen: Mapping[str, Any] | None,
    outputs: Mapping[str, Mapping[str, Any]] | None,
) -> ByRouter:
    """What was handed to ``append``, by router and tensor name."""
    tensors: ByRouter = {}
    for router, value in (values or {}).items():
        by_name = tensors.setdefault(router, {})
        if isinstance(value, TopLogits):
            by_name.update({TOP_LOGITS.name: value.logits, TOP_EXPERT.name: value.expert})
        else:
            by_name[STAGE_TENSORS[stage][0].name] = np.asarray(value)
    for router, ids in (chosen or {}).items():
        tensors.setdefault(router, {})[CHOSEN.name] = np.asarray(ids)
    for kind, by_router in (outputs or {}).items():
        for router, output in by_router.items():
            tensors.setdefault(router, {})[kind] = np.asarray(output)
    return tensors


class ShapeBook(Struct):
    """What the first shard fixed: the float dtype, the shapes of rows, and what is recorded."""

    stage: Stage
    routers: tuple[str, ...]
    dtype: str | None
    has_chosen: bool = False
    outputs: tuple[OutputKind, ...] = ()
    row_shapes: dict[str, dict[str, tuple[Annotated[int, Meta(ge=1)], ...]]] = {}

    @classmethod
    def of(cls, stage: Stage, routers: tuple[str, ...], dtype: str | None) -> ShapeBook:
        """The book of a recording without shards; UsageError for names that nothing has."""
        if stage not in STAGE_TENSORS:
            raise unknown_name("stage", stage, STAGE_TENSORS)
        if dtype is not None and dtype not in FLOAT_DTYPES:
            raise unknown_name("dtype", dtype, FLOAT_DTYPES)
        return cls(stage, routers, dtype)

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """What every router has in every shard."""
        return stored_tensors(self.stage, self.has_chosen, self.outputs)

    @property
    def stored_dtype(self) -> str | None:
        """What floats are stored as; None when there are none."""
        return self.dtype if has_floats(self.stage, self.outputs) else None

    def draft(self) -> ShapeBook:
        """A copy to try a shard on: when it is refused, nothing of it stays in this one."""
        shapes = {router: dict(by_name) for router, by_name in self.row_shapes.items()}
        return structs.replace(self, row_shapes=shapes)

    def accept(
        self, tensors: ByRouter, outputs: tuple[OutputKind, ...], num_tokens: int, where: str
    ) -> ByRouter:
        """The arrays as they are to be stored; an error when they do not fit the first shard."""
        if set(tensors) != set(self.routers):
            raise RecordingError(
                f"{where}: arrays for routers {sorted(tensors)}; expected {sorted(self.routers)}."
            )
        has_chosen = any(CHOSEN.name in arrays for arrays in tensors.values())
        if not self.row_shapes:
            self.has_chosen, self.outputs = has_chosen, outputs
        elif outputs != self.outputs:
            raise RecordingError(
                f"{where}: outputs {', '.join(outputs) or 'none'}; "
                f"expected {', '.join(self.outputs) or 'none'}, as in every shard."
            )
        return {
            router: self._accept_router(router, tensors[router], num_tokens, where)
            for router in self.routers
        }

    def _accept_router(
        self, router: str, arrays: dict[str, np.ndarray], num_tokens: int, where: str
    ) -> dict[str, np.ndarray]:
        names = [tensor.name for tensor in self.tensors]
        if set(arrays) != set(names):
            raise RecordingError(
                f"{where}: router {router} has {sorted(arrays)}; expected {sorted(names)} "
                f"at stage {self.stage}, as in every shard."
            )
        where = f"{where}: router {router}"
        shapes = self.row_shapes.setdefault(router, {})
        for tensor in self.tensors:
            self._check_shape(tensor, arrays[tensor.name].shape, num_tokens, shapes, where)
        check_output_shapes(shapes, where)
        return {
            tensor.name: self._storable(tensor, arrays[tensor.name], f"{where}: {tensor.name}")
            for tensor in self.tensors
        }

    def _check_shape(
        self,
        tensor: StoredTensor,
        shape: tuple[int, ...],
        num_tokens: int,
        shapes: dict[str, tuple[int, ...]],
        where: str,
    ) -> None:
        first = shapes.get(tensor.name)
        is_array = len(shape) == 1 + len(tensor.row) and 0 not in shape
        if not is_array or shape[0] != num_tokens or shape[1:] != (first or shape[1:]):
            expected = ", ".join(map(str, (num_tokens, *(first or tensor.row))))
            raise RecordingError(
                f"{where}: {tensor.name} has shape {shape}; expected ({expected})."
            )
        shapes[tensor.name] = shape[1:]

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
