"""Rows of a trace, or of another run, find their tokens and only theirs, or are refused; traces that
name places become those of the experts that lie there, or the map is refused.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.tokens import TokenColumns
from moegeom.tokens.open import open_tokens
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces import alignment, source, trace
from moegeom.tokens.traces.trace import RequestTrace, Trace
from tests.array_source import ArraySource
from tests.columns import columns_of
from tests.unit.tokens.dialects import test_counts, written
from tests.unit.tokens.dialects.written import (
    EXPERTS,
    FIRST,
    NAMES,
    NUM_LAYERS,
    WRITERS,
    Truth,
    Written,
    chosen,
    rows_in_memory,
    truth,
    write_sglang,
    write_vllm,
)

TRUTH = truth()


def trace_of(
    held: Truth, order=(0, 1, 2), has_tokens: bool = True, starts=(0, 0, 0)
) -> alignment.TraceRows:
    requests = [
        RequestTrace(
            f"r{n}",
            held.ids[n][starts[n] : -1],
            token_ids=held.tokens[n] if has_tokens else None,
            start=starts[n],
        )
        for n in order
    ]
    return rows_in_memory(Trace("t", "test", tuple(requests)))


def aligned(*arguments, **more) -> alignment.Alignment:
    trace, reference = trace_of(TRUTH, *arguments, **more), TRUTH.reference
    placed = alignment.align(reference, trace)
    rows = trace.chosen[np.arange(len(trace.request))]
    np.testing.assert_array_equal(reference.chosen[placed.token], rows)
    return placed


def refuse(
    words: str, trace: alignment.TraceRows, reference: alignment.Reference = TRUTH.reference
) -> str:
    with pytest.raises(RecordingError, match=words) as caught:
        alignment.align(reference, trace)
    return str(caught.value)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1,), (2, 1)])
def test_requests_in_any_order_find_their_documents_by_token_ids(order):
    placed = aligned(order)
    assert len(placed.fits) == len(alignment.TOKEN_SHIFTS) * len(alignment.LAYER_SHIFTS)
    assert f"in {len(order)} of {len(order)} requests" in placed.notes[0]
    assert placed.notes[1].startswith("alignment proven by the choices: 100.0 %")


@given(starts=st.tuples(*[st.integers(0, 12)] * 3), order=st.permutations([0, 1, 2]))
def test_a_prefix_that_is_left_out_moves_no_row(starts, order):
    aligned(tuple(order), starts=starts)


def test_without_token_ids_requests_are_documents_in_order_and_may_continue_shorter_ones():
    aligned(has_tokens=False)
    refuse("expected as many or one less", trace_of(TRUTH, (1, 0, 2), has_tokens=False))
    few = trace_of(TRUTH, (0, 1), has_tokens=False)
    refuse("3 documents and the trace 2 requests", few)
    reference = TRUTH.reference
    first = reference.columns.position < 16
    short = alignment.Reference("rec", reference.columns.at(first), reference.chosen[first])
    placed = alignment.align(short, trace_of(TRUTH))
    assert int((placed.token >= 0).sum()) == 48
    np.testing.assert_array_equal(placed.token[:19], [*range(16), -1, -1, -1])


@given(
    shift=st.sampled_from([-2, -1, 1, 2]),
    layers=st.sampled_from(alignment.LAYER_SHIFTS),
    every=st.integers(2, 5),
)
def test_a_planted_shift_is_refused_and_named(shift, layers, every):
    ids = [np.roll(np.roll(rows, -shift, axis=0), -layers, axis=1) for rows in TRUTH.ids]
    for rows in ids:
        # an engine in other arithmetic chooses other experts here and there
        rows[::every] = np.arange(4) * 16 + 1
    message = refuse("Trace misaligned", trace_of(Truth(ids, TRUTH.tokens)))
    assert f"shifted by {shift:+d} token" in message
    assert (f"and {layers:+d} layer" in message) == bool(layers)


def test_choices_or_tokens_of_another_text_are_refused_with_their_place():
    other = truth(seed=4)
    refuse("no place stands out among 15 shifts", trace_of(Truth(other.ids, TRUTH.tokens)))
    refuse(r"65 of 65 matched rows are of another token", trace_of(Truth(TRUTH.ids, other.tokens)))
    tokens = [ids.copy() for ids in TRUTH.tokens]
    tokens[1][22] += 1
    refuse(r"1 of 65 .* request 1 at position 22", trace_of(Truth(TRUTH.ids, tokens)))


def test_choices_that_never_change_or_are_not_there_prove_nothing():
    always = np.array([3, 14, 15, 9])
    constant = Truth([np.broadcast_to(always, ids.shape) for ids in TRUTH.ids], TRUTH.tokens)
    placed = alignment.align(constant.reference, trace_of(constant))
    assert placed.notes[1].startswith("choices hardly change from token to token")
    placed = alignment.align(replace(TRUTH.reference, chosen=None), trace_of(TRUTH))
    assert (placed.fits, len(placed.notes)) == ((), 1)
    columns = replace(TRUTH.reference.columns, document=np.full(68, -1))
    reference = alignment.Reference("rec", columns)
    refuse("does not say where its documents begin", trace_of(TRUTH), reference)


ROUTERS = tuple(KnownRouter(f"text/{layer}", "text", layer, 16, 4) for layer in range(2))
LENGTHS = (40, 25, 60)


class Choices(ArraySource):
    def __init__(self, columns: TokenColumns, chosen: dict[str, np.ndarray], **facts):
        unread = np.zeros((len(columns.document), 1), np.float32)
        super().__init__(dict.fromkeys(chosen, unread), chosen=chosen)
        self._columns = columns
        self._facts = replace(self.facts, **{"stage": "ids", **facts})

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return self._columns.at(slice(start, stop))


def columns() -> TokenColumns:
    document = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    return columns_of(document, np.random.default_rng(1).integers(0, 500, sum(LENGTHS)))


def choices(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        router.name: random.permuted(
            np.tile(np.arange(16, dtype=np.int32), (sum(LENGTHS), 1)), axis=1
        )[:, :4]
        for router in ROUTERS
    }


MINE = Choices(columns(), choices())


def refuse_run_b(words: str, chosen: dict[str, np.ndarray], **facts) -> str:
    with pytest.raises(RecordingError, match=words) as caught:
        alignment.match_run_b(MINE, Choices(columns(), chosen, **facts), ROUTERS)
    return str(caught.value)


def test_documents_in_another_order_find_their_tokens_and_others_are_not_matched():
    document = columns().document
    rows = np.concatenate([np.flatnonzero(document == d) for d in (2, 0, 1)])
    order = np.repeat(np.arange(3), [LENGTHS[d] for d in (2, 0, 1)])
    there = replace(columns().at(rows), document=order)
    matched = alignment.match_run_b(
        MINE, Choices(there, {name: chosen[rows] for name, chosen in choices().items()}), ROUTERS
    )
    np.testing.assert_array_equal(rows[matched.token], np.arange(125))
    for name, ids in choices().items():
        np.testing.assert_array_equal(matched.read_chosen(name, np.arange(125)), ids)
    assert matched.is_matched(0, 125).all()
    assert "alignment proven by the choices" in matched.notes[-1]
    rows = np.flatnonzero((document != 1) & (columns().position < 30))
    chosen = {name: chosen[rows] for name, chosen in choices().items()}
    matched = alignment.match_run_b(MINE, Choices(columns().at(rows), chosen), ROUTERS)
    np.testing.assert_array_equal(np.flatnonzero(matched.is_matched(0, 125)), rows)
    some = rows[[3, 4, 40, 41]]
    np.testing.assert_array_equal(matched.read_chosen("text/1", some), choices()["text/1"][some])


def test_sides_of_other_tokens_layers_or_kinds_are_refused_and_some_prove_nothing():
    shifted = {name: np.roll(chosen, 1, axis=0) for name, chosen in choices().items()}
    assert "shifted by -1 token" in refuse_run_b("misaligned", shifted)
    refuse_run_b("layer", dict(zip(choices(), reversed(choices().values()), strict=True)))
    refuse_run_b("does not say what was chosen", choices(), has_chosen=False, stage="logits")
    refuse_run_b("no router in common", choices(), routers=("text/7",))
    refuse_run_b("3 experts a token", {name: chosen[:, :3] for name, chosen in choices().items()})
    mine = Choices(columns(), choices(), stage="router_input", has_chosen=False)
    matched = alignment.match_run_b(mine, Choices(columns(), choices(5)), ROUTERS)
    assert matched.fits == ()
    assert "no choices to prove it by" in matched.notes[-1]


# ---------------------------------------------------------------------------------- maps of experts
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


def opened(path: Path | str, folder: Path):
    return written.opened(path, expert_map=str(folder / "map.json"))


def refuse_map(words: str, path: Path, folder: Path) -> None:
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


@pytest.mark.parametrize("of_routers", [False, True])
def test_a_map_is_read_for_all_layers_or_routers(of_routers, tmp_path):
    held, layers = truth(), plan(3)
    write_vllm(tmp_path / "r.jsonl", placed_requests(layers))
    (tmp_path / "map.json").write_text(listed(layers[FIRST:] if of_routers else layers))
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
    refuse_map("stand nowhere", tmp_path / "r.pt", tmp_path)
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
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), DAMAGED, ids=[words for _, words in DAMAGED])
def test_a_map_that_is_no_plan_for_the_checkpoint_is_refused(damage, words, tmp_path):
    layers = plan()
    write_vllm(tmp_path / "r.jsonl", placed_requests(layers))
    (tmp_path / "map.json").write_text(damage(layers))
    refuse_map(words, tmp_path / "r.jsonl", tmp_path)


def test_a_trace_of_another_map_and_what_is_no_trace_are_refused(tmp_path):
    layers = plan()
    requests = placed_requests(layers)
    write_vllm(tmp_path / "r.jsonl", requests)
    (tmp_path / "map.json").write_text(listed(plan(0, EXPERTS)))
    refuse_map("the map has 64 places there", tmp_path / "r.jsonl", tmp_path)
    write_sglang(tmp_path / "s.jsonl", requests)
    replies = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    for reply in replies:
        del reply["input_ids"], reply["meta_info"]["completion_tokens"]
    written.lines(tmp_path / "s.jsonl", replies)
    refuse_map("places without a shape, and no count of tokens", tmp_path / "s.jsonl", tmp_path)
    logits = dict.fromkeys(NAMES, np.zeros((3, EXPERTS), np.float32))
    np.savez(tmp_path / "logits.npz", **logits)
    with pytest.raises(UsageError, match="--expert-map does not apply"):
        open_tokens(tmp_path / "logits.npz", "logits", routers=NAMES, expert_map="map.json")
