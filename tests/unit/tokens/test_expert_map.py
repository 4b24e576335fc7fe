"""Traces that name places become those of the experts that lie there, or the map is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moegeom.core.errors import RecordingError, UsageError
from moegeom.tokens.open import open_tokens
from moegeom.tokens.traces import source
from moegeom.tokens.traces.dialects import _batch_arrays, _responses
from moegeom.tokens.traces.expert_map import read_expert_map
from tests.unit.tokens.dialects import test_counts
from tests.unit.tokens.dialects.written import (
    EXPERTS,
    FIRST,
    NUM_LAYERS,
    WRITERS,
    known,
    truth,
    write_sglang,
    write_vllm,
)

NAMES = tuple(router.name for router in known())
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
    said = [
        {
            "layer_id": number,
            "device_count": DEVICES,
            "device_list": [
                {"device_id": device, "device_expert": experts.tolist()}
                for device, experts in enumerate(np.split(layer, DEVICES))
            ],
        }
        for number, layer in enumerate(layers)
    ]
    return json.dumps({"moe_layer_count": len(layers), "layer_list": said})


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


def opened(path: Path | str, expert_map: Path | None, **more):
    return open_tokens(
        path,
        routers=NAMES,
        known=known(),
        expert_map=None if expert_map is None else str(expert_map),
        **more,
    )


def chosen(source) -> np.ndarray:
    parts = [source.read_chosen(name, 0, source.facts.num_tokens) for name in NAMES]
    return np.stack(parts, axis=1)


@pytest.mark.parametrize("name", WRITERS)
def test_places_become_the_experts_that_lie_there(name, tmp_path):
    writer, held, layers = WRITERS[name], truth(), plan()
    requests = [replace(r, ids=placed(r.ids, layers)) for r in held.written]
    writer.write(tmp_path / writer.file, requests)
    (tmp_path / "map.json").write_text(listed(layers))
    with pytest.raises(RecordingError, match=r"Give its map \(--expert-map\)|experts a token"):
        opened(tmp_path / writer.file, None)
    source = opened(tmp_path / writer.file, tmp_path / "map.json")
    np.testing.assert_array_equal(chosen(source), np.concatenate([ids[:-1] for ids in held.ids]))
    assert any("map.json, which places 24 copies" in note for note in source.facts.notes)


@pytest.mark.parametrize("name", ["vllm", "sglang", "verl"])
def test_many_files_and_pieces_of_them_are_mapped_as_one_file_is(name, tmp_path, monkeypatch):
    writer, held, layers = WRITERS[name], truth(), plan()
    (tmp_path / "dump").mkdir()
    for number, request in enumerate(held.written):
        path = tmp_path / "dump" / f"{number}{Path(writer.file).suffix}"
        writer.write(path, [replace(request, ids=placed(request.ids, layers))])
    (tmp_path / "map.json").write_text(listed(layers))
    for module in (_batch_arrays, _responses, source):
        monkeypatch.setattr(module, "CACHE_BYTES" if module is source else "PIECE_BYTES", 500)
    found = opened(f"{tmp_path}/dump/*", tmp_path / "map.json")
    np.testing.assert_array_equal(chosen(found), np.concatenate([ids[:-1] for ids in held.ids]))
    said = "ids are places: experts by map.json, which places 24 copies"
    assert [note for note in found.facts.notes if "map.json" in note] == [said]


def test_ids_too_narrow_for_the_places_of_a_map_are_refused(tmp_path):
    layers = np.concatenate([np.arange(EXPERTS)] * 5)
    write_vllm(tmp_path / "r.jsonl", truth().written)
    (tmp_path / "map.json").write_text(listed(layers))
    with pytest.raises(RecordingError, match="ids are uint8, which cannot name 320 places"):
        opened(tmp_path / "r.jsonl", tmp_path / "map.json")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of_routers", [False, True])
def test_every_form_of_a_map_is_read_for_layers_of_the_model_or_of_routers(
    form, of_routers, tmp_path
):
    held, layers = truth(), plan(3)
    write_vllm(tmp_path / "r.jsonl", [replace(r, ids=placed(r.ids, layers)) for r in held.written])
    (tmp_path / "map.json").write_text(FORMS[form](layers[FIRST:] if of_routers else layers))
    source = opened(tmp_path / "r.jsonl", tmp_path / "map.json")
    np.testing.assert_array_equal(chosen(source), np.concatenate([ids[:-1] for ids in held.ids]))


def test_one_permutation_may_stand_for_all_layers_and_padding_stays_padding(tmp_path):
    held, layers = truth(), np.tile(plan(4, EXPERTS)[:1], (NUM_LAYERS, 1))
    requests = [
        replace(
            r,
            ids=np.concatenate(
                [
                    placed(r.ids, layers),
                    np.zeros((2, 4, 4), int),
                    np.arange(4) + np.zeros((3, 4, 1), int),
                ]
            ),
        )
        for r in held.written
    ]
    for request in requests:
        request.ids[:, :FIRST] = 0
    write_vllm(tmp_path / "r.jsonl", requests)
    (tmp_path / "map.json").write_text(json.dumps(layers[0].tolist()))
    source = opened(tmp_path / "r.jsonl", tmp_path / "map.json")
    np.testing.assert_array_equal(chosen(source), np.concatenate([ids[:-1] for ids in held.ids]))
    assert "padding rows cut behind the last routed token: 15" in source.facts.notes


def test_counts_of_copies_are_added_up(tmp_path):
    layers, counts = plan(5)[FIRST:], np.random.default_rng(2).integers(1, 99, (7, 3, PLACES))
    test_counts.write_recorder(tmp_path / "r.pt", counts[..., :EXPERTS])
    (tmp_path / "map.json").write_text(listed(layers[:, :EXPERTS]))
    with pytest.raises(RecordingError, match="stand nowhere"):
        opened(tmp_path / "r.pt", tmp_path / "map.json")
    (tmp_path / "map.json").write_text(listed(layers))
    source = opened(tmp_path / "r.pt", tmp_path / "map.json")
    for index, name in enumerate(NAMES):
        expected = [
            np.bincount(
                layers[index, :EXPERTS], weights=of_step[index, :EXPERTS], minlength=EXPERTS
            )
            for of_step in counts
        ]
        np.testing.assert_array_equal(source.counts(name), expected)


def twice(layers):
    return np.where(layers == 5, 6, layers)


def beyond(layers):
    return np.where(layers == 5, EXPERTS, layers)


DAMAGED = [
    (lambda m: listed(twice(m)), "72 places for 64 experts, of which 1 stand nowhere \\(5\\)"),
    (lambda m: listed(beyond(m)), "layer 1: expert 64 at place .*; the checkpoint has experts 0 to 63"),
    (lambda m: listed(m[:2]), "maps 2 layers; the checkpoint has 3 routers in layers 1 to 3"),
    (lambda m: listed(m[:, :9]), "9 places for 64 experts, of which 5[5-9] stand nowhere"),
    (lambda m: listed(m - 1), "expert -1 at place"),
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


@pytest.mark.parametrize(("damage", "said"), DAMAGED, ids=[said for _, said in DAMAGED])
def test_a_map_that_is_no_plan_for_the_checkpoint_is_refused(damage, said, tmp_path):
    layers = plan()
    write_vllm(
        tmp_path / "r.jsonl", [replace(r, ids=placed(r.ids, layers)) for r in truth().written]
    )
    (tmp_path / "map.json").write_text(damage(layers))
    with pytest.raises(RecordingError, match=said):
        opened(tmp_path / "r.jsonl", tmp_path / "map.json")


def test_a_trace_of_another_map_and_what_is_no_trace_are_refused(tmp_path):
    layers = plan()
    requests = [replace(r, ids=placed(r.ids, layers)) for r in truth().written]
    write_vllm(tmp_path / "r.jsonl", requests)
    (tmp_path / "map.json").write_text(listed(plan(0, EXPERTS)))
    with pytest.raises(RecordingError, match="the map has 64 places there"):
        opened(tmp_path / "r.jsonl", tmp_path / "map.json")
    write_sglang(tmp_path / "s.jsonl", requests)
    text = (tmp_path / "s.jsonl").read_text()
    bare = [json.loads(line) for line in text.splitlines()]
    for reply in bare:
        del reply["input_ids"], reply["meta_info"]["completion_tokens"]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in bare))
    with pytest.raises(RecordingError, match="places without a shape, and no count of tokens"):
        opened(tmp_path / "s.jsonl", tmp_path / "map.json")
    np.savez(
        tmp_path / "logits.npz", **{name: np.zeros((3, EXPERTS), np.float32) for name in NAMES}
    )
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
