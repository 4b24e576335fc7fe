"""Tensors stored in blocks, as float32; the decoder is that of the gguf package."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from jaxtyping import Float32

from moegeom.checkpoint.dtypes import as_array
from moegeom.checkpoint.formats._gguf_types import GgmlType
from moegeom.core.errors import CheckpointError

#: A number takes 28 times its bytes in the file, and the largest router has three million.
_MOST_NUMBERS = 2**24


def decode(
    raw: bytes, stored: GgmlType, shape: tuple[int, ...], where: str
) -> Float32[np.ndarray, "*shape"]:
    """The numbers that the blocks of a tensor stand for, in its shape.

    Raises ``CheckpointError`` when the gguf package is not there, or does not know the type.
    """
    gguf = _package(stored, where)
    row_bytes = shape[-1] // stored.block_size * stored.block_bytes
    if not raw or not row_bytes:
        return as_array(b"", np.dtype(np.float32), shape, where)
    if prod(shape) > _MOST_NUMBERS:
        raise CheckpointError(
            f"{where} has {prod(shape)} numbers in blocks of {stored.name}, more than the "
            f"{_MOST_NUMBERS} that are decoded at once.",
            "Convert this tensor to F32.",
        )
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, row_bytes)
    try:
        # a scale may be anything, NaN and infinity included
        with np.errstate(all="ignore"):
            rows = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[stored.name])
    except (KeyError, NotImplementedError):
        raise CheckpointError(
            f"{where} is {stored.name}, which the installed gguf package cannot decode.",
            "Upgrade it (pip install -U gguf), or convert this tensor to F32.",
        ) from None
    return rows.reshape(shape)


def _package(stored: GgmlType, where: str) -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise CheckpointError(
            f"{where} is {stored.name}, stored in blocks, which needs the gguf package.",
            "pip install 'moegeom[gguf]'",
        ) from None
    return gguf
