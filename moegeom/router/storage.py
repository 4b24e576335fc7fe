"""How a router weight is stored, and the exact way back to floats.

The parts that schemes share: tensors by the names that they have beside a ``weight``, what
``config.json`` says about quantisation, how codes are packed, which part of a weight a scale is of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from itertools import islice
from typing import Any, Final

import ml_dtypes
import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, pairs_of_floats, upcast
from moegeom.checkpoint.shards import CONFIGS, FILES_BESIDE, QUANTISATION_PLACES, QuantisationPlace
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.documents import value_at
from moegeom.core.errors import PART_MISSING, STORAGE_UNKNOWN, RouterError
from moegeom.core.limits import (
    QUANTISED_MODULES,
    QUANTISER_GROUPS,
    QUANTISER_PATTERN_LENGTH,
    QUANTISER_STEPS,
    ROUTER_BYTES,
    ROUTER_PACKED_VALUES,
)
from moegeom.core.registry import Rooms, record_of_function
from moegeom.core.shapes import Float, Float32, Int32, Shaped, UInt8
from moegeom.core.text import quoted
from moegeom.router.family import Setting
from moegeom.router.plain_names import ADAPTER
from moegeom.router.settings import Settings

# ------------------------------------------------------------------------------------------ tensors
Values = Mapping[str, Shaped[np.ndarray, "..."]]
Read = Callable[[str], Shaped[np.ndarray, "..."]]

#: Scales and zero points of activations: they change what a layer computes, not its weight.
_OF_ACTIVATIONS = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale"}
)

#: Dtypes of a scale that is no power of two by definition.
FLOATS = PLAIN_FLOATS

#: Dtypes of a power of two that is stored as its exponent alone.
EXPONENTS = frozenset({"U8", "F8_E8M0"})


@dataclass(frozen=True)
class RouterTensors:
    """Tensors by the part of their name behind the module's path.

    A *part* is that name for a router whose plain weight is called ``weight``; ``leaf`` is what
    this one's is called. ``read`` reads a small tensor on which a shape depends.
    """

    infos: Mapping[str, TensorInfo]
    settings: Settings
    router: str
    leaf: str
    read: Read | None

    def key(self, part: str) -> str:
        """What a part is called here."""
        if part.startswith("weight"):
            return self.leaf + part.removeprefix("weight")
        stem = self.leaf.rpartition(".")[0]
        return f"{stem}.{part}" if stem else part

    def name(self, part: str) -> str:
        """The whole name that a part has or would have."""
        key, info = next(iter(self.infos.items()))
        return info.name.removesuffix(key) + self.key(part)

    @property
    def path(self) -> str:
        """That of the module, as configs spell it."""
        return self.name("weight").rpartition(".")[0]

    def dtype(self, part: str) -> str:
        """Stored dtype of a part; empty when there is no such tensor."""
        info = self.infos.get(self.key(part))
        return info.dtype if info else ""

    def take(
        self,
        storage: str,
        needed: Mapping[str, Collection[str]],
        optional: Mapping[str, Collection[str]] | None = None,
    ) -> dict[str, TensorInfo]:
        """The parts of a scheme, each with the dtypes that it may have.

        Raises
        ------
        RouterError
            If one is missing, has another dtype, or another tensor stands beside them.
        """
        allowed = {**needed, **(optional or {})}
        present = (self.infos.get(self.key(part)) for part in needed)
        first = next(info for info in present if info)
        for part in needed:
            if self.key(part) not in self.infos:
                raise refuse(first, f"is stored as {storage} without '{self.name(part)}'.")
        ignored = {self.key(part) for part in _OF_ACTIVATIONS}
        unknown = self.infos.keys() - {self.key(part) for part in allowed} - ignored
        if unknown:
            raise stands_beside(self.infos[min(unknown)], first)
        parts = {p: self.infos[self.key(p)] for p in allowed if self.key(p) in self.infos}
        for part, info in parts.items():
            if info.dtype not in allowed[part]:
                expected = " or ".join(sorted(allowed[part]))
                raise refuse(info, f"of {storage} is stored as {info.dtype}, expected {expected}.")
        return parts


def refuse(info: TensorInfo, why: str, hint: str = "") -> RouterError:
    """The error for storage that is not understood; ``why`` continues its sentence."""
    return RouterError(
        f"{info.file}: tensor '{info.name}' {why}",
        hint or "Use the original weights of this router.",
        code=STORAGE_UNKNOWN,
    )


_IF_A_BIAS = (
    "If it is a bias, say which: --router-pattern with --selection-bias or --logit-bias, or a "
    "--family FILE that names it."
)


def stands_beside(unknown: TensorInfo, weight: TensorInfo) -> RouterError:
    """The error for a tensor that nobody knows: it may change what the weight means."""
    return refuse(
        unknown,
        f"stands beside the router weight '{weight.name}' ({weight.dtype}), "
        "and what it means is not known.",
        _IF_A_BIAS
        if unknown.name.endswith("bias")
        else "It may be a scale of quantised storage; use the original weights.",
    )


def expect_shape(info: TensorInfo, *expected: tuple[int, ...]) -> None:
    """Raise unless the tensor has one of the shapes."""
    if info.shape not in expected:
        listed = " or ".join(map(str, dict.fromkeys(expected)))
        raise refuse(info, f"has shape {info.shape}, expected {listed}.")


def matrix_shape(info: TensorInfo) -> tuple[int, int]:
    """Rows and columns of a tensor that must be a matrix with elements."""
    if len(info.shape) != 2 or 0 in info.shape:
        raise refuse(info, f"has shape {info.shape}, expected a matrix (quantised weights are).")
    return info.shape[0], info.shape[1]


# -------------------------------------------------------------------------------------- config.json
#: What is named where there is no table.
_USUAL = QUANTISATION_PLACES[0]


def look_up(settings: Settings, *keys: str) -> tuple[str, Any]:
    """How to call the first of the keys that is given, and its value; None when none is. Of several
    tables the one that most engines prefer counts.
    """
    place, table = next(quantisation_tables(settings.config, settings.roots), (_USUAL, {}))
    # Its lists are not by layer.
    own = Settings(table)
    setting = Setting(keys)
    if not own.has(setting):
        return f"'{place.name}.{keys[0]}'", None
    name, value = own.get(setting)
    return f"'{place.name}.{name.strip(chr(39))}'", value


def mlx_entry(settings: Settings, path: str) -> tuple[str, Mapping[str, Any]]:
    """How MLX stores the module at a path: where the config says so, and what; the table's own
    entries where it says nothing of the module. Empty without a table of MLX.
    """
    for place, table in quantisation_tables(settings.config, settings.roots):
        if _is_of_mlx(place, table):
            entry = table.get(path)
            if isinstance(entry, Mapping):
                return f"{place.name}.{path}", entry
            return place.name, table
    return "quantization", {}


def integer(settings: Settings, *keys: str) -> int | None:
    """An integer that is -1 or positive; None when it is not given."""
    name, value = look_up(settings, *keys)
    if value is not None and (type(value) is not int or not (value == -1 or 0 < value < 2**31)):
        raise wrong(name, value, "a positive integer or -1")
    return value


def flag(settings: Settings, key: str) -> bool | None:
    """True or false; None when it is not given."""
    name, value = look_up(settings, key)
    if value is not None and not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def word(settings: Settings, *keys: str) -> str | None:
    """A name in small letters; None when it is not given."""
    name, value = look_up(settings, *keys)
    if value is not None and not isinstance(value, str):
        raise wrong(name, value, "a name")
    return value.lower() if value is not None else None


def pair(setting: tuple[str, Any]) -> tuple[int, int] | None:
    """Two positive integers; None when they are not given."""
    name, value = setting
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(n) is int and n > 0 for n in value):
        raise wrong(name, value, "two positive integers")
    return value[0], value[1]


def weight_recipes(settings: Settings) -> list[Mapping[str, Any]]:
    """How compressed-tensors quantised weights: the ``weights`` table of each config group."""
    name, groups = look_up(settings, "config_groups")
    if groups is None:
        return []
    if not isinstance(groups, Mapping) or len(groups) > QUANTISER_GROUPS:
        raise wrong(name, groups, f"a table of at most {QUANTISER_GROUPS} groups")
    tables = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    return [table for table in tables if isinstance(table, Mapping)]


def recipe_block(recipe: Mapping[str, Any], columns: int) -> tuple[int, int] | None:
    """Rows and columns that share a scale by a recipe; None where it is by row or by tensor."""
    structure = recipe.get("block_structure")
    if isinstance(structure, str) and len(structure) < 20:  # "128x128" in early files
        sides = structure.split("x")
        structure = [int(n) for n in sides if n.isascii() and n.isdigit()]
    block = pair(("'block_structure'", structure))
    size = recipe.get("group_size")
    if block is not None or size is None:
        return block
    if type(size) is not int or not (size == -1 or 0 < size < 2**31):
        raise wrong("'group_size'", size, "a positive integer or -1")
    return 1, columns if size == -1 else size


def wrong(name: str, value: Any, expected: str) -> RouterError:
    """The error for a value that makes no sense."""
    return RouterError(f"config.json: {name} is {str(value)[:60]}, expected {expected}.")


def not_decoded(name: str, value: Any, variant: str) -> RouterError:
    """The error for a value that makes sense and is not decoded."""
    return RouterError(
        f"config.json: {name} is {str(value)[:60]}; of such routers only {variant} is decoded.",
        "Use the original weights of this router.",
        code=STORAGE_UNKNOWN,
    )


# -------------------------------------------------------------------------------------------- codes
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
#: Both numbers of a byte, that of the low half first.
_E2M1_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)


def unpack_e2m1(packed: Shaped[np.ndarray, "rows bytes"]) -> Float32[np.ndarray, "rows columns"]:
    """The numbers of each row, twice as many as it has bytes."""
    raw = np.ascontiguousarray(packed).view(np.uint8)
    return pairs_of_floats(raw.reshape(-1), _E2M1_PAIRS).reshape(len(raw), 2 * raw.shape[1])


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


def scaled(
    floats: Float32[np.ndarray, "rows columns"], scale: Float32[np.ndarray, "*stored"], block: Block
) -> Float32[np.ndarray, "rows columns"]:
    """Each number times that of its block, written over it."""
    (rows, columns), (height, width) = floats.shape, block
    if rows % height or columns % width:
        floats *= spread(scale, (rows, columns), block)
    else:
        table = scale.reshape(rows // height, 1, columns // width, 1)
        floats.reshape(len(table), height, -1, width)[...] *= table
    return floats


def scale_floats(scale: Shaped[np.ndarray, "*stored"]) -> Float32[np.ndarray, "*stored"]:
    """A scale as float32; a byte is the exponent of a power of two (E8M0: 2^(byte - 127))."""
    if scale.dtype == np.uint8:
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    return upcast(scale).astype(np.float32)


# ------------------------------------------------------------------------------------------ schemes
@dataclass(frozen=True)
class Stored:
    """One router weight before its values: what to read, and how to make floats of it.

    ``dtype`` is for people; ``shape`` is that of the decoded weight. ``decode`` takes the values of
    ``tensors`` by the names that ``find_storage`` was given and returns float32 (float64 where the
    weight is stored so); it raises ``RouterError`` where values contradict each other.
    """

    scheme: str
    dtype: str
    shape: tuple[int, ...]
    tensors: tuple[TensorInfo, ...]
    decode: Callable[[Mapping[str, np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Scheme:
    """One way to store a weight: how to decode it, and how to see that a router is stored so."""

    name: str
    text: str
    open: Callable[[RouterTensors], Stored]
    recognises: Callable[[RouterTensors], bool]


#: Above the function that opens a router that is stored so; with how to see that it is.
scheme: Final = record_of_function(Scheme)


SCHEMES = Rooms("storage scheme", "moegeom.router.storages", Scheme)


def find_storage(
    tensors: Mapping[str, TensorInfo],
    settings: Settings,
    router: str,
    leaf: str = "weight",
    read: Read | None = None,
) -> Stored:
    """How a router weight is stored.

    Parameters
    ----------
    tensors
        All tensors of the router's module by the part of their name behind its path, without
        those that its family knows as something else.
    settings
        The config, whose ``quantization_config`` counts.
    router
        What to call the router in a message.
    leaf
        What the weight is called where it is stored as plain floats.
    read
        Reads one of ``tensors`` by the same name. Needed where the shape stands in a tensor: by
        bitsandbytes, and by pack-quantized weights whose rows do not fill whole words.

    Raises
    ------
    RouterError
        If the storage is not understood: a dtype, a shape, a scale that is missing, a version, or
        a tensor that nobody knows (it may change what the weight means).
    """
    for info in tensors.values():
        _check_size(info)
    module = RouterTensors(tensors, settings, router, leaf, read)
    for scheme in SCHEMES.all():
        if scheme.recognises(module):
            return scheme.open(module)
    raise _not_recognised(module)


def stored(
    tensors: RouterTensors,
    scheme: str,
    dtype: str,
    shape: tuple[int, int],
    parts: Mapping[str, TensorInfo],
    decode: Callable[[Values], Float32[np.ndarray, "experts hidden"]],
) -> Stored:
    """The record of a quantised weight, whose decoded size is believable.

    Raises
    ------
    RouterError
        If it is not.
    """
    first = next(iter(parts.values()))
    if math.prod(shape) > ROUTER_PACKED_VALUES:
        raise refuse(first, f"decodes to shape {shape}, too many values for a router.")

    def by_name(values: Mapping[str, Shaped[np.ndarray, "..."]]) -> Float[np.ndarray, "..."]:
        # Scales may be NaN or infinite; what comes of it is looked at with all other weights.
        with np.errstate(all="ignore"):
            return decode({part: values[tensors.key(part)] for part in parts})

    return Stored(scheme, dtype, shape, tuple(parts.values()), by_name)


def check_plain(info: TensorInfo, what: str) -> None:
    """Raise unless the tensor is stored as plain floats of a believable size."""
    _check_size(info)
    if info.dtype not in PLAIN_FLOATS:
        raise RouterError(
            f"{info.file}: tensor '{info.name}' ({what}) is stored as {info.dtype}, "
            f"expected one of {', '.join(sorted(PLAIN_FLOATS))}.",
            code=STORAGE_UNKNOWN,
        )


#: Numbers beside a packed weight, which is not there.
_BESIDE = re.compile(r"scale|zero|absmax|idx|bias|shape|packed|map|blocks")


def _not_recognised(tensors: RouterTensors) -> RouterError:
    """The error for a module that no scheme recognises."""
    hint = f"Known storage: {', '.join(SCHEMES.names())}; otherwise use the original weights."
    weight = tensors.infos.get(tensors.leaf)
    if weight is None:
        parts = sorted(tensors.infos.values(), key=lambda info: info.name)
        listed = ", ".join(f"'{info.name}' ({info.dtype})" for info in parts[:8])
        more = ", ..." if len(parts) > 8 else ""
        name = tensors.name("weight") if parts else tensors.leaf
        if any(ADAPTER.search(key) for key in tensors.infos):
            return RouterError(
                f"{tensors.router}: an adapter stands in its module: {listed}{more}; the router is "
                "the base weight plus B A.",
                "Merge the adapter into the model (peft: merge_and_unload), and open that.",
                code=STORAGE_UNKNOWN,
            )
        is_plain = all(len(i.shape) == 2 and i.dtype in PLAIN_FLOATS for i in parts)
        if len(parts) == 1 and is_plain and not _BESIDE.search(next(iter(tensors.infos))):
            return RouterError(
                f"{tensors.router}: its weight is stored as '{parts[0].name}' ({parts[0].dtype}, "
                f"{parts[0].shape[0]} x {parts[0].shape[1]}), and loaders read '{name}': they "
                "leave the router at its initial values.",
                "Rename the tensor in every layer.",
                code=PART_MISSING,
            )
        method = str(look_up(tensors.settings, "quant_method")[1])[:60]
        return RouterError(
            f"{tensors.router}: there is no tensor '{name}', only {listed or 'none'}{more}, "
            f"which is no storage known for the quantisation method {method}.",
            hint,
            code=STORAGE_UNKNOWN,
        )
    beside = sorted(tensors.infos.keys() - {tensors.leaf})
    if beside:
        return stands_beside(tensors.infos[beside[0]], weight)
    return RouterError(
        f"{weight.file}: tensor '{weight.name}' (router weight) is stored as {weight.dtype}, "
        f"expected one of {', '.join(sorted(PLAIN_FLOATS))}.",
        hint,
        code=STORAGE_UNKNOWN,
    )


def _check_size(info: TensorInfo) -> None:
    if info.size_bytes > ROUTER_BYTES:
        raise RouterError(
            f"{info.file}: tensor '{info.name}' has {info.size_bytes} bytes, too many for a router."
        )


# ----------------------------------------------------------------------- modules that are quantised
#: Where configs hold a table, beside where the family has its settings.
_ROOTS = ("", "text_config", "llm_config", "language_config")

#: Under these keys quantisers list modules that they leave alone (compressed-tensors, transformers,
#: vLLM, ModelOpt, Quark, HQQ, bitsandbytes).
_EXCLUSIONS = (
    "ignore",
    "modules_to_not_convert",
    "ignored_layers",
    "exclude_modules",
    "exclude",
    "skip_modules",
    "llm_int8_skip_modules",
)

#: Every linear module, as compressed-tensors writes it; and what stands before an expression.
_LINEAR, _EXPRESSION = "Linear", "re:"

#: Of ModelOpt: each layer has a method of its own.
_MIXED = "MIXED_PRECISION"

_ESCAPED, _REPEAT = re.compile(r"\\.", re.DOTALL), re.compile(r"[*+?{]")

#: A group that is repeated, or one of a kind that may hide that it is: a comment, or flags.
_NOT_TRIED = re.compile(r"\)[*+{]|\(\?[^:=!<]")

#: Steps that a pattern takes to compile, and to be tried once.
_TO_COMPILE, _TO_TRY = 10_000, 50


def quantisation_tables(
    config: Mapping[str, Any], roots: Sequence[str] = ()
) -> Iterator[tuple[QuantisationPlace, Mapping[str, Any]]]:
    """Every table that an engine may read, the one that most prefer first.

    ``roots`` are the paths of the config where its family has its settings.
    """
    beside = config.get(FILES_BESIDE)
    files = beside if isinstance(beside, Mapping) else {}
    has_table: set[str] = set()
    for place in QUANTISATION_PLACES:
        inner = dict.fromkeys((*_ROOTS, *roots)) if place.file == CONFIGS[0] else ("",)
        holder = config if place.file == CONFIGS[0] else files.get(place.file)
        for root in inner:
            path = f"{root}.{place.path}".strip(".")
            table = value_at(holder, path) if path else holder
            # a file that holds a table further in is no table itself
            if isinstance(table, Mapping) and table and place.file not in has_table:
                yield place, table
                if place.file != CONFIGS[0]:
                    has_table.add(place.file)


@dataclass(frozen=True)
class Quantisation:
    """What a table asks to be quantised.

    ``targets`` are kinds or names of modules, "Linear" for all linear ones; ``excluded`` names,
    globs, or regular expressions behind ``re:``. ``key`` is the list that was read, or the one that
    is usual there. One that is ``by_path`` covers what it names, and what is stored so (MLX).
    """

    method: str
    key: str
    targets: tuple[str, ...]
    excluded: tuple[str, ...]
    by_path: bool = False

    @classmethod
    def of(cls, place: QuantisationPlace, table: Mapping[str, Any]) -> Quantisation | None:
        """That of a table; None where it asks for none, as one of a cache alone."""
        if place.by_tensor:
            return cls(
                quoted(str(table.get("model_quant_type", "?")), 40),
                place.name,
                tuple(_described(table)),
                (),
            )
        if _is_of_mlx(place, table):
            built = {
                name for name, entry in table.items() if isinstance(entry, Mapping) or entry is True
            }
            left = tuple(name for name, entry in table.items() if entry is False)
            return cls("'mlx'", place.name, tuple(built), left, by_path=True)
        method = table.get("quant_method") or table.get("quant_algo")
        if method is None and "quant_algo" in table:
            return None
        keys = [key for key in _EXCLUSIONS if isinstance(table.get(key), Sequence)]
        listed = (entry for key in keys for entry in table[key])
        excluded = [*islice(listed, QUANTISED_MODULES), *_left_alone(table)]
        key = keys[0] if keys else place.usual
        return cls(
            method=quoted(str(method or "?"), 40),
            key=f"{place.name}.{key}" if place.path else f"{place.name}: {key}",
            targets=tuple(_targets(table)) or (_LINEAR,),
            excluded=tuple(entry for entry in excluded if isinstance(entry, str) and entry),
        )

    def covers(
        self, modules: Sequence[str], not_linear: Collection[str] = (), are_packed: bool = False
    ) -> list[bool | None]:
        """For each module of these names, whether it is to be quantised; None where a pattern would
        have to be tried that may take for ever, or is none. All are linear but for ``not_linear``,
        which only a target of their own name means.
        """
        excluded = _matches(self.excluded, modules)
        is_target = _matches(self.targets, modules)
        everywhere = _LINEAR in self.targets or (self.by_path and are_packed)
        return [
            None
            if excluded[name] is None
            else not excluded[name] and ((everywhere and name not in not_linear) or is_target[name])
            for name in modules
        ]


def _is_of_mlx(place: QuantisationPlace, table: Mapping[str, Any]) -> bool:
    """Whether MLX wrote a table: it names no method, which all others do in the config."""
    has_method = any(key in table for key in ("quant_method", "quant_algo"))
    return place.file == CONFIGS[0] and not has_method and {"bits", "group_size"} <= table.keys()


def _targets(table: Mapping[str, Any]) -> Iterator[str]:
    """Targets of all groups, as compressed-tensors writes them, or layers, as ModelOpt does."""
    groups = table.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        for target in targets if isinstance(targets, list) else ():
            if isinstance(target, str):
                yield target
    layers = table.get("quantized_layers")
    if str(table.get("quant_algo", _MIXED)).upper() == _MIXED and isinstance(layers, Mapping):
        yield from layers


def _described(table: Mapping[str, Any]) -> Iterator[str]:
    """Modules whose weight ModelSlim describes as quantised."""
    for name, kind in table.items():
        if isinstance(kind, str) and name.endswith(".weight") and kind.upper() != "FLOAT":
            yield name.removesuffix(".weight")


def _left_alone(table: Mapping[str, Any]) -> Iterator[str]:
    """Modules that a table by name leaves in 16 bits (AutoRound) or takes out (GPTQModel)."""
    extra, dynamic = table.get("extra_config"), table.get("dynamic")
    for name, entry in extra.items() if isinstance(extra, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("bits") in (16, 32):
            yield name
    for name in dynamic if isinstance(dynamic, Mapping) else ():
        if str(name).startswith("-:"):
            yield f"re:{name.removeprefix('-:')}"


def _matches(entries: Sequence[str], modules: Sequence[str]) -> dict[str, bool | None]:
    """Whether an entry of a list means each module; None where that cannot be told.

    A name means a module that has it anywhere between dots, or that it ends with.
    """
    patterns = [entry for entry in entries if entry.startswith(_EXPRESSION) or "*" in entry]
    names = set(entries) - set(patterns)
    lengths = sorted({len(module) for module in modules})
    ends = {entry[-n:] for entry in names for n in lengths if entry[-n - 1 : -n] == "."}
    matches = {m: m in ends or not names.isdisjoint(_parts(m)) for m in modules}
    steps, is_open = 0.0, False
    for pattern in patterns:
        left = [module for module in modules if not matches[module]]
        cost = _cost(pattern, left)
        is_dear = steps + cost > QUANTISER_STEPS
        expression = None if is_dear else _expression(pattern)
        is_open |= expression is None
        if is_dear and cost <= QUANTISER_STEPS:  # those before it were too many
            break
        if expression is not None:
            steps += cost
            matches.update((module, True) for module in left if expression.match(module))
    return {
        module: is_match or (None if is_open else False) for module, is_match in matches.items()
    }


def _parts(module: str) -> Iterator[str]:
    """Every run of the words between the dots of a name."""
    words = module.split(".")
    for first in range(len(words)):
        for last in range(first, len(words)):
            yield ".".join(words[first : last + 1])


def _cost(pattern: str, modules: Sequence[str]) -> float:
    """Steps of trying a pattern on modules, about: places of its repeats, and ways to choose."""
    if not pattern.startswith(_EXPRESSION):
        return _TO_COMPILE + _TO_TRY * len(modules) * (1 + pattern.count("*"))
    bare = _ESCAPED.sub("x", pattern)
    if len(pattern) > QUANTISER_PATTERN_LENGTH or _NOT_TRIED.search(bare):
        return math.inf
    repeats, choices = len(_REPEAT.findall(bare)), bare.count("|")
    longest = max(map(len, modules), default=1)
    ways = 2.0**choices * longest**repeats / math.factorial(repeats)
    return _TO_COMPILE + len(modules) * (_TO_TRY + ways)


def _expression(pattern: str) -> re.Pattern[str] | None:
    """A glob, anywhere behind a dot, or an expression; None for one that is broken."""
    if not pattern.startswith(_EXPRESSION):
        return re.compile(rf"(?:.*\.)?{translate(pattern)}", re.DOTALL)
    try:
        return re.compile(pattern.removeprefix(_EXPRESSION))
    except (re.error, OverflowError, RecursionError):
        return None
