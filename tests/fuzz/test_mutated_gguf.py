"""Whatever the bytes of a GGUF file: a value or a MoeGeomError, soon, in little memory."""

from __future__ import annotations

import random
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from moegeom.checkpoint.formats._gguf_types import BLOCK_DTYPES
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import MoeGeomError
from tests.fuzz.mutations import rounds

_ROOT = Path(__file__).resolve().parents[2]

_SECONDS = 2.0
_MEGABYTES = 512

_TYPES = gguf.GGMLQuantizationType

_WORDS = [
    *(struct.pack("<Q", n) for n in (0, 1, 255, 300, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)),
    *(struct.pack("<I", n) for n in (2, 6, 7, 8, 9, 12, 13, 19, 30, 39, 41, 2**31)),
    b"\xff", b"\x00" * 8, b"GGUF", b"split.count", b"general.alignment", b"olmoe.", b".", b"../x",
]  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two parts: settings, a vocabulary, and tensors of eight types."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "olmoe", split_max_tensors=5)
    writer.add_custom_alignment(32)
    writer.add_expert_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_head_count_kv([1, 2, 3])
    writer.add_token_list([f"t{i}" for i in range(300)])
    writer.add_token_scores([0.5] * 300)
    draw = np.random.default_rng(0)
    for dtype in ("Q8_0", "Q4_K", "MXFP4", "IQ2_S", "TQ1_0", "BF16"):
        block_bytes = gguf.GGML_QUANT_SIZES[_TYPES[dtype]][1]
        blocks = draw.integers(0, 256, (4, 2 * block_bytes), np.uint8)
        writer.add_tensor(f"blk.0.{dtype}.weight", blocks, raw_dtype=_TYPES[dtype])
    for layer in range(3):
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", np.ones((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path


def _mutate(raw: bytes, draw: random.Random) -> bytes:
    """One to four edits, half of them in place so that what follows keeps its position."""
    data = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        span = draw.choice((0, 1, 1, 2, 8, 40))
        word = draw.choice(_WORDS)
        edits: list[Callable[[], tuple[int, bytes]]] = [
            lambda: (1, bytes([draw.randrange(256)])),
            lambda word=word: (len(word), word),
            lambda word=word, span=span: (span, word),
            lambda at=at, span=span: (span, bytes(data[at : at + span]) * 2),
            lambda span=span: (span, b""),
        ]
        removed, put = draw.choice((*edits[:2], *edits))()
        data[at : at + removed] = put
    return bytes(data)


def _is_answered(folder: Path) -> bool:
    """True if everything has a value, False for errors on purpose; anything else fails."""
    started = time.process_time()
    errors = list(_errors(folder))
    for error in errors:
        assert str(error).isprintable() or "\n" in str(error)
        assert len(str(error)) < 2000
    assert time.process_time() - started < _SECONDS
    return not errors


def _errors(folder: Path) -> Iterator[MoeGeomError]:
    try:
        store = open_checkpoint(folder)
        assert store.config["model_type"] == "gguf"
    except MoeGeomError as error:
        yield error
        return
    for name in store.names():
        try:
            value = store.read(name)
            info = store.info(name)
            assert value.shape == info.shape
            assert len(store.read_bytes(name, 0, info.size_bytes)) == info.size_bytes
            assert info.dtype in BLOCK_DTYPES or value.nbytes == info.size_bytes
        except MoeGeomError as error:
            yield error


@pytest.mark.parametrize(("part", "count"), rounds({1: (700, 3500), 2: (200, 1000)}))
def test_mutated_files_end_in_values_or_in_errors_on_purpose(
    part: int, count: int, checkpoint: Path
) -> None:
    assert _is_answered(checkpoint)
    file = checkpoint / f"m-{part:05d}-of-00002.gguf"
    good = file.read_bytes()
    reader = gguf.GGUFReader(file)
    header_end = reader.data_offset
    draw = random.Random(f"moegeom gguf {part}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers = []
    for _ in range(count):
        # Most of a file is numbers, which may be anything: three of four mutations hit the header.
        cut = header_end if draw.random() < 0.75 else 0
        head, rest = (good[:cut], good[cut:]) if cut else (good, b"")
        file.write_bytes(_mutate(head, draw) + rest)
        answers.append(_is_answered(checkpoint))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < _MEGABYTES * 1024
    assert 0.02 < np.mean(answers) < 0.9  # the mutations do bite, and do get through


def test_random_bytes_are_refused(checkpoint: Path) -> None:
    draw = random.Random(7)
    file = checkpoint / "m-00001-of-00002.gguf"
    for _ in range(200):
        start = b"GGUF\3\0\0\0" if draw.random() < 0.5 else b""
        file.write_bytes(start + draw.randbytes(draw.randrange(500)))
        assert not _is_answered(checkpoint)


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _array(index: int, kind: int, length: int, values: bytes) -> bytes:
    return _text(b"%d" % index) + struct.pack("<IIQ", 9, kind, length) + values


#: Headers that ask for as much work and memory as their limits let them, or more.
_GREEDY: dict[str, Callable[[], tuple[int, int, bytes]]] = {
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


#: By itself: the shape checks of the tests would cost more than the reading.
_OPEN = r"""
import pathlib, re, sys, time
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import MoeGeomError
started = time.process_time()
try:
    open_checkpoint(sys.argv[1]).config
except MoeGeomError:
    # ru_maxrss would be that of the process which started this one, if it was larger
    peak = re.search(r"VmHWM:\s+([0-9]+) kB", pathlib.Path("/proc/self/status").read_text())[1]
    print(time.process_time() - started, int(peak) / 1024)
"""


@pytest.mark.parametrize("case", _GREEDY)
def test_the_largest_headers_end_soon_and_in_little_memory(case: str, tmp_path: Path) -> None:
    num_tensors, num_settings, body = _GREEDY[case]()
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_settings)
    (tmp_path / "m.gguf").write_bytes(head + body + bytes(64))
    command = [sys.executable, "-c", _OPEN, str(tmp_path)]
    seconds, megabytes = map(float, subprocess.check_output(command, cwd=_ROOT).split())
    assert seconds < _SECONDS
    assert megabytes < _MEGABYTES
