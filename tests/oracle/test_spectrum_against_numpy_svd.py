"""Oracle: numpy's singular value decomposition of the rows themselves, and scipy's entropy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
from scipy.stats import entropy

from moegeom.geometry.gram import row_spectrum, symmetric_root

SHAPES = [(2, 5), (8, 64), (64, 16), (17, 17), (128, 300), (300, 128)]


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize(("experts", "hidden"), SHAPES)
def test_the_spectrum_is_that_of_the_rows(experts, hidden, is_centred):
    random = np.random.default_rng([experts, hidden])
    # singular values over three decades
    rows = random.standard_normal((experts, hidden)) * np.logspace(0, 3, hidden)
    rows -= is_centred * rows.mean(axis=0)
    values = np.linalg.svd(rows, compute_uv=False)[: min(experts - is_centred, hidden)]
    found = row_spectrum(rows @ rows.T, hidden, is_centred)
    assert found.rank == found.largest_possible_rank == np.linalg.matrix_rank(rows)
    np.testing.assert_allclose(found.condition, values[0] / values[-1], rtol=1e-7)
    np.testing.assert_allclose(found.effective_rank, np.exp(entropy(values)), rtol=1e-9)


@pytest.mark.parametrize("rank", [1, 3, 10])
def test_a_low_rank_is_found(rank):
    random = np.random.default_rng(rank)
    rows = random.standard_normal((24, rank)) @ random.standard_normal((rank, 50))
    values = np.linalg.svd(rows, compute_uv=False)[:rank]
    found = row_spectrum(rows @ rows.T, 50, False)
    assert found.rank == rank == np.linalg.matrix_rank(rows)
    np.testing.assert_array_equal(found.condition, np.inf)
    np.testing.assert_allclose(found.effective_rank, np.exp(entropy(values)), rtol=1e-9)


@pytest.mark.parametrize("rank", [3, 8])
def test_the_symmetric_root_is_scipys(rank):
    rows = np.random.default_rng(rank).standard_normal((8, rank))
    gram = rows @ rows.T
    # of a singular matrix scipy's root is complex by rounding, and no better than its root
    np.testing.assert_allclose(
        symmetric_root(gram), scipy.linalg.sqrtm(gram).real, atol=1e-12 if rank == 8 else 1e-6
    )


def test_a_symmetric_root_does_not_hang_on_the_signs_of_eigenvectors(monkeypatch):
    rows = np.random.default_rng(0).standard_normal((6, 9))
    here = symmetric_root(rows @ rows.T)
    eigh = scipy.linalg.eigh

    def turned(matrix):
        values, vectors = eigh(matrix)
        return values, vectors * np.array([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])

    monkeypatch.setattr(scipy.linalg, "eigh", turned)
    np.testing.assert_allclose(symmetric_root(rows @ rows.T), here, atol=1e-14)
