"""Oracles: torch.save writes, torch.load says what the numbers are; the pickle module writes, and
reads what is harmless; it also shows what is not.
"""

import argparse
import collections
import copyreg
import gc
import io
import json
import os
import pickle
import pickletools
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_tensor_v2
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from moegeom.checkpoint import pickled
from moegeom.checkpoint.formats import pytorch
from moegeom.checkpoint.formats.pytorch import FORMAT, PickledTensor, Storage, UnreadableTensor
from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.pickled import Global, OddKey, unpickle
from moegeom.checkpoint.reading import ByteRange, Location, local
from moegeom.core.errors import CheckpointError
from moegeom.router.load import load_routers
from tests.unit.checkpoint.conftest import refusal, why

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"


def _saved(value: Any, folder: Path, name: str = _SINGLE, **options: Any) -> Path:
    torch.save(value, folder / name, **options)
    return folder


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


_EVERY_16_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
_EVERY_8_BITS = torch.arange(256, dtype=torch.int32).to(torch.uint8)
_MATRIX = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))

_DTYPES = {
    "BOOL": torch.tensor([True, False, True]),
    "U8": _EVERY_8_BITS,
    "I8": _EVERY_8_BITS.view(torch.int8),
    "I16": _EVERY_16_BITS,
    "U16": _EVERY_16_BITS.view(torch.uint16),
    "I32": torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32),
    "U32": torch.tensor([0, 2**32 - 1], dtype=torch.uint32),
    "I64": torch.tensor([-(2**63), 2**63 - 1]),
    "U64": torch.tensor([0, 2**63], dtype=torch.uint64),
    "F16": _EVERY_16_BITS.view(torch.float16),
    "BF16": _EVERY_16_BITS.view(torch.bfloat16),
    "F32": _MATRIX,
    "F64": _MATRIX.double(),
    "C64": _MATRIX.to(torch.complex64),
    "F8_E4M3": _EVERY_8_BITS.view(torch.float8_e4m3fn),
    "F8_E5M2": _EVERY_8_BITS.view(torch.float8_e5m2),
    "F8_E4M3FNUZ": _EVERY_8_BITS.view(torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": _EVERY_8_BITS.view(torch.float8_e5m2fnuz),
    "F8_E8M0": _EVERY_8_BITS.view(torch.float8_e8m0fnu),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_dtype_has_the_bits_that_torch_reads(protocol, tmp_path):
    own = {dtype: tensor.clone() for dtype, tensor in _DTYPES.items()}
    _saved(own, tmp_path, pickle_protocol=protocol)
    expected = torch.load(tmp_path / _SINGLE, weights_only=protocol == 2)
    store = open_checkpoint(tmp_path)
    for dtype, tensor in expected.items():
        values = store.read(dtype)
        assert store.info(dtype).dtype == dtype
        assert store.info(dtype).shape == values.shape == tuple(tensor.shape)
        assert values.tobytes() == _bytes(tensor), dtype


_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda t: t,
    "transposed": lambda t: t.T,
    "rows": lambda t: t[2:4],
    "a row": lambda t: t[3],
    "a column": lambda t: t[:, 5],
    "columns": lambda t: t[1:, 2:5],
    "every second": lambda t: t[::2, 1::3],
    "one number": lambda t: t[4, 5],
    "no rows": lambda t: t[6:],
    "four axes": lambda t: t.reshape(2, 3, 4, 2).permute(3, 0, 2, 1),
    "a row of one": lambda t: t[:1].T[:, :],
    "one on top of the other": lambda t: t.as_strided((3, 4), (2, 1), 5),
    "expanded": lambda t: t[1, 2:3].expand(4, 3),
}


def test_views_have_the_numbers_that_torch_reads(tmp_path):
    _saved({name: view(_MATRIX) for name, view in _VIEWS.items()}, tmp_path)
    store = open_checkpoint(tmp_path)
    for name, tensor in torch.load(tmp_path / _SINGLE).items():
        np.testing.assert_array_equal(store.read(name), tensor.numpy(), name, strict=True)
        raw = tensor.numpy().tobytes()
        size = len(raw)
        assert store.info(name).size_bytes == size
        for begin, length in ((0, 8), (4, 12), (0, size), (max(size - 4, 0), 100), (size, 4)):
            assert store.read_bytes(name, begin, length) == raw[begin : begin + length], name


def test_parameters_and_buffers_with_attributes_are_tensors(tmp_path):
    marked: Any = torch.nn.Parameter(torch.ones(2))
    marked.tensor_model_parallel = True  # as Megatron marks its own
    plain: Any = torch.full((2,), 3.0)
    plain.note = "as torch has it"
    state = {"p": torch.nn.Parameter(_MATRIX), "b": torch.nn.Buffer(torch.zeros(1))}
    state |= {"m": marked, "t": plain}
    store = open_checkpoint(_saved(state, tmp_path))
    for name, tensor in state.items():
        assert store.read(name).tobytes() == _bytes(tensor), name


def test_a_nested_state_dict_is_named_by_its_keys_as_torch_flattens_it(tmp_path):
    module = torch.nn.Linear(2, 3)
    module(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.step()
    checkpoint = {
        "model": {"a.b": torch.ones(1), "c": module.state_dict()},
        "optimizer": optimizer.state_dict(),
        "list": [torch.ones(3), {"x": torch.ones(4)}],
        "step": 7, "lr": 0.1, "name": "text", "flags": {1, 2}, "none": None, "raw": b"bytes",
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "shape": torch.Size([1, 2]),
        "rng": np.random.default_rng(0).bit_generator.state, "array": np.ones(3), "path": Path("a"),
        ("odd", "key"): torch.ones(5),
    }  # fmt: skip
    store = open_checkpoint(_saved(checkpoint, tmp_path))
    del checkpoint["odd", "key"]  # torch names by texts alone
    flat, _ = flatten_state_dict(checkpoint)
    expected = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    assert list(store.names()) == list(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(store.read(name), tensor.numpy(), name, strict=True)


def _csr() -> torch.Tensor:
    return torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], (2, 2))


def _quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


_UNREADABLE = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "is a sparse tensor, which cannot be read."),
    "compressed": (_csr, "is a sparse tensor, which cannot be read."),
    "quantised": (_quantised, "is a quantised tensor, which cannot be read."),
    "meta": (lambda: torch.ones(2, device="meta"), "is a meta tensor without values, which"),
    "conjugate": (lambda: torch.ones(2, dtype=torch.complex64).conj(), "is stored conjugated or"),
    "complex128": (lambda: torch.ones(2, dtype=torch.complex128), "has dtype 'complex128', which"),
    "expanded": (lambda: torch.ones(1).expand(1000), "has shape (1000,) and its storage 4 bytes"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize", "ignore:TypedStorage")
@pytest.mark.parametrize(("make", "sentence"), _UNREADABLE.values(), ids=_UNREADABLE)
def test_a_tensor_that_is_no_plain_array_is_refused_only_when_it_is_read(make, sentence, tmp_path):
    store = open_checkpoint(_saved({"a": torch.ones(2), "t": make()}, tmp_path))
    assert "t" in store.names()
    assert store.read("a").tolist() == [1.0, 1.0]
    assert why(tmp_path).startswith(f"{_SINGLE}: tensor 't' {sentence}")


def _sharded(folder: Path) -> Path:
    torch.save({"a": torch.arange(4.0), "b": torch.ones(2)}, folder / "m-1.bin")
    torch.save({"c": torch.full((2, 2), 7, dtype=torch.int32)}, folder / "m-2.bin")
    index = {"weight_map": {"a": "m-1.bin", "b": "m-1.bin", "c": "m-2.bin"}}
    (folder / _INDEX).write_text(json.dumps(index))
    return folder


def test_shards_read_like_one_file(tmp_path):
    for path in (_sharded(tmp_path), tmp_path / _INDEX):
        store: Any = open_checkpoint(path)
        assert set(store.names()) == {"a", "b", "c"}
        np.testing.assert_array_equal(store.read("c"), np.full((2, 2), 7, np.int32))
        assert store.info("c").file == "m-2.bin"
        assert {r.file for r in store.log.ranges} == {_INDEX, "m-2.bin"}
        assert store.bytes_total == sum(p.stat().st_size for p in tmp_path.iterdir())
    (tmp_path / _INDEX).unlink()
    assert set(open_checkpoint(tmp_path).names()) == {"a", "b", "c"}
    for name in ("a.bin.index.json", "b.bin.index.json"):
        (tmp_path / name).write_text("{}")
    assert "holds 2 indexes (a.bin.index.json, b.bin.index.json)." in why(tmp_path)


def test_what_a_trainer_writes_beside_the_weights_is_not_read(tmp_path):
    for name in (
        "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "scaler.pt",
        "optimizer.bin", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ):  # fmt: skip
        (tmp_path / name).write_bytes(b"anything")
        assert not FORMAT.recognises(local(tmp_path)), name
    _saved({"t": torch.ones(1)}, tmp_path, "weights.pt")
    for suffix in (".pt", ".bin", ".pth", ".ckpt"):
        path = next(tmp_path.glob("weights*"))
        path = path.rename(path.with_suffix(suffix))
        for passed in (tmp_path, path):
            assert open_checkpoint(passed).info("t").file == path.name
    # the usual name is preferred to its neighbours
    assert open_checkpoint(_saved({"t": torch.ones(1)}, tmp_path)).info("t").file == _SINGLE


def test_folders_and_files_of_other_formats_are_left_to_them(tmp_path):
    _saved({"t": torch.ones(1)}, tmp_path)
    for other in ("m.safetensors", ".metadata", "__0_0.distcp", "m.gguf"):
        (tmp_path / other).touch()
        assert not FORMAT.recognises(local(tmp_path)), other
        assert FORMAT.recognises(local(tmp_path / _SINGLE)), other
        (tmp_path / other).unlink()
    for name in ("m.txt", "m.safetensors", "config.json", "m.bin.json"):
        assert not FORMAT.recognises(Location(local(tmp_path).folder, name)), name


def test_only_directory_pickle_and_the_bytes_asked_for_are_read(tmp_path):
    tensors = {f"expert.{i}": torch.ones(256, 256) for i in range(8)}
    _saved({**tensors, "gate": _MATRIX, "last": torch.ones(256, 256)}, tmp_path)
    store: Any = open_checkpoint(tmp_path)
    opened = store.bytes_read
    with zipfile.ZipFile(tmp_path / _SINGLE) as archive:
        data = archive.getinfo("pytorch_model/data.pkl").file_size
        directory = (tmp_path / _SINGLE).stat().st_size - archive.start_dir
        local_header = 30 + len("pytorch_model/data.pkl")
        byteorder = 30 + len("pytorch_model/byteorder") + len("little")
    magic = 32
    assert opened == magic + data + directory + local_header + byteorder
    store.read("gate")
    header = 30 + len("pytorch_model/data/8")
    assert store.bytes_read - opened == header + _MATRIX.nbytes
    info = store.info("gate")
    assert store.log.ranges[-1] == ByteRange(_SINGLE, info.offset, _MATRIX.nbytes)
    whole = torch.ones(1000, 64)
    views = {"t": whole[10:12], "u": whole[:4, :2], "v": whole[7:8].T}
    store = open_checkpoint(_saved(views, tmp_path))
    store.read("t")
    assert store.log.ranges[-1].size == 2 * 64 * 4
    store.read("u")
    assert store.log.ranges[-1].size == (3 * 64 + 2) * 4
    store.read_bytes("v", 4, 12)
    assert store.log.ranges[-1].size == 12


def _rezipped(folder: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """A saved checkpoint with changed entries, as the zipfile module writes it."""
    with zipfile.ZipFile(_saved({"t": torch.arange(6.0)}, folder) / _SINGLE) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(folder / _SINGLE, "w") as archive:
        for name, raw in entries.items():
            archive.writestr(name, raw)
    return folder


def _set(name: str, raw: bytes) -> Callable[[dict[str, bytes]], object]:
    return lambda entries: entries.update({name: raw})


_ROOT = "pytorch_model"


_ARCHIVES: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "big-endian": (_set(f"{_ROOT}/byteorder", b"big"), "is not little-endian."),
    "TorchScript": (_set(f"{_ROOT}/constants.pkl", b""), "is a TorchScript archive."),
    "code": (_set(f"{_ROOT}/code/model.py", b""), "is a TorchScript archive."),
    "two roots": (_set("x/data.pkl", b""), "holds 2 pickles of data, expected the one"),
    "no root": (lambda e: e.pop(f"{_ROOT}/data.pkl"), "holds 0 pickles of data, expected the one"),
    "no pickle": (_set(f"{_ROOT}/data.pkl", b"abc"), "the pickle is malformed"),
    "a long byteorder": (_set(f"{_ROOT}/byteorder", b"b" * 99), "has 99 bytes, more than the 16"),
    "no storage": (lambda e: e.pop(f"{_ROOT}/data/0"), "has a storage that is not in the archive."),
    "a short storage": (_set(f"{_ROOT}/data/0", b"1234"), "has a storage of 24 bytes, and the"),
    "no directory of names": (_set("../x", b""), "it names '../x', which is outside of it"),
    "a drive": (_set("C:x", b""), "it names 'C:x', which is outside of it"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), _ARCHIVES.values(), ids=_ARCHIVES)
def test_an_archive_that_is_no_checkpoint_is_refused_in_a_sentence(change, sentence, tmp_path):
    message = why(_rezipped(tmp_path, change))
    assert message.startswith(f"{_SINGLE}: ")
    assert sentence in message


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_files_that_torch_reads_in_other_ways_are_refused_with_the_way_out(tmp_path):
    _saved({"t": torch.ones(1)}, tmp_path, _use_new_zipfile_serialization=False)
    error = refusal(tmp_path)
    assert "was written by a torch before 1.6, whose files are no archives." in error.message
    assert "torch.save(torch.load(file), new_file)" in error.hint
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / _SINGLE)
    error = refusal(tmp_path)
    assert "is a TorchScript archive" in error.message
    assert "state_dict()" in error.hint


_NO_STATE: dict[str, tuple[Any, str]] = {
    "a module": (
        torch.nn.Linear(2, 2),
        "the pickle names torch.nn.modules.linear.Linear, which is not among what a checkpoint holds.",
    ),
    "a number": (7, "holds a int, expected a state dict."),
    "nothing": (None, "holds a NoneType, expected a state dict."),
    "a text": ("text", "holds a str, expected a state dict."),
    "a tensor": (torch.ones(1), "holds a single tensor without a name, expected a state dict."),
    "two of a name": (
        {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "holds two tensors named 'a.b'."
    ),
}  # fmt: skip


@pytest.mark.parametrize(("value", "sentence"), _NO_STATE.values(), ids=_NO_STATE)
def test_what_is_no_state_dict_is_refused(value, sentence, tmp_path):
    assert why(_saved(value, tmp_path)) == f"{_SINGLE}: {sentence}"


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_that_would_run_code_runs_none(tmp_path):
    canary = tmp_path / "canary"
    _saved({"t": torch.ones(1), "x": _Attack(canary)}, tmp_path)
    assert why(tmp_path) == (
        f"{_SINGLE}: the pickle names posix.mkdir, which is not among what a checkpoint holds."
    )
    assert not canary.exists()
    torch.load(tmp_path / _SINGLE, weights_only=False)
    assert canary.exists()


def _endless_dict() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["x"] = value
    return value


def _doubled_dict() -> dict[str, Any]:
    value: dict[str, Any] = {"t": torch.ones(1)}
    for _ in range(60):
        value = {"left": value, "right": value}
    return value


def _crossed_lists() -> list[Any]:
    inner = [0] * 20_000
    return [inner] * 20_000


@pytest.mark.parametrize("make", [_endless_dict, _doubled_dict, _crossed_lists])
def test_names_without_end_are_refused(make, tmp_path, monkeypatch):
    monkeypatch.setattr(pytorch, "TORCH_STEPS", 300_000)
    assert "holds too many tensors, or dicts inside themselves." in why(_saved(make(), tmp_path))


def test_a_truncated_or_another_file_is_refused(tmp_path):
    path = _saved({"t": torch.ones(100)}, tmp_path) / _SINGLE
    raw = path.read_bytes()
    for size in (21, 41, 300, len(raw) - 1, len(raw) - 22):
        path.write_bytes(raw[:size])
        assert f"truncated, has {size} bytes and no zip directory at their end." in why(tmp_path)
    for other in (b"", raw[:3], b"version https://git-lfs.github.com/spec/v1\n" * 3):
        path.write_bytes(other)
        assert why(tmp_path) == f"{_SINGLE}: is no zip archive, as torch.save writes it."


class _Forged:
    """Pickled as a tensor of six float32 numbers, with one argument of torch's changed."""

    def __init__(self, **changes: Any) -> None:
        self.fields = {"storage": _Id(), "offset": 0, "size": (2, 3), "stride": (3, 1), **changes}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_tensor_v2, (*self.fields.values(), False, {})


class _Id:
    def __init__(self, *fields: Any) -> None:
        self.fields = fields or ("storage", torch.FloatStorage, "0", "cpu", 6)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.fields if isinstance(obj, _Id) else None


def _forge(value: Any) -> Callable[[dict[str, bytes]], object]:
    raw = io.BytesIO()
    _Pickler(raw, 2).dump(value)
    return _set(f"{_ROOT}/data.pkl", raw.getvalue())


_STORAGE = ("storage", torch.FloatStorage, "0", "cpu")
_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a row too many": ({"size": (3, 3)}, "needs element 8 of a storage that has 6."),
    "an offset too far": ({"offset": 1}, "needs element 6 of a storage that has 6."),
    "a negative offset": ({"offset": -1}, "has storage offset -1, expected a non-negative"),
    "a negative stride": ({"stride": (-3, 1)}, "has stride -3, expected a non-negative"),
    "a negative size": ({"size": (-2, 3)}, "has shape -2, expected a non-negative"),
    "a size of 2^63": ({"size": (2**63, 3)}, "has shape 9223372036854775808, expected"),
    "a size of 2^62": ({"size": (2**62, 3)}, "of a storage that has 6."),
    "sizes that overflow": ({"size": (2**32, 2**32), "stride": (0, 0)}, "it repeats them."),
    "a size that is a truth": ({"size": (True, 3)}, "has shape a bool, expected"),
    "a shape that is a list": ({"size": [2, 3]}, "has shape a list, expected at most 16 integers."),
    "17 axes": ({"size": (1,) * 17, "stride": (1,) * 17}, "has shape a tuple, expected at most 16"),
    "a stride too few": ({"stride": (1,)}, "has shape (2, 3) and stride (1,)."),
    "no storage": ({"storage": None}, "has no storage."),
    "another class of storage": (
        {"storage": _Id("storage", torch.Tensor, "0", "cpu", 6)}, "has no storage.",
    ),
    "a key that is a number": (
        {"storage": _Id("storage", torch.FloatStorage, 0, "cpu", 6)},
        "has a storage that is not in the archive.",
    ),
    "a key that leads away": (
        {"storage": _Id("storage", torch.FloatStorage, "../data.pkl", "cpu", 6)},
        "has a storage that is not in the archive.",
    ),
    "more elements than bytes": (
        {"storage": _Id(*_STORAGE, 7)}, "has a storage of 28 bytes, and the archive 24 of them.",
    ),
    "fewer than no elements": ({"storage": _Id(*_STORAGE, -1)}, "has a storage of -1, expected"),
    "a number of elements that is a text": (
        {"storage": _Id(*_STORAGE, "6")}, "has a storage of a str, expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), _FAULTS.values(), ids=_FAULTS)
def test_a_forged_description_is_refused_when_its_tensor_is_read(changes, sentence, tmp_path):
    forged = {"good": _Forged(), "t": _Forged(**changes)}
    _rezipped(tmp_path, _forge(forged))
    assert open_checkpoint(tmp_path).read("good").tolist() == [[0, 1, 2], [3, 4, 5]]
    message = why(tmp_path)
    assert message.startswith(f"{_SINGLE}: tensor 't' ")
    assert sentence in message


def test_other_persistent_ids_and_views_spread_over_too_much_are_refused(tmp_path, monkeypatch):
    sentence = f"{_SINGLE}: the pickle refers to an object outside of it that cannot exist."
    assert why(_rezipped(tmp_path, _forge({"t": _Forged(storage=_Id("module", "x"))}))) == sentence
    monkeypatch.setattr(pytorch, "TORCH_SPAN_BYTES", 19)
    _saved({"t": torch.arange(12.0)[:10:4], "whole": torch.ones(12)}, tmp_path)
    assert "tensor 't' is spread over 36 bytes, more than the 19 allowed." in why(tmp_path)
    assert open_checkpoint(tmp_path).read("whole").shape == (12,)


def test_tensors_of_one_storage_are_read_alone_and_are_no_routers_of_layers(tmp_path):
    whole = torch.arange(48.0).reshape(6, 8)
    tied = {"a": whole, "b": whole, "part": whole[2:4], "rest": whole[4:], "empty": whole[:0]}
    store = open_checkpoint(_saved(tied, tmp_path))
    for name, tensor in tied.items():
        np.testing.assert_array_equal(store.read(name), tensor.numpy())
    assert {name for name, _ in store.read_many(["part", "rest", "empty"])} == {
        "part", "rest", "empty"
    }  # fmt: skip
    for pair, size in ((("a", "b"), 192), (("a", "part"), 64)):
        begin = store.info(pair[1]).offset
        with pytest.raises(CheckpointError) as caught:
            list(store.read_many(pair))
        assert caught.value.message == (
            f"{_SINGLE}: the tensors {pair[0]!r} and {pair[1]!r} both claim the bytes {begin} to "
            f"{begin + size}."
        )
        assert "tensor.clone()" in caught.value.hint
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    named = {}
    for layer in range(3):
        named[f"model.layers.{layer}.mlp.gate.weight"] = rows
        named[f"model.layers.{layer}.post_attention_layernorm.weight"] = torch.ones(8)
    config = {
        "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False,
        "rms_norm_eps": 1e-5, "num_hidden_layers": 3,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="both claim the bytes"):
        load_routers(open_checkpoint(_saved(named, tmp_path)))
    apart = {name: tensor.clone() for name, tensor in named.items()}
    assert len(load_routers(open_checkpoint(_saved(apart, tmp_path))).routers) == 3


def test_a_tensor_with_attributes_is_made_by_what_makes_tensors_of_a_tuple_only(tmp_path):
    class Subclass:
        def __reduce__(self) -> tuple[Any, ...]:
            make = _rebuild_from_type_v2
            return make, (make, torch.Tensor, (make, torch.Tensor, (), {}), {})

    of_bytes = (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_sparse_tensor\n"
        b"NB" + struct.pack("<I", 255) + bytes(255) + b"NtR."
    )
    for change in (_forge({"t": Subclass()}), _set(f"{_ROOT}/data.pkl", of_bytes)):
        message = why(_rezipped(tmp_path, change))
        assert "calls torch._tensor._rebuild_from_type_v2 with 4 arguments that it does" in message


#: How protocol 2, which has no bytes, spells them.
_BYTES = {"_codecs.encode": lambda text, coding: text.encode(coding), "__builtin__.bytes": bytes}

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**2000), 2**2000)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
_KEYS = st.text() | st.integers(1 - 2**60, 2**60 - 1) | st.none()
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(_KEYS, inner, max_size=4)
    ),
    max_leaves=30,
)


def _refusal(raw: bytes, allowed: dict[str, Any] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        unpickle(raw, "f", allowed or {})
    assert caught.value.message.startswith("f: the pickle ")
    return caught.value.message.removeprefix("f: the pickle ")


@given(_VALUES, st.sampled_from((2, 3, 4, 5)))
def test_plain_values_are_what_was_pickled(value, protocol):
    read = unpickle(pickle.dumps(value, protocol), "f", _BYTES)
    assert repr(read) == repr(value)  # tells 0.0 from -0.0, and 1 from True


def test_long_objects_and_sets_are_read_and_one_object_in_two_places_stays_one():
    value = {
        "long": "é" * 70_000,
        "many": list(range(3000)),
        "keys": {str(i): i for i in range(3000)},
    }
    assert unpickle(pickle.dumps(value, 4), "f", {}) == value
    inner: list[Any] = [1]
    twice = unpickle(pickle.dumps([inner, inner]), "f", {})
    assert twice[0] is twice[1]
    inner.append(inner)
    endless = unpickle(pickle.dumps(inner), "f", {})
    assert endless[1] is endless
    allowed = {"builtins.bytearray": bytes, "collections.OrderedDict": dict}
    ordered = collections.OrderedDict(a=1, b=2)
    vars(ordered)["extra"] = "metadata"
    for protocol in (4, 5):
        raw = pickle.dumps([{1, 2}, frozenset("a"), bytearray(b"b"), ordered], protocol)
        *others, items = unpickle(raw, "f", allowed)
        assert others == [[1, 2], ("a",), b"b"]
        assert list(items.items()) == [("a", 1), ("b", 2)]


class _Namespace:
    """Stands in for argparse.Namespace."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_stand_in_receives_the_arguments_and_the_state(protocol):
    raw = pickle.dumps(argparse.Namespace(lr=0.1), protocol)
    found = unpickle(raw, "f", {"argparse.Namespace": _Namespace})
    assert (found.arguments, found.state) == ((), {"lr": 0.1})


def test_globals_are_names_and_persistent_ids_what_the_caller_makes_of_them():
    raw = pickle.dumps([os.getcwd, complex], 4)
    name, value = unpickle(raw, "f", {"posix.getcwd": print, "builtins.complex": "a value"})
    assert type(name) is Global
    assert (name.name, value) == ("posix.getcwd", "a value")
    raw = b"\x80\x02X\x01\x00\x00\x00aQ."
    assert unpickle(raw, "f", {}, lambda text: text * 3) == "aaa"
    assert _refusal(raw) == "refers to an object that lies outside of it."


class _Touching:
    """Leaves a file behind when it is made, or when it is given a state."""

    def __new__(cls, path: str = "", *, name: str = "") -> "_Touching":
        if path or name:
            Path(path or name).touch()
        return super().__new__(cls)

    def __init__(self, *_: str) -> None: ...

    def __setstate__(self, path: str) -> None:
        Path(path).touch()


_NAME = f"{__name__}\n_Touching\n".encode()


def _text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


_ATTACKS: dict[str, Callable[[str], bytes]] = {
    "REDUCE": lambda path: b"c" + _NAME + _text(path) + b"\x85R.",
    "REDUCE of os": lambda path: b"cos\nmkdir\n" + _text(path) + b"\x85R.",
    "STACK_GLOBAL": lambda path: (
        b"\x80\x04" + _text(__name__) + _text("_Touching") + b"\x93" + _text(path) + b"\x85R."
    ),
    "BUILD": lambda path: b"\x80\x02c" + _NAME + b")\x81" + _text(path) + b"b.",
    "NEWOBJ": lambda path: b"\x80\x02c" + _NAME + _text(path) + b"\x85\x81.",
    "NEWOBJ_EX": lambda path: (
        b"\x80\x04c" + _NAME + b")}" + _text("name") + _text(path) + b"s\x92."
    ),
    "INST": lambda path: b"(" + _text(path) + b"i" + _NAME + b".",
    "OBJ": lambda path: b"(c" + _NAME + _text(path) + b"o.",
    "EXT1": lambda path: b"\x80\x02\x82\xf1" + _text(path) + b"\x85R.",
}


@pytest.fixture
def _extension() -> Iterator[None]:
    copyreg.add_extension(__name__, "_Touching", 0xF1)
    yield
    copyreg.remove_extension(__name__, "_Touching", 0xF1)


@pytest.mark.usefixtures("_extension")
@pytest.mark.parametrize("opcode", _ATTACKS)
def test_what_pickle_would_run_is_not_run(opcode, tmp_path):
    canary = tmp_path / "canary"
    raw = _ATTACKS[opcode](str(canary))
    _refusal(raw)
    _refusal(raw, {"collections.OrderedDict": dict, "torch.Size": tuple})
    assert not canary.exists()
    pickle.loads(raw)
    assert canary.exists()


_SUPPORTED = {chr(code) for code in pickled._ROWS} | {"."}
_REFUSED = {op.name: op.code for op in pickletools.opcodes if op.code not in _SUPPORTED}


def test_foreign_globals_and_opcodes_that_checkpoints_do_not_need_are_named():
    for name, code in _REFUSED.items():
        raw = b"\x80\x04(]" + code.encode("latin-1") + b"\x00" * 20
        assert _refusal(raw) == f"uses the opcode {name} at byte 4, which no checkpoint needs."
    # those that run code in odd ways
    assert {"INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"} <= _REFUSED.keys()
    sentence = "names posix.system, which is not among what a checkpoint holds."
    assert _refusal(pickle.dumps(os.system)) == sentence
    assert _refusal(b"c\x1b[2J\nx\n.").startswith("names '\\x1b[2J.x', which")


_NONSENSE = {
    "a call of a text": (b"X\x01\0\0\0a)R.", "calls a str with a tuple"),
    "a call of a result": (b"cmake\nlist\n)R)R.", "calls a list with a tuple"),
    "a call with a list": (b"cmake\nlist\n]R.", "calls make.list with a list"),
    "a call with an argument too many": (b"cmake\nnone\nN\x85R.", "that it does not take"),
    "a call with 256 arguments": (
        b"cmake\nlist\n(" + b"N" * 256 + b"tR.", "calls make.list with 256 arguments",
    ),
    "the state of a list": (b"]Nb.", "sets the state of a list"),
    "the state of a name": (b"cmake\nlist\nNb.", "sets the state of make.list"),
    "a state that is refused": (b"cmake\nstate\n)RNb.", "gives a State a state that it cannot have"),
    "an append to a dict": (b"}Na.", "appends to a dict"),
    "an item of a list": (b"]NNs.", "gives 2 keys and values to a list"),
    "a key without a value": (b"}(Nu.", "gives 1 keys and values to a dict"),
    "a key of 5000 characters": (
        b"}X\x88\x13\0\0" + b"k" * 5000 + b"Ns.", "has a key of 5000 characters",
    ),
    "a name of 5000 characters": (b"c" + b"m" * 5000 + b"\nx\n.", "names a global of 5001 characters"),
    "a name that is a number": (b"NN\x93.", "names a global by a NoneType and a NoneType"),
    "a gap in the memo": (b"Nq\x07.", "remembers object 7 after 0 others"),
    "an empty memo": (b"h\x00.", "is malformed or breaks off at byte 0 of 3"),
    "an empty stack": (b"0.", "is malformed or breaks off at byte 0 of 2"),
    "nothing to return": (b".", "is malformed or breaks off at byte 0 of 1"),
    "a tuple of too few": (b"N\x86.", "is malformed or breaks off at byte 1 of 3"),
    "no mark": (b"Nt.", "is malformed or breaks off at byte 1 of 3"),
    "no bytes": (b"", "is malformed or breaks off at byte 0 of 0"),
    "a text beyond the end": (b"X\xff\xff\xff\x7fa.", "is malformed or breaks off at byte 0 of 7"),
    "a text that is not UTF-8": (b"X\x01\0\0\0\xff.", "holds a text that is not UTF-8 at byte 0"),
    "no opcode": (b"N\xff.", "is malformed: byte 1 is 0xff, which is no opcode"),
}  # fmt: skip


class _State:
    def __setstate__(self, state: Any) -> None:
        raise ValueError


_MAKE = {"make.list": lambda *_: [], "make.none": lambda: None, "make.state": _State}


@pytest.mark.parametrize(("raw", "sentence"), _NONSENSE.values(), ids=_NONSENSE)
def test_nonsense_is_refused_in_a_sentence(raw, sentence):
    assert sentence in _refusal(raw, _MAKE)


def test_a_pickle_that_breaks_off_is_refused_and_bytes_behind_its_end_are_ignored():
    raw = pickle.dumps({"a": [1, 2.5, "text", (None, True)], "b": 2**70})
    for length in range(len(raw)):
        _refusal(raw[:length])
    assert unpickle(b"N.\xff\xff", "f", {}) is None


def test_keys_that_are_hashed_by_value_are_wrapped_and_others_are_not():
    raw = pickle.dumps({(1, 2): "a", 2.5: "b", b"c": "c", 2**61: "d", 7: "e", None: "f"})
    keys = list(unpickle(raw, "f", {}))
    assert [k.value for k in keys if isinstance(k, OddKey)] == [(1, 2), 2.5, b"c", 2**61]
    assert [k for k in keys if not isinstance(k, OddKey)] == [7, None]
    raw = pickle.dumps({argparse.Namespace: 1})
    (key,) = unpickle(raw, "f", {"argparse.Namespace": _Namespace})
    assert type(key) is Global


_BOMBS = {
    "lists": b"]", "dicts": b"}", "marks": b"(", "numbers": b"J\0\1\2\3", "floats": b"G" + b"\1" * 8,
    "tuples": b"N\x85", "texts": b"X\x04\0\0\0\xf0\x9f\x90\xa6", "copies": b"N2", "memo": b"N\x94",
    "dicts of one": b"}NNs", "lists of one": b"]Na", "large integers": b"\x8a\xff" + b"\x7f" * 255,
    "calls": b"cmake\nlist\n)R", "bytes": b"B\x03\0\0\0abc", "names": b"cmake\nlist\n",
    "a long dict": b"}(" + b"".join(b"J" + i.to_bytes(4, "little") + b"N" for i in range(3000)) + b"u",
    "pairs": b"NN\x86", "triples": b"NNN\x87", "small integers": b"\x8a\x03\x7f\x7f\x7f",
    "two bytes": b"M\xff\xff", "a dict of odd keys": b"}(" + b"]N" * 3000 + b"u",
    "a dict of six": b"}" + b"".join(b"K" + bytes([i]) + b"Ns" for i in range(6)),
    "a list of five": b"]" + b"Na" * 5,
    "a long list": b"](" + b"N" * 3000 + b"e", "a long tuple": b"(" + b"N" * 3000 + b"t",
}  # fmt: skip


@pytest.mark.parametrize("case", _BOMBS)
def test_no_pickle_takes_more_memory_than_is_allowed(case, monkeypatch):
    budget = 100_000
    monkeypatch.setattr(pickled, "PICKLE_OBJECT_BYTES", budget)
    monkeypatch.setattr(pickled, "_BATCH", 50)  # what one takes is paid for behind it
    raw = _BOMBS[case] * (2 * budget // len(_BOMBS[case]))
    tracemalloc.start()
    message = _refusal(raw, _MAKE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message == f"describes more than {budget} bytes of objects."
    assert peak < 1.2 * budget


@pytest.mark.parametrize(("opcodes", "steps"), [(b"((", 2), (b"N0", 4), (b"cmake\nlist\n", 5)])
def test_a_pickle_of_too_many_steps_is_refused(opcodes, steps, monkeypatch):
    monkeypatch.setattr(pickled, "PICKLE_STEPS", 12_000)
    monkeypatch.setattr(pickled, "_BATCH", 1)
    most = 12_000 // steps
    unpickle(opcodes * (most - 2) + b"N.", "f", _MAKE)
    assert _refusal(opcodes * (most + 1) + b"N.", _MAKE) == "takes more than 12000 steps."


def test_a_long_name_is_kept_once_and_a_pickle_above_the_limit_is_not_read(monkeypatch):
    names = _text("m" * 2000) + b"\x94" + _text("n" * 2000) + b"\x94"
    raw = b"\x80\x04](" + names + b"h\x00h\x01\x93" * 3000 + b"e."
    tracemalloc.start()
    found = unpickle(raw, "f", {f"{'m' * 2000}.{'n' * 2000}": _Namespace})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(map(id, found[2:]))) == 1
    assert peak < 500_000
    monkeypatch.setattr(pickled, "PICKLE_BYTES", 10)
    assert _refusal(b"N." + bytes(9)) == "has 11 bytes, more than the 10 allowed."


@pytest.mark.parametrize("record", [Global, OddKey, PickledTensor, UnreadableTensor, Storage])
def test_no_pickle_can_change_a_record(record):
    # a dataclass with slots=True would let it: it has a __setstate__
    assert not hasattr(record, "__setstate__")


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_search_for_garbage_is_as_before(was_enabled):
    enabled = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        unpickle(b"N.", "f", {})
        _refusal(b"\xff")
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if enabled else gc.disable)()
