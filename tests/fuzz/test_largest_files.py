"""Files that ask for as much work and memory as the limits let them, or a little more.

Work on any file comes to an end, and takes 512 MB beside its own size.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import tracemalloc
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

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError, MoeGeomError, RecordingError, UsageError
from moegeom.core.tokens import TokenColumns
from moegeom.router.requested_family import read_family_file
from moegeom.studies.log_probs import log_probs
from moegeom.tokens.open import open_tokens
from tests.ends import work_ends
from tests.unit.tokens.dialects.written import known

_ROOT = Path(__file__).resolve().parents[2]

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
    places = {
        MetadataIndex(name, corner, 0): _StorageInfo("__0_0.distcp", 100 * i, 100)
        for i, name in enumerate(names)
    }
    return pickle.dumps(Metadata(described, {}, places))


_BYTES = 29_900_000
_SIZE = b"\x80\x04ctorch\nSize\n\x94"


def _repeated(opcodes: bytes, start: bytes = b"\x80\x04") -> bytes:
    return start + opcodes * ((_BYTES - len(start)) // len(opcodes)) + b"N."


_PICKLES: dict[str, tuple[Callable[[], bytes], str]] = {
    "70 000 tensors": (lambda: _metadata(70_000), "is a router of family olmoe"),
    "None": (lambda: _repeated(b"N"), "more than 8100000 steps"),
    "lists": (lambda: _repeated(b"]"), "300000000 bytes of objects"),
    "numbers": (lambda: _repeated(b"M\xff\xff"), "more than 8100000 steps"),
    "long numbers": (lambda: _repeated(b"\x8a\x01\x010"), "more than 8100000 steps"),
    "memo": (lambda: _repeated(b"N\x94"), "more than 8100000 steps"),
    "items": (lambda: _repeated(b"K\x01K\x01s", b"\x80\x04}"), "more than 8100000 steps"),
    "keys": (
        lambda: b"}(" + b"".join(b"\x8c\x08%08dN" % i for i in range(1_700_000)) + b"u.",
        "more than 8100000 steps",
    ),
    "calls": (lambda: _repeated(b"h\x00)R0", _SIZE), "more than 8100000 steps"),
    "names": (lambda: _repeated(b"ctorch\nSize\n0"), "more than 8100000 steps"),
    "texts": (lambda: _repeated(b"X\x04\0\0\0\xf0\x9f\x90\xa60"), "more than 8100000 steps"),
    "a wide text": (
        lambda: b"X" + (_BYTES - 100).to_bytes(4, "little") + b"a" * (_BYTES - 104)
        + b"\xf0\x9f\x90\xa6.",
        "expected a Metadata",
    ),
    "a long tuple": (lambda: b"(" + b"N" * 4_000_000 + b"t.", "holds a tuple"),
}  # fmt: skip


#: By itself: the shape checks of the tests would cost more than the reading.
_LOAD = r"""
import pathlib, re, sys
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import MoeGeomError
from moegeom.router.load import load_routers
from tests.ends import work_ends
with work_ends():
    try:
        answer = f"{len(load_routers(open_checkpoint(sys.argv[1])).routers)} routers"
    except MoeGeomError as error:
        answer = str(error)
# ru_maxrss would be that of the process which started this one, if it was larger
peak = re.search(r"VmHWM:\s+([0-9]+) kB", pathlib.Path("/proc/self/status").read_text())[1]
print(int(peak) / 1024, answer.replace("\n", " "))
"""


def _check(folder: Path, answer: str) -> None:
    command = [sys.executable, "-c", _LOAD, str(folder)]
    found = subprocess.check_output(command, cwd=_ROOT, text=True)
    megabytes, said = found.split(maxsplit=1)
    assert answer in said
    assert len(said) < 2000
    assert float(megabytes) < _MEGABYTES


def _of_minutes(cases: Iterable[str], quick: Collection[str]) -> list[Any]:
    """The cases, of which all but the quick ones run at night."""
    marks = pytest.mark.nightly
    return [case if case in quick else pytest.param(case, marks=marks) for case in cases]


_QUICK = (
    "a header of 200 000 tensors", "a header of keys", "a header of more keys", "a header of lists",
    "a header of one name", "an index of 590 000 tensors", "a config of lists", "a config of 9 MB",
    "70 000 tensors", "lists", "a wide text",
)  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", _of_minutes(_JSON, _QUICK))
def test_the_largest_json_ends_and_in_little_memory(case: str, tmp_path: Path) -> None:
    write, answer = _JSON[case]
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    write(tmp_path)
    _check(tmp_path, answer)


@pytest.mark.parametrize("case", _of_minutes(_PICKLES, _QUICK))
def test_the_largest_pickle_ends_and_in_little_memory(case: str, tmp_path: Path) -> None:
    make, answer = _PICKLES[case]
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    (tmp_path / ".metadata").write_bytes(make())
    with (tmp_path / "__0_0.distcp").open("wb") as file:
        file.truncate(100 * 70_000)
    _check(tmp_path, answer)


@pytest.mark.nightly
def test_the_largest_archive_ends_and_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"}.")
        for i in range(149_000):
            archive.writestr(f"archive/data/{i}", b"")
    _check(tmp_path, "is a router of family olmoe")


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _array(index: int, kind: int, length: int, values: bytes) -> bytes:
    return _text(b"%d" % index) + struct.pack("<IIQ", 9, kind, length) + values


#: Headers that ask for as much work and memory as their limits let them, or more.
_HEADERS: dict[str, Callable[[], tuple[int, int, bytes]]] = {
    "empty strings": lambda: (0, 1, _array(0, 8, 2_499_999, bytes(8 * 2_499_999))),
    "short arrays": lambda: (
        0, 1024, b"".join(_array(i, 8, 256, 256 * _text("\u0100".encode())) for i in range(1024)),
    ),
    "wide texts": lambda: (
        0, 80, b"".join(_array(i, 8, 256, 256 * _text(b"\xf0\x9f\x98\x80" + b"a" * 2900)) for i in range(80)),
    ),
    "tensors": lambda: (
        30_000, 0,
        b"".join(
            _text(b"\xf0\x9f\x98\x80" + b"%0252d" % i) + struct.pack("<I3QIQ", 3, 1, 0, 9, 0, 0)
            for i in range(30_000)
        ),
    ),
    "strings that are skipped one by one": lambda: (
        0, 1, _array(0, 8, 1_000, 1_000 * _text(bytes(70_000))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _HEADERS)
def test_the_largest_gguf_headers_end_and_in_little_memory(case: str, tmp_path: Path) -> None:
    num_tensors, num_settings, body = _HEADERS[case]()
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_settings)
    (tmp_path / "m.gguf").write_bytes(head + body + bytes(64))
    _check(tmp_path, "m.gguf: ")


def _described(pieces: int, rows: int) -> Metadata:
    """A small file that claims a large tensor: each piece points at the same bytes."""
    chunks = [
        ChunkStorageMetadata(torch.Size([i * rows, 0]), torch.Size([rows, 8]))
        for i in range(pieces)
    ]
    size = torch.Size([pieces * rows, 8])
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
    places = {
        MetadataIndex("t", chunk.offsets): _StorageInfo("__0_0.distcp", 0, 1400) for chunk in chunks
    }
    return Metadata({"t": tensor}, None, places)


@pytest.mark.parametrize(("pieces", "rows"), [(600, 2), (1, 2**40), (3, 2**58)])
def test_a_tensor_larger_than_its_files_is_refused_before_it_is_made(
    pieces: int, rows: int, tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_described(pieces, rows)))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1400))
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path).read("t")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000_000


_STACK = """text = "x"
[[stacks]]
name = "s"
weight = [{names}]
top_k = {top_k}
score = "softmax"
[stacks.weights]
source = "scores"
renormalise = true
"""

#: Texts that ask for as much as they can; what the sentence about each begins with.
_GREEDY = {
    "dots of a key": ("a." * 32_000 + "b = 1", "mine.toml: line 1 has 32000 dots, more than 100."),
    "long keys": ("\n".join("a." * 99 + f"b{i}=1" for i in range(300)), "mine.toml: unknown key 'a'."),
    "tables": ("\n".join(f"[{i}{'.a' * 90}]" for i in range(300)), "mine.toml: unknown key '0'."),
    "brackets": ("a = " + "[" * 60_000, "mine.toml: is nested too deeply."),
    "digits": ("a = " + "1" * 60_000, "mine.toml: is not TOML (Exceeds the limit"),
    "names": (
        _STACK.format(names=",\n".join(f'"{{layer}}.{i}"' for i in range(3000)), top_k=2),
        "mine.toml: stacks[0]: weight has 3000 names, more than 100.",
    ),
    "a long value": ("text = [" + "1," * 30_000 + "]\nstacks = []", "mine.toml: text is [1, 1, 1,"),
    "a long pattern": (
        _STACK.format(names=f'"{"x" * 60_000}"', top_k=2), "mine.toml: pattern 'xxxxx",
    ),
    "an integer of no machine": (
        _STACK.format(names='"{layer}.x"', top_k=10**400), "mine.toml: holds an integer beyond 64 bits.",
    ),
    "characters": ("#" * 70_000, "mine.toml: has 70000 characters, more than 65536."),
}  # fmt: skip


@pytest.mark.parametrize("case", _GREEDY)
def test_a_greedy_family_file_is_refused_in_a_short_sentence(case: str, tmp_path: Path) -> None:
    text, sentence = _GREEDY[case]
    path = tmp_path / "mine.toml"
    path.write_text(text)
    tracemalloc.start()
    with work_ends(), pytest.raises(UsageError) as caught:
        read_family_file(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.message.startswith(sentence)
    assert len(str(caught.value)) < 500
    assert peak < 100_000_000


def npz_bomb(path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 4, 4)}
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", header.getvalue() + b"\0" * 200_000_000)


def npy_claim(path: Path) -> None:
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(
            stream, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 4, 4)}
        )


def deep_json(path: Path) -> None:
    path.write_text('{"choices": [{"routed_experts": ' + "[" * 2_000_000 + "]}]}")


def wide_json(path: Path) -> None:
    path.write_text('{"choices": [{"routed_experts": [' + "[]," * 12_000_000 + "[]]}]}")


def one_line(path: Path) -> None:
    path.write_bytes(b'{"choices": "' + b"x" * 60_000_000 + b'", "routed_experts": [')


HOSTILE = {
    "compressed zeros": ("a.npz", npz_bomb),
    "a claimed size": ("a.npy", npy_claim),
    "deep lists": ("a.json", deep_json),
    "many empty lists": ("a.json", wide_json),
    "a record without end": ("a.jsonl", one_line),
}


def a_key_for_each_line(path: Path) -> None:
    scored = '"document": 0, "position": 9, "logprob": 0, "other_logprob": 0'
    path.write_text("".join(f'{{{scored}, "{i}": 0}}\n' for i in range(20_000)))


def a_file_that_ends_nowhere(path: Path) -> None:
    path.write_text("document,position,logprob,other_logprob\n")
    os.truncate(path, (1 << 30) + 1)


def rows_without_end(path: Path) -> None:
    path.write_text("document,position,logprob,other_logprob\n" + "0,1,0,0\n" * (2**22 + 1))


def one_line_of_text(path: Path) -> None:
    path.write_text('{"text": "' + "x" * 60_000_000 + '"}\n')


LOG_PROBS = {
    "a column for each row": ("a.jsonl", a_key_for_each_line, "none of its 20,000 rows"),
    "bytes": ("a.csv", a_file_that_ends_nowhere, "1,073,741,825 bytes, more than the 1,073,"),
    "rows": ("a.csv", rows_without_end, "rows or more, more than the 4,194,304"),
    "a line": ("a.jsonl", one_line_of_text, "more than 1,048,576 bytes"),
}


@pytest.mark.parametrize("name", LOG_PROBS)
def test_log_probs_of_any_size_are_read_in_bounded_memory(name, tmp_path):
    file, write, said = LOG_PROBS[name]
    write(tmp_path / file)
    one = np.zeros(1, np.int64)
    columns = TokenColumns(one, one.astype(np.int32), one.astype(np.int32), one.astype(np.int16))
    before = peak_megabytes()
    with work_ends(), pytest.raises(RecordingError, match=said):
        log_probs(tmp_path / file, columns, one)
    assert peak_megabytes() - before < _MEGABYTES


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_asks_for_the_world_is_refused(name, tmp_path):
    file, write = HOSTILE[name]
    write(tmp_path / file)
    before = peak_megabytes()
    with work_ends(), pytest.raises(MoeGeomError, match=r"\S"):
        open_tokens(tmp_path / file, known=known(), routers=("text/1",), dialect="vllm")
    assert peak_megabytes() - before < _MEGABYTES


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
