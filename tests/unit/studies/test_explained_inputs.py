"""What explain keeps of the inputs that it reads is what was read."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.studies.explain.layer import ReadParts


@pytest.mark.parametrize(
    "some", [[0, 1, 2], [4, 5, 6], [2, 3, 4, 5], [9, 0, 9, 3], [8, 7], [], [0, 2]]
)
def test_any_rows_of_parts_are_those_of_the_whole(some):
    whole = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)
    kept = ReadParts.of([whole[:4].copy(), whole[4:7].copy(), whole[7:].copy()])
    rows = np.array(some, np.int64)
    np.testing.assert_array_equal(kept.rows(rows), whole[rows])
