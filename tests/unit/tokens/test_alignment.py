"""TraceRows of a trace find their tokens, and only theirs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import TokenColumns
from moegeom.tokens.traces.alignment import (
    LAYER_SHIFTS,
    TOKEN_SHIFTS,
    Alignment,
    Reference,
    TraceRows,
    align,
)
from moegeom.tokens.traces.trace import RequestTrace, Trace
from tests.unit.tokens.dialects.written import Truth, rows_in_memory, truth


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


def token_of(held: Truth, found: Alignment, trace: TraceRows) -> None:
    """Every row is at a token whose choices are its own."""
    reference = held.reference
    assert reference.chosen is not None
    np.testing.assert_array_equal(
        reference.chosen[found.token], trace.chosen[np.arange(len(trace.request))]
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1,), (2, 1)])
def test_requests_in_any_order_find_their_documents_by_token_ids(order):
    held = truth()
    trace = trace_of(held, order)
    found = align(held.reference, trace)
    token_of(held, found, trace)
    assert len(found.fits) == len(TOKEN_SHIFTS) * len(LAYER_SHIFTS)
    assert f"in {len(order)} of {len(order)} requests" in found.notes[0]
    assert found.notes[1].startswith("alignment proven by the choices: 100.0 %")


@given(starts=st.tuples(*[st.integers(0, 12)] * 3), order=st.permutations([0, 1, 2]))
def test_a_prefix_that_is_left_out_moves_no_row(starts, order):
    held = truth()
    trace = trace_of(held, tuple(order), starts=starts)
    token_of(held, align(held.reference, trace), trace)


def test_without_token_ids_requests_are_documents_in_order():
    held = truth()
    trace = trace_of(held, has_tokens=False)
    token_of(held, align(held.reference, trace), trace)


def test_without_token_ids_another_order_is_refused():
    held = truth()
    with pytest.raises(RecordingError, match="expected as many or one less"):
        align(held.reference, trace_of(held, (1, 0, 2), has_tokens=False))


def test_without_token_ids_another_number_of_requests_is_refused():
    held = truth()
    with pytest.raises(RecordingError, match="3 documents and the trace 2 requests"):
        align(held.reference, trace_of(held, (0, 1), has_tokens=False))


@given(
    shift=st.sampled_from([-2, -1, 1, 2]),
    layers=st.sampled_from(LAYER_SHIFTS),
    every=st.integers(2, 5),
)
def test_a_planted_shift_is_refused_and_named(shift, layers, every):
    held = truth()
    ids = [np.roll(np.roll(rows, -shift, axis=0), -layers, axis=1) for rows in held.ids]
    for rows in ids:
        # an engine in other arithmetic chooses other experts here and there
        rows[::every] = np.arange(4) * 16 + 1
    trace = trace_of(Truth(ids, held.tokens))
    with pytest.raises(RecordingError, match="Trace misaligned") as caught:
        align(held.reference, trace)
    assert f"shifted by {shift:+d} token" in str(caught.value)
    assert (f"and {layers:+d} layer" in str(caught.value)) == bool(layers)


def test_choices_of_another_model_are_refused():
    held = truth()
    other = Truth(truth(seed=4).ids, held.tokens)
    with pytest.raises(RecordingError, match="no place stands out among 15 shifts"):
        align(held.reference, trace_of(other))


def test_choices_that_never_change_prove_nothing_and_are_said_to():
    held = truth()
    always = np.array([3, 14, 15, 9])
    constant = Truth([np.broadcast_to(always, ids.shape) for ids in held.ids], held.tokens)
    found = align(constant.reference, trace_of(constant))
    assert found.notes[1].startswith("choices hardly change from token to token")


def test_token_ids_of_another_text_are_refused_with_their_number():
    held = truth()
    other = Truth(held.ids, truth(seed=3).tokens)
    with pytest.raises(RecordingError, match=r"65 of 65 matched rows are of another token"):
        align(held.reference, trace_of(other))


def test_one_changed_token_is_refused_with_its_place():
    held = truth()
    tokens = [ids.copy() for ids in held.tokens]
    tokens[1][22] += 1
    with pytest.raises(RecordingError, match=r"1 of 65 .* request 1 at position 22"):
        align(held.reference, trace_of(Truth(held.ids, tokens)))


def test_a_longer_request_continues_a_shorter_document():
    held = truth()
    reference = held.reference
    kept = reference.columns.position < 16
    assert reference.chosen is not None
    short = Reference(
        "rec",
        TokenColumns(**{name: values[kept] for name, values in vars(reference.columns).items()}),
        reference.chosen[kept],
    )
    found = align(short, trace_of(held))
    assert int((found.token >= 0).sum()) == 48
    np.testing.assert_array_equal(found.token[:19], [*range(16), -1, -1, -1])


def test_a_reference_without_choices_gives_places_and_no_proof():
    held = truth()
    found = align(replace(held.reference, chosen=None), trace_of(held))
    assert found.fits == ()
    assert len(found.notes) == 1


def test_a_reference_without_documents_is_refused():
    held = truth()
    columns = replace(held.reference.columns, document=np.full(68, -1))
    with pytest.raises(RecordingError, match="does not say where its documents begin"):
        align(Reference("rec", columns), trace_of(held))
