"""Files that ask for as much work and memory as the limits let them, or a little more.

The bounds are CPU seconds of a shared machine, about twice what was measured on one. A pickle is
interpreted, half a microsecond for each of its at most twelve million opcodes.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

_ROOT = Path(__file__).resolve().parents[2]

_JSON_SECONDS = 4.0
_PICKLE_SECONDS = 14.0
_MEGABYTES = 512

_CONFIG = {
    "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False,
    "rms_norm_eps": 1e-5, "num_hidden_layers": 1,
}  # fmt: skip

_ROUTER = {
    "model.layers.0.mlp.gate.weight": np.ones((4, 8), np.float32),
    "model.layers.0.post_attention_layernorm.weight": np.ones(8, np.float32),
}


def _expert(i: int) -> str:
    return f"model.layers.{i // 768}.mlp.experts.{i // 3 % 256}.{i}_proj.weight"


def _write_header(folder: Path, text: str, num_data: int = 0) -> None:
    raw = text.encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + num_data)


def _write_many_tensors(folder: Path, count: int = 200_000) -> None:
    entries = {
        _expert(i): {"dtype": "F32", "shape": [1, 2], "data_offsets": [8 * i, 8 * i + 8]}
        for i in range(count)
    }
    _write_header(folder, json.dumps(entries), 8 * count)


def _write_slices(folder: Path) -> None:
    slices = json.dumps({f"{i}": {"saved_offsets": [0]} for i in range(330_000)})
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = {"__metadata__": {"DCP_SHARDING_INFO": slices}, "t": entry}
    _write_header(folder, json.dumps(header), 4)


def _write_index(folder: Path, names: dict[str, str], more: str = "") -> None:
    save_file(_ROUTER, folder / "model.safetensors")
    whole = dict.fromkeys(_ROUTER, "model.safetensors") | names
    text = json.dumps({"weight_map": whole})
    (folder / "model.safetensors.index.json").write_text(text[:-2] + more + "}}")


def _write_config(folder: Path, config: str) -> None:
    save_file(_ROUTER, folder / "model.safetensors")
    (folder / "config.json").write_text(config)


def _flat(count: int) -> str:
    return "{" + ",".join(f'"{i}":0' for i in range(count)) + "}"


def _in_one_file(count: int) -> dict[str, str]:
    return {_expert(i): "model.safetensors" for i in range(count)}


_JSON: dict[str, tuple[Callable[[Path], None], str]] = {
    "a header of 200 000 tensors": (_write_many_tensors, "is a router of family olmoe"),
    "a header of keys": (lambda f: _write_header(f, _flat(1_300_000)), "1300000 tensors, more"),
    "a header of more keys": (lambda f: _write_header(f, _flat(2_000_000)), "bytes of objects"),
    "a header of lists": (
        lambda f: _write_header(f, '{"a":[' + "[]," * 2_000_000 + "[]]}"), "is described by a list",
    ),
    "a header of one name": (
        lambda f: _write_header(f, '{"' + "\u00e9" * 10_000_000 + '":{}}'), "10000000 characters",
    ),
    "row slices of 330 000 tensors": (_write_slices, "is a router of family olmoe"),
    "an index of 590 000 tensors": (lambda f: _write_index(f, _in_one_file(590_000)), "1 routers"),
    "an index with a name twice": (
        lambda f: _write_index(f, _in_one_file(500_000), f', "{_expert(0)}": "x"'), "twice",
    ),
    "an index of 590 000 files": (
        lambda f: _write_index(f, {f"t{i}": f"{i}.safetensors" for i in range(590_000)}),
        "files, more than the 20000 allowed",
    ),
    "a config of lists": (
        lambda f: _write_config(f, '{"x":[' + "[]," * 2_000_000 + "[]]," + json.dumps(_CONFIG)[1:]),
        "1 routers",
    ),
    "a config of numbers": (
        lambda f: _write_config(f, json.dumps({**_CONFIG, "x": list(range(1_000_000))})), "1 routers",
    ),
    "a config of 9 MB": (
        lambda f: _write_config(f, json.dumps({**_CONFIG, "x": "a" * 9_000_000})), "8000000 allowed",
    ),
}  # fmt: skip


def _metadata(count: int) -> bytes:
    """What torch writes for tensors that lie in one piece each."""
    shape, corner = torch.Size([2048, 7168]), torch.Size([0, 0])
    names = [_expert(i) for i in range(count)]
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: TensorStorageMetadata(
            TensorProperties(torch.float32), shape, [ChunkStorageMetadata(corner, shape)]
        )
        for name in names
    }
    places = {MetadataIndex(n, corner, 0): _StorageInfo("__0_0.distcp", 0, 100) for n in names}
    return pickle.dumps(Metadata(described, {}, places))


_BYTES = 29_900_000
_SIZE = b"\x80\x04ctorch\nSize\n\x94"


def _repeated(opcodes: bytes, start: bytes = b"\x80\x04") -> bytes:
    return start + opcodes * ((_BYTES - len(start)) // len(opcodes)) + b"N."


_PICKLES: dict[str, tuple[Callable[[], bytes], str]] = {
    "100 000 tensors": (lambda: _metadata(100_000), "is a router of family olmoe"),
    "None": (lambda: _repeated(b"N"), "more than 12000000 opcodes"),
    "lists": (lambda: _repeated(b"]"), "300000000 bytes of objects"),
    "numbers": (lambda: _repeated(b"M\xff\xff"), "300000000 bytes of objects"),
    "long numbers": (lambda: _repeated(b"\x8a\x01\x010"), "300000000 bytes of objects"),
    "memo": (lambda: _repeated(b"N\x94"), "more than 12000000 opcodes"),
    "items": (lambda: _repeated(b"K\x01K\x01s", b"\x80\x04}"), "more than 12000000 opcodes"),
    "keys": (
        lambda: b"}(" + b"".join(b"\x8c\x08%08dN" % i for i in range(1_700_000)) + b"u.",
        "300000000 bytes of objects",
    ),
    "calls": (lambda: _repeated(b"h\x00)R0", _SIZE), "more than 12000000 opcodes"),
    "names": (lambda: _repeated(b"ctorch\nSize\n0"), "expected a Metadata of torch"),
    "texts": (lambda: _repeated(b"X\x04\0\0\0\xf0\x9f\x90\xa60"), "expected a Metadata"),
    "a wide text": (
        lambda: b"X" + (_BYTES - 100).to_bytes(4, "little") + b"a" * (_BYTES - 104)
        + b"\xf0\x9f\x90\xa6.",
        "expected a Metadata",
    ),
    "a long tuple": (lambda: b"(" + b"N" * 11_900_000 + b"t.", "holds a tuple"),
}  # fmt: skip


#: By itself: the shape checks of the tests would cost more than the reading.
_LOAD = r"""
import pathlib, re, sys, time
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import MoeGeomError
from moegeom.router.load import load_routers
started = time.process_time()
try:
    answer = f"{len(load_routers(open_checkpoint(sys.argv[1])).routers)} routers"
except MoeGeomError as error:
    answer = str(error)
seconds = time.process_time() - started
# ru_maxrss would be that of the process which started this one, if it was larger
peak = re.search(r"VmHWM:\s+([0-9]+) kB", pathlib.Path("/proc/self/status").read_text())[1]
print(seconds, int(peak) / 1024, answer.replace("\n", " "))
"""


def _check(folder: Path, answer: str, most_seconds: float) -> None:
    command = [sys.executable, "-c", _LOAD, str(folder)]
    found = subprocess.check_output(command, cwd=_ROOT, text=True)
    seconds, megabytes, said = found.split(maxsplit=2)
    assert answer in said
    assert len(said) < 2000
    assert float(seconds) < most_seconds
    assert float(megabytes) < _MEGABYTES


def _of_minutes(cases: Iterable[str], quick: Collection[str]) -> list[Any]:
    """The cases, of which all but the quick ones run at night."""
    marks = pytest.mark.nightly
    return [case if case in quick else pytest.param(case, marks=marks) for case in cases]


_QUICK = (
    "a header of 200 000 tensors", "a header of keys", "a header of more keys", "a header of lists",
    "a header of one name", "an index of 590 000 tensors", "a config of lists", "a config of 9 MB",
    "100 000 tensors", "lists", "a wide text",
)  # fmt: skip


@pytest.mark.parametrize("case", _of_minutes(_JSON, _QUICK))
def test_the_largest_json_ends_soon_and_in_little_memory(case: str, tmp_path: Path) -> None:
    write, answer = _JSON[case]
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    write(tmp_path)
    _check(tmp_path, answer, _JSON_SECONDS)


@pytest.mark.parametrize("case", _of_minutes(_PICKLES, _QUICK))
def test_the_largest_pickle_ends_soon_and_in_little_memory(case: str, tmp_path: Path) -> None:
    make, answer = _PICKLES[case]
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    (tmp_path / ".metadata").write_bytes(make())
    (tmp_path / "__0_0.distcp").write_bytes(bytes(200))
    _check(tmp_path, answer, _PICKLE_SECONDS)


@pytest.mark.nightly
def test_the_largest_archive_ends_soon_and_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"}.")
        for i in range(149_000):
            archive.writestr(f"archive/data/{i}", b"")
    _check(tmp_path, "is a router of family olmoe", _PICKLE_SECONDS)
