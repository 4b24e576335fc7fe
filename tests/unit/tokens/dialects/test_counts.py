"""Logs of counts: imatrix files written by gguf, the recorder of SGLang, Megatron's counts."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from moegeom.core.errors import RecordingError
from tests.unit.tokens.dialects.written import EXPERTS, NAMES, TOP_K, lines, opened, refuse


def some_counts(num_steps: int = 1) -> np.ndarray:
    """(steps, 3 layers, experts); all layers have the same total."""
    random = np.random.default_rng(5)
    share = random.dirichlet(np.ones(EXPERTS), (num_steps, 3))
    return np.stack([[random.multinomial(400 * TOP_K, p) for p in step] for step in share])


def write_imatrix(path: Path, counts: np.ndarray, kind: str = "imatrix") -> None:
    """llama-imatrix (GGUF since PR 9400), with gguf's own writer."""
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["wiki.txt"])
    writer.add_uint32("imatrix.chunk_count", 2)
    writer.add_uint32("imatrix.chunk_size", 200)
    for layer, of_layer in enumerate(counts[0], start=1):
        for matrix in ("gate", "up", "down"):
            name = f"blk.{layer}.ffn_{matrix}_exps.weight"
            writer.add_tensor(f"{name}.counts", of_layer.astype(np.float32)[:, None])
            writer.add_tensor(f"{name}.in_sum2", np.ones((EXPERTS, 8), np.float32))
        writer.add_tensor(f"blk.{layer}.attn_q.weight.counts", np.full((1, 1), 400, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_recorder(path: Path, counts: np.ndarray) -> None:
    """SGLang 0.5.23, mode stat: all layers, the buffer filled up with zeros."""
    buffer = np.zeros((10, 4, EXPERTS), np.int32)
    buffer[: len(counts), 1:] = counts
    record = {"rank": 0, "logical_count": torch.from_numpy(buffer)}
    torch.save(record | {"average_utilization_rate_over_window": None}, path)


def write_megatron(path: Path, counts: np.ndarray) -> None:
    """rank0.jsonl of Megatron-LM d98e8a64dd: two microbatches to an iteration."""
    records = []
    for step, layer in np.ndindex(counts.shape[:2]):
        half = counts[step, layer] // 2
        record = {"iter": 10 * step, "block": "decoder", "layer": layer}
        records.append(record | {"tpe": [half.tolist(), (counts[step, layer] - half).tolist()]})
    lines(path, records)


WRITERS = {
    "imatrix": ("m.gguf", write_imatrix, 1),
    "sglang": ("recorder.pt", write_recorder, 7),
    "megatron": ("rank0.jsonl", write_megatron, 7),
}

#: The dialect of each.
DIALECT = {
    "imatrix": "llama_imatrix", "sglang": "sglang_recorder",
    "megatron": "megatron_counts",
}  # fmt: skip


@pytest.mark.parametrize(("file", "write", "num_steps"), WRITERS.values(), ids=WRITERS)
def test_counts_are_read_as_they_were_written(file, write, num_steps, tmp_path):
    counts = some_counts(num_steps)
    write(tmp_path / file, counts)
    source = opened(tmp_path / file)
    assert source.facts.stage == "counts"
    assert source.facts.num_tokens == 400 * num_steps
    for index, router in enumerate(NAMES):
        np.testing.assert_array_equal(source.counts(router), counts[:, index])
    with pytest.raises(RecordingError, match="counts only, of"):
        source.read_chosen(NAMES[0], 0, 1)


def without_a_layer(counts: np.ndarray) -> np.ndarray:
    return np.where(np.arange(3)[:, None] == 1, 0, counts)


def an_expert_more(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([counts, np.ones_like(counts[..., :1])], axis=-1)


REFUSED = [
    ("imatrix", lambda c: np.full_like(c, 25), "converted from an older file"),
    ("imatrix", lambda c: c / 2 + 0.25, "no counts"),
    ("imatrix", without_a_layer, "no choices are counted at text/2"),
    ("imatrix", lambda c: c[:, :2], "names the layers 1, 2; the routers"),
    ("sglang", without_a_layer, "no choices are counted at text/2"),
    ("sglang", lambda c: -c, "values from -"),
    ("sglang", lambda c: 0 * c, "every count is 0"),
    ("megatron", lambda c: c[..., : EXPERTS // 2], "counts 32 experts; router text/1 has 64"),
    ("megatron", lambda c: -c, "expected counts"),
    ("megatron", lambda c: c[:, :2], "names the layers 0, 1; the routers"),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_counts_that_do_not_fit_are_refused(name, change, words, tmp_path):
    file, write, num_steps = WRITERS[name]
    write(tmp_path / file, change(some_counts(num_steps)))
    refuse(words, tmp_path / file)


def test_totals_and_unused_steps_are_told(tmp_path):
    write_recorder(tmp_path / "r.pt", some_counts(7))
    notes = opened(tmp_path / "r.pt").facts.notes
    assert "steps of the buffer that were not used, left out: 3" in notes
    assert "layers without router, which count nothing: 1" in notes
    counts = some_counts()
    counts[0, 1, 3] += 8
    write_imatrix(tmp_path / "m.gguf", counts)
    notes = opened(tmp_path / "m.gguf").facts.notes
    assert "layers count 1,600 to 1,608 slots: some saw or kept fewer tokens" in notes


def test_a_dump_of_single_passes_is_refused_by_name_and_a_model_is_no_trace(tmp_path):
    dump = {"records": [], "last_physical_to_logical_map": torch.zeros(4, 64)}
    torch.save(dump, tmp_path / "r.pt")
    refuse("records of single passes: physical ids", tmp_path / "r.pt")
    write_imatrix(tmp_path / "m.gguf", some_counts(), kind="model")
    refuse("not a kind of token file", tmp_path / "m.gguf")
