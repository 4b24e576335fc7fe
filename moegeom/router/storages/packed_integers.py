"""Integers of a few bits, packed into words: GPTQ, AWQ, and ``pack-quantized``.

GPTQ and AWQ mean weight[out, in] = scales[g, out] * (qweight[in, out] - zero[g, out]), exact in
float32 for scales in half precision, which engines round the product to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from moegeom.checkpoint.store import TensorInfo
from moegeom.core.shapes import Float32, Int, Int32, Shaped, UInt8
from moegeom.core.text import number_of
from moegeom.router.settings import Settings
from moegeom.router.storage import (
    FLOATS,
    RouterTensors,
    Stored,
    Values,
    expect_shape,
    flag,
    integer,
    look_up,
    matrix_shape,
    not_decoded,
    num_words,
    quantisation_tables,
    recipe_block,
    refuse,
    scale_floats,
    scheme,
    stored,
    unpack_rows,
    weight_recipes,
    word,
)

# --------------------------------------------------------------------------------------------- GPTQ
_GPTQ_BITS = (2, 3, 4, 8)

#: What is added to a stored zero point, by the name of the format.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}

#: The order of a kernel for GPUs, and a tensor that only files in it have.
_MARLIN, _OF_MARLIN = "marlin", "B"


def _packing(tensors: RouterTensors) -> str:
    """By what method words are packed: AutoRound writes as one of the others does."""
    method = word(tensors.settings, "quant_method") or ""
    if method.replace("_", "-").endswith("auto-round"):
        method = word(tensors.settings, "packing_format") or "auto_round:auto_gptq"
        method = method.removeprefix("auto_round:auto_")
    return method if any(tensors.dtype(part) for part in ("qweight", _OF_MARLIN)) else ""


def _with_own_numbers(tensors: RouterTensors) -> RouterTensors:
    """The same, with what AutoRound says of this module alone (``extra_config``)."""
    others = look_up(tensors.settings, "extra_config")[1]
    own = others.get(tensors.path) if isinstance(others, Mapping) else None
    if not isinstance(own, Mapping):
        return tensors
    _, table = next(quantisation_tables(tensors.settings.config, tensors.settings.roots))
    return replace(tensors, settings=Settings({"quantization_config": {**table, **own}}))


@scheme(lambda tensors: _packing(tensors) in ("gptq", _MARLIN, f"gptq_{_MARLIN}"))
def gptq(tensors: RouterTensors) -> Stored:
    """GPTQ: integers of 2, 3, 4 or 8 bits, packed along the input dimension; g = g_idx[in].

    ``qzeros`` holds the zero point minus one in ``gptq`` (v1) and the zero point in ``gptq_v2``.
    gptqmodel 7.7.0 ``nn_modules/qlinear/__init__.py`` (``PackableQuantLinear``) and
    ``utils/model.py`` (``convert_gptq_v1_to_v2_format_module``). AutoRound in the packing
    ``auto_round:auto_gptq`` is read as vLLM does (``AutoRoundConfig``), as v1.
    """
    tensors = _with_own_numbers(tensors)
    format_name, spelled = look_up(tensors.settings, "checkpoint_format", "format")
    is_marlin = spelled == _MARLIN or _MARLIN in _packing(tensors)
    if is_marlin or tensors.dtype(_OF_MARLIN) or flag(tensors.settings, "is_marlin_format"):
        raise refuse(
            next(iter(tensors.infos.values())),
            "is packed in the order of the Marlin kernel ('checkpoint_format' marlin).",
            "Save with 'checkpoint_format' gptq, of which engines make that order as they load, or "
            "leave routers out.",
        )
    parts = tensors.take(
        "GPTQ", {"qweight": {"I32"}, "qzeros": {"I32"}, "scales": FLOATS}, {"g_idx": {"I32"}}
    )
    qweight, scales = parts["qweight"], parts["scales"]
    offset = _ZERO_OFFSETS.get("gptq" if spelled is None else spelled)
    if offset is None:
        raise not_decoded(format_name, spelled, " or ".join(_ZERO_OFFSETS))
    bits, hidden = _bits_and_hidden(tensors)
    experts = matrix_shape(qweight)[1]
    groups = matrix_shape(scales)[0]
    expect_shape(scales, (groups, experts))
    expect_shape(parts["qzeros"], (groups, num_words(experts, bits)))
    in_order = None if "g_idx" in parts else _groups_in_order(tensors, hidden, groups)
    zero_is_half = flag(tensors.settings, "sym") and not _has_exceptions(tensors.settings)

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        group = values["g_idx"] if in_order is None else in_order
        if not ((group >= 0) & (group < groups)).all():
            raise refuse(
                parts["g_idx"],
                f"holds {group.min()} to {group.max()}, expected groups from 0 to {groups - 1}.",
            )
        packed_zeros = np.ascontiguousarray(values["qzeros"].T)
        zeros = unpack_rows(packed_zeros, bits)[:experts].astype(np.float32)
        if offset and zeros.max() == 2**bits - 1:
            # One more is 2^bits to some engines and 0 to others.
            raise refuse(
                parts["qzeros"],
                f"holds {2**bits - 1}, to which the format 'gptq' adds 1 beyond its {bits} bits.",
                "Quantise again with the format 'gptq_v2'.",
            )
        zeros += offset
        if zero_is_half and not (zeros == 2 ** (bits - 1)).all():
            raise refuse(
                parts["qzeros"],
                f"stands for zero points from {zeros.min():.0f} to {zeros.max():.0f}; config.json "
                f"says symmetric, which has {2 ** (bits - 1)}.",
                "Does 'checkpoint_format' (gptq or gptq_v2) belong to these tensors?",
            )
        factors = scale_floats(values["scales"]).T
        weight = unpack_rows(values["qweight"], bits).T.astype(np.float32, order="C")
        weight -= zeros[:, group]
        weight *= factors[:, group]
        return weight

    return stored(tensors, "gptq", f"int{bits} gptq", (experts, hidden), parts, decode)


def _bits_and_hidden(tensors: RouterTensors) -> tuple[int, int]:
    """Bits of an integer, and how many integers a column holds."""
    qweight = tensors.infos[tensors.key("qweight")]
    rows = matrix_shape(qweight)[0]
    claimed = integer(tensors.settings, "bits")
    g_idx = tensors.infos.get(tensors.key("g_idx"))
    if g_idx is None:
        if claimed not in _GPTQ_BITS:
            raise not_decoded("'quantization_config.bits'", claimed, f"one of {_GPTQ_BITS}")
        bits, hidden = claimed, rows * 32 // claimed
    else:
        hidden = g_idx.shape[0] if len(g_idx.shape) == 1 else 0
        fitting = [b for b in _GPTQ_BITS if hidden and rows * 32 == hidden * b]
        if not fitting:
            raise refuse(
                g_idx,
                f"has shape {g_idx.shape}, which fits no number of bits of {_GPTQ_BITS} for "
                f"'{qweight.name}' of shape {qweight.shape}.",
            )
        bits = fitting[0]
        if claimed not in (None, bits) and not _has_exceptions(tensors.settings):
            raise refuse(qweight, f"holds integers of {bits} bits; config.json says {claimed}.")
    if hidden * bits != rows * 32:
        raise refuse(
            qweight,
            f"has {number_of(rows, 'row')}, which hold no whole number of {bits}-bit integers.",
        )
    return bits, hidden


def _has_exceptions(settings: Settings) -> bool:
    """True where some modules have other settings (``dynamic`` of gptqmodel)."""
    return bool(look_up(settings, "dynamic")[1])


def _groups_in_order(tensors: RouterTensors, hidden: int, groups: int) -> Int[np.ndarray, "hidden"]:
    """The group of each input where ``g_idx`` is not stored."""
    scales = tensors.infos[tensors.key("scales")]
    if flag(tensors.settings, "desc_act"):
        raise refuse(scales, "is by activation order ('desc_act'), but there is no 'g_idx'.")
    size = integer(tensors.settings, "group_size")
    size = hidden if size == -1 else size or -(-hidden // groups)
    if -(-hidden // size) != groups:
        raise refuse(
            scales,
            f"holds {groups} groups, expected {-(-hidden // size)} of {size} for {hidden} inputs.",
        )
    return np.arange(hidden) // size


# ---------------------------------------------------------------------------------------------- AWQ
_AWQ_BITS = 4

#: Which of eight neighbouring outputs lies in each half byte of a word, lowest first.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@scheme(lambda tensors: _packing(tensors) == "awq")
def awq(tensors: RouterTensors) -> Stored:
    """AWQ: four-bit integers, packed along the output dimension in an order of their own; g =
    in // group size.

    AutoAWQ 0.2.9 ``modules/linear/gemm.py`` (``WQLinear_GEMM``) and ``utils/packing_utils.py``;
    compressed-tensors 0.20.0 ``entrypoints/convert/converters/autoawq.py``.
    """
    tensors = _with_own_numbers(tensors)
    for key in ("version", "checkpoint_format", "format"):
        name, version = look_up(tensors.settings, key)
        if version is not None and str(version).lower() != "gemm":
            raise not_decoded(name, version, "gemm")
    bits = integer(tensors.settings, "bits", "w_bit")
    if bits not in (None, _AWQ_BITS):
        raise not_decoded("'quantization_config.bits'", bits, str(_AWQ_BITS))
    parts = tensors.take("AWQ", {"qweight": {"I32"}, "qzeros": {"I32"}, "scales": FLOATS})
    hidden, words = matrix_shape(parts["qweight"])
    groups = matrix_shape(parts["scales"])[0]
    experts = words * len(_ORDER)
    expect_shape(parts["scales"], (groups, experts))
    expect_shape(parts["qzeros"], (groups, words))
    size = integer(tensors.settings, "group_size", "q_group_size")
    size = hidden if size == -1 else size or hidden // groups
    if groups * size != hidden:
        raise refuse(
            parts["scales"], f"holds {groups} groups of {size}; there are {hidden} inputs."
        )

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        by_group = _unpack(values["qweight"]).reshape(groups, size, experts).astype(np.float32)
        by_group -= _unpack(values["qzeros"])[:, np.newaxis]
        by_group *= scale_floats(values["scales"])[:, np.newaxis]
        return np.ascontiguousarray(by_group.reshape(hidden, experts).T)

    return stored(tensors, "awq", "int4 awq", (experts, hidden), parts, decode)


def _unpack(words: Int32[np.ndarray, "rows words"]) -> UInt8[np.ndarray, "rows experts"]:
    """The integers of each row, eight to a word."""
    halves = np.empty((*words.shape, len(_ORDER)), np.uint8)
    for place, output in enumerate(_ORDER):
        halves[:, :, output] = words.view(np.uint32) >> np.uint32(_AWQ_BITS * place) & np.uint32(
            0xF
        )
    return halves.reshape(words.shape[0], -1)


# ------------------------------------------------------------------------------- compressed-tensors
_PACK_BITS = (2, 4, 8)


@dataclass(frozen=True)
class _Reading:
    """How a recipe of the config reads the tensors; ``group`` is the number of columns."""

    bits: int
    group: int
    is_symmetric: bool


@scheme(lambda tensors: tensors.dtype("weight_packed") == "I32")
def pack_quantized(tensors: RouterTensors) -> Stored:
    """The ``pack-quantized`` format of compressed-tensors: 2, 4 or 8 bits by row or group.

    weight = (stored - 2^(bits - 1) - zero point) * scale, in float32; the library rounds to the
    dtype of the scale. The zero point is packed along the rows, with the same offset (``int8``
    without it in early files). ``weight_g_idx`` names the group of each column, -1 for none named.

    compressed-tensors 0.20.0 ``compressors/pack_quantized``; ``weight_g_idx`` by 0.9.0
    ``quantization/lifecycle/forward.py``. Its versions pack other numbers of bits differently.
    """
    parts = tensors.take(
        "pack-quantized integers",
        {"weight_packed": {"I32"}, "weight_scale": FLOATS, "weight_shape": {"I32", "I64"}},
        {"weight_zero_point": {"I32", "I8"}, "weight_g_idx": {"I32", "I64"}},
    )
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    rows = matrix_shape(packed)[0]
    expect_shape(parts["weight_shape"], (2,))
    stated = tensors.read(tensors.key("weight_shape")) if tensors.read else None
    reading, columns = _find_reading(tensors, packed, scale, stated)
    bits, shape = reading.bits, (rows, columns)
    if "weight_g_idx" in parts:
        expect_shape(parts["weight_g_idx"], (columns,))
    zero = parts.get("weight_zero_point")
    if zero is None and not reading.is_symmetric:
        raise refuse(packed, "has no zero point, and config.json says that it is not symmetric.")
    groups = 1 if reading.group == columns else -(-columns // reading.group)
    if zero is not None and zero.dtype == "I32":
        expect_shape(zero, (num_words(rows, bits), groups))
    elif zero is not None:
        expect_shape(zero, scale.shape)

    def decode(values: Values) -> Float32[np.ndarray, "experts hidden"]:
        if values["weight_shape"].tolist() != [rows, columns]:
            raise refuse(
                parts["weight_shape"],
                f"says {values['weight_shape'].tolist()}; '{packed.name}' holds {[rows, columns]}.",
            )
        words = np.ascontiguousarray(values["weight_packed"].T)
        integers = unpack_rows(words, bits)[:columns].T.astype(np.float32)
        half = np.float32(2 ** (bits - 1))
        group = np.arange(columns) // reading.group
        if "weight_g_idx" in parts:
            group = _named_groups(parts["weight_g_idx"], values["weight_g_idx"], groups, group)
        if zero is None:
            integers -= half
        elif zero.dtype == "I8":
            table = values["weight_zero_point"].astype(np.float32).reshape(-1, groups) + half
            integers -= table[:, group]
        else:
            integers -= unpack_rows(values["weight_zero_point"], bits)[:rows][:, group]
        return integers * scale_floats(values["weight_scale"]).reshape(-1, groups)[:, group]

    return stored(tensors, "pack_quantized", f"int{bits} pack-quantized", shape, parts, decode)


def _find_reading(
    tensors: RouterTensors,
    packed: TensorInfo,
    scale: TensorInfo,
    stated: Shaped[np.ndarray, "2"] | None,
) -> tuple[_Reading, int]:
    """The one recipe of the config that fits the shapes, and the number of columns."""
    rows, words = matrix_shape(packed)
    readings: set[tuple[_Reading, int]] = set()
    recipes = weight_recipes(tensors.settings)
    for recipe in recipes:
        bits = recipe.get("num_bits")
        if type(bits) is not int or bits not in _PACK_BITS or recipe.get("type", "int") != "int":
            continue
        columns = words * 32 // bits if stated is None else int(stated[1])
        if columns < 1 or num_words(columns, bits) != words:
            continue
        block = recipe_block(recipe, columns) or (1, columns)
        group = min(block[1], columns)
        by_row = [(rows,), (), (1,)] if group == columns else []
        if scale.shape in ((rows, -(-columns // group)), *by_row):
            readings.add((_Reading(bits, group, recipe.get("symmetric", True) is True), columns))
    if len(readings) != 1:
        raise refuse(
            packed,
            f"has shape {packed.shape} and a scale of shape {scale.shape}, which "
            f"{'several' if readings else 'none'} of the {len(recipes)} 'config_groups' of "
            f"config.json fit, expected one with 'num_bits' of {_PACK_BITS}.",
        )
    return readings.pop()


def _named_groups(
    info: TensorInfo,
    named: Int[np.ndarray, "hidden"],
    groups: int,
    in_order: Int[np.ndarray, "hidden"],
) -> Int[np.ndarray, "hidden"]:
    """The group of each column."""
    if (named == -1).all():
        return in_order
    if not ((named >= 0) & (named < groups)).all():
        raise refuse(
            info, f"holds {named.min()} to {named.max()}, expected groups from 0 to {groups - 1}."
        )
    return named
