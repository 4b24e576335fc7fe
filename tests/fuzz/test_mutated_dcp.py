"""Whatever the bytes of a distributed checkpoint: a value or a MoeGeomError, soon, in little memory."""

from __future__ import annotations

import io
import pickle
import random
import resource
import time
from pathlib import Path

import pytest
import torch
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
from moegeom.core.errors import MoeGeomError
from tests.fuzz.mutations import mutate, rounds

_SECONDS = 2.0
_MEGABYTES = 512

_WORDS = [
    b"(", b")", b"}", b"]", b"t", b"R", b"b", b"\x81", b"\x93", b"\x94", b".", b"N", b"\x88", b"0",
    b"2", b"1", b"u", b"s", b"a", b"e", b"\x85", b"\x86", b"\x87", b"h\x00", b"h\xff", b"K\xff",
    b"M\xff\xff", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8a\xff" + b"\x7f" * 255,
    b"cos\nsystem\n", b"ctorch\nSize\n", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f", b"(" * 500,
    b"]" * 500, b"X\xff\xff\xff\x7f", b"G\x7f\xf0\x00\x00\x00\x00\x00\x00", b"PK\x03\x04", b"PK\x05\x06",
    b"\xff\xff\xff\xff", b"\x00" * 8, b"../x", b"\x8e" + b"\xff" * 8,
]  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three tensors in two chunks each, in two files, described as torch does it."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    described["step"] = BytesStorageMetadata()
    places = {}
    files = [io.BytesIO(), io.BytesIO()]
    for layer, dtype in enumerate((torch.float32, torch.bfloat16, torch.int8)):
        name = f"model.layers.{layer}.mlp.gate.weight"
        whole = torch.ones(4, 8).to(dtype)
        chunks = []
        for rank, file in enumerate(files):
            box = ChunkStorageMetadata(torch.Size([2 * rank, 0]), torch.Size([2, 8]))
            begin = file.tell()
            torch.save(whole[2 * rank : 2 * rank + 2].clone(), file)
            info = _StorageInfo(f"__{rank}_0.distcp", begin, file.tell() - begin)
            places[MetadataIndex(name, box.offsets, rank)] = info
            chunks.append(box)
        properties = TensorProperties(dtype)
        described[name] = TensorStorageMetadata(properties, torch.Size([4, 8]), chunks)
    for rank, file in enumerate(files):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(file.getvalue())
    metadata = Metadata(described, {"step": ("step",)}, places)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    return tmp_path


def _mutate(raw: bytes, draw: random.Random) -> bytes:
    return mutate(raw, draw, _WORDS, (0, 1, 1, 1, 2, 8, 40))


def _is_answered(folder: Path) -> bool:
    """True if every tensor has a value, False for errors on purpose; anything else fails."""
    started = time.process_time()
    answer = True
    try:
        store = open_checkpoint(folder)
        for name in store.names():
            try:
                value = store.read(name)
                info = store.info(name)
                assert (value.shape, value.nbytes) == (info.shape, info.size_bytes)
                assert store.read_bytes(name, 0, info.size_bytes) == value.tobytes()
            except MoeGeomError as error:
                assert str(error).isprintable() or "\n" in str(error)
                answer = False
    except MoeGeomError as error:
        assert str(error).isprintable() or "\n" in str(error)
        answer = False
    assert time.process_time() - started < _SECONDS
    return answer


@pytest.mark.parametrize(
    ("file", "count"), rounds({".metadata": (400, 2500), "__1_0.distcp": (300, 1300)})
)
def test_mutated_files_end_in_values_or_in_errors_on_purpose(
    file: str, count: int, checkpoint: Path
) -> None:
    assert _is_answered(checkpoint)
    good = (checkpoint / file).read_bytes()
    draw = random.Random(f"moegeom {file}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers = []
    for _ in range(count):
        (checkpoint / file).write_bytes(_mutate(good, draw))
        answers.append(_is_answered(checkpoint))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < _MEGABYTES * 1024
    assert False in answers  # the mutations do bite


def test_random_bytes_are_refused(checkpoint: Path) -> None:
    draw = random.Random(7)
    for file in (".metadata", "__0_0.distcp"):
        good = (checkpoint / file).read_bytes()
        for _ in range(100):
            (checkpoint / file).write_bytes(draw.randbytes(draw.randrange(len(good))))
            assert not _is_answered(checkpoint)
        (checkpoint / file).write_bytes(good)


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
    pieces: int, rows: int, checkpoint: Path
) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_described(pieces, rows)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not _is_answered(checkpoint)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
