"""A trace in many files, or in pieces of one, is the same as in one file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.core.text import natural
from moegeom.core.tokens import SourceFacts, TokenSource
from moegeom.tokens.files import TokenFiles
from moegeom.tokens.open import open_tokens
from moegeom.tokens.source import Company
from moegeom.tokens.traces import source, trace
from moegeom.tokens.traces.dialects import batches
from moegeom.tokens.traces.survey import FileJournal
from tests.unit.tokens.dialects.test_counts import write_imatrix
from tests.unit.tokens.dialects.written import (
    FIRST,
    NAMES,
    WRITERS,
    Writer,
    Written,
    lines,
    megatron_lines,
    opened,
    refuse,
    truth,
    write_prime_rl,
    write_sglang,
    write_slime,
    write_vllm,
    write_vllm_arrays,
)

Read = tuple[SourceFacts, dict[str, np.ndarray]]


def everything(found: TokenSource) -> Read:
    """What is said, and all that a scan can read, in ranges that cut files and documents."""
    facts, num_tokens = found.facts, found.facts.num_tokens
    # the first note counts files; how wide padding is depends on what stands beside it
    beside = ("own mask", "padding behind packed sequences")
    notes = [note for note in facts.notes[1:] if not any(words in note for words in beside)]
    ranges = [(n, min(n + 17, num_tokens)) for n in range(0, num_tokens, 17)]
    columns = [vars(found.read_columns(*r)) for r in ranges]
    read = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
    read |= {n: np.concatenate([found.read_chosen(n, *r) for r in ranges]) for n in NAMES}
    return replace(facts, name="", size_bytes=0, notes=tuple(sorted(notes))), read


def assert_same(found: TokenSource, expected: Read) -> None:
    facts, read = everything(found)
    assert facts == expected[0]
    for name, array in expected[1].items():
        np.testing.assert_array_equal(read[name], array, err_msg=name)


def dirty() -> list[Written]:
    """Requests of which one stands there twice, one has stale rows and one a row without choices.

    Two have equal contents and different names.
    """
    one, two, three = truth().written
    stale, gap = two.ids.copy(), three.ids.copy()
    stale[5:16] = stale[5]
    gap[4] = 0
    stale_one = replace(two, name="req-7", ids=stale)
    return [one, two, stale_one, replace(three, ids=gap), one, replace(two, name="req-8")]


def parts_of(writer: Writer, folder: Path, requests: list[Written], sizes: list[int]) -> list[Path]:
    """The requests in as many files as there are sizes; ``9`` comes before ``10``."""
    stops = np.cumsum(sizes)
    if writer.dialect == "megatron":  # whose lines number their steps
        return _ranks(folder, megatron_lines(requests), stops * (requests[0].ids.shape[1] - 1))
    named = Path(writer.file)
    before = "rank_" if named.stem.startswith("rank_") else ""
    for number, (size, stop) in enumerate(zip(sizes, stops, strict=True), start=9):
        writer.write(folder / f"{before}{number}{named.suffix}", requests[stop - size : stop])
    return sorted(folder.iterdir(), key=lambda path: natural(path.name))


def _ranks(folder: Path, records: list[dict], stops: np.ndarray) -> list[Path]:
    paths = []
    for number, part in enumerate(np.split(np.array(records), stops[:-1]), start=9):
        (folder / str(number)).mkdir()
        paths.append(lines(folder / str(number) / "router_trace_rank0.jsonl", list(part)))
    return paths


@pytest.mark.parametrize("name", WRITERS)
def test_any_split_over_files_reads_as_one_file(name, tmp_path):
    writer, requests = WRITERS[name], dirty()
    if writer.file.endswith(".npz"):  # an archive cannot hold a name twice
        requests = [r for n, r in enumerate(requests) if n != 4]
    if "log" in writer.kinds:  # a log has no requests that could stand in it twice
        requests = requests[:4]
    writer.write(tmp_path / writer.file, requests)
    whole = everything(opened(tmp_path / writer.file))
    for number, sizes in enumerate(([1] * len(requests), [2, len(requests) - 2])):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths = parts_of(writer, folder, requests, sizes)
        several = opened(TokenFiles(tuple(map(str, paths))), writer.dialect)
        assert several.facts.notes[0].endswith(f"in {len(sizes)} files")
        assert_same(several, whole)
        pattern = f"{folder}/*/*" if writer.dialect == "megatron" else f"{folder}/*"
        assert_same(opened(pattern), whole)
        if not any(path.is_dir() or path.parent != folder for path in paths):
            assert_same(opened(folder), whole)


@pytest.mark.parametrize("name", WRITERS)
def test_pieces_of_any_size_read_as_the_whole_file(name, tmp_path, monkeypatch):
    writer = WRITERS[name]
    writer.write(tmp_path / writer.file, dirty()[:4])
    whole = everything(opened(tmp_path / writer.file))
    monkeypatch.setattr(source, "CACHE_BYTES", 1)
    for module in (trace, batches):
        monkeypatch.setattr(module, "PIECE_BYTES", 500)
    in_pieces = opened(tmp_path / writer.file)
    assert_same(in_pieces, whole)
    for array in NAMES:  # from the end to the beginning
        for start in range(whole[0].num_tokens - 5, 0, -13):
            found = in_pieces.read_chosen(array, start, start + 5)
            np.testing.assert_array_equal(found, whole[1][array][start : start + 5])


def test_an_array_of_one_request_is_read_by_ranges_of_rows(tmp_path, monkeypatch):
    ids = np.concatenate([request.ids for request in dirty()]).astype(np.uint8)
    ids[:3] = 0
    ids[-2:] = 0
    np.save(tmp_path / "rows.npy", ids)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(ids))
    whole = everything(opened(tmp_path / "rows.npy"))
    assert "cut at the beginning (prefix not captured): 3" in str(whole[0].notes)
    assert "rows equal to the row before" in str(whole[0].notes)
    for num_rows in (1, 7):  # cuts the run of stale rows
        monkeypatch.setattr(trace, "PIECE_BYTES", num_rows * ids[0].nbytes)
        assert_same(opened(tmp_path / "rows.npy"), whole)
        assert_same(opened(tmp_path / "fortran.npy"), whole)


def test_flat_ids_whose_layers_a_later_file_tells_are_read_by_them(tmp_path):
    """Six layers on disk of a model with four: only counts of tokens tell, in the second file."""
    requests = [replace(r, ids=np.pad(r.ids, ((0, 0), (0, 2), (0, 0)))) for r in truth().written]
    write_sglang(tmp_path / "one.jsonl", requests)
    records = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    del records[0]["output_ids"], records[0]["meta_info"]["completion_tokens"]
    lines(tmp_path / "one.jsonl", records)
    for number, record in enumerate(records):
        lines(tmp_path / f"part-{number}.jsonl", [record])
    whole = everything(opened(tmp_path / "one.jsonl"))
    assert_same(opened(f"{tmp_path}/part-*.jsonl"), whole)


def test_ranks_that_hold_the_same_are_kept_once_over_folders(tmp_path):
    records = megatron_lines(truth().written)
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        lines(tmp_path / str(number) / f"router_trace_rank{number}.jsonl", records)
    found = opened(f"{tmp_path}/*")
    assert found.facts.num_tokens == 65
    assert "ranks with the same lines as another, left out: 1" in found.facts.notes


def test_files_that_do_not_belong_together_are_refused_by_their_names(tmp_path):
    one, two, three = truth().written
    write_vllm(tmp_path / "1.jsonl", [one])
    write_vllm(tmp_path / "2.jsonl", [replace(two, name=one.name)])
    refuse(r"req-0 stands twice in it, in 1\.jsonl and 2\.jsonl", f"{tmp_path}/*")
    write_prime_rl(tmp_path / "2.jsonl", [two])
    refuse(r"2\.jsonl is a trace of dialect prime_rl.* vllm", f"{tmp_path}/*.jsonl")
    write_slime(tmp_path / "2.jsonl", [three])
    (tmp_path / "2.jsonl").rename(tmp_path / "3.pt")
    refuse(r"3\.pt is a trace of dialect slime; 1\.jsonl", tmp_path)
    (tmp_path / "3.pt").unlink()
    (tmp_path / "notes.md").write_text("when and how")
    refuse(r"notes\.md is no trace that can be told", tmp_path)
    for number, request in enumerate((one, replace(two, ids=two.ids[:, 1:]))):
        write_vllm_arrays(tmp_path / f"{number}.npz", [request])
    refuse(r"shapes \(3, 4\), \(4, 4\); expected one shape", f"{tmp_path}/*.npz")


def test_files_that_cannot_be_one_source_are_refused(tmp_path):
    write_vllm(tmp_path / "a.jsonl", truth().written)
    with pytest.raises(UsageError, match="is named twice"):
        opened(TokenFiles((f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl")))
    refuse("no file matches", f"{tmp_path}/*.pt")
    refuse(r"b\.jsonl: no such file", TokenFiles((f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl")))
    for number in range(2):
        np.savez(tmp_path / f"{number}.npz", a=np.ones((4, 3), np.float32))
        write_imatrix(tmp_path / f"{number}.gguf", np.arange(192).reshape(1, 3, 64))
    with pytest.raises(UsageError, match="several files are read where they are traces"):
        open_tokens(f"{tmp_path}/*.npz", stage="logits", routers=("a",))
    refuse(r"0\.npz is no trace that can be told", f"{tmp_path}/*.npz")
    refuse("holds counts only", f"{tmp_path}/*.gguf")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    paths = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    for path, request in zip(paths, truth().written, strict=False):
        write_vllm(path, [request])
    found = opened(tmp_path)
    write_vllm(paths[1], truth().written[2:])
    with pytest.raises(RecordingError, match=r"2\.jsonl: holds other rows than when it was first"):
        found.read_chosen(NAMES[0], 0, found.facts.num_tokens)


class Watched(FileJournal):
    read: list[str]

    def keep(self, path, facts):
        vars(self).setdefault("read", []).append(path.name)
        super().keep(path, facts)


@pytest.mark.parametrize("name", ["vllm", "sglang", "verl", "megatron"])
def test_a_journal_stands_for_files_that_were_read(name, tmp_path):
    writer = WRITERS[name]
    (tmp_path / "dump").mkdir()
    (tmp_path / "kept").mkdir()
    paths = parts_of(writer, tmp_path / "dump", truth().written, [1, 1, 1])
    files = TokenFiles(tuple(map(str, paths)))

    def first_pass(which):
        journal = Watched(tmp_path / "kept", "terms")
        found = opened(which, writer.dialect, company=Company(journal))
        return found, vars(journal).get("read", [])

    assert first_pass(TokenFiles(files.paths[:2]))[1] == [path.name for path in paths[:2]]
    found, read = first_pass(files)
    assert read == [paths[2].name]
    assert_same(found, everything(opened(files, writer.dialect)))
    found, read = first_pass(files)
    assert read == []
    assert_same(found, everything(opened(files, writer.dialect)))
    for kept in (tmp_path / "kept").iterdir():  # what is damaged is read again
        kept.write_bytes(kept.read_bytes()[:-50])
    found, read = first_pass(files)
    assert read == [path.name for path in paths]
    paths[1].write_bytes(paths[1].read_bytes().replace(b"1", b"2"))
    with pytest.raises(MoeGeomError, match="changed since the first pass"):
        first_pass(files)


def test_a_journal_of_files_whose_layers_others_tell_is_not_believed(tmp_path):
    """Flat ids of routers alone: by themselves zeros may be rows of all layers of the model."""
    (tmp_path / "kept").mkdir()
    company = Company(FileJournal(tmp_path / "kept", "terms"))
    for number, request in enumerate(truth().written[:2]):
        ids = request.ids[:16, FIRST:] * number
        write_sglang(tmp_path / f"{number}.jsonl", [replace(request, ids=ids)])
        record = json.loads((tmp_path / f"{number}.jsonl").read_text())
        del record["output_ids"], record["meta_info"]["completion_tokens"]
        lines(tmp_path / f"{number}.jsonl", [record])
    refuse("nothing was captured", tmp_path / "0.jsonl", company=company)
    both = f"{tmp_path}/*.jsonl"
    assert_same(opened(both, company=company), everything(opened(both)))
