"""Rows of log-probabilities find their tokens."""

from __future__ import annotations

import numpy as np

from moegeom.core.tokens import TokenColumns
from moegeom.studies.log_probs import _cost, _rows


def test_a_document_of_any_number_is_matched_to_itself_alone():
    document = np.array([0, 2**32, 2**32, 7])
    tokens = TokenColumns(
        document=document,
        position=np.array([1, 1, 2, 3], np.int32),
        token_id=np.zeros(4, np.int32),
        domain=np.zeros(4, np.int16),
    )
    asked = np.array([2**32, 0, 2**33, 2**33 + 7, 7, 7, 0])
    position = np.array([1, 1, 1, 3, 3, 4, -1])
    assert _rows(tokens, asked, position).tolist() == [1, 0, -1, -1, 3, -1, -1]


def test_the_error_of_a_cost_is_that_of_drawing_documents_again():
    generator = np.random.default_rng(5)
    document = np.repeat(np.arange(60), 40)
    of_document = 0.4 * generator.standard_normal(60)[document]
    is_flipped = generator.random(len(document)) < 0.2 + 0.3 * (document % 2)
    change = np.abs(0.5 + 0.3 * is_flipped + of_document + 0.1 * generator.standard_normal(2400))
    found = _cost(change, is_flipped, document)
    assert found is not None

    def cost(chosen: np.ndarray) -> float:
        rows = (chosen[:, None] * 40 + np.arange(40)).ravel()
        kind = is_flipped[rows]
        return change[rows][kind].mean() - change[rows][~kind].mean()

    again = [cost(generator.integers(0, 60, 60)) for _ in range(2000)]
    np.testing.assert_allclose(found.nats, cost(np.arange(60)), rtol=1e-12)
    np.testing.assert_allclose(found.error, np.std(again), rtol=0.1)
    # as if tokens were independent it would be less than half
    alone = np.sqrt(change[is_flipped].var() / is_flipped.sum())
    assert found.error > 2.0 * alone


def test_a_cost_needs_documents_and_tokens_of_both_kinds():
    change, document = np.ones(100), np.arange(100) // 10
    assert _cost(change, np.arange(100) < 20, document) is None
    assert _cost(change, np.arange(100) < 50, np.zeros(100, np.int64)) is None
    found = _cost(change, np.arange(100) < 50, document)
    assert found is not None
    assert (found.nats, found.error) == (0.0, 0.0)
