"""How a router weight is stored, and the exact way back to floats."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Float32, Shaped

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, SCALED_FLOATS, upcast
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.errors import RouterError
from moegeom.router.family import Setting
from moegeom.router.integrity import STORAGE_UNKNOWN
from moegeom.router.settings import Settings

#: A router has at most a few hundred MB; a header that claims more is not believed.
_MOST_BYTES = 1 << 30

#: DeepSeek's block size, when ``quantization_config.weight_block_size`` does not say.
_BLOCK = (128, 128)

ScaleShape = Callable[[tuple[int, ...], tuple[int, ...], tuple[int, int]], bool]


def _is_blockwise(scale: tuple[int, ...], weight: tuple[int, ...], block: tuple[int, int]) -> bool:
    """One scale per block; the last blocks may be cut off."""
    return scale == tuple(-(-n // b) for n, b in zip(weight, block, strict=True))


def _is_per_row(scale: tuple[int, ...], weight: tuple[int, ...], block: tuple[int, int]) -> bool:
    """One scale for all, or one per expert."""
    return scale in ((), (1,), (1, 1), (weight[0], 1))


#: Scales that fp8 weights are multiplied by, by the end of their name.
_SCALES: dict[str, ScaleShape] = {"weight_scale_inv": _is_blockwise, "weight_scale": _is_per_row}


def check_plain(info: TensorInfo, what: str) -> None:
    """Raise unless the tensor is stored as plain floats of a believable size."""
    _check_size(info)
    if info.dtype not in PLAIN_FLOATS:
        raise RouterError(
            f"{info.file}: tensor '{info.name}' ({what}) is stored as {info.dtype}, "
            f"expected one of {', '.join(sorted(PLAIN_FLOATS))}.",
            code=STORAGE_UNKNOWN,
        )


def find_scale(info: TensorInfo, beside: tuple[str, ...]) -> str | None:
    """The scale that belongs to a router weight, None if it is stored as plain floats.

    Raises
    ------
    RouterError
        If the storage is not understood: another dtype, fp8 without scale, or a tensor in the
        router's module that nobody knows (it may change what the weight means).
    """
    _check_size(info)
    stem = info.name.rpartition(".")[0] + "."
    is_scaled = info.dtype in SCALED_FLOATS
    scales = [n for n in beside if is_scaled and n.removeprefix(stem) in _SCALES]
    unknown = [n for n in beside if n not in scales[:1]]
    if unknown:
        raise RouterError(
            f"{info.file}: tensor '{unknown[0]}' stands beside the router weight "
            f"'{info.name}' ({info.dtype}), and what it means is not known.",
            "It may be a scale of quantised storage; use the original weights.",
            code=STORAGE_UNKNOWN,
        )
    if not is_scaled:
        check_plain(info, "router weight")
        return None
    if not scales:
        raise RouterError(
            f"{info.file}: tensor '{info.name}' is stored as {info.dtype} without a scale, "
            f"expected {' or '.join(repr(stem + s) for s in _SCALES)}.",
            code=STORAGE_UNKNOWN,
        )
    return scales[0]


def block_size(settings: Settings) -> tuple[int, int]:
    """Rows and columns that share one scale."""
    setting = Setting(("quantization_config.weight_block_size",))
    if not settings.has(setting):
        return _BLOCK
    key, found = settings.get(setting)
    is_pair = isinstance(found, list) and len(found) == 2
    if not is_pair or not all(type(n) is int and n > 0 for n in found):
        raise RouterError(
            f"config.json: {key} is {str(found)[:60]}, expected two positive integers."
        )
    return found[0], found[1]


def check_scale(weight: TensorInfo, scale: TensorInfo, block: tuple[int, int]) -> None:
    """Raise unless the scale has a dtype and a shape that fit the weight."""
    _check_size(scale)
    fits = _scale_kind(scale.name)
    if scale.dtype not in PLAIN_FLOATS | {"F8_E8M0"} or not fits(scale.shape, weight.shape, block):
        raise RouterError(
            f"{scale.file}: tensor '{scale.name}' has shape {scale.shape} of {scale.dtype}, "
            f"which is no scale for a weight of shape {weight.shape} in blocks of {block}.",
            code=STORAGE_UNKNOWN,
        )


def decode_scaled(
    weight: Shaped[np.ndarray, "experts hidden"],
    scale: Shaped[np.ndarray, "*shape"],
    scale_name: str,
    block: tuple[int, int],
) -> Float32[np.ndarray, "experts hidden"]:
    """Weight times scale in float32, as the engines that read such files compute it."""
    factors: Float[np.ndarray, "*shape"] = upcast(scale).astype(np.float32)
    if _scale_kind(scale_name) is _is_blockwise:
        rows, columns = weight.shape
        # A block larger than the weight is as large as the weight.
        factors = factors.repeat(min(block[0], rows), axis=0)[:rows]
        factors = factors.repeat(min(block[1], columns), axis=1)[:, :columns]
    return upcast(weight) * factors


def _scale_kind(name: str) -> ScaleShape:
    return _SCALES[name.rpartition(".")[2]]


def _check_size(info: TensorInfo) -> None:
    if info.size_bytes > _MOST_BYTES:
        raise RouterError(
            f"{info.file}: tensor '{info.name}' has {info.size_bytes} bytes, too many for a router."
        )
