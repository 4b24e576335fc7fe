"""Rows of log-probabilities find their tokens."""

from __future__ import annotations

import numpy as np

from moegeom.core.tokens import TokenColumns
from moegeom.studies.explain.log_probs import _rows


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
