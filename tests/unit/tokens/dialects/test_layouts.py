"""What only one dialect has."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch

from moegeom.core.errors import MoeGeomError, RecordingError
from moegeom.tokens.open import open_tokens
from tests.unit.tokens.dialects.written import (
    known,
    lines,
    llama_text,
    megatron_lines,
    npy,
    truth,
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
