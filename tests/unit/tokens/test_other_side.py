"""Two sides of the same tokens: matched by document, position and token id, or refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import SourceFacts, TokenColumns
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.run_b import match_run_b

ROUTERS = tuple(KnownRouter(f"text/{layer}", "text", layer, 16, 4) for layer in range(2))
LENGTHS = (40, 25, 60)


class Choices:
    """A recording of choices in memory."""

    def __init__(self, columns: TokenColumns, chosen: dict[str, np.ndarray], **facts) -> None:
        self._columns, self._chosen = columns, chosen
        self.facts = SourceFacts(
            **{
                "name": "side",
                "stage": "ids",
                "num_tokens": len(columns.document),
                "routers": tuple(chosen),
                "domains": (),
                "has_documents": True,
                "has_chosen": True,
                **facts,
            }
        )

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return self._columns.at(slice(start, stop))

    def read_chosen(self, router: str, start: int, stop: int) -> np.ndarray:
        return self._chosen[router][start:stop]


def columns() -> TokenColumns:
    count = sum(LENGTHS)
    return TokenColumns(
        document=np.repeat(np.arange(len(LENGTHS)), LENGTHS),
        position=np.concatenate([np.arange(n) for n in LENGTHS]).astype(np.int32),
        token_id=np.random.default_rng(1).integers(0, 500, count).astype(np.int32),
        domain=np.full(count, -1, np.int16),
    )


def choices(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        router.name: random.permuted(
            np.tile(np.arange(16, dtype=np.int32), (sum(LENGTHS), 1)), axis=1
        )[:, :4]
        for router in ROUTERS
    }


def rows_of(side: Choices, rows: np.ndarray, **facts) -> Choices:
    """Some tokens of a side, in another order."""
    chosen = {name: side.read_chosen(name, 0, sum(LENGTHS))[rows] for name in side.facts.routers}
    return Choices(side.read_columns(0, sum(LENGTHS)).at(rows), chosen, **facts)


def test_documents_in_another_order_find_their_tokens() -> None:
    mine = Choices(columns(), choices())
    document = columns().document
    rows = np.concatenate([np.flatnonzero(document == d) for d in (2, 0, 1)])
    renumbered = rows_of(mine, rows)
    order = np.repeat(np.arange(3), [LENGTHS[d] for d in (2, 0, 1)])
    there = Choices(
        dataclasses.replace(renumbered.read_columns(0, 125), document=order),
        {name: renumbered.read_chosen(name, 0, 125) for name in renumbered.facts.routers},
    )
    found = match_run_b(mine, there, ROUTERS)
    np.testing.assert_array_equal(rows[found.token], np.arange(125))
    for router in ROUTERS:
        token = np.arange(125)
        np.testing.assert_array_equal(
            found.read_chosen(router.name, token), mine.read_chosen(router.name, 0, 125)
        )
    assert found.is_matched(0, 125).all()
    assert "alignment proven by the choices" in found.notes[-1]


def test_tokens_that_the_other_run_lacks_are_not_matched() -> None:
    mine = Choices(columns(), choices())
    kept = np.flatnonzero((columns().document != 1) & (columns().position < 30))
    found = match_run_b(mine, rows_of(mine, kept), ROUTERS)
    np.testing.assert_array_equal(np.flatnonzero(found.is_matched(0, 125)), kept)
    some = kept[[3, 4, 40, 41]]
    np.testing.assert_array_equal(
        found.read_chosen("text/1", some), mine.read_chosen("text/1", 0, 125)[some]
    )


def test_choices_shifted_by_a_token_are_refused_with_the_shift() -> None:
    mine = Choices(columns(), choices())
    shifted = {name: np.roll(chosen, 1, axis=0) for name, chosen in choices().items()}
    with pytest.raises(RecordingError, match="misaligned") as caught:
        match_run_b(mine, Choices(columns(), shifted), ROUTERS)
    assert "shifted by -1 token" in str(caught.value)


def test_layers_that_changed_places_are_refused() -> None:
    mine, swapped = Choices(columns(), choices()), choices()
    swapped = {"text/0": swapped["text/1"], "text/1": swapped["text/0"]}
    with pytest.raises(RecordingError, match="layer"):
        match_run_b(mine, Choices(columns(), swapped), ROUTERS)


def test_without_own_choices_nothing_proves_the_match_and_that_is_said() -> None:
    mine = Choices(columns(), choices(), stage="router_input", has_chosen=False)
    found = match_run_b(mine, Choices(columns(), choices(5)), ROUTERS)
    assert found.fits == ()
    assert "no choices to prove it by" in found.notes[-1]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"has_chosen": False, "stage": "logits"}, "does not say what was chosen"),
        ({"routers": ("text/7",)}, "no router in common"),
    ],
)
def test_sides_that_cannot_be_compared_are_refused(facts: dict, said: str) -> None:
    mine = Choices(columns(), choices())
    with pytest.raises(RecordingError, match=said):
        match_run_b(mine, Choices(columns(), choices(), **facts), ROUTERS)


def test_another_number_of_experts_a_token_is_refused() -> None:
    mine = Choices(columns(), choices())
    fewer = {name: chosen[:, :3] for name, chosen in choices().items()}
    with pytest.raises(RecordingError, match="3 experts a token"):
        match_run_b(mine, Choices(columns(), fewer), ROUTERS)
