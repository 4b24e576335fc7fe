"""What only one dialect has."""

from __future__ import annotations

import base64
import json

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from moegeom.core.errors import MoeGeomError, RecordingError
from moegeom.tokens.open import open_tokens
from tests.unit.tokens.dialects.written import (
    EXPERTS,
    areal_arrays,
    known,
    lines,
    llama_text,
    megatron_lines,
    moe_trace_text,
    nemo_rl_item,
    npy,
    prime_rl_batch,
    replace,
    truth,
    tunix_arrays,
    write_flame,
    write_moe_atlas,
    write_slime,
    write_vllm_arrays,
)

NAMES = tuple(router.name for router in known())


def opened(path, dialect=None, **changed):
    return open_tokens(path, routers=NAMES, known=known(**changed), dialect=dialect)


def chosen(source):
    parts = [source.read_chosen(name, 0, source.facts.num_tokens) for name in NAMES]
    return np.stack(parts, axis=1)


def kept(held):
    return np.concatenate([ids[:-1] for ids in held.ids])


# ------------------------------------------------------------------------------- inference servers
def test_choices_of_one_reply_are_requests_of_their_own(tmp_path):
    held = truth()
    choices = [
        {
            "token_ids": held.tokens[0][6:].tolist(),
            "routed_experts": npy(request.ids.astype(np.uint8)),
        }
        for request in held.written[:1] * 2
    ]
    reply = {"id": "a", "prompt_token_ids": held.tokens[0][:6].tolist(), "choices": choices}
    reply["usage"] = {"prompt_tokens": 6, "completion_tokens": 28}  # of both together
    lines(tmp_path / "r.jsonl", [reply])
    source = opened(tmp_path / "r.jsonl")
    assert source.facts.num_documents == 2
    assert source.facts.num_tokens == 38


def test_replies_without_experts_are_counted(tmp_path):
    held = truth()
    replies = [{"id": "none", "choices": [{"routed_experts": None}]}] * 2
    good = {"id": "a", "choices": [{"routed_experts": npy(held.written[0].ids.astype(np.uint8))}]}
    lines(tmp_path / "r.jsonl", [*replies, good])
    assert "replies without routed experts: 2" in opened(tmp_path / "r.jsonl").facts.notes


def test_counts_of_tokens_are_enough_where_ids_are_not_there(tmp_path):
    held = truth()
    reply = {
        "id": "a",
        "choices": [{"routed_experts": npy(held.written[0].ids.astype(np.uint8))}],
        "usage": {"prompt_tokens": 6, "completion_tokens": 14},
    }
    lines(tmp_path / "r.jsonl", [reply])
    columns = opened(tmp_path / "r.jsonl").read_columns(0, 19)
    np.testing.assert_array_equal(columns.position, np.arange(19))
    np.testing.assert_array_equal(columns.token_id, -1)
    reply["usage"]["completion_tokens"] = 15
    lines(tmp_path / "r.jsonl", [reply])
    with pytest.raises(
        RecordingError, match="19 rows for 21 tokens .6 of the prompt.; expected 20"
    ):
        opened(tmp_path / "r.jsonl")


def test_a_list_of_ids_contradicts_another_count_of_tokens(tmp_path):
    held = truth()
    reply = {
        "id": "a",
        "prompt_token_ids": held.tokens[0][:6].tolist(),
        "choices": [
            {
                "token_ids": held.tokens[0][6:].tolist(),
                "routed_experts": npy(held.written[0].ids.astype(np.uint8)),
            }
        ],
        "usage": {"prompt_tokens": 6, "completion_tokens": 13},
    }
    lines(tmp_path / "r.jsonl", [reply])
    with pytest.raises(RecordingError, match="lists 20 token ids and counts 19 tokens"):
        opened(tmp_path / "r.jsonl")


@pytest.mark.parametrize("key", ["sglext", "sgl_ext"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_openai_replies_of_sglang_are_read_from_both_places(key, is_inside, tmp_path):
    held = truth()
    raw = base64.b64encode(held.written[0].ids.astype("<i4").tobytes()).decode()
    extension = {key: {"routed_experts": raw}}
    reply = {"id": "a", "choices": [extension if is_inside else {}]}
    reply |= {} if is_inside else extension
    reply["usage"] = {"prompt_tokens": 6, "completion_tokens": 14}
    lines(tmp_path / "r.jsonl", [reply])
    np.testing.assert_array_equal(chosen(opened(tmp_path / "r.jsonl")), held.ids[0][:-1])


def test_flat_ids_of_routers_alone_are_told_apart_by_their_number(tmp_path):
    held = truth()
    raw = base64.b64encode(held.ids[0][:-1].astype("<i4").tobytes()).decode()
    counts = {"id": "a", "prompt_tokens": 6, "completion_tokens": 14}
    (tmp_path / "r.json").write_text(json.dumps({"meta_info": counts | {"routed_experts": raw}}))
    np.testing.assert_array_equal(chosen(opened(tmp_path / "r.json")), held.ids[0][:-1])


def test_a_fused_shared_expert_is_cut_and_named(tmp_path):
    held = truth()
    requests = [
        type(r)(r.name, np.concatenate([r.ids, np.full((*r.ids.shape[:2], 1), 64)], 2), r.tokens, 6)
        for r in held.written
    ]
    for request in requests:
        request.ids[:, 0] = 0
    write_vllm_arrays(tmp_path / "r.npz", requests)
    source = opened(tmp_path / "r.npz")
    np.testing.assert_array_equal(chosen(source), kept(held))
    assert any("1 slots behind the 4 chosen experts hold 64" in note for note in source.facts.notes)


def test_stale_rows_are_named(tmp_path):
    held = truth()
    ids = [np.concatenate([rows[:9], np.repeat(rows[9:10], 10, axis=0)]) for rows in held.ids[1:]]
    ids = [np.concatenate([rows, more]) for rows, more in zip(ids, truth(3).ids[1:], strict=True)]
    np.savez(tmp_path / "r.npz", **{f"r{n}": rows for n, rows in enumerate(ids)})
    notes = opened(tmp_path / "r.npz").facts.notes
    assert any(note.endswith("in runs of 10 (stale?): 18") for note in notes)


# ---------------------------------------------------------------------------------------- training
def test_a_turn_that_a_later_one_repeats_is_left_out(tmp_path):
    held = truth()
    whole = held.written[0]
    turns = [
        replace(whole, tokens=whole.tokens[:12], ids=whole.ids[:11]),
        replace(whole, num_prompt=14),
    ]
    other = held.written[1]
    rollout = {"response": {"output": [nemo_rl_item(turn) for turn in turns]}}
    reply = {"id": "a", "choices": [{"message": nemo_rl_item(other)}]}
    lines(tmp_path / "r.jsonl", [rollout, reply, {"response": {"output": []}}])
    source = opened(tmp_path / "r.jsonl")
    assert {"turns that a later turn of the rollout repeats, left out: 1",
            "records without routed experts: 1"} <= set(source.facts.notes)  # fmt: skip
    np.testing.assert_array_equal(
        chosen(source), np.concatenate([held.ids[0][:-1], held.ids[1][:-1]])
    )


def test_triple_lists_are_read_as_envelopes_are(tmp_path):
    held = truth()
    item = nemo_rl_item(held.written[0])
    ids = np.concatenate([held.written[0].ids, np.arange(4) + np.zeros((1, 4, 1), int)])
    lines(
        tmp_path / "r.jsonl", [{"response": {"output": [item | {"routed_experts": ids.tolist()}]}}]
    )
    np.testing.assert_array_equal(chosen(opened(tmp_path / "r.jsonl")), held.ids[0][:-1])
    lines(tmp_path / "r.jsonl", [{"response": {"output": [item | {"routed_experts": "nrlre2:x"}]}}])
    with pytest.raises(RecordingError, match="expected nrlre1:"):
        opened(tmp_path / "r.jsonl", "nemo_rl")


def prime_rl(path, *batches):
    path.write_bytes(msgspec.msgpack.encode(list(batches)))
    return path


def test_padding_behind_packed_sequences_is_counted_and_so_are_batches_without_ids(tmp_path):
    held = truth()
    packed, bare = prime_rl_batch(held.written, 64), prime_rl_batch(held.written[:1], 1)
    bare[10] = None
    source = opened(prime_rl(tmp_path / "rank_3.bin", packed, bare, bare[:9]))
    assert {"micro batches without routed experts: 2",
            "tokens of padding behind packed sequences, left out: 60"} <= set(source.facts.notes)  # fmt: skip
    np.testing.assert_array_equal(chosen(source), kept(held))


def test_a_sequence_cut_to_the_length_of_the_trainer_keeps_its_last_row(tmp_path):
    held = truth()
    cut = [
        replace(r, tokens=r.tokens[:16], ids=rows[:16])
        for r, rows in zip(held.written, [np.pad(i, ((0, 0), (1, 0), (0, 0))) for i in held.ids],
                           strict=True)
    ]  # fmt: skip
    source = opened(prime_rl(tmp_path / "rank_0.bin", *(prime_rl_batch([r], 1) for r in cut)))
    np.testing.assert_array_equal(chosen(source), np.concatenate([i[:16] for i in held.ids]))


def test_positions_must_say_where_sequences_begin(tmp_path):
    batch = prime_rl_batch(truth().written, 1)
    batch[4] = [position + 1 for position in batch[4]]
    with pytest.raises(RecordingError, match="positions do not begin at 0 where its sequences do"):
        opened(prime_rl(tmp_path / "rank_0.bin", batch))
    batch[4] = batch[4][1:]
    with pytest.raises(RecordingError, match="68 tokens, 67 positions, 68 rows"):
        opened(prime_rl(tmp_path / "rank_0.bin", batch))
    with pytest.raises(RecordingError, match=r"Expected .*array"):
        opened(prime_rl(tmp_path / "rank_0.bin", {"input_ids": []}), "prime_rl_batches")


def test_sequences_that_the_trainer_filled_up_are_left_out(tmp_path):
    held = truth()
    arrays = areal_arrays(held.written)
    arrays["r3_routing_valid"][1] = False
    torch.save({name: torch.from_numpy(a) for name, a in arrays.items()}, tmp_path / "b.pt")
    source = opened(tmp_path / "b.pt")
    assert "sequences whose rows the trainer filled up, left out: 1" in source.facts.notes
    expected = np.concatenate([held.ids[0][:-1], held.ids[2][:-1]])
    np.testing.assert_array_equal(chosen(source), expected)


def test_packed_payloads_are_refused_and_so_are_some_without_masks(tmp_path):
    arrays = tunix_arrays(truth().written)
    segments = np.ones(arrays["routed_experts"].shape[:2], np.int32)
    np.savez(tmp_path / "p.npz", **arrays, segment_ids=segments)
    assert opened(tmp_path / "p.npz").facts.num_tokens == 65
    segments[1, 20:] = 2
    np.savez(tmp_path / "p.npz", **arrays, segment_ids=segments)
    with pytest.raises(RecordingError, match="row 1 of segment_ids holds several sequences"):
        opened(tmp_path / "p.npz")
    del arrays["prompt_mask"]
    np.savez(tmp_path / "p.npz", **arrays)
    with pytest.raises(RecordingError, match="lacks prompt_mask; expected them beside"):
        opened(tmp_path / "p.npz")


def test_layers_of_flame_are_as_long_as_each_other_and_as_the_samples(tmp_path):
    held = truth()
    folder = tmp_path / "flame" / "actives" / "iter_7"
    write_flame(folder, held.written)
    samples = tmp_path / "flame" / "samples"
    samples.mkdir()
    pq.write_table(pa.table({"token_id": np.arange(60, dtype=np.int32)}), samples / "000.parquet")
    with pytest.raises(RecordingError, match="layers have 65 rows; the samples have 60 tokens"):
        opened(folder)
    pq.write_table(pa.table({"token_id": np.arange(5, dtype=np.int32)}), samples / "001.parquet")
    np.testing.assert_array_equal(chosen(opened(folder)), kept(held))
    pq.write_table(pq.read_table(folder / "layer_02.parquet")[:64], folder / "layer_02.parquet")
    with pytest.raises(RecordingError, match="files of layers have 64 to 65 rows"):
        opened(folder)


def test_prompts_of_one_file_that_number_their_tokens_alike_are_refused(tmp_path):
    held = truth()
    for number, request in enumerate(held.written[:2]):
        write_moe_atlas(tmp_path / f"{number}.jsonl", [request])
    both = "".join((tmp_path / f"{number}.jsonl").read_text() for number in range(2))
    (tmp_path / "r.jsonl").write_text(both)
    with pytest.raises(RecordingError, match="token 19, layer 1: 4 choices; another has 8"):
        opened(tmp_path / "r.jsonl")


def test_a_sample_that_has_no_experts_yet_is_counted(tmp_path):
    held = truth()
    write_slime(tmp_path / "r.pt", held.written)
    saved = torch.load(tmp_path / "r.pt", weights_only=True)
    saved["samples"].append({"tokens": [1, 2], "rollout_routed_experts": None})
    torch.save(saved, tmp_path / "r.pt")
    source = opened(tmp_path / "r.pt")
    assert "samples without routed experts: 1" in source.facts.notes
    np.testing.assert_array_equal(chosen(source), kept(held))


class Evil:
    def __reduce__(self):
        return print, ("code ran",)


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, capsys):
    torch.save({"samples": [{"rollout_routed_experts": Evil()}]}, tmp_path / "r.pt")
    with pytest.raises(RecordingError, match=r"the pickle names __builtin__\.print"):
        opened(tmp_path / "r.pt")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
def test_numpy_arrays_in_a_pickle_are_read_as_numpy_reads_them(protocol, dtype, tmp_path):
    held = truth()
    samples = [{"tokens": r.tokens.tolist(), "rollout_routed_experts": r.ids.astype(dtype)}
               for r in held.written]  # fmt: skip
    torch.save({"samples": samples}, tmp_path / "r.pt", pickle_protocol=protocol)
    np.testing.assert_array_equal(chosen(opened(tmp_path / "r.pt")), kept(held))


def megatron(tmp_path, ranks):
    folder = tmp_path / "trace"
    folder.mkdir()
    for rank, records in enumerate(ranks):
        lines(folder / f"router_trace_rank{rank}.jsonl", records)
    return folder


def test_ranks_with_the_same_lines_are_kept_once_and_others_add_tokens(tmp_path):
    held, more = truth(), truth(seed=2)
    ranks = [megatron_lines(held.written), megatron_lines(held.written, 1)]
    source = opened(megatron(tmp_path, [*ranks, megatron_lines(more.written, 2)]))
    np.testing.assert_array_equal(chosen(source), np.concatenate([kept(held), kept(more)]))
    assert "ranks with the same lines as another, left out: 1" in source.facts.notes


def test_recomputed_lines_and_prediction_heads_are_left_out_and_counted(tmp_path):
    held = truth()
    records = megatron_lines(held.written)
    heads = [record | {"block": "mtp", "mtp_idx": 0} for record in records[:2]]
    source = opened(megatron(tmp_path, [[*records, *records[3:5], *heads]]))
    np.testing.assert_array_equal(chosen(source), kept(held))
    assert "lines written twice by recomputation, left out: 2" in source.facts.notes
    assert "lines of prediction heads (mtp), left out: 2" in source.facts.notes


@pytest.mark.parametrize("first", [0, 1, 2])
def test_layers_of_megatron_may_count_from_0_or_1_or_among_routers(first, tmp_path):
    held = truth()
    records = [r | {"layer": r["layer"] - 1 + first} for r in megatron_lines(held.written)]
    np.testing.assert_array_equal(chosen(opened(megatron(tmp_path, [records]))), kept(held))


def test_ranks_of_a_pipeline_are_refused(tmp_path):
    records = megatron_lines(truth().written)
    stages = [[r for r in records if r["layer"] in part] for part in ((1, 2), (3,))]
    with pytest.raises(RecordingError, match="names the layers 1, 2; the routers"):
        opened(megatron(tmp_path, stages))
    with pytest.raises(RecordingError, match="names the layers 1, 2; the routers"):
        opened(_only(tmp_path / "one", stages[0]))


def _only(folder, records):
    folder.mkdir()
    lines(folder / "router_trace_rank0.jsonl", records)
    return folder


def test_a_missing_line_is_refused(tmp_path):
    records = megatron_lines(truth().written)
    with pytest.raises(RecordingError, match="different sets of layers"):
        opened(megatron(tmp_path, [records[:-1]]))


# --------------------------------------------------------------------------------------- llama.cpp
def whole_batch(held):
    """The first request as one batch of 5 tokens, (tokens, layers, k)."""
    return held.written[0].ids[:5]


def test_a_batch_of_few_tokens_is_whole_and_its_last_layer_may_have_one(tmp_path):
    held = truth()
    text = llama_text(whole_batch(held)) + llama_text(whole_batch(held), last_only=True)
    (tmp_path / "e.log").write_text(text)
    source = opened(tmp_path / "e.log")
    expected = np.concatenate([held.ids[0][:5], held.ids[0][4:5]])
    np.testing.assert_array_equal(chosen(source), expected)
    assert any(note.endswith("was not computed for them: 4") for note in source.facts.notes)


def test_batches_with_gaps_are_left_out_and_counted(tmp_path):
    held = truth()
    long = llama_text(held.written[0].ids, elided=True)
    (tmp_path / "e.log").write_text(long + llama_text(held.written[0].ids[:1]))
    source = opened(tmp_path / "e.log")
    assert source.facts.num_tokens == 1
    assert any("the log shows with gaps, left out: 1" in note for note in source.facts.notes)
    (tmp_path / "e.log").write_text(long)
    with pytest.raises(RecordingError, match="elided: 1 batch, each of more than 6 tokens"):
        opened(tmp_path / "e.log")


def test_more_than_6_experts_are_refused_as_elided(tmp_path):
    held = truth(top_k=8)
    (tmp_path / "e.log").write_text(llama_text(held.written[0].ids[:1]))
    with pytest.raises(RecordingError, match="elided: 8 experts a token"):
        opened(tmp_path / "e.log", top_k=8)


def test_ids_that_do_not_give_the_printed_sum_are_refused(tmp_path):
    text = llama_text(truth().written[0].ids[:1])
    first = text.index("sum = ") + len("sum = ")
    (tmp_path / "e.log").write_text(text[:first] + "1" + text[first:])
    with pytest.raises(RecordingError, match="the log says"):
        opened(tmp_path / "e.log")


def test_a_batch_that_breaks_off_is_refused(tmp_path):
    text = llama_text(truth().written[0].ids[:1])
    whole, part = text + text, text[: text.index("ffn_moe_topk-3")]
    (tmp_path / "e.log").write_text(whole + part)
    with pytest.raises(RecordingError, match="a batch has 2 layers with choices"):
        opened(tmp_path / "e.log")


def test_a_prompt_read_without_its_strides_is_left_out(tmp_path):
    """As moe-trace of 0a5bc4d: numbers of an argsort of 64 experts, read as if they were 4 wide."""
    held = truth()
    argsort = np.argsort(np.random.default_rng(3).random((20, 4, EXPERTS)), axis=2)
    read = np.stack([argsort[:, n].ravel()[: 20 * 4].reshape(20, 4) for n in range(4)], axis=1)
    assert (read[:16].reshape(-1, 4, 4)[:, 1].ravel() == argsort[0, 1]).all()
    path = tmp_path / "moe_trace.csv"
    path.write_text(
        moe_trace_text(read) + "".join(moe_trace_text(r[None]) for r in held.written[0].ids)
    )
    source = opened(path)
    np.testing.assert_array_equal(chosen(source), held.ids[0][:-1])
    assert "batches left out that rank all experts in place of choices: 1" in source.facts.notes
    honest = moe_trace_text(held.written[1].ids)
    path.write_text(honest + moe_trace_text(held.written[0].ids[:1]))
    assert opened(path).facts.num_tokens == 31
    path.write_text(moe_trace_text(read) + moe_trace_text(read[:19]))
    with pytest.raises(RecordingError, match="2 batches, each the ranking of all experts"):
        opened(path)


def test_the_last_layer_of_a_prompt_may_have_one_token_and_no_other_may(tmp_path):
    held = truth()
    path = tmp_path / "moe_trace.csv"
    text = moe_trace_text(held.written[0].ids, last_only=True)
    path.write_text(text + moe_trace_text(held.written[1].ids[:1]))
    source = opened(path)
    np.testing.assert_array_equal(chosen(source)[0], held.ids[0][18])
    assert any(note.endswith("was not computed for them: 18") for note in source.facts.notes)
    path.write_text(text.replace(f"2,{held.ids[0][3, 1, 0]}\n", "", 1))
    with pytest.raises(RecordingError, match="layers of one batch have|1 experts a token"):
        opened(path)
    path.write_text(text + "1,5\n1,6\n")
    with pytest.raises(RecordingError, match="a batch has 1 layer, the first 3"):
        opened(path)


# --------------------------------------------------------------------------------------- elsewhere
def test_routers_that_a_trace_cannot_mean_are_refused(tmp_path):
    write_slime(tmp_path / "r.pt", truth().written)
    twice = tuple(type(r)(f"{r.name}/b", r.stack, r.layer, 64, 4) for r in known())
    with pytest.raises(RecordingError, match="6 routers in 3 layers"):
        open_tokens(tmp_path / "r.pt", known=(*known(), *twice), routers=NAMES)


def test_a_trace_without_a_checkpoint_is_refused(tmp_path):
    write_slime(tmp_path / "r.pt", truth().written)
    with pytest.raises(MoeGeomError, match="read against all routers of its checkpoint"):
        open_tokens(tmp_path / "r.pt", routers=NAMES)


def test_routers_of_another_stack_are_not_in_a_trace(tmp_path):
    held = truth()
    write_slime(tmp_path / "r.pt", held.written)
    heads = tuple(type(r)(f"mtp/{r.layer}", "mtp", r.layer, 64, 4) for r in known())
    source = open_tokens(tmp_path / "r.pt", known=(*known(), *heads), routers=("mtp/1", *NAMES))
    assert source.facts.routers == NAMES
