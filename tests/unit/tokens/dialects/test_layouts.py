"""What only one dialect has."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from moegeom.core.errors import MoeGeomError, RecordingError
from moegeom.core.tokens import TokenSource
from moegeom.tokens.open import open_tokens
from tests.unit.tokens.dialects.written import (
    EXPERTS,
    NAMES,
    areal_arrays,
    chosen,
    known,
    lines,
    llama_text,
    megatron_lines,
    moe_trace_text,
    nemo_rl_item,
    npy,
    opened,
    packed,
    prime_rl_batch,
    refuse,
    replace,
    truth,
    tunix_arrays,
    write_flame,
    write_moe_atlas,
    write_slime,
    write_vllm_arrays,
)

TRUTH = truth()

#: Choices of the first request, and what an engine keeps of it.
FIRST, REQUEST = TRUTH.ids[0][:-1], TRUTH.written[0]


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
    source = assert_read(lines(tmp_path / "r.jsonl", [reply]), np.concatenate([FIRST, FIRST]))
    assert source.facts.num_documents == 2
    reply |= {"choices": choices[:1], "usage": usage | {"completion_tokens": 13}}
    refuse("lists 20 token ids and counts 19 tokens", lines(tmp_path / "r.jsonl", [reply]))
    reply = reply_of(REQUEST, usage={"prompt_tokens": 6, "completion_tokens": 14})
    none = {"id": "none", "choices": [{"routed_experts": None}]}
    path = lines(tmp_path / "r.jsonl", [none, reply, none])
    columns = assert_read(path, FIRST, "replies without routed experts: 2").read_columns(0, 19)
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
    assert_read(lines(tmp_path / "r.jsonl", [reply]), FIRST)


def test_flat_ids_of_routers_alone_are_told_apart_by_their_number(tmp_path):
    facts = {"id": "a", "prompt_tokens": 6, "completion_tokens": 14}
    facts["routed_experts"] = packed(FIRST.astype("<i4"))
    assert_read(text(tmp_path / "r.json", json.dumps({"meta_info": facts})), FIRST)


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
        np.concatenate([FIRST, TRUTH.ids[1][:-1]]),
        "turns that a later turn of the rollout repeats, left out: 1",
        "records without routed experts: 1",
    )
    ids = np.concatenate([REQUEST.ids, np.arange(4) + np.zeros((1, 4, 1), int)])

    def rollout(experts):
        item = nemo_rl_item(REQUEST) | {"routed_experts": experts}
        return lines(tmp_path / "r.jsonl", [{"response": {"output": [item]}}])

    assert_read(rollout(ids.tolist()), FIRST)
    refuse("expected nrlre1:", rollout("nrlre2:x"), "nemo_rl")


def prime_rl(path, *batches):
    path.write_bytes(msgspec.msgpack.encode(list(batches)))
    return path


def test_packed_sequences_are_told_by_their_positions_whole_padded_or_cut(tmp_path):
    whole, bare = prime_rl_batch(TRUTH.written, 64), prime_rl_batch(TRUTH.written[:1], 1)
    bare[10] = None
    assert_read(
        prime_rl(tmp_path / "rank_3.bin", whole, bare, bare[:9]),
        TRUTH.routed,
        "micro batches without routed experts: 2",
        "tokens of padding behind packed sequences, left out: 60",
    )
    rows = [np.pad(ids[:16], ((0, 0), (1, 0), (0, 0))) for ids in TRUTH.ids]
    cut = [
        replace(r, tokens=r.tokens[:16], ids=i) for r, i in zip(TRUTH.written, rows, strict=True)
    ]
    path = prime_rl(tmp_path / "rank_0.bin", *(prime_rl_batch([request], 1) for request in cut))
    assert_read(path, np.concatenate([ids[:16] for ids in TRUTH.ids]))
    batch, path = prime_rl_batch(TRUTH.written, 1), tmp_path / "rank_0.bin"
    named = prime_rl(path, batch).read_bytes()
    path.write_bytes(named.replace(b"uint8", b"\xf7int8"))
    refuse("can't decode byte 0xf7", path)
    batch[4] = [position + 1 for position in batch[4]]
    refuse("positions do not begin at 0 where its sequences do", prime_rl(path, batch))
    batch[4] = batch[4][1:]
    refuse("68 tokens, 67 positions, 68 rows", prime_rl(path, batch))
    refuse(r"Expected .*array", prime_rl(path, {"input_ids": []}), "prime_rl_batches")


def test_sequences_that_the_trainer_filled_up_are_left_out(tmp_path):
    arrays = areal_arrays(TRUTH.written)
    arrays["r3_routing_valid"][1] = False
    expected = np.concatenate([FIRST, TRUTH.ids[2][:-1]])
    note = "sequences whose rows the trainer filled up, left out: 1"
    assert_read(saved(tmp_path / "b.pt", arrays), expected, note)


def test_packed_payloads_are_refused_and_so_are_some_without_masks(tmp_path):
    arrays = tunix_arrays(TRUTH.written)
    arrays["routed_experts"][:, -1, 1:] = (9, 3, 7, 1)  # padding, whatever it holds
    segments = np.ones(arrays["routed_experts"].shape[:2], np.int32)
    np.savez(tmp_path / "p.npz", **arrays, segment_ids=segments)
    assert_read(tmp_path / "p.npz", TRUTH.routed)
    segments[1, 20:] = 2
    np.savez(tmp_path / "p.npz", **arrays, segment_ids=segments)
    refuse("row 1 of segment_ids holds several sequences", tmp_path / "p.npz")
    del arrays["prompt_mask"]
    np.savez(tmp_path / "p.npz", **arrays)
    refuse("lacks prompt_mask; expected them beside", tmp_path / "p.npz")


def test_layers_of_flame_have_one_length_and_prompts_of_a_file_other_numbers(tmp_path):
    folder, samples = tmp_path / "flame/actives/iter_7", tmp_path / "flame/samples"
    write_flame(folder, TRUTH.written)
    samples.mkdir()
    pq.write_table(pa.table({"token_id": np.arange(60, dtype=np.int32)}), samples / "000.parquet")
    refuse("layers have 65 rows; the samples have 60 tokens", folder)
    pq.write_table(pa.table({"token_id": np.arange(5, dtype=np.int32)}), samples / "001.parquet")
    assert_read(folder, TRUTH.routed)
    pq.write_table(pq.read_table(folder / "layer_02.parquet")[:64], folder / "layer_02.parquet")
    refuse("files of layers have 64 to 65 rows", folder)
    for number, request in enumerate(TRUTH.written[:2]):
        write_moe_atlas(tmp_path / f"{number}.jsonl", [request])
    both = "".join((tmp_path / f"{number}.jsonl").read_text() for number in range(2))
    refuse("token 19, layer 1: 4 choices; another has 8", text(tmp_path / "r.jsonl", both))


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
    expected = np.concatenate([FIRST[:5], FIRST[4:5]])
    assert_read(log, expected, "was not computed for them: 4")
    long, path = llama_text(REQUEST.ids, elided=True), tmp_path / "e.log"
    note = "the log shows with gaps, left out: 1"
    assert_read(text(path, long + llama_text(REQUEST.ids[:1])), FIRST[:1], note)
    refuse("elided: 1 batch, each of more than 6 tokens", text(path, long))
    many = llama_text(truth(top_k=8).written[0].ids[:1])
    refuse("elided: 8 experts a token", text(path, many), known=known(top_k=8))
    batch, path = llama_text(REQUEST.ids[:1]), tmp_path / "e.log"
    refuse("the log says", text(path, batch.replace("sum = ", "sum = 1", 1)))
    part = batch[: batch.index("ffn_moe_topk-3")]
    refuse("a batch has 2 layers with choices", text(path, batch + batch + part))


def test_a_prompt_read_without_its_strides_is_left_out(tmp_path):
    """As moe-trace of 0a5bc4d: numbers of an argsort of 64 experts, read as if they were 4 wide."""
    argsort = np.argsort(np.random.default_rng(3).random((20, 4, EXPERTS)), axis=2)
    read = np.stack([argsort[:, n].ravel()[: 20 * 4].reshape(20, 4) for n in range(4)], axis=1)
    assert (read[:16].reshape(-1, 4, 4)[:, 1].ravel() == argsort[0, 1]).all()
    path, ranked = tmp_path / "moe_trace.csv", moe_trace_text(read)
    tokens = "".join(moe_trace_text(row[None]) for row in REQUEST.ids)
    note = "batches left out that rank all experts in place of choices: 1"
    assert_read(text(path, ranked + tokens), FIRST, note)
    other = TRUTH.ids[1][:-1]
    honest = moe_trace_text(TRUTH.written[1].ids) + moe_trace_text(REQUEST.ids[:1])
    assert_read(text(path, honest), np.concatenate([other, FIRST[:1]]))
    refuse("2 batches, each the ranking of all", text(path, ranked + moe_trace_text(read[:19])))


def test_the_last_layer_of_a_prompt_may_have_one_token_and_no_other_may(tmp_path):
    path, prompt = tmp_path / "moe_trace.csv", moe_trace_text(REQUEST.ids, last_only=True)
    log = text(path, prompt + moe_trace_text(TRUTH.written[1].ids[:1]))
    expected = np.concatenate([FIRST[18:], TRUTH.ids[1][:1]])
    assert_read(log, expected, "was not computed for them: 18")
    gap = prompt.replace(f"2,{FIRST[3, 1, 0]}\n", "", 1)
    refuse("layers of one batch have|1 experts a token", text(path, gap))
    refuse("a batch has 1 layer, the first 3", text(path, prompt + "1,5\n1,6\n"))


def test_a_trace_is_read_against_the_routers_of_its_stack(tmp_path):
    write_slime(tmp_path / "r.pt", TRUTH.written)
    with pytest.raises(MoeGeomError, match="read against all routers of its checkpoint"):
        open_tokens(tmp_path / "r.pt", routers=NAMES)
    twice = tuple(replace(router, name=f"{router.name}/b") for router in known())
    with pytest.raises(RecordingError, match="6 routers in 3 layers"):
        open_tokens(tmp_path / "r.pt", known=(*known(), *twice), routers=NAMES)
    heads = tuple(replace(r, name=f"mtp/{r.layer}", stack="mtp") for r in known())
    source = open_tokens(tmp_path / "r.pt", known=(*known(), *heads), routers=("mtp/1", *NAMES))
    assert source.facts.routers == NAMES


def test_a_field_that_a_line_lacks_or_has_of_another_type_is_refused_with_the_line(tmp_path):
    choice = {"layer": 1, "token_idx": 0, "expert_idx": 3, "gate_weight": 0.5}
    for change, words in [
        ({"layer": -1}, "layer is -1, expected a whole number of at least 0"),
        ({"token_idx": True}, "token_idx is true, expected a whole number"),
        ({"expert_idx": 2.5}, "expert_idx is 2.5, expected a whole number"),
        ({"gate_weight": "1"}, "gate_weight is '1', expected a number"),
    ]:
        refuse(f"line 2: {words}", lines(tmp_path / "a.jsonl", [choice, choice | change]))
    line = {"step": 0, "num_tokens": 1, "topk": 2, "top_indices": [[1, 2]]}
    path = lines(tmp_path / "router_trace_rank0.jsonl", [line])
    refuse("line 1: key 'layer' is missing", path)
