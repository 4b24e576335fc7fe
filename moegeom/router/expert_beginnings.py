"""The first rows of every expert: enough to compare experts with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, as_array, numpy_dtype, upcast
from moegeom.core.errors import RouterError
from moegeom.core.shapes import Float
from moegeom.geometry.number_formats import NUMBER_FORMATS
from moegeom.router.expert_tensors import ExpertTensors

#: Bytes read of each expert, one half of its first matrix and one of its last.
SAMPLE_BYTES = 2**16

_LARGEST = float(np.finfo(np.float32).max)

_FORMATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True, eq=False)
class Beginning:
    """The first rows of one matrix of all experts, as stored, before they are read.

    ``unit`` is the unit roundoff of the numbers. ``spans`` are names and first bytes, by expert.
    """

    tensors: ExpertTensors
    matrix: str
    unit: float
    dtype: str
    shape: tuple[int, int]
    spans: Sequence[tuple[str, int]]

    @property
    def size(self) -> int:
        """Bytes that ``read`` reads."""
        itemsize = numpy_dtype(self.dtype, self.matrix).itemsize
        return len(self.spans) * self.shape[0] * self.shape[1] * itemsize

    def read(self) -> Float[np.ndarray, "experts rows columns"]:
        """The numbers, in float32 or float64.

        Raises
        ------
        RouterError
            Where they are not finite in float32.
        """
        store, each = self.tensors.store, self.size // len(self.spans)
        dtype = numpy_dtype(self.dtype, self.matrix)
        matrices = np.stack(
            [
                upcast(as_array(store.read_bytes(name, start, each), dtype, self.shape, name))
                for name, start in self.spans
            ]
        )
        if not max(matrices.max(), -matrices.min()) <= _LARGEST:  # a NaN is not, either
            raise RouterError(
                f"{store.label}: '{self.spans[0][0]}' or its like holds values that are not "
                "finite, or beyond float32."
            )
        return matrices


def expert_beginnings(tensors: ExpertTensors) -> tuple[Beginning, Beginning]:
    """Whole rows of the first and of the last matrix, of 32 kB each, and one row at least.

    Raises
    ------
    RouterError
        If they are stored with scales: numbers without them cannot be compared.
    """
    return _beginning(tensors, "first"), _beginning(tensors, "last")


def _beginning(tensors: ExpertTensors, matrix: str) -> Beginning:
    tensor = tensors.last if matrix == "last" else tensors.first[0]
    one, *more = tensor.stored.tensors
    if more or one.dtype not in PLAIN_FLOATS:
        raise RouterError(
            f"{tensors.store.label}: experts of router {tensors.router} are stored as "
            f"{tensor.stored.dtype}; expected plain floats.",
            "Compare the experts of the checkpoint before it was quantised.",
        )
    rows, columns = one.shape
    row_bytes = one.size_bytes // rows
    taken = max(1, min(rows, SAMPLE_BYTES // 2 // row_bytes))
    if tensor.names is None:
        spans = [(one.name, e * one.size_bytes) for e in range(tensors.num_experts)]
    else:
        spans = [(next(iter(names.values())), 0) for _, names in sorted(tensor.names.items())]
    unit = NUMBER_FORMATS[_FORMATS[one.dtype]].unit
    return Beginning(tensors, matrix, unit, one.dtype, (taken, columns), spans)
