"""What only one dialect has; a trace in many files, or in pieces of one, is the same as in one
file, and in a scan it gives load figures of its choices, everything else null with reason.
"""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.core.text import natural
from moegeom.core.tokens import SourceFacts, TokenSource
from moegeom.pipeline import ScanRequest, scan
from moegeom.results.reader import Results, open_results
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
    areal_arrays,
    chosen,
    known,
    lines,
    llama_text,
    megatron_lines,
    nemo_rl_item,
    npy,
    opened,
    packed,
    refuse,
    truth,
    write_prime_rl,
    write_sglang,
    write_slime,
    write_vllm,
    write_vllm_arrays,
)

TRUTH = truth()

#: Choices of the first request, and what an engine keeps of it.
FIRST_CHOICES, REQUEST = TRUTH.ids[0][:-1], TRUTH.written[0]


def assert_read(path, expected: np.ndarray, *notes: str) -> TokenSource:
    source = opened(path)
    np.testing.assert_array_equal(chosen(source), expected)
    assert [n for n in notes if not any(n in note for note in source.facts.notes)] == []
    return source


def saved(path, arrays):
    torch.save({name: torch.from_numpy(a) for name, a in arrays.items()}, path)
    return path


def text(path, content: str):
    path.write_text(content)
    return path


def reply_of(request, **more):
    experts = npy(request.ids.astype(np.uint8))
    return {"id": "a", "choices": [{"routed_experts": experts}], **more}


def test_choices_of_one_reply_are_requests_and_counts_of_tokens_stand_for_their_ids(tmp_path):
    (choice,) = reply_of(REQUEST)["choices"]
    usage = {"prompt_tokens": 6, "completion_tokens": 28}  # of both together
    choices = [choice | {"token_ids": REQUEST.answer}] * 2
    reply = {"id": "a", "prompt_token_ids": REQUEST.prompt, "choices": choices, "usage": usage}
    source = assert_read(
        lines(tmp_path / "r.jsonl", [reply]), np.concatenate([FIRST_CHOICES, FIRST_CHOICES])
    )
    assert source.facts.num_documents == 2
    reply |= {"choices": choices[:1], "usage": usage | {"completion_tokens": 13}}
    refuse("lists 20 token ids and counts 19 tokens", lines(tmp_path / "r.jsonl", [reply]))
    reply = reply_of(REQUEST, usage={"prompt_tokens": 6, "completion_tokens": 14})
    none = {"id": "none", "choices": [{"routed_experts": None}]}
    path = lines(tmp_path / "r.jsonl", [none, reply, none])
    columns = assert_read(path, FIRST_CHOICES, "replies without routed experts: 2").read_columns(
        0, 19
    )
    np.testing.assert_array_equal(columns.position, np.arange(19))
    np.testing.assert_array_equal(columns.token_id, -1)
    reply["usage"]["completion_tokens"] = 15
    refuse("19 rows for 21 tokens .6 of the prompt.; expected 20", lines(path, [reply]))


@pytest.mark.parametrize("key", ["sglext", "sgl_ext"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_openai_replies_of_sglang_are_read_from_both_places(key, is_inside, tmp_path):
    extension = {key: {"routed_experts": packed(REQUEST.ids.astype("<i4"))}}
    reply = {"id": "a", "choices": [extension if is_inside else {}]}
    reply |= {} if is_inside else extension
    reply["usage"] = {"prompt_tokens": 6, "completion_tokens": 14}
    assert_read(lines(tmp_path / "r.jsonl", [reply]), FIRST_CHOICES)


def test_flat_ids_of_routers_alone_are_told_apart_by_their_number(tmp_path):
    facts = {"id": "a", "prompt_tokens": 6, "completion_tokens": 14}
    facts["routed_experts"] = packed(FIRST_CHOICES.astype("<i4"))
    assert_read(text(tmp_path / "r.json", json.dumps({"meta_info": facts})), FIRST_CHOICES)


def test_a_fused_shared_expert_is_cut_and_stale_rows_are_named(tmp_path):
    fused = [np.pad(r.ids, ((0, 0), (0, 0), (0, 1)), constant_values=64) for r in TRUTH.written]
    for ids in fused:
        ids[:, 0] = 0
    requests = [replace(r, ids=ids) for r, ids in zip(TRUTH.written, fused, strict=True)]
    write_vllm_arrays(tmp_path / "r.npz", requests)
    assert_read(tmp_path / "r.npz", TRUTH.routed, "1 slots behind the 4 chosen experts hold 64")
    ids = [np.concatenate([rows[:9], np.repeat(rows[9:10], 10, axis=0)]) for rows in TRUTH.ids[1:]]
    ids = [np.concatenate([rows, more]) for rows, more in zip(ids, truth(3).ids[1:], strict=True)]
    np.savez(tmp_path / "r.npz", **{f"r{n}": rows for n, rows in enumerate(ids)})
    notes = opened(tmp_path / "r.npz").facts.notes
    assert any(note.endswith("in runs of 10 (stale?): 18") for note in notes)


def test_a_turn_that_a_later_one_repeats_is_left_out_and_triple_lists_are_envelopes(tmp_path):
    early = replace(REQUEST, tokens=REQUEST.tokens[:12], ids=REQUEST.ids[:11])
    turns = [nemo_rl_item(turn) for turn in (early, replace(REQUEST, num_prompt=14))]
    reply = {"id": "a", "choices": [{"message": nemo_rl_item(TRUTH.written[1])}]}
    rollouts = [{"response": {"output": output}} for output in (turns, [])]
    assert_read(
        lines(tmp_path / "r.jsonl", [*rollouts, reply]),
        np.concatenate([FIRST_CHOICES, TRUTH.ids[1][:-1]]),
        "turns that a later turn of the rollout repeats, left out: 1",
        "records without routed experts: 1",
    )
    ids = np.concatenate([REQUEST.ids, np.arange(4) + np.zeros((1, 4, 1), int)])

    def rollout(experts):
        item = nemo_rl_item(REQUEST) | {"routed_experts": experts}
        return lines(tmp_path / "r.jsonl", [{"response": {"output": [item]}}])

    assert_read(rollout(ids.tolist()), FIRST_CHOICES)
    refuse("expected nrlre1:", rollout("nrlre2:x"), "nemo_rl")


def test_sequences_that_the_trainer_filled_up_are_left_out(tmp_path):
    arrays = areal_arrays(TRUTH.written)
    arrays["r3_routing_valid"][1] = False
    expected = np.concatenate([FIRST_CHOICES, TRUTH.ids[2][:-1]])
    note = "sequences whose rows the trainer filled up, left out: 1"
    assert_read(saved(tmp_path / "b.pt", arrays), expected, note)


def test_a_sample_without_experts_is_counted_and_code_in_a_pickle_not_run(tmp_path, capsys):
    write_slime(tmp_path / "r.pt", TRUTH.written)
    rollout = torch.load(tmp_path / "r.pt", weights_only=True)
    rollout["samples"].append({"tokens": [1, 2], "rollout_routed_experts": None})
    torch.save(rollout, tmp_path / "r.pt")
    assert_read(tmp_path / "r.pt", TRUTH.routed, "samples without routed experts: 1")
    torch.save({"samples": [{"rollout_routed_experts": Evil()}]}, tmp_path / "r.pt")
    refuse(r"the pickle names __builtin__\.print", tmp_path / "r.pt")
    assert capsys.readouterr().out == ""


class Evil:
    def __reduce__(self):
        return print, ("code ran",)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
def test_numpy_arrays_in_a_pickle_are_read_as_numpy_reads_them(protocol, dtype, tmp_path):
    samples = [
        {"tokens": r.tokens.tolist(), "rollout_routed_experts": r.ids.astype(dtype)}
        for r in TRUTH.written
    ]
    torch.save({"samples": samples}, tmp_path / "r.pt", pickle_protocol=protocol)
    assert_read(tmp_path / "r.pt", TRUTH.routed)


def megatron(folder, *ranks):
    folder.mkdir()
    for rank, records in enumerate(ranks):
        lines(folder / f"router_trace_rank{rank}.jsonl", records)
    return folder


RECORDS = megatron_lines(TRUTH.written)


def test_lines_of_megatron_that_stand_there_twice_are_left_out_and_counted(tmp_path):
    more = truth(seed=2)
    same, others = megatron_lines(TRUTH.written, 1), megatron_lines(more.written, 2)
    path = megatron(tmp_path / "trace", RECORDS, same, others)
    expected = np.concatenate([TRUTH.routed, more.routed])
    assert_read(path, expected, "ranks with the same lines as another, left out: 1")
    heads = [record | {"block": "mtp", "mtp_idx": 0} for record in RECORDS[:2]]
    assert_read(
        megatron(tmp_path / "heads", [*RECORDS, *RECORDS[3:5], *heads]),
        TRUTH.routed,
        "lines written twice by recomputation, left out: 2",
        "lines of prediction heads (mtp), left out: 2",
    )


def test_layers_of_megatron_may_count_from_any_number_and_may_not_be_missing(tmp_path):
    for first in (0, 1, 2):
        records = [record | {"layer": record["layer"] - 1 + first} for record in RECORDS]
        assert_read(megatron(tmp_path / str(first), records), TRUTH.routed)
    stages = [[r for r in RECORDS if r["layer"] in part] for part in ((1, 2), (3,))]
    for number, ranks in enumerate((stages, stages[:1])):
        refuse("names the layers 1, 2; the routers", megatron(tmp_path / f"part {number}", *ranks))
    refuse("different sets of layers", megatron(tmp_path / "missing line", RECORDS[:-1]))


def test_what_a_log_shows_whole_is_read_and_what_it_elides_or_breaks_off_is_not(tmp_path):
    batch = REQUEST.ids[:5]
    log = text(tmp_path / "e.log", llama_text(batch) + llama_text(batch, last_only=True))
    expected = np.concatenate([FIRST_CHOICES[:5], FIRST_CHOICES[4:5]])
    assert_read(log, expected, "was not computed for them: 4")
    long, path = llama_text(REQUEST.ids, elided=True), tmp_path / "e.log"
    note = "the log shows with gaps, left out: 1"
    assert_read(text(path, long + llama_text(REQUEST.ids[:1])), FIRST_CHOICES[:1], note)
    refuse("elided: 1 batch, each of more than 6 tokens", text(path, long))
    many = llama_text(truth(top_k=8).written[0].ids[:1])
    refuse("elided: 8 experts a token", text(path, many), checkpoint_routers=known(top_k=8))
    batch, path = llama_text(REQUEST.ids[:1]), tmp_path / "e.log"
    refuse("the log says", text(path, batch.replace("sum = ", "sum = 1", 1)))
    part = batch[: batch.index("ffn_moe_topk-3")]
    refuse("a batch has 2 layers with choices", text(path, batch + batch + part))


def test_a_trace_is_read_against_the_routers_of_its_stack(tmp_path):
    write_slime(tmp_path / "r.pt", TRUTH.written)
    with pytest.raises(MoeGeomError, match="read against all routers of its checkpoint"):
        open_tokens(tmp_path / "r.pt", routers=NAMES)
    twice = tuple(replace(router, name=f"{router.name}/b") for router in known())
    with pytest.raises(RecordingError, match="6 routers in 3 layers"):
        open_tokens(tmp_path / "r.pt", checkpoint_routers=(*known(), *twice), routers=NAMES)
    heads = tuple(replace(r, name=f"mtp/{r.layer}", stack="mtp") for r in known())
    source = open_tokens(
        tmp_path / "r.pt", checkpoint_routers=(*known(), *heads), routers=("mtp/1", *NAMES)
    )
    assert source.facts.routers == NAMES


def test_a_field_that_a_line_lacks_or_has_of_another_type_is_refused_with_the_line(tmp_path):
    path = tmp_path / "router_trace_rank0.jsonl"
    line = {"step": 0, "layer": 1, "num_tokens": 1, "topk": 2, "top_indices": [[1, 2]]}
    for change, words in [
        ({"layer": -1}, "layer is -1, expected a whole number of at least 0"),
        ({"step": True}, "step is true, expected a whole number"),
        ({"topk": 2.5}, "topk is 2.5, expected a whole number"),
    ]:
        refuse(f"line 2: {words}", lines(path, [line, line | change]))
    del line["layer"]
    refuse("line 1: key 'layer' is missing", lines(path, [line]))


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
    return dataclasses.replace(facts, name="", size_bytes=0, notes=tuple(sorted(notes))), read


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
    stale_one = dataclasses.replace(two, name="req-7", ids=stale)
    return [
        one,
        two,
        stale_one,
        dataclasses.replace(three, ids=gap),
        one,
        dataclasses.replace(two, name="req-8"),
    ]


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
    requests = [
        dataclasses.replace(r, ids=np.pad(r.ids, ((0, 0), (0, 2), (0, 0)))) for r in truth().written
    ]
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
    write_vllm(tmp_path / "2.jsonl", [dataclasses.replace(two, name=one.name)])
    refuse(r"req-0 stands twice in it, in 1\.jsonl and 2\.jsonl", f"{tmp_path}/*")
    write_prime_rl(tmp_path / "2.jsonl", [two])
    refuse(r"2\.jsonl is a trace of dialect prime_rl.* vllm", f"{tmp_path}/*.jsonl")
    write_slime(tmp_path / "2.jsonl", [three])
    (tmp_path / "2.jsonl").rename(tmp_path / "3.pt")
    refuse(r"3\.pt is a trace of dialect slime; 1\.jsonl", tmp_path)
    (tmp_path / "3.pt").unlink()
    (tmp_path / "notes.md").write_text("when and how")
    refuse(r"notes\.md is no trace that can be told", tmp_path)
    for number, request in enumerate((one, dataclasses.replace(two, ids=two.ids[:, 1:]))):
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
        write_sglang(tmp_path / f"{number}.jsonl", [dataclasses.replace(request, ids=ids)])
        record = json.loads((tmp_path / f"{number}.jsonl").read_text())
        del record["output_ids"], record["meta_info"]["completion_tokens"]
        lines(tmp_path / f"{number}.jsonl", [record])
    refuse("nothing was captured", tmp_path / "0.jsonl", company=company)
    both = f"{tmp_path}/*.jsonl"
    assert_same(opened(both, company=company), everything(opened(both)))


CHECKPOINT = Path("sample_ckpts/olmoe-balanced/step_1500")
NUM_TOKENS = 1024


@pytest.fixture(scope="module")
def recording() -> TokenSource:
    return open_tokens("sample_ckpts/olmoe-balanced/rec/step_1500")


def requests_of(recording: TokenSource) -> list[Written]:
    """The first documents, as an engine would have kept them."""
    columns = recording.read_columns(0, NUM_TOKENS)
    routers = recording.facts.routers
    ids = np.stack([recording.read_chosen(r, 0, NUM_TOKENS) for r in routers], axis=1)
    requests = []
    for document in np.unique(columns.document):
        rows = columns.document == document
        tokens = columns.token_id[rows].astype(np.int64)
        requests.append(Written(f"req-{document}", ids[rows][:-1], tokens, num_prompt=5))
    return requests


def scanned(tmp_path: Path, tokens: str, **asked) -> Results:
    out = tmp_path / "out"
    scan(ScanRequest(checkpoint=str(CHECKPOINT), out=out, tokens=tokens, **asked))
    return open_results(out)


def slots_of(results: Results) -> list[list[int]]:
    """By router and expert."""
    rows = [row for row in results.rows("experts") if row["population"] == "all"]
    routers = [router["name"] for router in results.run["routers"]]
    return [[row["num_slots"] for row in rows if row["router"] == name] for name in routers]


def test_load_of_counts_is_that_of_the_counts(recording, tmp_path):
    random = np.random.default_rng(1)
    routers = recording.facts.routers
    experts, top_k = 16, 4
    counts = random.multinomial(500 * top_k, random.dirichlet(np.ones(experts)), len(routers))
    write_imatrix(tmp_path / "m.gguf", counts[None])
    results = scanned(tmp_path, str(tmp_path / "m.gguf"))
    np.testing.assert_array_equal(slots_of(results), counts)
    layers = [row for row in results.rows("layers") if row["population"] == "all"]
    expected = counts.max(axis=1) * experts / counts.sum(axis=1) - 1
    np.testing.assert_allclose([row["max_vio_global"] for row in layers], expected)
    assert all(row["max_vio_global_se"] is None for row in layers)
    part = next(iter(results.run["parts"].values()))
    assert part["reasons"]["coactivation"].startswith("needs the choices of each token")
    assert all(row["margin_p50"] is None for row in layers)
    with pytest.raises(UsageError, match="--per-token: m.gguf holds counts only"):
        scanned(tmp_path / "rows", str(tmp_path / "m.gguf"), per_token=True)


def test_one_layer_of_a_trace_can_be_scanned_and_no_stage_beside_its_dialect(recording, tmp_path):
    write_vllm(tmp_path / "replies.jsonl", requests_of(recording))
    results = scanned(tmp_path, str(tmp_path / "replies.jsonl"), layers="1")
    assert {row["router"] for row in results.rows("experts")} == {recording.facts.routers[1]}
    with pytest.raises(UsageError, match="holds ids of experts, not stage logits"):
        scanned(tmp_path, str(tmp_path / "replies.jsonl"), stage="logits", dialect="vllm")
