"""What the pickle of a torch archive may name, and the records that stand in for it.

The table is torch's list of safe globals (``torch.load(weights_only=True)``, torch 2.13) as far as
weights need it; what only accompanies them (settings, random states) is accepted and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moegeom.checkpoint.pickle.machine import Global, Record
from moegeom.core.limits import PICKLE_ARGUMENTS


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
