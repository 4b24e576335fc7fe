"""Whatever the bytes of a torch archive, the answer is a value or a MoeGeomError, soon and small."""

from __future__ import annotations

import io
import random
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moegeom.checkpoint.folder import local
from moegeom.checkpoint.formats.pytorch import FORMAT
from moegeom.core.errors import MoeGeomError
from tests.fuzz.mutations import mutate, rounds

_SECONDS = 2.0
_MEGABYTES = 512
_FILE = "pytorch_model.bin"
_PICKLE = "pytorch_model/data.pkl"

_WORDS = [
    b"(", b"]", b"}", b")", b".", b"0", b"2", b"R", b"b", b"s", b"u", b"t", b"\x81", b"\x94", b"Q", b"q\x00",
    b"h\x00", b"h\x01", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"\x8a\x08" + b"\xff" * 8, b"X\xff\xff\xff\xff",
    b"cos\nsystem\n", b"ctorch\nSize\n", b"ccollections\nOrderedDict\n", b"(" * 3000, b"]" * 3000, b"\x85" * 3000,
    b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\7", b"\0", b"\xff" * 8, b"../", b"\x08\0", b"h\x00h\x00s" * 500,
]  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    whole = torch.arange(64.0).reshape(8, 8)
    tensors = {
        "model": {
            "layers.0.gate.weight": torch.ones(4, 8, dtype=torch.bfloat16),
            "layers.0.gate.view": whole.T[1:3],
            "layers.1.gate.weight": torch.nn.Parameter(whole),
            "layers.1.gate.f8": torch.ones(4).to(torch.float8_e4m3fn),
        },
        "state": [torch.ones(2), {"step": torch.tensor(3), "sparse": torch.eye(2).to_sparse()}],
        "step": 7,
    }
    torch.save(tensors, tmp_path / _FILE)
    return tmp_path


def _mutate(raw: bytes, draw: random.Random) -> bytes:
    return mutate(raw, draw, _WORDS, (0, 1, 1, 2, 8, 40))


def _with_pickle(good: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A sound archive with another pickle in it, so that the pickle is reached."""
    raw = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(raw, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name == _PICKLE else content)
    return raw.getvalue()


def _end(raw: bytes, draw: random.Random) -> bytes:
    """The directory, where all structure of the archive lies, mutated in its place."""
    start = raw.index(b"PK\1\2")
    return raw[:start] + _mutate(raw[start:], draw)


def _answers(folder: Path) -> list[bool]:
    """For the file and each tensor: True for a value, False for an error on purpose."""
    started = time.process_time()
    answers = []
    try:
        store = FORMAT.open(local(folder))
        names = list(store.names())
    except MoeGeomError as error:
        assert str(error).isprintable() or "\n" in str(error)
        return [False]
    finally:
        assert time.process_time() - started < _SECONDS
    for name in names:
        started = time.process_time()
        try:
            value = store.read(name)
        except MoeGeomError as error:
            assert str(error).isprintable() or "\n" in str(error)
            answers.append(False)
        else:
            assert value.shape == store.info(name).shape
            answers.append(True)
        assert time.process_time() - started < _SECONDS
    return answers


@pytest.mark.parametrize(
    ("part", "count"),
    rounds({"pickle": (350, 1700), "directory": (200, 900), "file": (150, 600)}),
)
def test_mutated_archives_end_in_a_value_or_an_error_on_purpose(
    part: str, count: int, checkpoint: Path
) -> None:
    good = (checkpoint / _FILE).read_bytes()
    assert sorted(_answers(checkpoint)) == [False, True, True, True, True, True, True]
    draw = random.Random(f"moegeom pytorch {part}")
    mutations: dict[str, Callable[[], bytes]] = {
        "pickle": lambda: _with_pickle(good, lambda raw: _mutate(raw, draw)),
        "directory": lambda: _end(good, draw),
        "file": lambda: _mutate(good, draw),
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers = []
    for _ in range(count):
        (checkpoint / _FILE).write_bytes(mutations[part]())
        answers.extend(_answers(checkpoint))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < _MEGABYTES * 1024
    assert set(answers) == {False, True}  # the mutations bite, and not all at the gate


def test_random_bytes_are_refused(checkpoint: Path) -> None:
    draw = random.Random(7)
    for _ in range(200):
        (checkpoint / _FILE).write_bytes(draw.randbytes(draw.randrange(300)))
        assert _answers(checkpoint) == [False]


def test_random_pickles_are_answered(checkpoint: Path) -> None:
    good = (checkpoint / _FILE).read_bytes()
    draw = random.Random(8)
    for _ in range(200):
        program = b"\x80\x02" + b"".join(draw.choices(_WORDS[:24], k=draw.randrange(60))) + b"."
        (checkpoint / _FILE).write_bytes(_with_pickle(good, lambda _, program=program: program))
        assert _answers(checkpoint) in ([False], [])
