"""Whatever the bytes of a trace, the answer is a source or a MoeGeomError, soon and small."""

from __future__ import annotations

import io
import json
import random
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegeom.core.errors import MoeGeomError
from moegeom.tokens.dialect import find_dialect
from moegeom.tokens.open import open_tokens
from tests.fuzz.mutations import mutate
from tests.unit.tokens.dialects.test_counts import WRITERS as COUNT_WRITERS
from tests.unit.tokens.dialects.test_counts import some_counts
from tests.unit.tokens.dialects.written import WRITERS, known, truth

COUNTS = {f"counts of {name}": writer for name, writer in COUNT_WRITERS.items()}

_SECONDS = 2.0
_MEGABYTES = 512
_NUM_MUTANTS = 120

_WORDS = [
    b"\xff" * 8, b"\0" * 8, b"-1", b"1e400", b"NaN", b"null", b"{}", b"[]", b'""', b"[" * 4000, b"{\"a\":" * 900,
    b"9" * 5000, b"k05VTVBZ", b'"shape"', b"(99999999999, 4, 4)", b"'|O'", b"'<f8'", b"sum = ", b"...", b"\n", b"\x93NUMPY",
    b"h\x00", b"J\xff\xff\xff\x7f", b"X\xff\xff\xff\xff", b"cos\nsystem\n", b"]" * 3000, b"PK\1\2", b"GGUF",
]  # fmt: skip

_VALUES = [
    None, True, -1, 2**70, 1.5, "", "x", "k05VTVBZ", "AAAA", [], [[]], [1, "2"], {}, [[[1]]], [[[-1]]],
    {"data": "AAAA", "shape": [2**39, 2**39, 2], "dtype": "uint8"}, {"data": "", "shape": [0, 4, 4]},
    {"data": "AAAA", "shape": [1, 1, 3], "dtype": "object"}, [[[2**62, 1]]], [[[0.5]]],
]  # fmt: skip


def opened(path: Path, dialect: str | None) -> None:
    """Both ways to open it; neither may end in anything but a source or one of our errors."""
    for asked in (None, dialect):
        try:
            source = open_tokens(path, known=known(), routers=("text/1", "text/2"), dialect=asked)
            if source.facts.stage == "ids":
                source.read_chosen("text/1", 0, source.facts.num_tokens)
                source.read_columns(0, source.facts.num_tokens)
        except MoeGeomError as error:
            assert error.message


def written_file(name: str, folder: Path) -> tuple[Path, Path, str | None]:
    """(what is opened, the file whose bytes are changed, dialect)."""
    if name in COUNTS:
        file, write, num_steps = COUNTS[name]
        write(folder / file, some_counts(num_steps))
        found = find_dialect(folder / file, None)
        assert found is not None
        return folder / file, folder / file, found.name
    writer = WRITERS[name]
    path = folder / writer.file
    writer.write(path, truth().written)
    return path, next(path.iterdir()) if path.is_dir() else path, writer.dialect


@pytest.mark.parametrize("name", [*WRITERS, *COUNTS])
def test_mutated_bytes_end_in_a_source_or_an_error(name, tmp_path):
    path, file, dialect = written_file(name, tmp_path)
    good, draw = file.read_bytes(), random.Random(name)
    for _ in range(_NUM_MUTANTS):
        file.write_bytes(mutate(good, draw, _WORDS, (0, 1, 1, 2, 8, 40, 400)))
        opened(path, dialect)


@pytest.mark.parametrize("name", ["slime", "miles", "verl torch", "counts of sglang"])
def test_mutated_pickles_end_in_a_source_or_an_error(name, tmp_path):
    path, file, dialect = written_file(name, tmp_path)
    good, draw = file.read_bytes(), random.Random(name)
    for _ in range(_NUM_MUTANTS):
        file.write_bytes(with_pickle(good, lambda raw: mutate(raw, draw, _WORDS, (0, 1, 1, 2, 8))))
        opened(path, dialect)


@pytest.mark.parametrize("name", ["vllm", "vllm 0.21", "sglang", "prime_rl", "megatron"])
def test_mutated_values_of_json_end_in_a_source_or_an_error(name, tmp_path):
    path, file, dialect = written_file(name, tmp_path)
    draw = random.Random(name)
    good = file.read_text()
    is_lines = name != "vllm 0.21"
    for _ in range(_NUM_MUTANTS):
        if is_lines:
            records = [json.loads(line) for line in good.splitlines()]
        else:
            records = json.loads(good)
        for _ in range(draw.randint(1, 3)):
            replace_one(draw.choice(records), draw)
        file.write_text("\n".join(map(json.dumps, records)) if is_lines else json.dumps(records))
        opened(path, dialect)


def replace_one(found: Any, draw: random.Random) -> None:
    """One value at any depth becomes another, or goes."""
    keys = list(found) if isinstance(found, dict) else range(len(found))
    if not keys:
        return
    key = draw.choice(list(keys))
    if isinstance(found[key], dict | list) and draw.random() < 0.7:
        replace_one(found[key], draw)
    elif isinstance(found, dict) and draw.random() < 0.2:
        del found[key]
    else:
        found[key] = draw.choice(_VALUES)


def with_pickle(good: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A sound archive with another pickle in it, so that the pickle is reached."""
    raw = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(raw, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("/data.pkl") else content)
    return raw.getvalue()


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


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_asks_for_the_world_is_refused_soon(name, tmp_path):
    file, write = HOSTILE[name]
    write(tmp_path / file)
    before, started = peak_megabytes(), time.perf_counter()
    with pytest.raises(MoeGeomError, match=r"\S"):
        open_tokens(tmp_path / file, known=known(), routers=("text/1",), dialect="vllm")
    assert time.perf_counter() - started < _SECONDS
    assert peak_megabytes() - before < _MEGABYTES


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
