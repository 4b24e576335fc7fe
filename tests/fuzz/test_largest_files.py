"""Files that ask for as much work and memory as the limits let them, or a little more.

Work on any file comes to an end, and takes 512 MB beside its own size.

Whatever the bytes of a file: a value or a MoeGeomError, soon and small. Every kind of file is mutated by
edits that know its language. An input may take two seconds of processor time and 512 MB beside its own
size, may print no warning, and must not end in anything but a value or one of our errors. The same inputs
are tried in every run; at night a million.
"""

import io
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from benchmarks.synthetic import SyntheticModel, write_checkpoint
from moegeom.checkpoint.open import FORMATS, open_checkpoint
from moegeom.core import limits
from moegeom.core.errors import MoeGeomError
from moegeom.core.tokens import TokenColumns
from moegeom.router.load import load_routers
from moegeom.router.requested_family import read_family_file
from moegeom.studies.check.study import GateRequest, gate
from moegeom.studies.log_probs import log_probs
from moegeom.tokens.open import open_tokens
from moegeom.tokens.source import SOURCES
from moegeom.tokens.traces.trace import DIALECTS
from tests.by_day import by_day
from tests.ends import work_ends
from tests.fuzz.kinds import KINDS
from tests.fuzz.ranges import ROOT, distinct, environment, fuzz, offenders_of
from tests.fuzz.worker import FAULTS, memory_of
from tests.unit.tokens.dialects import test_counts
from tests.unit.tokens.dialects.written import WRITERS, known

Write = Callable[[Path], object]

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


def _write_many_tensors(folder: Path) -> None:
    count = 200_000
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


def _index(count: int, more: str = "") -> Write:
    return lambda folder: _write_index(
        folder, {_expert(i): "model.safetensors" for i in range(count)}, more
    )


def _index_of_files(folder: Path) -> None:
    _write_index(folder, {f"t{i}": f"{i}.safetensors" for i in range(590_000)})


def _header(make: Callable[[], str]) -> Write:
    return lambda folder: _write_header(folder, make())


def _config(make: Callable[[], object]) -> Write:
    return lambda folder: _write_config(folder, json.dumps(_CONFIG | {"x": make()}))


def _config_of_lists(folder: Path) -> None:
    lists = "[]," * 2_000_000
    _write_config(folder, f'{{"x":[{lists}[]],' + json.dumps(_CONFIG)[1:])


def _metadata(count: int) -> bytes:
    """What torch writes for tensors that lie in one piece each."""
    shape, corner = torch.Size([2048, 7168]), torch.Size([0, 0])
    names = [_expert(i) for i in range(count)]
    described: dict[str, metadata.TensorStorageMetadata | metadata.BytesStorageMetadata] = {
        name: metadata.TensorStorageMetadata(
            metadata.TensorProperties(torch.float32),
            shape,
            [metadata.ChunkStorageMetadata(corner, shape)],
        )
        for name in names
    }
    places = {
        metadata.MetadataIndex(name, corner, 0): _StorageInfo("__0_0.distcp", 100 * i, 100)
        for i, name in enumerate(names)
    }
    return pickle.dumps(metadata.Metadata(described, {}, places))


_BYTES = 29_900_000
_SIZE = b"\x80\x04ctorch\nSize\n\x94"


def _repeated(opcodes: bytes, start: bytes = b"\x80\x04") -> bytes:
    return start + opcodes * ((_BYTES - len(start)) // len(opcodes)) + b"N."


def _dcp(make: Callable[[], bytes], num_data: int = 100 * 70_000) -> Write:
    """A checkpoint of torch.distributed whose metadata is this pickle."""

    def write(folder: Path) -> None:
        (folder / ".metadata").write_bytes(make())
        (folder / "__0_0.distcp").write_bytes(bytes(num_data))

    return write


def _steps(opcodes: bytes, start: bytes = b"\x80\x04") -> Write:
    return _dcp(partial(_repeated, opcodes, start))


def _wide_text() -> bytes:
    size = (_BYTES - 100).to_bytes(4, "little")
    return b"X" + size + b"a" * (_BYTES - 104) + b"\xf0\x9f\x90\xa6."


def _archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"}.")
        for i in range(149_000):
            archive.writestr(f"archive/data/{i}", b"")


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _gguf(num_tensors: int, num_settings: int, body: Callable[[], bytes]) -> Write:
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_settings)
    return lambda folder: (folder / "m.gguf").write_bytes(head + body() + bytes(64))


def _arrays(count: int, length: int, text: bytes) -> bytes:
    about = struct.pack("<IIQ", 9, 8, length)
    return b"".join(_text(b"%d" % i) + about + length * _text(text) for i in range(count))


def _gguf_tensors() -> bytes:
    about = struct.pack("<I3QIQ", 3, 1, 0, 9, 0, 0)
    names = (_text(b"\xf0\x9f\x98\x80" + b"%0252d" % i) for i in range(30_000))
    return b"".join(name + about for name in names)


def _described(pieces: int, rows: int) -> metadata.Metadata:
    """A small file that claims a large tensor: each piece points at the same bytes."""
    chunks = [
        metadata.ChunkStorageMetadata(torch.Size([i * rows, 0]), torch.Size([rows, 8]))
        for i in range(pieces)
    ]
    size = torch.Size([pieces * rows, 8])
    tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(torch.float32), size, chunks)
    places = {
        metadata.MetadataIndex("t", chunk.offsets): _StorageInfo("__0_0.distcp", 0, 1400)
        for chunk in chunks
    }
    return metadata.Metadata({"t": tensor}, None, places)


def _claims(pieces: int, rows: int) -> Write:
    return _dcp(lambda: pickle.dumps(_described(pieces, rows)), 1400)


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


def _family(text: str) -> Write:
    return lambda folder: (folder / "mine.toml").write_text(text)


def _npy_header(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
    header = io.BytesIO()
    about = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, about)
    return header.getvalue()


def _npz_bomb(folder: Path) -> None:
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", _npy_header((10**9, 4, 4)) + b"\0" * 200_000_000)


def _npz_of_tokens(folder: Path) -> None:
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text.0.npy", _npy_header((4_000_000, 9), "<f4") + bytes(144_000_000))


def _npz_of_arrays(folder: Path) -> None:
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.writestr("a.npy", _npy_header((1, 4, 4)) + bytes(16))
    raw, count = (folder / "a.npz").read_bytes(), struct.pack("<HH", 20_001, 20_001)
    (folder / "a.npz").write_bytes(raw[:-14] + count + raw[-10:])


def _log_without_end(folder: Path) -> None:
    (folder / "eval.log").write_bytes(b"a log\n")
    os.truncate(folder / "eval.log", 1 << 40)


def _file(name: str, make: Callable[[], bytes]) -> Write:
    return lambda folder: (folder / name).write_bytes(make())


def _a_key_for_each_line() -> bytes:
    scored = '"document": 0, "position": 9, "logprob": 0, "other_logprob": 0'
    return "".join(f'{{{scored}, "{i}": 0}}\n' for i in range(20_000)).encode()


_ROUTED = b'{"choices": [{"routed_experts": '
_COLUMNS = b"document,position,logprob,other_logprob\n"


def _a_file_that_ends_nowhere(folder: Path) -> None:
    (folder / "a.csv").write_bytes(_COLUMNS)
    os.truncate(folder / "a.csv", (1 << 30) + 1)


# ---------------------------------------------------------------------------------------- reading
def _routers(folder: Path) -> str:
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(_CONFIG))
    return f"{len(load_routers(open_checkpoint(folder)).routers)} routers"


def _tensor(folder: Path) -> str:
    return str(open_checkpoint(folder).read("t").shape)


def _family_file(folder: Path) -> str:
    return str(read_family_file(folder / "mine.toml"))


def _trace(folder: Path) -> str:
    path = next(folder.iterdir())
    return str(open_tokens(path, checkpoint_routers=known(), routers=("text/1",), dialect="vllm"))


def _tokens(folder: Path) -> str:
    return str(open_tokens(next(folder.iterdir()), "router_input", routers=("text/0",)))


def _log(folder: Path) -> str:
    return str(open_tokens(next(folder.iterdir()), checkpoint_routers=known(), dialect="llama_cpp"))


def _log_probs(folder: Path) -> str:
    one = np.zeros(1, np.int64)
    columns = TokenColumns(one, one.astype(np.int32), one.astype(np.int32), one.astype(np.int16))
    return str(log_probs(next(folder.iterdir()), columns, one))


@dataclass(frozen=True)
class Largest:
    """A file, what is said of it, how it is read, and the megabytes that reading may take."""

    write: Write
    answer: str
    read: Callable[[Path], str] = _routers
    megabytes: int = 512


_STEPS = "more than 8100000 steps"
_TWICE = "both claim the bytes 0 to 1400"
_OLMOE = "is a router of family olmoe"

LARGEST = {
    "a header of 200 000 tensors": Largest(_write_many_tensors, _OLMOE),
    "a header of keys": Largest(_header(partial(_flat, 1_300_000)), "1300000 tensors, more"),
    "a header of more keys": Largest(_header(partial(_flat, 2_000_000)), "bytes of objects"),
    "a header of lists": Largest(
        _header(lambda: '{"a":[' + "[]," * 2_000_000 + "[]]}"), "is described by a list"
    ),
    "a header of one name": Largest(
        _header(lambda: '{"' + "\u00e9" * 10_000_000 + '":{}}'), "10000000 characters"
    ),
    "row slices of 330 000 tensors": Largest(_write_slices, _OLMOE),
    "an index of 590 000 tensors": Largest(_index(590_000), "1 routers"),
    "an index with a name twice": Largest(_index(500_000, f', "{_expert(0)}": "x"'), "twice"),
    "an index of 590 000 files": Largest(_index_of_files, "files, more than the 20000 allowed"),
    "a config of lists": Largest(_config_of_lists, "1 routers"),
    "a config of numbers": Largest(_config(lambda: list(range(1_000_000))), "1 routers"),
    "a config of 9 MB": Largest(_config(lambda: "a" * 9_000_000), "8000000 allowed"),
    "a pickle of 70 000 tensors": Largest(_dcp(partial(_metadata, 70_000)), _OLMOE),
    "a pickle of lists": Largest(_steps(b"]"), "300000000 bytes of objects"),
    "a pickle of long numbers": Largest(_steps(b"\x8a\x01\x010"), _STEPS),
    "a pickle of calls": Largest(_steps(b"h\x00)R0", _SIZE), _STEPS),
    "a pickle of texts": Largest(_steps(b"X\x04\0\0\0\xf0\x9f\x90\xa60"), _STEPS),
    "a pickle of tuples in each other": Largest(_steps(b"\x85", b"\x80\x04N"), _STEPS),
    "a pickle of a wide text": Largest(_dcp(_wide_text), "expected a Metadata"),
    "a pickle of a long tuple": Largest(
        _dcp(lambda: b"(" + b"N" * 4_000_000 + b"t."), "holds a tuple"
    ),
    "an archive": Largest(_archive, _OLMOE),
    "gguf of empty strings": Largest(_gguf(0, 1, lambda: _arrays(1, 2_499_999, b"")), "m.gguf: "),
    "gguf of short arrays": Largest(
        _gguf(0, 1024, lambda: _arrays(1024, 256, "\u0100".encode())), "m.gguf: "
    ),
    "gguf of wide texts": Largest(
        _gguf(0, 80, lambda: _arrays(80, 256, b"\xf0\x9f\x98\x80" + b"a" * 2900)), "m.gguf: "
    ),
    "gguf of tensors": Largest(_gguf(30_000, 0, _gguf_tensors), "m.gguf: "),
    "gguf of strings that are skipped one by one": Largest(
        _gguf(0, 1, lambda: _arrays(1, 1_000, bytes(70_000))), "m.gguf: "
    ),
    "a tensor in 600 pieces": Largest(_claims(600, 2), _TWICE, _tensor, 50),
    "a tensor of 2^40 rows": Largest(_claims(1, 2**40), "takes 35184372088832", _tensor, 50),
    "a tensor of 2^58 rows in 3 pieces": Largest(_claims(3, 2**58), _TWICE, _tensor, 50),
    **{
        f"a family file of {name}": Largest(_family(text), f"mine.toml: {said}", _family_file, 100)
        for name, (text, said) in {
            "dots": ("a." * 32_000 + "b = 1", "line 1 has 32000 dots, more than 100."),
            "long keys": ("\n".join("a." * 99 + f"b{i}=1" for i in range(300)), "unknown key 'a'."),
            "tables": ("\n".join(f"[{i}{'.a' * 90}]" for i in range(300)), "unknown key '0'."),
            "brackets": ("a = " + "[" * 60_000, "is nested too deeply."),
            "digits": ("a = " + "1" * 60_000, "is not TOML (Exceeds the limit"),
            "names": (
                _STACK.format(names=",\n".join(f'"{{layer}}.{i}"' for i in range(3000)), top_k=2),
                "stacks[0].weight is a list of 3000, expected a list of at most 100 entries.",
            ),
            "a long value": (
                "text = [" + "1," * 30_000 + "]\nstacks = []",
                "text is a list of 30000, expected text.",
            ),
            "a long pattern": (_STACK.format(names=f'"{"x" * 60_000}"', top_k=2), "pattern 'xxxxx"),
            "an integer of no machine": (
                _STACK.format(names='"{layer}.x"', top_k=10**400),
                "holds an integer beyond 64 bits.",
            ),
            "characters": ("#" * 70_000, "has 70000 characters, more than 65536."),
        }.items()
    },
    "an npz of compressed zeros": Largest(_npz_bomb, "more than 160,000,000 are read", _trace),
    "an npz of compressed tokens": Largest(
        _npz_of_tokens, "compressed arrays of more than", _tokens
    ),
    "an npz of 20 001 arrays": Largest(_npz_of_arrays, "more than the 20000", _trace),
    "a log of 2^40 zeros": Largest(_log_without_end, "line 2 is no text", _log),
    "an npy of a claimed size": Largest(
        _file("a.npy", partial(_npy_header, (10**12, 4, 4))), "needs 16000000000000.", _trace
    ),
    "a trace of deep lists": Largest(
        _file("a.json", lambda: _ROUTED + b"[" * 2_000_000 + b"]}]}"), "nested too deeply", _trace
    ),
    "a trace of many empty lists": Largest(
        _file("a.json", lambda: _ROUTED + b"[" + b"[]," * 12_000_000 + b"[]]}]}"),
        "has 24,000,005 values, more than the 3,000,000",
        _trace,
    ),
    "a trace of a record without end": Largest(
        _file("a.jsonl", lambda: b'{"choices": "' + b"x" * 60_000_000 + b'", "routed_experts": ['),
        "more than the 48,000,000 bytes",
        _trace,
    ),
    "a trace of blank lines": Largest(
        _file("a.jsonl", lambda: _ROUTED + b"[[[0]]]}]}\n" + b"\n" * 500_001),
        "more than 500,000 lines without anything",
        _trace,
        50,
    ),
    "log-probs of a column for each row": Largest(
        _file("a.jsonl", _a_key_for_each_line), "none of its 20,000 rows", _log_probs
    ),
    "log-probs of bytes": Largest(
        _a_file_that_ends_nowhere, "1,073,741,825 bytes, more than the 1,073,", _log_probs
    ),
    "log-probs of rows": Largest(
        _file("a.csv", lambda: _COLUMNS + b"0,1,0,0\n" * (2**22 + 1)),
        "rows or more, more than the 4,194,304",
        _log_probs,
    ),
    "log-probs of a line": Largest(
        _file("a.jsonl", lambda: b'{"text": "' + b"x" * 60_000_000 + b'"}\n'),
        "more than 1,048,576 bytes",
        _log_probs,
    ),
}

#: Some of them take minutes, and most are one limit that another meets too.
_AT_NIGHT = ("a pickle", "an index", "a config of l", "a config of n", "row slices", "an archive")
_AT_NIGHT += ("a header of l", "a header of m")
_DAY = [
    *(name for name in LARGEST if not name.startswith((*_AT_NIGHT, "gguf of s", "gguf of w"))),
    "a pickle of lists",
    "a pickle of a wide text",
]
_DAY.remove("a header of 200 000 tensors")


@pytest.fixture(autouse=True)
def _at_the_pace_of_a_user() -> Iterator[None]:
    """Shape checks would cost more than the reading."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("name", by_day(LARGEST, _DAY))
def test_the_largest_file_is_read_or_refused_soon_and_in_little_memory(
    name: str, tmp_path: Path
) -> None:
    case = LARGEST[name]
    case.write(tmp_path)

    def said() -> str:
        try:
            return case.read(tmp_path)
        except MoeGeomError as error:
            return str(error)

    with work_ends():
        sentence, megabytes = memory_of(said)
    assert case.answer in sentence
    assert len(sentence) < (500 if case.read is _family_file else 1000)
    assert megabytes < case.megabytes


def _calls(folder: Path, layers: int) -> int:
    """Calls and returns of ``check`` on a model of so many layers, in this thread."""
    shape = SyntheticModel("deepseek_v3", hidden=32, experts=8, top_k=2, layers=layers)
    model, steps = write_checkpoint(folder / f"{layers}", shape), 0

    def step(*_: object) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(step)
    try:
        gate(GateRequest(str(model)))
    finally:
        sys.setprofile(None)
    return steps


def test_a_layer_more_costs_check_as_much_as_the_one_before(tmp_path: Path) -> None:
    _calls(tmp_path, 17)  # what is imported and kept where it is used
    few, more, most = (_calls(tmp_path, layers) for layers in (16, 32, 64))
    assert most - more < 2.1 * (more - few)


_UNITS = {"": 1, "MB": 10**6, "MiB": 1 << 20, "GiB": 1 << 30}


def test_the_page_has_a_row_for_each_limit_with_its_number() -> None:
    page = (ROOT / "docs/storage.md").read_text("utf-8")
    rows = re.findall(r"(?m)^\| [^|]+ \| ([^|]+) \| [^|]*\| `([A-Z_]+)` \|$", page)
    numbers = {name: limit.replace("2^63 - 1", str(2**63 - 1)) for limit, name in rows}
    shown = {
        name: int(number.replace(" ", "")) * _UNITS[unit]
        for name, limit in numbers.items()
        for number, unit in re.findall(r"^([0-9 ]*[0-9]) ?([A-Za-z]*)$", limit)
    }
    assert len(rows) == len(numbers)
    assert shown == {name: n for name, n in vars(limits).items() if isinstance(n, int)}


#: Names of constants that bound something, in the floors that read files of others; and those that
#: bound no file, with what they are.
_CONSTANTS = re.compile(r"(?m)^([A-Z_][A-Z_0-9]*(?:, [A-Z_0-9]+)*)(?:: [^=\n]+)? = ")
_BOUND = re.compile(r"_?(MOST|MAX|LONGEST)(_|$)|_WORK")
_NO_LIMITS = {
    "core/text.py MOST_QUOTED": "characters of what a sentence quotes",
    "core/finding.py MOST_FAIR_SHARES": "a limit of checks, which profiles change",
    "router/attention/tensors.py _MOST_TEXT": "of families here",
}


def test_what_bounds_files_of_others_stands_in_one_table() -> None:
    package = ROOT / "moegeom"
    names = {
        f"{file.relative_to(package)} {name}"
        for floor in ("core", "checkpoint", "router", "tokens", "results")
        for file in (package / floor).rglob("*.py")
        for constants in _CONSTANTS.findall(file.read_text("utf-8"))
        for name in constants.split(", ")
        if _BOUND.match(name) and file.name != "limits.py"
    }
    assert names <= _NO_LIMITS.keys()


# ------------------------------------------------------------------------------- every kind of file
#: Numbers of the inputs of each kind: by day a few, at night a million in all.
BY_DAY, AT_NIGHT = 6, 1_000_000

#: Inputs of which a million ended in something else than they should.
FOUND = {
    "config": (3075,),
    "log-probs in jsonl": (6181,),
    "npy": (16567,),
    "npz": (10422,),
    "recording facts": (4140,),
    "results tables": (714, 4650, 6640),
    "compressed npz": (5203,),
    "counts of imatrix": (11648,),
    "counts of sglang": (13304,),
    "weights": (8450,),
    "tokens in pt": (15655,),
    "run.json": (2305,),
    "results of tokens": (3911,),
    "unfinished results": (3350,),
    "baseline": (1376,),
    "odd weights": (35,),
}

#: What the first two hold is kept to save work: where it is damaged, the work is done again. The
#: third are sound files, each other weights.
_NEVER_REFUSED = {"range cache", "kept first pass", "odd weights"}


def test_mutated_inputs_of_every_kind_end_in_a_value_or_an_error(tmp_path: Path) -> None:
    few = [(kind, 0, BY_DAY) for kind in KINDS]
    mended = [(kind, n, n + 1) for kind, numbers in FOUND.items() for n in numbers]
    ends: Counter[tuple[str, str]] = Counter()
    offenders = offenders_of(fuzz(few + mended, tmp_path), ends)
    assert offenders == [], distinct(offenders)
    assert ends.total() == BY_DAY * len(KINDS) + sum(map(len, FOUND.values()))
    # the mutations bite, and not all of them
    assert sum(ends[kind, "error"] > 0 for kind in KINDS) > 0.8 * len(KINDS)
    assert sum(ends[kind, "value"] > 0 for kind in KINDS) > 0.6 * len(KINDS)


@pytest.mark.nightly
def test_a_million_mutated_inputs_end_in_a_value_or_an_error(tmp_path: Path) -> None:
    each = AT_NIGHT / sum(kind.share for kind in KINDS.values())
    counts = {name: int(each * kind.share) + 1 for name, kind in KINDS.items()}
    ends: Counter[tuple[str, str]] = Counter()
    offenders = offenders_of(fuzz([(kind, 0, n) for kind, n in counts.items()], tmp_path), ends)
    assert offenders == [], distinct(offenders)
    for name, count in counts.items():
        assert ends[name, "error"] > 0 or name in _NEVER_REFUSED
        assert ends[name, "value"] > 0 or KINDS[name].is_refused
        assert ends[name, "error"] + ends[name, "value"] == count


#: What a kind stands for, where its name does not begin with it.
_FORMATS = {"safetensors", "pytorch", "dcp", "gguf"}
_SOURCES = {
    "npy": "npy", "npz": "npz", "safetensors": "tokens in safetensors", "recording": "recording",
    "parquet": "tokens in parquet", "pt": "tokens in pt", "trace": "trace of vllm",
}  # fmt: skip


def test_every_format_source_and_dialect_is_a_kind() -> None:
    assert set(FORMATS.names()) == _FORMATS
    assert all(any(kind.startswith(name) for kind in KINDS) for name in _FORMATS)
    assert set(SOURCES.names()) == set(_SOURCES)
    assert set(_SOURCES.values()) <= set(KINDS)
    written = {writer.dialect for writer in WRITERS.values()}
    assert len(set(DIALECTS.names()) - written) == len(test_counts.WRITERS)
    assert {f"trace of {name}" for name in WRITERS} <= set(KINDS)
    assert {f"counts of {name}" for name in test_counts.WRITERS} <= set(KINDS)


def test_the_worker_sees_every_fault() -> None:
    # in a process of its own: memory and signals are those of a process
    command = [sys.executable, "-m", "tests.fuzz.worker", json.dumps("faults")]
    ends = json.loads(subprocess.check_output(command, env=environment(), cwd=ROOT))
    assert ends == {fault: fault for fault in FAULTS}
