"""Samples of experts: what initialisations of any size look like, and what else numbers are."""

import numpy as np
import pytest
import scipy.stats

from moegeom.geometry.rows import drawn_errors

SHAPES = [(8, 512), (64, 1024), (128, 4096)]

#: Laws of an initialisation, with their excess kurtosis.
LAWS = {
    "normal": (lambda draw, shape: draw.standard_normal(shape), 0.0),
    "uniform": (lambda draw, shape: draw.uniform(-1.0, 1.0, shape), -1.2),
}


def farthest(rows: np.ndarray) -> float:
    """The least over the laws of the largest error."""
    return min(max(map(abs, drawn_errors(rows, kurtosis))) for _, kurtosis in LAWS.values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("law", LAWS)
def test_numbers_of_one_law_lie_within_their_errors_whatever_their_size(law, shape):
    draw = np.random.default_rng(3)
    make, kurtosis = LAWS[law]
    sizes = 10.0 ** draw.uniform(-6.0, 3.0, 60)
    errors = np.array([drawn_errors(size * make(draw, shape), kurtosis) for size in sizes])
    # 60 of each figure: their quantiles are those of a standard normal one, or of its upper half
    assert (np.abs(errors) <= 4.0).all(axis=1).mean() >= 0.95
    for column in (0, 1):
        sizes_of = np.abs(errors[:, column])
        assert scipy.stats.kstest(sizes_of, scipy.stats.halfnorm.cdf).pvalue > 1e-4


OTHERS = {
    "heavy tails": lambda draw, shape: draw.standard_t(6, shape),
    "rows of unlike length": lambda draw, shape: (
        draw.standard_normal(shape) * np.exp(0.2 * draw.standard_normal(shape[0]))[:, None]
    ),
    "columns of unlike energy": lambda draw, shape: (
        draw.standard_normal(shape) * np.exp(0.4 * draw.standard_normal(shape[1]))
    ),
    "a direction in common": lambda draw, shape: (
        draw.standard_normal(shape) + 0.5 * draw.standard_normal(shape[1])
    ),
    "a mean": lambda draw, shape: draw.standard_normal(shape) + 0.2,
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", OTHERS)
def test_what_training_leaves_is_not_taken_for_it(kind, shape):
    draw = np.random.default_rng(4)
    assert all(farthest(OTHERS[kind](draw, shape)) > 4.0 for _ in range(20))
