"""What a trace tells before a checkpoint is at hand: never more than its routers would say."""

from dataclasses import replace

import numpy as np
import pytest

import moegeom as mg
from moegeom.core.errors import RecordingError
from moegeom.tokens.open import open_tokens
from moegeom.tokens.traces import trace
from tests.by_day import by_day
from tests.unit.tokens.dialects import test_counts
from tests.unit.tokens.dialects.planted import PLANTED
from tests.unit.tokens.dialects.written import (
    WRITERS,
    known,
    truth,
    write_sglang,
    write_vllm,
    write_vllm_arrays,
)

#: Defects that show without a checkpoint, where token ids are in the file.
SHOWN = {
    "rows of a longer answer",
    "the prefix is omitted and nobody says so",
    "an expert stands twice",
    # 512 experts in 8 bits: two of a row become one
    "ids have wrapped",
    "one name stands for two requests",
    "nothing was captured",
    "the last layer stands first",
    # what is left can be read, and is not all of it
    "the prompt is omitted",
    "a row between others is lost",
}

NAMES = [name for name in WRITERS if name != "sglang"]
CASES = [(planted, name) for planted in PLANTED for name in NAMES]


@pytest.mark.parametrize(
    ("planted", "name"),
    by_day(CASES, {p.name: (p, NAMES[n % len(NAMES)]) for n, p in enumerate(PLANTED)}),
    ids=lambda value: getattr(value, "name", value),
)
def test_what_is_called_defective_fits_no_checkpoint(planted, name, tmp_path):
    """No false alarm: what the right routers accept can be read, with the same rows left."""
    writer = WRITERS[name]
    path = tmp_path / writer.file
    writer.write(path, planted.plant(planted.truth().written))
    (found,) = mg.routes(path).value.files
    try:
        routers = known(planted.num_experts)
        source = open_tokens(
            path, checkpoint_routers=routers, routers=tuple(r.name for r in routers)
        )
    except RecordingError:
        return
    assert (found.state, found.defects) == ("incomplete" if found.oddities else "sound", ())
    assert set(source.facts.oddities) <= set(found.oddities)
    assert found.num_tokens == source.facts.num_tokens
    assert {note for note in found.notes if note.startswith("requests")} <= set(source.facts.notes)


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.name for planted in PLANTED])
def test_planted_defects_are_found_or_named_as_not_looked_at(planted, tmp_path):
    write_vllm(tmp_path / "r.jsonl", planted.plant(planted.truth().written))
    report = mg.routes(tmp_path / "r.jsonl")
    (found,) = report.value.files
    assert report.value.exit_code == (planted.name in SHOWN)
    assert "how many experts there are" in found.not_looked_at
    assert report.text(80).startswith("VERDICT")


def test_every_request_with_a_defect_is_named_and_the_others_are_kept(tmp_path):
    requests = truth().written
    for request in (requests[0], requests[2]):
        request.ids[3, 2, 1] = request.ids[3, 2, 0]
    write_vllm(tmp_path / "r.jsonl", requests)
    (found,) = mg.routes(tmp_path / "r.jsonl").value.files
    assert [defect.request for defect in found.defects] == ["req-0", "req-2"]
    assert (found.num_rows, found.num_tokens) == (65, 30)


def test_a_trace_in_many_files_and_pieces_is_what_it_is_in_one(tmp_path, monkeypatch):
    requests = truth().written
    requests[1].ids[3, 2, 1] = requests[1].ids[3, 2, 0]
    write_vllm(tmp_path / "whole.jsonl", requests)
    (whole,) = mg.routes(tmp_path / "whole.jsonl").value.files
    (tmp_path / "dump").mkdir()
    for number, request in enumerate(requests):
        write_vllm(tmp_path / "dump" / f"{number}.jsonl", [request])
    monkeypatch.setattr(trace, "PIECE_BYTES", 1)
    alone = {"name": "", "given": "", "defects": ()}
    for given in ("whole.jsonl", "dump", "dump/*.jsonl"):
        (found,) = mg.routes(tmp_path / given).value.files
        assert replace(found, **alone) == replace(whole, **alone)
        assert [defect.request for defect in found.defects] == ["req-1"]


def test_a_request_over_several_pieces_is_left_out_whole(tmp_path, monkeypatch):
    ids = np.concatenate([request.ids for request in truth().written])
    ids[40, 2, 1] = ids[40, 2, 0]
    np.savez(tmp_path / "rows.npz", rows=ids)
    np.save(tmp_path / "rows.npy", ids)
    monkeypatch.setattr(trace, "PIECE_BYTES", 7 * ids[0].nbytes)
    for name in ("rows.npy", "rows.npz"):
        (found,) = mg.routes(tmp_path / name).value.files
        assert (found.num_requests, found.num_rows, found.num_tokens) == (1, 65, 0)
        (defect,) = found.defects
        assert "row 40, layer 2: an expert stands twice" in defect.text


def test_layers_slots_and_largest_ids_are_those_of_the_choices(tmp_path):
    held = truth()
    requests = [
        replace(r, ids=np.concatenate([r.ids, np.full((*r.ids.shape[:2], 1), 64)], axis=2))
        for r in held.written
    ]
    for request in requests:
        request.ids[:, 0] = 0
        request.ids[:, 1, :4] //= 2  # an expert may stand twice: another defect
    write_vllm_arrays(tmp_path / "r.npz", requests)
    (found,) = mg.routes(tmp_path / "r.npz").value.files
    assert (found.top_k, found.num_layers) == (4, 4)
    ids = np.concatenate([request.ids for request in requests])[:, :, :4]
    assert [(one.name, one.largest, one.num_seen) for one in found.layers] == [
        (layer, ids[:, layer].max(), len(np.unique(ids[:, layer]))) for layer in (1, 2, 3)
    ]


def test_what_says_too_little_is_not_judged_and_what_is_damaged_has_a_defect(tmp_path):
    write_sglang(tmp_path / "flat.jsonl", truth().written)
    found = mg.routes(tmp_path / "flat.jsonl").value
    assert found.exit_code == 4
    assert found.files[0].not_looked_at[0].startswith("layers, slots and rows")
    for file, write, steps in test_counts.WRITERS.values():
        write(tmp_path / file, test_counts.some_counts(steps))
        (counted,) = mg.routes(tmp_path / file).value.files
        assert (counted.state, counted.num_rows, len(counted.layers)) == ("sound", 0, 3)
    write_vllm(tmp_path / "r.jsonl", truth().written)
    text = (tmp_path / "r.jsonl").read_text()
    (tmp_path / "r.jsonl").write_text(text[: len(text) - 40])
    (found,) = mg.routes(tmp_path / "r.jsonl").value.files
    assert found.state == "defective"
    assert "line 3" in found.defects[0].text
    np.save(tmp_path / "logits.npy", np.zeros((3, 4), np.float32))
    for name, said in (("logits.npy", "no trace that can be told"), ("gone", "no such file")):
        with pytest.raises(RecordingError, match=said):
            mg.routes(tmp_path / name)


@pytest.mark.parametrize("shape", [(0, 4, 4), (5, 0, 4), (5, 4, 0), (0, 0, 0)])
def test_an_array_without_a_number_is_defective_and_holds_nothing_for_any_checkpoint(
    shape, tmp_path
):
    np.save(tmp_path / "none.npy", np.zeros(shape, np.int64))
    (found,) = mg.routes(tmp_path / "none.npy").value.files
    assert found.state == "defective"
    with pytest.raises(RecordingError, match=r"there are no rows|without 0"):
        open_tokens(tmp_path / "none.npy", checkpoint_routers=known(64))


DAMAGED = {
    "none.npz": (b"", "empty"),
    "none.jsonl": (b"", "empty"),
    "cut.npz": (b"PK\x03\x04" + bytes(100), "truncated"),
    "cut.jsonl": (b'{"a": [1, ', "line 1 is no JSON"),
    "words.json": (b"words", "does not begin as JSON"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_is_empty_or_cut_off_is_called_so_wherever_it_is_read(name, tmp_path):
    content, flaw = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    for read in (mg.routes, open_tokens):
        with pytest.raises(RecordingError, match=flaw):
            read(tmp_path / name)
