"""How codes are packed into words and bytes, and which part of a weight a scale belongs to."""

from __future__ import annotations

from collections.abc import Collection

import ml_dtypes
import numpy as np

from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.shapes import Float32, Int32, Shaped, UInt8
from moegeom.router.storages._tensors import refuse


def unpack_rows(
    words: Int32[np.ndarray, "words columns"], bits: int
) -> UInt8[np.ndarray, "values columns"]:
    """Unsigned integers of ``bits`` bits (1 to 8), packed densely down the rows.

    The values of a column are one string of bits, lowest first; where ``bits`` does not divide 32
    some lie across two words. Values of the last words are returned even if they only pad.
    """
    num_words, columns = words.shape
    # 32 values take ``bits`` words, after which the pattern starts anew.
    num_runs = -(-num_words // bits)
    padded = np.zeros((num_runs * bits, columns), np.uint32)
    padded[:num_words] = words.view(np.uint32)
    runs = padded.reshape(num_runs, bits, columns)
    values = np.empty((num_runs, 32, columns), np.uint8)
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        value = runs[:, word] >> np.uint32(shift)
        if shift + bits > 32:
            value |= runs[:, word + 1] << np.uint32(32 - shift)
        values[:, place] = value & np.uint32((1 << bits) - 1)
    return values.reshape(num_runs * 32, columns)[: num_words * 32 // bits]


def num_words(values: int, bits: int) -> int:
    """Words that hold so many values."""
    return -(-values * bits // 32)


#: OCP Microscaling Formats 1.0, section 5.3.3: sign, two bits of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)


def unpack_e2m1(
    packed: Shaped[np.ndarray, "rows bytes"],
) -> Float32[np.ndarray, "rows columns"]:
    """The numbers of each row, twice as many as it has bytes."""
    raw = packed.view(np.uint8)
    halves = np.stack([raw & 0xF, raw >> 4], axis=-1)
    return _VALUES[halves.reshape(raw.shape[0], 2 * raw.shape[1])]


# ------------------------------------------------------------------------------------------- scales
Block = tuple[int, int]


def find_block(scale: TensorInfo, shape: tuple[int, int], blocks: Collection[Block]) -> Block:
    """Rows and columns that share one scale: all if there is but one, else a block that fits.

    The last blocks may be cut off.

    Raises
    ------
    RouterError
        If no block fits the shape of the scale, or two that differ.
    """
    if scale.shape in ((), (1,)):
        return shape
    rows, columns = shape
    # A block larger than the weight is as large as the weight.
    inside = {(min(b, rows), min(c, columns)) for b, c in blocks}
    fitting = [(b, c) for b, c in inside if scale.shape == (-(-rows // b), -(-columns // c))]
    if len(fitting) != 1:
        listed = " or ".join(map(str, dict.fromkeys(blocks))) or "unknown size"
        why = "fits more than one reading of" if fitting else "is no scale for"
        raise refuse(
            scale,
            f"has shape {scale.shape} of {scale.dtype}, which {why} "
            f"a weight of shape {shape} in blocks of {listed}.",
        )
    return fitting[0]


def spread(
    scale: Float32[np.ndarray, "*stored"], shape: tuple[int, int], block: Block
) -> Float32[np.ndarray, "rows columns"]:
    """One number for each element of the weight."""
    (rows, columns), (height, width) = shape, block
    table = scale.reshape(-(-rows // height), -(-columns // width))
    return table.repeat(height, axis=0)[:rows].repeat(width, axis=1)[:, :columns]


def scale_floats(scale: Shaped[np.ndarray, "*stored"]) -> Float32[np.ndarray, "*stored"]:
    """A scale as float32; a byte is the exponent of a power of two (E8M0: 2^(byte - 127))."""
    if scale.dtype == np.uint8:
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    return upcast(scale).astype(np.float32)
