"""Recipes of choices that were joined to other tokens than those they belong to."""

from collections.abc import Sequence

import numpy as np

from moegeom.core.tokens import TokenColumns
from tests.museum.disagreements import model, noisy
from tests.museum.recipe import Recipe
from tests.museum.recipes_of_rules import damage, of_runs, twin
from tests.museum.two_runs import After, Array, Runs, TwoRuns


def _runs(after: After) -> Runs:
    return lambda: TwoRuns(model(), after=after, noise=0.001)


def _span(columns: TokenColumns, documents: Sequence[int], first: int, last: int) -> Array:
    """Tokens at positions from ``first`` up to ``last`` of some documents."""
    there = (columns.position >= first) & (columns.position < last)
    return np.flatnonzero(there & np.isin(columns.document, documents))


def _stale(documents: Sequence[int], rows: int) -> After:
    """Positions from 40 on hold what position 5 of their document chose, in every layer."""

    def after(ids: Array, columns: TokenColumns) -> Array:
        out = ids.copy()
        for document in documents:
            fifth = _span(columns, [document], 5, 6)
            out[:, _span(columns, [document], 40, 40 + rows)] = ids[:, fifth]
        return out

    return after


def _repeats(unit: Array, columns: TokenColumns) -> Array:
    """Document 3 says the token at position 5 again, from position 40 on."""
    unit[_span(columns, [3], 40, 107)] = unit[_span(columns, [3], 5, 6)]
    return unit


STALE_ROWS = of_runs(
    "padded_rows_keep_a_stale_row",
    ("sgl-project/sglang#36404",),
    "Rows that a chunk padded were not written, and kept the routes of an earlier token: one row "
    "67 times, at the border of the chunk.",
    "From position 40 on, rows of B become row 5 of their document, in all layers.",
    "B repeats a row, at these positions of these documents.",
    "rows repeated",
    {
        "10 rows of one document": _runs(_stale([3], 10)),
        "67 rows of 2 documents of 16": _runs(_stale([3, 9], 67)),
        "67 rows of 8 documents": _runs(_stale(range(8), 67)),
    },
    {
        "a document that truly repeats one token": lambda: TwoRuns(
            model(), before=_repeats, noise=0.002
        )
    },
    told=r"\b4[01]\b",
)


def _ahead(by: int, first: int, documents: Sequence[int]) -> After:
    """Positions from ``first`` on hold the rows of tokens further on, up to the document's end."""

    def after(ids: Array, columns: TokenColumns) -> Array:
        out, length = ids.copy(), int(columns.position.max()) + 1
        for document in documents:
            here = _span(columns, [document], first, length - by)
            out[:, here] = ids[:, here + by]
        return out

    return after


TURNS_MISALIGNED = Recipe(
    "later_turns_misaligned",
    ("inclusionAI/AReno#524",),
    "The turns of a conversation were put together with another count of tokens between them than "
    "the routes: what follows the first turn belongs to other tokens.",
    "From a position on, every row of B is that of the token three further.",
    "B's rows are shifted by as many tokens from that position on.",
    "explain",
    "choices of both runs",
    (
        damage("second half of 4 of 16 documents", _runs(_ahead(3, 64, range(4))),
               "tokens shifted", r"\b6[345]\b|half"),
        damage("second half of every document", _runs(_ahead(3, 64, range(16))),
               "tokens shifted", r"\b6[345]\b|half"),
        damage("from position 16 on, by one", _runs(_ahead(1, 16, range(16))),
               "tokens shifted", r"\b1[567]\b"),
    ),
    (twin("put together rightly", noisy),),
)  # fmt: skip


def _slots(documents: Sequence[int], first: int, last: int) -> After:
    """Ranges of positions hold what the document before chose there."""

    def after(ids: Array, columns: TokenColumns) -> Array:
        out = ids.copy()
        for document in documents:
            here = _span(columns, [document], first, last)
            out[:, here] = ids[:, _span(columns, [(document - 1) % 16], first, last)]
        return out

    return after


SLOT_OCCUPANT = of_runs(
    "rows_of_the_slot_before",
    ("vllm-project/vllm#39568",),
    "Routes were read from slots of a cache that another request had filled before: ranges of rows "
    "belong to a stranger.",
    "Positions 32 to 63 of some documents of B hold the rows of the document before.",
    "B's rows belong to other tokens, in these ranges.",
    "tokens shifted",
    {
        "1 of 16 documents": _runs(_slots([4], 32, 64)),
        "4 documents": _runs(_slots([2, 6, 10, 14], 32, 64)),
        "every document": _runs(_slots(range(16), 32, 64)),
    },
    {"its own slots": noisy},
    told="document|position",
)
