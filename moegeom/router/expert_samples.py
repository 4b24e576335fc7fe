"""What headers and a few bytes say of the experts beside routers: widths, first rows, hashes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, as_array, numpy_dtype, upcast
from moegeom.checkpoint.store import TensorStore
from moegeom.core.digest import digest_of
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.router import Router
from moegeom.core.shapes import Float
from moegeom.geometry.number_formats import NUMBER_FORMATS
from moegeom.router.expert_tensors import CONFIG_ROOTS, LAYER, SHARED, ExpertTensors
from moegeom.router.family import SOME, Setting
from moegeom.router.plain_names import plain_name, with_plain_names
from moegeom.router.settings import Settings

# ------------------------------------------------------------------------------------------- hashes
#: Bytes read of one tensor of each expert.
HASHED_BYTES = 512

#: Tensors that are tried until one tells all experts apart.
_TRIES = 3

#: ``experts.<number>.<rest>``: one tensor for each expert.
_NUMBERED = re.compile(r"experts\.([0-9]{1,5})\.(.+)")


@dataclass(frozen=True)
class ExpertSamples:
    """Hashes by router and expert; None for a router whose experts are not found."""

    digests: Mapping[str, Sequence[str] | None]
    bytes_read: int


def read_expert_samples(store: TensorStore, routers: Sequence[Router]) -> ExpertSamples:
    """The first 512 bytes of one tensor of each expert, hashed: enough to know it again.

    Experts are the tensors ``experts.<number>.*`` beside the router, or one tensor ``experts.*``
    with an entry for each expert. The same tensor is taken for every expert: the first by name that
    tells them all apart; None when none of the first three does.
    """
    before = store.bytes_read
    store = with_plain_names(store)
    by_folder = experts_by_folder(store)
    digests = {router.name: _samples(store, router, by_folder) for router in routers}
    return ExpertSamples(digests, store.bytes_read - before)


def experts_by_folder(store: TensorStore) -> dict[str, list[str]]:
    """Names with ``experts.`` in them, sorted, by what stands before that."""
    by_folder: dict[str, list[str]] = {}
    for name in sorted(store.names()):
        folder, separator, _ = name.partition("experts.")
        if separator:
            by_folder.setdefault(folder, []).append(name)
    return by_folder


def folder_of(router: Router) -> str:
    """``model.layers.3.mlp.`` for the router ``model.layers.3.mlp.gate.weight``."""
    return plain_name(router.provenance.tensors[0]).rpartition(".")[0].rpartition(".")[0] + "."


def expert_leaves(folder: str, names: Sequence[str]) -> dict[str, dict[int, str]]:
    """Tensors of numbered experts: what stands behind the number, and the name by number."""
    leaves: dict[str, dict[int, str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name.removeprefix(folder))
        if match:
            leaves.setdefault(match[2], {})[int(match[1])] = name
    return leaves


def _samples(
    store: TensorStore, router: Router, by_folder: Mapping[str, Sequence[str]]
) -> list[str] | None:
    folder = folder_of(router)
    names = by_folder.get(folder, ())
    try:
        return _numbered(store, router, folder, names) or _stacked(store, router, folder, names)
    except CheckpointError:
        return None  # experts in shards that are not there: nothing is known of them


def _numbered(
    store: TensorStore, router: Router, folder: str, names: Sequence[str]
) -> list[str] | None:
    leaves = expert_leaves(folder, names)
    experts = set(range(router.num_experts))
    whole = sorted(leaf for leaf, by_expert in leaves.items() if set(by_expert) == experts)
    for leaf in whole[:_TRIES]:
        by_expert = leaves[leaf]
        digests = [_digest(store, by_expert[expert], 0, 1) for expert in sorted(experts)]
        if len(set(digests)) == len(digests):
            return digests
    return None


def _stacked(
    store: TensorStore, router: Router, folder: str, names: Sequence[str]
) -> list[str] | None:
    experts = router.num_experts
    shapes = {name: store.info(name).shape for name in names}
    stacked = [n for n, shape in shapes.items() if shape[:1] == (experts,) and len(shape) > 1]
    # matrices before vectors: biases may all be zero
    for name in sorted(stacked, key=lambda n: -len(shapes[n]))[:_TRIES]:
        digests = [_digest(store, name, expert, experts) for expert in range(experts)]
        if len(set(digests)) == experts:
            return digests
    return None


def _digest(store: TensorStore, name: str, part: int, num_parts: int) -> str:
    """Hash of the beginning of one of ``num_parts`` equal parts of a tensor."""
    size = store.info(name).size_bytes // num_parts
    raw = store.read_bytes(name, part * size, min(size, HASHED_BYTES))
    return digest_of(bytes(raw))


# ------------------------------------------------------------------------------------------- widths
#: Keys of a config that hold the width of one expert, those of experts alone first.
_KEYS = (
    "moe_intermediate_size",
    "expert_feed_forward_length",
    "moe_ffn_hidden_size",
    "expert_ffn_hidden_size",
    "expert_intermediate_size",
    "moe_inter_dim",
    "ffn_hidden_size",
    "intermediate_size",
    "feed_forward_length",
)

#: Numbers beside packed weights, and what is packed: their shapes are not those of the matrix.
_NO_MATRIX = re.compile(
    r"scale|zero|bias|blocks|packed|absmax|g_idx|lora|quant_map|qweight|router|norm"
)

#: Formats that hold a number in each element.
_PLAIN = re.compile(r"(F|BF|I8|F8_)\w*", re.IGNORECASE)


@dataclass(frozen=True)
class ExpertShape:
    """Neurons of one expert, and of all shared experts together; ``origin`` says by what.

    ``is_gated`` is None where no tensor shows it.
    """

    width: int
    is_gated: bool | None
    shared_width: int
    origin: str


def expert_shape(
    store: TensorStore,
    router: Router,
    by_folder: Mapping[str, Sequence[str]],
    option: int | None = None,
) -> ExpertShape:
    """The width of the experts of a router: ``option``, or that of the config, as shapes confirm.

    ``store`` and ``by_folder`` have plain names (``experts_by_folder``).

    Raises
    ------
    RouterError
        Where config and shapes contradict each other, or neither says it.
    """
    matrices = dict(_matrices(store, router, by_folder))
    others = sorted({other for other in matrices.values() if other > 0})
    key, width = ("--width", option) if option is not None else _in_config(store.config, router)
    if width is None and not others:
        raise RouterError(
            f"{store.label}: neither the config nor a tensor says how wide the experts of router "
            f"{router.name} are.",
            "Say it: --width N.",
        )
    if width is None:
        width, origin = others[0], f"shape of {_first(matrices)}"
    elif not others:
        origin = f"{key}; no tensor of an expert to check it by"
    else:
        origin = f"{key}, as {_first(matrices)} has it"
    if others and (others[0] != width or set(others) - {width, 2 * width}):
        raise RouterError(
            f"{store.label}: {key} says experts of {width:,} neurons, and {_first(matrices)} has "
            f"{others[0]:,} beside inputs of {router.hidden_size:,}.",
            "One of them is of another model; --width N takes the place of the config.",
        )
    is_fused = 2 * width in others
    is_gated = None if not matrices else is_fused or len(matrices) >= 3
    return ExpertShape(width, is_gated, _shared(store, router), origin)


def open_headers(
    store: TensorStore, routers: Iterable[Router], by_folder: Mapping[str, Sequence[str]]
) -> None:
    """What ``expert_shape`` of these routers reads, at the same time where that saves waiting."""
    names = [
        name
        for router in routers
        for name in (*_named_experts(router, by_folder)[0], *_shared_names(store, router))
    ]
    # of files that are not there nothing is known
    with contextlib.suppress(CheckpointError):
        store.prepare(names)


def _first(matrices: Mapping[str, int]) -> str:
    return min(matrices, key=lambda name: (matrices[name], name))


def _in_config(config: Mapping[str, Any], router: Router) -> tuple[str, int | None]:
    settings = Settings(config, CONFIG_ROOTS).at(router.layer)
    for key in _KEYS:
        if settings.has(setting := Setting((key,), range=SOME)):
            return f"config.json: '{key}'", settings.integer(setting)
    return "", None


def _matrices(
    store: TensorStore, router: Router, by_folder: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, int]]:
    """Matrices of one expert, each with the size of the side that is not that of the inputs."""
    folder = folder_of(router)
    names, is_stacked = _named_experts(router, by_folder)
    for name in names or _of_layer(store, router):
        if not _NO_MATRIX.search(name.removeprefix(folder)):
            other = _other_side(store, name, router.hidden_size, router.num_experts, is_stacked)
            if other:
                yield name, other


def _named_experts(
    router: Router, by_folder: Mapping[str, Sequence[str]]
) -> tuple[Sequence[str], bool]:
    """Tensors of the first expert; or those of all experts, and True."""
    folder = folder_of(router)
    names = by_folder.get(folder, ())
    one = [those[min(those)] for those in expert_leaves(folder, names).values()]
    return (one, False) if one else (names, True)


def _of_layer(store: TensorStore, router: Router) -> list[str]:
    """All tensors of the layer: experts may be one tensor under a name of its own."""
    layer = LAYER.match(plain_name(router.provenance.tensors[0]))
    if layer is None:
        return []
    return sorted(name for name in store.names() if name.startswith(layer[0]))


def _other_side(
    store: TensorStore, name: str, hidden: int, experts: int, is_stacked: bool
) -> int | None:
    """None for what is no matrix of the inputs, and for headers that are not there."""
    try:
        info = store.info(name)
    except CheckpointError:
        return None
    shape = info.shape
    if not _PLAIN.fullmatch(info.dtype):
        return None
    if is_stacked and len(shape) == 2 and hidden in shape and "experts." in name:
        other = shape[1] if shape[0] == hidden else shape[0]  # one below the other
        return other // experts if other % experts == 0 else None
    if is_stacked:
        if len(shape) != 3 or shape[0] != experts:
            return None
        shape = shape[1:]
    if len(shape) != 2 or hidden not in shape:
        return None
    return shape[0] if shape[1] == hidden else shape[1]


def _shared(store: TensorStore, router: Router) -> int:
    """Neurons of all shared experts of the layer together; 0 where there are none."""
    others = (
        _other_side(store, name, router.hidden_size, 0, is_stacked=False)
        for name in _shared_names(store, router)
    )
    return min((other for other in others if other), default=0)


def _shared_names(store: TensorStore, router: Router) -> list[str]:
    return [
        name
        for name in _of_layer(store, router)
        if SHARED.search(name) and not _NO_MATRIX.search(name)
    ]


# --------------------------------------------------------------------------------------- first rows
#: Bytes read of each expert, one half of its first matrix and one of its last.
ROW_BYTES = 2**16

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
    taken = max(1, min(rows, ROW_BYTES // 2 // row_bytes))
    if tensor.names is None:
        spans = [(one.name, e * one.size_bytes) for e in range(tensors.num_experts)]
    else:
        spans = [(next(iter(names.values())), 0) for _, names in sorted(tensor.names.items())]
    unit = NUMBER_FORMATS[_FORMATS[one.dtype]].unit
    return Beginning(tensors, matrix, unit, one.dtype, (taken, columns), spans)
