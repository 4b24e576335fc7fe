"""Traces that name places become those of the experts that lie there, or the map is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moegeom.core.errors import RecordingError, UsageError
from moegeom.tokens.open import open_tokens
from moegeom.tokens.traces import source, trace
from moegeom.tokens.traces.expert_map import read_expert_map
from tests.unit.tokens.dialects import test_counts, written
from tests.unit.tokens.dialects.written import (
    EXPERTS,
    FIRST,
    NAMES,
    NUM_LAYERS,
    WRITERS,
    Written,
    chosen,
    truth,
    write_sglang,
    write_vllm,
)

DEVICES, PLACES = 8, 72


def plan(seed: int = 0, num_places: int = PLACES) -> np.ndarray:
    """(layers, places): every expert once, and some twice."""
    random = np.random.default_rng(seed)
    copies = random.integers(0, EXPERTS, (NUM_LAYERS, num_places - EXPERTS))
    whole = np.concatenate([np.tile(np.arange(EXPERTS), (NUM_LAYERS, 1)), copies], axis=1)
    return random.permuted(whole, axis=1)


def placed(ids: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Choices of experts as places, any of their copies."""
    random = np.random.default_rng(1)
    found = ids.copy()
    for layer in range(FIRST, NUM_LAYERS):
        order = random.permutation(layers.shape[1])
        place = dict(zip(layers[layer][order].tolist(), order.tolist(), strict=True))
        found[:, layer] = np.vectorize(place.get)(ids[:, layer])
    return found


def listed(layers: np.ndarray) -> str:
    return json.dumps(layers.tolist())


def of_ascend(layers: np.ndarray) -> str:
    """As in the unit tests of eplb of vllm-ascend 61eb47b4d8."""
    records = []
    for number, layer in enumerate(layers):
        devices = [
            {"device_id": device, "device_expert": experts.tolist()}
            for device, experts in enumerate(np.split(layer, DEVICES))
        ]
        record = {"layer_id": number, "device_count": DEVICES, "device_list": devices}
        records.append(record)
    return json.dumps({"moe_layer_count": len(layers), "layer_list": records})


def of_initial_mapping(layers: np.ndarray) -> str:
    """generate_static_mapping.py of vLLM PR 41141, behind a line of statistics."""
    record = {
        "record_type": "eplb_initial_mapping",
        "version": 1,
        "num_redundant_experts": layers.shape[1] - EXPERTS,
        "num_slots": layers.shape[1],
        "initial_global_assignments": {str(n): row.tolist() for n, row in enumerate(layers)},
    }
    return json.dumps({"record_type": "eplb_load_meta"}) + "\n" + json.dumps(record) + "\n"


FORMS = {"list": listed, "vllm-ascend": of_ascend, "initial mapping": of_initial_mapping}


def opened(path: Path | str, folder: Path):
    return written.opened(path, expert_map=str(folder / "map.json"))


def refuse(words: str, path: Path, folder: Path) -> None:
    written.refuse(words, path, expert_map=str(folder / "map.json"))


def placed_requests(layers: np.ndarray) -> list[Written]:
    return [replace(r, ids=placed(r.ids, layers)) for r in truth().written]


@pytest.mark.parametrize("name", WRITERS)
def test_places_become_the_experts_that_lie_there(name, tmp_path):
    writer, held, layers = WRITERS[name], truth(), plan()
    requests = placed_requests(layers)
    writer.write(tmp_path / writer.file, requests)
    (tmp_path / "map.json").write_text(listed(layers))
    with pytest.raises(RecordingError, match=r"Give its map \(--expert-map\)|experts a token"):
        written.opened(tmp_path / writer.file)
    source = opened(tmp_path / writer.file, tmp_path)
    np.testing.assert_array_equal(chosen(source), held.routed)
    assert any("map.json, which places 24 copies" in note for note in source.facts.notes)


@pytest.mark.parametrize("name", ["vllm", "sglang", "verl"])
def test_many_files_and_pieces_of_them_are_mapped_as_one_file_is(name, tmp_path, monkeypatch):
    writer, held, layers = WRITERS[name], truth(), plan()
    (tmp_path / "dump").mkdir()
    for number, request in enumerate(held.written):
        path = tmp_path / "dump" / f"{number}{Path(writer.file).suffix}"
        writer.write(path, [replace(request, ids=placed(request.ids, layers))])
    (tmp_path / "map.json").write_text(listed(layers))
    monkeypatch.setattr(trace, "PIECE_BYTES", 500)
    monkeypatch.setattr(source, "CACHE_BYTES", 500)
    run = opened(f"{tmp_path}/dump/*", tmp_path)
    np.testing.assert_array_equal(chosen(run), held.routed)
    note = "ids are places: experts by map.json, which places 24 copies"
    assert [one for one in run.facts.notes if "map.json" in one] == [note]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of_routers", [False, True])
def test_every_form_of_a_map_is_read_for_all_layers_or_routers(form, of_routers, tmp_path):
    held, layers = truth(), plan(3)
    write_vllm(tmp_path / "r.jsonl", placed_requests(layers))
    (tmp_path / "map.json").write_text(FORMS[form](layers[FIRST:] if of_routers else layers))
    source = opened(tmp_path / "r.jsonl", tmp_path)
    np.testing.assert_array_equal(chosen(source), held.routed)


def test_one_permutation_may_stand_for_all_layers_and_rows_that_count_up_name_places(tmp_path):
    held, layers = truth(), np.tile(plan(4, EXPERTS)[:1], (NUM_LAYERS, 1))
    behind = [np.zeros((2, 4, 4), int), np.arange(4) + np.zeros((3, 4, 1), int)]
    requests = [replace(r, ids=np.concatenate([r.ids, *behind])) for r in placed_requests(layers)]
    for request in requests:
        request.ids[:, :FIRST] = 0
    write_vllm(tmp_path / "r.jsonl", requests)
    (tmp_path / "map.json").write_text(json.dumps(layers[0].tolist()))
    source = opened(tmp_path / "r.jsonl", tmp_path)
    np.testing.assert_array_equal(chosen(source), held.routed)
    assert "padding rows cut behind the last routed token: 15" in source.facts.notes
    layers = np.tile(np.arange(EXPERTS)[::-1], (NUM_LAYERS, 1))
    request = truth().written[0]
    request.ids[7, FIRST:] = np.arange(4)
    write_vllm(tmp_path / "r.jsonl", [request])
    (tmp_path / "map.json").write_text(listed(layers))
    experts = chosen(opened(tmp_path / "r.jsonl", tmp_path))
    np.testing.assert_array_equal(experts, EXPERTS - 1 - request.ids[:, FIRST:].astype(int))


def test_counts_of_copies_are_added_up(tmp_path):
    layers, counts = plan(5)[FIRST:], np.random.default_rng(2).integers(1, 99, (7, 3, PLACES))
    test_counts.write_recorder(tmp_path / "r.pt", counts[..., :EXPERTS])
    (tmp_path / "map.json").write_text(listed(layers[:, :EXPERTS]))
    refuse("stand nowhere", tmp_path / "r.pt", tmp_path)
    (tmp_path / "map.json").write_text(listed(layers))
    source = opened(tmp_path / "r.pt", tmp_path)
    for index, name in enumerate(NAMES):
        expected = np.zeros((7, EXPERTS), int)
        for place, expert in enumerate(layers[index, :EXPERTS]):
            expected[:, expert] += counts[:, index, place]
        np.testing.assert_array_equal(source.counts(name), expected)


def instead_of_5(layers, expert):
    return np.where(layers == 5, expert, layers)


DAMAGED = [
    (lambda m: listed(instead_of_5(m, 6)), "72 places for 64 experts, of which 1 stand nowhere \\(5\\)"),
    (lambda m: listed(instead_of_5(m, EXPERTS)), "layer 1: expert 64 at place .*; the checkpoint has experts 0 to 63"),
    (lambda m: listed(m[:2]), "maps 2 layers; the checkpoint has 3 routers in layers 1 to 3"),
    (lambda m: listed(m[:, :9]), "9 places for 64 experts, of which 5[5-9] stand nowhere"),
    (lambda m: listed(m - 1), "expert -1 at place"),
    (lambda m: listed(np.tile(np.arange(EXPERTS), 5)), "ids are uint8, which cannot name 320 places"),
    (lambda m: "[]", "no map of experts"),
    (lambda m: "{}", "no map of experts"),
    (lambda m: "[[0, 1.5]]", "layer 0 holds"),
    (lambda m: "[[]]", "layer 0 holds"),
    (lambda m: listed(m)[:-9], "Is it whole"),
    (lambda m: of_ascend(m).replace('"moe_layer_count": 4', '"moe_layer_count": 5'), "lists 4 layers and counts 5"),
    (lambda m: of_ascend(m).replace('"layer_id": 3', '"layer_id": 2'), "expected 0 to 2, each once"),
    (lambda m: of_ascend(m).replace("device_expert", "experts"), "without lists of 'device_expert'"),
    (lambda m: 2 * of_initial_mapping(m), "2 lines with 'initial_global_assignments'"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), DAMAGED, ids=[words for _, words in DAMAGED])
def test_a_map_that_is_no_plan_for_the_checkpoint_is_refused(damage, words, tmp_path):
    layers = plan()
    write_vllm(tmp_path / "r.jsonl", placed_requests(layers))
    (tmp_path / "map.json").write_text(damage(layers))
    refuse(words, tmp_path / "r.jsonl", tmp_path)


def test_a_trace_of_another_map_and_what_is_no_trace_are_refused(tmp_path):
    layers = plan()
    requests = placed_requests(layers)
    write_vllm(tmp_path / "r.jsonl", requests)
    (tmp_path / "map.json").write_text(listed(plan(0, EXPERTS)))
    refuse("the map has 64 places there", tmp_path / "r.jsonl", tmp_path)
    write_sglang(tmp_path / "s.jsonl", requests)
    replies = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    for reply in replies:
        del reply["input_ids"], reply["meta_info"]["completion_tokens"]
    written.lines(tmp_path / "s.jsonl", replies)
    refuse("places without a shape, and no count of tokens", tmp_path / "s.jsonl", tmp_path)
    logits = dict.fromkeys(NAMES, np.zeros((3, EXPERTS), np.float32))
    np.savez(tmp_path / "logits.npz", **logits)
    with pytest.raises(UsageError, match="--expert-map does not apply"):
        open_tokens(tmp_path / "logits.npz", "logits", routers=NAMES, expert_map="map.json")


def test_the_example_of_vllm_is_read_as_vllm_reads_it(tmp_path):
    """Its test of PR 41141: slots of two layers with one copy each."""
    (tmp_path / "m.jsonl").write_text(
        '{"record_type": "eplb_initial_mapping", "version": 1, "num_redundant_experts": 1, '
        '"num_slots": 4, "initial_global_assignments": {"0": [0, 1, 2, 0], "1": [1, 2, 0, 1]}}\n'
    )
    found = read_expert_map(tmp_path / "m.jsonl")
    np.testing.assert_array_equal(found.layers, [[0, 1, 2, 0], [1, 2, 0, 1]])
