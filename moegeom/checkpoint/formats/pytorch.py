"""PyTorch: a file of ``torch.save``, a folder with an index, or a folder of files.

A file is an archive: a pickle that describes tensors, and an entry for each storage. What a pickle
may name is torch's list of safe globals (``torch.load(weights_only=True)``, torch 2.13) as far as
weights need it; what only accompanies them (settings, random states) is accepted and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import as_array, numpy_dtype
from moegeom.checkpoint.pickled import Global, Record, unpickle
from moegeom.checkpoint.ranks import open_files
from moegeom.checkpoint.reading import AGAIN, Location, RangeFile
from moegeom.checkpoint.shards import (
    FileShard,
    Naming,
    ShardedStore,
    choose,
    config_file,
    lazy,
    open_index,
)
from moegeom.checkpoint.store import Format, TensorInfo, is_count
from moegeom.checkpoint.zipped import Archive, ZipEntry, read_archive
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import PICKLE_ARGUMENTS, TORCH_PICKLE_BYTES, TORCH_SPAN_BYTES, TORCH_STEPS
from moegeom.core.shapes import Shaped


# ------------------------------------------------------------------------------- globals of pickles
@dataclass(frozen=True)
class TorchDtype:
    """A dtype, spelled as in safetensors where that has it, and the bytes of an element."""

    name: str
    size: int


@dataclass(frozen=True)
class StorageType:
    """A class of storages; an untyped one counts bytes."""

    dtype: TorchDtype


@dataclass(frozen=True, eq=False)
class Storage:
    """A persistent id: the entry of the archive, and how many elements it says that this has."""

    __slots__ = ("key", "length", "type")

    type: Any
    key: Any
    length: Any


@dataclass(frozen=True, eq=False)
class PickledTensor:
    """A tensor as the pickle describes it; nothing is checked before it is asked for."""

    __slots__ = ("dtype", "flags", "offset", "shape", "storage", "stride")

    storage: Any
    offset: Any
    shape: Any
    stride: Any
    dtype: Any
    flags: Any


@dataclass(frozen=True, eq=False)
class UnreadableTensor:
    """A tensor that is no array of numbers in a storage."""

    __slots__ = ("kind",)

    kind: str


class Dropped(Record):
    """An object that no tensor needs."""

    __slots__ = ()


def storage_of(persistent_id: Any) -> Storage:
    """The storage of a persistent id ``("storage", type, key, location, length)``."""
    if type(persistent_id) is not tuple:  # unpacking anything else may take as long as it is large
        raise TypeError
    _, kind, key, _, length = persistent_id
    return Storage(kind, key, length)


def _tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    _: Any = None,
    __: Any = None,
    flags: Any = None,
) -> PickledTensor:
    return PickledTensor(storage, offset, shape, stride, None, flags)


def _tensor_of_dtype(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    _: Any,
    __: Any,
    dtype: Any,
    flags: Any = None,
) -> PickledTensor:
    return PickledTensor(storage, offset, shape, stride, dtype, flags)


def _unreadable(kind: str) -> Callable[..., UnreadableTensor]:
    return lambda *_: UnreadableTensor(kind)


def _first(first: Any, *_: Any) -> Any:
    return first


def _of_type(function: Any, _: Any, arguments: Any, __: Any) -> Any:
    """A tensor with attributes, which are dropped; what makes it must be one of the makers."""
    is_maker = type(function) is Global and function.name in _MAKERS
    # Unpacking takes as long as what is unpacked is large, which a file may ask for many times.
    if not is_maker or type(arguments) is not tuple or len(arguments) > PICKLE_ARGUMENTS:
        raise TypeError
    return function.stand_in(*arguments)


def empty_dict(*_: Any) -> dict[Any, Any]:
    """A dict, to be filled by opcodes; nothing of what a file gives is hashed or walked through."""
    return {}


_DTYPES = {
    "bool": TorchDtype("BOOL", 1),
    "uint8": TorchDtype("U8", 1),
    "int8": TorchDtype("I8", 1),
    "uint16": TorchDtype("U16", 2),
    "int16": TorchDtype("I16", 2),
    "uint32": TorchDtype("U32", 4),
    "int32": TorchDtype("I32", 4),
    "uint64": TorchDtype("U64", 8),
    "int64": TorchDtype("I64", 8),
    "float16": TorchDtype("F16", 2),
    "bfloat16": TorchDtype("BF16", 2),
    "float32": TorchDtype("F32", 4),
    "float64": TorchDtype("F64", 8),
    "complex32": TorchDtype("complex32", 4),
    "complex64": TorchDtype("C64", 8),
    "complex128": TorchDtype("complex128", 16),
    "float8_e4m3fn": TorchDtype("F8_E4M3", 1),
    "float8_e5m2": TorchDtype("F8_E5M2", 1),
    "float8_e4m3fnuz": TorchDtype("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": TorchDtype("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": TorchDtype("F8_E8M0", 1),
    "float4_e2m1fn_x2": TorchDtype("float4_e2m1fn_x2", 1),
    "qint8": TorchDtype("qint8", 1),
    "quint8": TorchDtype("quint8", 1),
    "qint32": TorchDtype("qint32", 4),
    "quint4x2": TorchDtype("quint4x2", 1),
    "quint2x4": TorchDtype("quint2x4", 1),
}

_STORAGES = {
    "torch.BoolStorage": "bool",
    "torch.ByteStorage": "uint8",
    "torch.CharStorage": "int8",
    "torch.ShortStorage": "int16",
    "torch.IntStorage": "int32",
    "torch.LongStorage": "int64",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.ComplexFloatStorage": "complex64",
    "torch.ComplexDoubleStorage": "complex128",
    "torch.QInt8Storage": "qint8",
    "torch.QUInt8Storage": "quint8",
    "torch.QInt32Storage": "qint32",
    "torch.QUInt4x2Storage": "quint4x2",
    "torch.QUInt2x4Storage": "quint2x4",
    "torch.UntypedStorage": "uint8",
    "torch.storage.UntypedStorage": "uint8",
}

_MAKERS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _first,
    "torch._utils._rebuild_device_tensor_from_numpy": _unreadable("tensor kept as a NumPy array"),
    "torch._utils._rebuild_meta_tensor_no_storage": _unreadable("meta tensor without values"),
    "torch._utils._rebuild_nested_tensor": _unreadable("nested tensor"),
    "torch._utils._rebuild_qtensor": _unreadable("quantised tensor"),
    "torch._utils._rebuild_sparse_tensor": _unreadable("sparse tensor"),
    "torch._utils._rebuild_wrapper_subclass": _unreadable("tensor of a subclass"),
}

#: Classes and functions whose results no tensor needs.
_DROPPED = """
    __builtin__.bytearray __builtin__.bytes __builtin__.complex __builtin__.dict __builtin__.float
    __builtin__.frozenset __builtin__.int __builtin__.list __builtin__.set
    _codecs.encode argparse.Namespace builtins.bytearray builtins.complex builtins.dict
    builtins.float builtins.frozenset builtins.int builtins.list builtins.set
    collections.Counter numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct
    numpy.core.multiarray.scalar numpy._core.multiarray.scalar numpy.dtype numpy.ndarray
    pathlib.Path pathlib.PosixPath pathlib.WindowsPath torch.Tensor torch.device
    torch.nn.parameter.Buffer torch.nn.parameter.Parameter torch.per_channel_affine
    torch.per_channel_affine_float_qparams torch.per_tensor_affine torch.serialization._get_layout
""".split()

ALLOWED: Mapping[str, Any] = {
    **dict.fromkeys(_DROPPED, Dropped),
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
    **{name: StorageType(_DTYPES[dtype]) for name, dtype in _STORAGES.items()},
    **_MAKERS,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Size": _first,
    "collections.OrderedDict": empty_dict,
    "collections.defaultdict": empty_dict,
}


# -------------------------------------------------------------------------------- runs of Megatron
#: The file of a rank in a save without torch.distributed: model, optimiser and arguments.
_OF_RANK = "model_optim_rng.pt"

_Plain = bool | int | float | str | None


class _Arguments(Record):
    """What stands in for ``argparse.Namespace``."""

    __slots__ = ()


class Anything(Mapping[str, Any]):
    """Stand-ins for every global: arguments hold enums and functions, which nobody needs."""

    def __getitem__(self, name: str) -> Any:
        if name in ("argparse.Namespace", "types.SimpleNamespace"):
            return _Arguments
        return ALLOWED.get(name, Dropped)

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(ALLOWED)

    def __len__(self) -> int:
        return len(ALLOWED)


def config_of_run(root: Any, where: str) -> Mapping[str, Any]:
    """The plain arguments of the run in what was saved, as a config.

    ``model_type`` is ``megatron-sigmoid``, ``megatron-softmax``, or ``megatron-softmax-first``
    where the softmax comes before the choice; ``gain_offset`` is 1 for norms whose gain is stored
    less 1.
    """
    namespace = root.get("args") if isinstance(root, dict) else None
    arguments = namespace.state if isinstance(namespace, _Arguments) else None
    pairs = arguments.items() if isinstance(arguments, dict) else ()
    plain = {key: value for key, value in pairs if isinstance(key, str) and _is_plain(value)}
    if not plain:
        raise CheckpointError(
            f"{where}: holds no arguments of the run.",
            "Describe the routers with --family FILE or --router-pattern.",
        )
    score = plain.get("moe_router_score_function") or "softmax"
    is_first = score == "softmax" and plain.get("moe_router_pre_softmax") is True
    return {
        **plain,
        "model_type": f"megatron-{score}{'-first' if is_first else ''}",
        "gain_offset": 1.0 if plain.get("apply_layernorm_1p") is True else 0.0,
    }


def _is_plain(value: Any) -> bool:
    entries = value if isinstance(value, list) and len(value) <= 10_000 else [value]
    return all(isinstance(entry, _Plain) for entry in entries)


# ----------------------------------------------------------------------------------------- archives
#: What torch.save wrote first before version 1.6, when its files were no archives.
_OLD_MAGIC = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")

_RESAVE = "Write it again with a current torch: torch.save(torch.load(file), new_file)."


@dataclass(frozen=True)
class TensorView:
    """A tensor in the file: bytes ``[offset, offset + span)`` hold its elements at ``strides``."""

    dtype: str
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    span: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item

    @property
    def is_contiguous(self) -> bool:
        """True when the range holds the elements in order, and nothing else."""
        expected = self.item
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return self.size_bytes == 0
            expected *= size
        return True


@dataclass(frozen=True)
class TorchArchive:
    """An archive and what its pickle describes; ``root`` is whatever was saved."""

    archive: Archive
    folder: str
    root: Any

    def view(self, tensor: PickledTensor | UnreadableTensor, where: str) -> TensorView:
        """Where a tensor lies, inside its storage; ``where`` begins the sentence of an error."""
        if isinstance(tensor, UnreadableTensor):
            raise CheckpointError(
                f"{where} is a {tensor.kind}, which cannot be read.",
                "Save it as a plain dense tensor.",
            )
        if isinstance(tensor.flags, dict) and any(tensor.flags.values()):
            raise CheckpointError(
                f"{where} is stored conjugated or negated, which cannot be read.",
                "Save tensor.resolve_conj().resolve_neg().",
            )
        dtype, name, entry, length = self._storage(tensor, where)
        offset = _count(tensor.offset, f"{where} has storage offset")
        shape = _counts(tensor.shape, f"{where} has shape")
        strides = _counts(tensor.stride, f"{where} has stride")
        if len(strides) != len(shape):
            raise CheckpointError(f"{where} has shape {shape} and stride {strides}.")
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        first, span = (0, 0) if 0 in shape else (offset, last + 1 - offset)
        if first + span > length:
            raise CheckpointError(
                f"{where} needs element {last} of a storage that has {length}.", AGAIN
            )
        if math.prod(shape) * dtype.size > entry.size:
            raise CheckpointError(
                f"{where} has shape {shape} and its storage {entry.size} bytes: it repeats them.",
                "Save tensor.contiguous().",
            )
        view = TensorView(
            dtype.name,
            dtype.size,
            shape,
            tuple(step * dtype.size for step in strides),
            self.archive.start(name) + first * dtype.size,
            span * dtype.size,
        )
        if not view.is_contiguous and view.span > TORCH_SPAN_BYTES:
            raise CheckpointError(
                f"{where} is spread over {view.span} bytes, more than the {TORCH_SPAN_BYTES} "
                "allowed.",
                "Save tensor.contiguous().",
            )
        return view

    def _storage(self, tensor: PickledTensor, where: str) -> tuple[TorchDtype, str, ZipEntry, int]:
        """Dtype, entry and elements of a tensor's storage."""
        storage = tensor.storage
        if not isinstance(storage, Storage) or not isinstance(storage.type, StorageType):
            raise CheckpointError(f"{where} has no storage.")
        dtype = storage.type.dtype if tensor.dtype is None else tensor.dtype
        if not isinstance(dtype, TorchDtype):
            raise CheckpointError(f"{where} has a dtype that is none.")
        name = f"{self.folder}/data/{storage.key}" if type(storage.key) is str else ""
        entry = self.archive.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{where} has a storage that is not in the archive.")
        num_bytes = _count(storage.length, f"{where} has a storage of") * storage.type.dtype.size
        if num_bytes > entry.size:
            raise CheckpointError(
                f"{where} has a storage of {num_bytes} bytes, and the archive {entry.size} of them."
            )
        return dtype, name, entry, num_bytes // dtype.size

    def read_bytes(self, view: TensorView, start: int, size: int) -> bytes:
        """``size`` bytes of a tensor, in the order of its elements, from byte ``start`` of it."""
        length = max(min(size, view.size_bytes - start), 0)
        if view.is_contiguous:
            return self.archive.file.read(view.offset + start, length)
        raw = self.archive.file.read(view.offset, view.span)
        # frombuffer wants whole elements only; their kind does not matter here
        items = np.frombuffer(raw, np.dtype((np.void, view.item)))
        strided = np.lib.stride_tricks.as_strided(items, view.shape, view.strides, writeable=False)
        return strided.tobytes()[start : start + length]

    def read(self, view: TensorView, where: str) -> Shaped[np.ndarray, "*shape"]:
        """The tensor in the dtype it is stored in."""
        dtype = numpy_dtype(view.dtype, where)
        return as_array(self.read_bytes(view, 0, view.size_bytes), dtype, view.shape, where)


def read_torch_archive(file: RangeFile, allowed: Mapping[str, Any] = ALLOWED) -> TorchArchive:
    """What one file holds; reads the zip directory and the pickle, and no tensor.

    Raises
    ------
    CheckpointError
        If the file is no archive, one that torch.save did not write, or refused by ``unpickle``.
    """
    if _OLD_MAGIC in file.read(0, min(file.size_bytes(), 32)):
        raise CheckpointError(
            f"{file.label}: was written by a torch before 1.6, whose files are no archives.",
            _RESAVE,
        )
    archive = read_archive(file)
    folder = folder_of_pickle(archive)
    if any(
        name.startswith((f"{folder}/code/", f"{folder}/constants.pkl")) for name in archive.entries
    ):
        raise CheckpointError(
            f"{file.label}: is a TorchScript archive.",
            "Save its weights: torch.save(torch.jit.load(file).state_dict(), new_file).",
        )
    order = f"{folder}/byteorder"
    if order in archive.entries and archive.read(order, 16) != b"little":
        raise CheckpointError(f"{file.label}: is not little-endian.", _RESAVE)
    raw = archive.read(f"{folder}/data.pkl", TORCH_PICKLE_BYTES)
    return TorchArchive(archive, folder, unpickle(raw, file.label, allowed, storage_of))


def folder_of_pickle(archive: Archive) -> str:
    """The folder of an archive in which ``data.pkl`` and the tensors lie.

    Raises
    ------
    CheckpointError
        If there is not one such folder.
    """
    roots = [name for name in archive.entries if name.endswith("/data.pkl")]
    roots = [name for name in roots if name.count("/") == 1]
    if len(roots) != 1:
        raise CheckpointError(
            f"{archive.file.label}: holds {len(roots)} pickles of data, expected the one of "
            "torch.save."
        )
    return roots[0].removesuffix("/data.pkl")


def _count(number: Any, what: str) -> int:
    if not is_count(number):
        raise CheckpointError(f"{what} {_short(number)}, expected a non-negative 64-bit integer.")
    return number


def _counts(numbers: Any, what: str) -> tuple[int, ...]:
    if type(numbers) is not tuple or len(numbers) > limits.DIMENSIONS:
        raise CheckpointError(
            f"{what} {_short(numbers)}, expected at most {limits.DIMENSIONS} integers."
        )
    return tuple(_count(n, what) for n in numbers)


def _short(item: Any) -> str:
    """An integer as it stands, and the kind of anything else, which may have any size."""
    is_small = type(item) is int and abs(item) < 10**30
    return str(item) if is_small else f"a {type(item).__name__}"


# -------------------------------------------------------------------------------------------- files
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_INDEX_SUFFIX = ".bin.index.json"
_NAMING = Naming(_INDEX_SUFFIX, "pytorch_model.bin.index.json", "pytorch_model.bin")

#: What trainers write beside the weights with the same suffixes.
_NO_WEIGHTS = (
    "training_args.bin", "optimizer*", "*optim_states.pt", "scheduler*", "scaler*", "rng_state*",
    "random_states*", "trainer_state*",
)  # fmt: skip

#: Files with such suffixes that are no archives: of OpenVINO and MLC.
_FOREIGN = ("openvino*.bin", "params_shard_*.bin")

#: The files of DeepSpeed ZeRO-3, each of which has a part of every tensor.
_PARTITIONED = "zero_pp_rank_*_model_states.pt"

#: A folder that holds one of these is a checkpoint of another format.
_OTHER_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", ".metadata", "*.distcp", "*.gguf")


class PytorchFile(FileShard):
    """One file; its directory and its pickle are read on first use."""

    @lazy
    def content(self) -> TorchArchive:
        is_of_run = self.label.endswith(_OF_RANK)
        return read_torch_archive(self.file, Anything() if is_of_run else ALLOWED)

    @lazy
    def tensors(self) -> Mapping[str, Any]:
        return flatten(self.content.root, self.label)

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        view = self._view(name)
        return TensorInfo(name, view.dtype, view.shape, self.label, view.offset, view.size_bytes)

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        return self.content.read(self._view(name), self._where(name))

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        return self.content.read_bytes(self._view(name), start, size)

    def _view(self, name: str) -> TensorView:
        if name not in self.tensors:
            raise CheckpointError(
                f"{self._where(name)} is not in this file, which holds {len(self.tensors)}."
            )
        return self.content.view(self.tensors[name], self._where(name))

    def _where(self, name: str) -> str:
        return f"{self.label}: tensor {name!r}"


def recognises(location: Location) -> bool:
    """True for a file of ``torch.save``, an index of such files, or a folder of either."""
    if location.file is not None:
        is_foreign = any(fnmatchcase(location.file, pattern) for pattern in _FOREIGN)
        return location.file.endswith((*_SUFFIXES, _INDEX_SUFFIX)) and not is_foreign
    files = location.files
    if any(fnmatchcase(name, pattern) for name in files for pattern in _OTHER_WEIGHTS):
        return False
    return any(name.endswith(_INDEX_SUFFIX) for name in files) or bool(_weights(files))


def _weights(files: Sequence[str]) -> list[str]:
    """The files that hold weights, by their names."""

    def holds_weights(name: str) -> bool:
        plain = name.rpartition("/")[2]
        return not any(fnmatchcase(plain, pattern) for pattern in (*_NO_WEIGHTS, *_FOREIGN))

    return [name for name in files if name.endswith(_SUFFIXES) and holds_weights(name)]


def open_pytorch(location: Location) -> ShardedStore:
    """The checkpoint at a location that ``recognises`` accepts."""
    folder = location.folder
    for name in location.files:
        if fnmatchcase(name.rpartition("/")[2], _PARTITIONED):
            raise CheckpointError(
                f"{location.label}: holds files of DeepSpeed ZeRO-3 ({name}), each with a part of "
                "every tensor.",
                "Join them with the script beside the folder (python zero_to_fp32.py . OUT), and "
                "pass OUT.",
            )
    chosen = choose(location, _weights(location.files), _NAMING)
    if chosen.index:
        return open_index(folder, chosen, lambda name: PytorchFile(folder.file(name)))
    shards = {name: PytorchFile(folder.file(name)) for name in chosen.files}
    config = _config_of_ranks(shards)
    if config and config_file(folder) is None:
        folder.parsed[""] = config  # what counts where no file of its own says it
    return open_files(folder, shards)


def _config_of_ranks(shards: Mapping[str, PytorchFile]) -> Mapping[str, Any]:
    """The arguments of the run in the files of its ranks, each of which holds all layers; empty
    where the files are no such ones.
    """
    name, first = next(iter(shards.items()))
    root = first.content.root if name.endswith(_OF_RANK) else None
    if not isinstance(root, dict) or not isinstance(root.get("args"), _Arguments):
        return {}
    config = config_of_run(root, name)
    count = config.get("pipeline_model_parallel_size")
    if count not in (None, 1):
        raise CheckpointError(
            f"{name}: the run cut its layers over {str(count)[:20]} pipeline ranks, and each file "
            "counts its own from 0.",
            "Convert the save with Megatron-LM: --ckpt-convert-format torch_dist.",
        )
    return config


FORMAT = Format("pytorch", recognises, open_pytorch)


Tensor = PickledTensor | UnreadableTensor

_STEPS_PER_NAME = 100


def flatten(root: Any, where: str) -> Mapping[str, Tensor]:
    """The tensors of whatever was saved, in its order, by name; all else is left out.

    Raises
    ------
    CheckpointError
        If ``root`` is no dict or list, two tensors have one name, or there is no end of them.
    """
    if isinstance(root, Tensor):
        raise CheckpointError(
            f"{where}: holds a single tensor without a name, expected a state dict.",
            "Save a dict: torch.save({'name': tensor}, file).",
        )
    if not isinstance(root, dict | list | tuple):
        raise CheckpointError(f"{where}: holds a {type(root).__name__}, expected a state dict.")
    tensors: dict[str, Tensor] = {}
    waiting: list[tuple[str, Any]] = [("", root)]
    left = TORCH_STEPS
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Tensor):
            name = path[1:]
            if name in tensors:
                raise CheckpointError(f"{where}: holds two tensors named {name!r}.")
            tensors[name] = value
            continue
        inner = _items(value)
        left -= len(value) + len(inner) * (_STEPS_PER_NAME + len(path))
        left -= sum(len(str(key)) for key, _ in inner)
        if left < 0:
            raise CheckpointError(f"{where}: holds too many tensors, or dicts inside themselves.")
        waiting.extend((f"{path}.{key}", item) for key, item in reversed(inner))
    return tensors


def _items(value: Any) -> list[tuple[str | int, Any]]:
    """Items that are tensors or may hold some, under keys that can be part of a name."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    kinds = (PickledTensor, UnreadableTensor, dict, list, tuple)
    return [
        (key, item) for key, item in pairs if isinstance(item, kinds) and isinstance(key, str | int)
    ]
