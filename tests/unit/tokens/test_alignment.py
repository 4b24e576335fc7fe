"""Rows of a trace, or of another run, find their tokens and only theirs, or are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import TokenColumns
from moegeom.testing.array_source import ArraySource
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.alignment import (
    LAYER_SHIFTS,
    TOKEN_SHIFTS,
    Alignment,
    Reference,
    TraceRows,
    align,
    match_run_b,
)
from moegeom.tokens.traces.trace import RequestTrace, Trace
from tests.columns import columns_of
from tests.unit.tokens.dialects.written import Truth, rows_in_memory, truth

TRUTH = truth()


def trace_of(held: Truth, order=(0, 1, 2), has_tokens: bool = True, starts=(0, 0, 0)) -> TraceRows:
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


def aligned(*arguments, **more) -> Alignment:
    trace, reference = trace_of(TRUTH, *arguments, **more), TRUTH.reference
    placed = align(reference, trace)
    rows = trace.chosen[np.arange(len(trace.request))]
    np.testing.assert_array_equal(reference.chosen[placed.token], rows)
    return placed


def refuse(words: str, trace: TraceRows, reference: Reference = TRUTH.reference) -> str:
    with pytest.raises(RecordingError, match=words) as caught:
        align(reference, trace)
    return str(caught.value)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1,), (2, 1)])
def test_requests_in_any_order_find_their_documents_by_token_ids(order):
    placed = aligned(order)
    assert len(placed.fits) == len(TOKEN_SHIFTS) * len(LAYER_SHIFTS)
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
    short = Reference("rec", reference.columns.at(first), reference.chosen[first])
    placed = align(short, trace_of(TRUTH))
    assert int((placed.token >= 0).sum()) == 48
    np.testing.assert_array_equal(placed.token[:19], [*range(16), -1, -1, -1])


@given(
    shift=st.sampled_from([-2, -1, 1, 2]),
    layers=st.sampled_from(LAYER_SHIFTS),
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
    placed = align(constant.reference, trace_of(constant))
    assert placed.notes[1].startswith("choices hardly change from token to token")
    placed = align(replace(TRUTH.reference, chosen=None), trace_of(TRUTH))
    assert (placed.fits, len(placed.notes)) == ((), 1)
    columns = replace(TRUTH.reference.columns, document=np.full(68, -1))
    reference = Reference("rec", columns)
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
        match_run_b(MINE, Choices(columns(), chosen, **facts), ROUTERS)
    return str(caught.value)


def test_documents_in_another_order_find_their_tokens_and_others_are_not_matched():
    document = columns().document
    rows = np.concatenate([np.flatnonzero(document == d) for d in (2, 0, 1)])
    order = np.repeat(np.arange(3), [LENGTHS[d] for d in (2, 0, 1)])
    there = replace(columns().at(rows), document=order)
    matched = match_run_b(
        MINE, Choices(there, {name: chosen[rows] for name, chosen in choices().items()}), ROUTERS
    )
    np.testing.assert_array_equal(rows[matched.token], np.arange(125))
    for name, chosen in choices().items():
        np.testing.assert_array_equal(matched.read_chosen(name, np.arange(125)), chosen)
    assert matched.is_matched(0, 125).all()
    assert "alignment proven by the choices" in matched.notes[-1]
    rows = np.flatnonzero((document != 1) & (columns().position < 30))
    chosen = {name: chosen[rows] for name, chosen in choices().items()}
    matched = match_run_b(MINE, Choices(columns().at(rows), chosen), ROUTERS)
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
    matched = match_run_b(mine, Choices(columns(), choices(5)), ROUTERS)
    assert matched.fits == ()
    assert "no choices to prove it by" in matched.notes[-1]
