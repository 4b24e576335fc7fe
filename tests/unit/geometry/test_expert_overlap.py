"""Overlap of outputs against scikit-learn, loops and vectors worked out by hand."""

from __future__ import annotations

import numpy as np
from sklearn.metrics.pairwise import cosine_similarity

from moegeom.geometry.expert_overlap import adding_up, centred_by_expert, mean_pair_cosine

OUTPUTS = np.random.default_rng(0).standard_normal((7, 4, 5))


def test_the_mean_cosine_of_pairs_is_that_of_their_table() -> None:
    above = np.triu_indices(4, 1)
    expected = [cosine_similarity(rows)[above].mean() for rows in OUTPUTS]
    np.testing.assert_allclose(mean_pair_cosine(OUTPUTS), expected, rtol=1e-12)


def test_outputs_of_zero_have_no_direction() -> None:
    outputs = OUTPUTS.copy()
    outputs[:, 1] = 0.0
    expected = mean_pair_cosine(OUTPUTS[:, [0, 2, 3]])
    np.testing.assert_allclose(mean_pair_cosine(outputs), expected, rtol=1e-12)
    outputs[0, 2:] = 0.0
    np.testing.assert_array_equal(np.isnan(mean_pair_cosine(outputs)), [True] + 6 * [False])


def test_each_expert_is_centred_over_its_own_tokens() -> None:
    draw = np.random.default_rng(1)
    experts = np.stack([draw.permutation(6)[:4] for _ in range(7)])
    experts[experts == 5] = 6  # and one that only one token chose
    experts[0, 0] = 9
    outputs = OUTPUTS.astype(np.float32)
    found = centred_by_expert(outputs, experts)
    for expert in np.unique(experts):
        rows = outputs[experts == expert]
        np.testing.assert_allclose(found[experts == expert], rows - rows.mean(axis=0), atol=1e-6)
    np.testing.assert_array_equal(found[0, 0], 0.0)


def test_outputs_add_up_as_their_directions_say() -> None:
    same = np.ones((1, 4, 3))
    orthogonal = np.eye(4)[None]
    opposite = np.array([[[1.0, 2.0], [-1.0, -2.0]]])
    np.testing.assert_allclose(adding_up(same), [1.0])
    np.testing.assert_allclose(adding_up(orthogonal), [0.5])
    np.testing.assert_allclose(adding_up(opposite), [0.0])
    np.testing.assert_array_equal(adding_up(np.zeros((1, 2, 2))), [np.nan])
