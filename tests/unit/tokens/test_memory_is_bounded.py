import tracemalloc

import numpy as np
import pytest

from moegeom.core.tokens import TokenColumns
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.traces import source
from moegeom.tokens.traces.dialects import vllm
from tests.unit.tokens.dialects.written import known

WIDTH = 256
STEP = 256


def scan(source, num_tokens, router="a"):
    for start in range(0, num_tokens, STEP):
        source.read_values(router, start, start + STEP)
        source.read_columns(start, start + STEP)


def peak_of(action) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def columns(first, num_tokens):
    token = np.arange(first, first + num_tokens)
    return TokenColumns(
        document=token // 512,
        position=(token % 512).astype(np.int32),
        token_id=np.zeros(num_tokens, np.int32),
        domain=np.full(num_tokens, -1, np.int16),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reading_a_recording_does_not_grow_with_its_tokens(tmp_path, dtype):
    values = {"a": np.ones((8192, WIDTH), np.float32)}

    def write(path, num_shards):
        with RecordingWriter(path, "router_input", ("a",), dtype=dtype) as writer:
            for shard in range(num_shards):
                writer.append(columns(shard * 8192, 8192), values)

    write(tmp_path / "short", 1)
    write(tmp_path / "long", 8)
    short, long = open_recording(tmp_path / "short"), open_recording(tmp_path / "long")
    scan(short, 8192)
    whole = 8 * 8192 * WIDTH * 4
    peak = peak_of(lambda: scan(long, 8 * 8192))
    # Four cached row groups, a batch and the scratch.
    assert peak < 4 * 8192 * 18 + 3 * STEP * WIDTH * 4 + (3 << 20) < whole / 8
    assert peak < peak_of(lambda: scan(short, 8192)) + 4 * 8192 * 18 + (1 << 20)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_large_npy_or_npz_is_not_loaded(tmp_path, suffix):
    values = np.ones((40_000, WIDTH), np.float32)
    path = tmp_path / f"a.{suffix}"
    {"npy": np.save, "npz": np.savez}[suffix](path, values)
    source = open_tokens(path, "logits", routers=("a",))
    assert peak_of(lambda: scan(source, 39_000)) < 2 << 20 < values.nbytes / 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reading_outputs_of_experts_does_not_load_the_shard(tmp_path, dtype):
    shape = (2048, 16, WIDTH)
    with RecordingWriter(tmp_path / "rec", "router_input", ("a",), dtype=dtype) as writer:
        writer.append(
            columns(0, 2048),
            {"a": np.ones((2048, WIDTH), np.float32)},
            outputs={"expert_output": {"a": np.ones(shape, np.float32)}},
        )
    source = open_recording(tmp_path / "rec")

    def read():
        for start in range(0, 2048, 64):
            source.read_output("a", "expert_output", start, start + 64)

    batch = 64 * 16 * WIDTH * 4
    # Two batches, the one before still being held, and the scratch.
    assert peak_of(read) < 2 * batch + (2 << 20) < np.prod(shape) * 4 / 6


@pytest.mark.parametrize(("step", "most"), [(1, 2**20), (-1, 2**18)])
def test_counting_documents_takes_no_memory_that_their_number_multiplies(tmp_path, step, most):
    """As many documents as tokens: in order next to nothing is held, else a number of each."""

    def peak(num_tokens):
        document = np.arange(num_tokens)[::step]
        path = tmp_path / f"{num_tokens}.npz"
        np.savez(path, a=np.zeros((num_tokens, 1), np.int32), document=document)
        opened = []
        peak = peak_of(lambda: opened.append(open_tokens(path, "ids", routers=("a",))))
        assert opened[0].facts.num_documents == num_tokens
        np.testing.assert_array_equal(opened[0].read_columns(70, 90).document, document[70:90])
        return peak

    peak(2**10)  # what a first opening imports stays
    growth = peak(most) - peak(most // 4)
    assert growth < 0.75 * most * (0.01 if step == 1 else 40)


def test_traces_do_not_grow_with_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "CACHE_BYTES", 1 << 17)
    monkeypatch.setattr(vllm, "PIECE_BYTES", 1 << 17)
    order = np.argsort(np.random.default_rng(0).random((2**15, 4, 16)), axis=2)
    ids = order[:, :, :4].astype(np.uint8)
    ids[:, 0] = 0
    for number in range(9):
        np.save(tmp_path / f"{number}.npy", np.roll(ids, number + 1, axis=0))

    def read(pattern):
        opened = open_tokens(str(tmp_path / pattern), routers=("text/1",), known=known(64))
        for start in range(0, opened.facts.num_tokens, 2**15):
            opened.read_chosen("text/1", start, start + 1024)

    read("0.npy")  # what is imported when it is first used
    few = peak_of(lambda: read("[01].npy"))
    assert peak_of(lambda: read("*.npy")) < few + (1 << 16)
    assert few < 6 * ids.nbytes
