"""What data can tell of gated attention: ranks by position, splits, exchanges of channels."""

import dataclasses

import numpy as np
import pytest
from numpy.testing import assert_allclose

from benchmarks import slopes_of_descents_are_those_of_their_starts as descents
from moegeom.geometry import hmoe

TRUTH = hmoe.published_truth()
INPUTS = np.random.default_rng(0).uniform(-1.0, 1.0, (5000, 2))


def gated(position):
    rows = {"none": None, "head": 1, "channel": 2}[hmoe.PLACEMENTS[position].gates]
    gates = None if rows is None else np.random.default_rng(9).normal(size=(2, rows, 2))
    return dataclasses.replace(TRUTH, gates=gates)


#: Position, activation -> parameters, rank, flat directions beyond what all scores of a head share.
RANKS = {
    ("none", "sigmoid"): (32, 12, 14),
    ("query_or_key", "sigmoid"): (32, 18, 14),
    ("output", "sigmoid"): (32, 12, 14),
    ("value", "sigmoid"): (32, 26, 0),
    ("sdpa", "sigmoid"): (32, 26, 0),
    ("sdpa", "silu"): (32, 26, 0),
    ("gate_per_head", "sigmoid"): (36, 18, 12),
    ("gate_per_channel", "sigmoid"): (40, 30, 4),
}


@pytest.mark.parametrize(("position", "activation"), RANKS)
def test_ranks_say_where_a_non_linearity_tells_channels_apart(position, activation):
    mixture = gated(position)
    derivatives = hmoe.jacobian(mixture, INPUTS, position, hmoe.ACTIVATIONS[activation])
    rank = hmoe.numerical_rank(derivatives)
    flat = rank.columns - rank.rank - hmoe.gauge_dimensions(mixture, position)
    assert (rank.columns, rank.rank, flat) == RANKS[position, activation]
    scaled = derivatives / np.linalg.norm(derivatives, axis=0)
    threshold = hmoe.FISHER_THRESHOLD * np.linalg.norm(scaled, 2)
    assert np.linalg.matrix_rank(scaled, tol=threshold) == rank.rank
    assert rank.least > 100 * hmoe.FISHER_THRESHOLD > 1e4 * rank.rest


def test_without_a_gate_channels_mix_at_will_and_what_scores_share_is_free():
    """Expert vectors count by their weighted sum alone; so no estimator finds them (F-22)."""
    shift = np.array([0.7, -0.4])
    experts = TRUTH.experts.copy()
    experts[:, :, 0] += TRUTH.weights[:, 1][:, None, None] * shift
    experts[:, :, 1] -= TRUTH.weights[:, 0][:, None, None] * shift
    mixed = dataclasses.replace(TRUTH, experts=experts)
    assert_allclose(hmoe.regression(mixed, INPUTS), hmoe.regression(TRUTH, INPUTS), atol=1e-14)
    assert descents.loss_1(mixed, TRUTH, INPUTS, 1.0) > 0.5
    for position in ("value", "sdpa"):
        change = hmoe.regression(mixed, INPUTS, position) - hmoe.regression(TRUTH, INPUTS, position)
        assert abs(change).max() > 0.01
    # the published truth does not obey (A.3): raw differences would measure it (F-21)
    raw = np.linalg.norm(descents.centred(TRUTH).scores - TRUTH.scores, axis=(2, 3))
    assert_allclose(TRUTH.weights.sum(axis=1) @ raw.sum(axis=1), 7.9, atol=0.05)
    for position in ("none", "value", "sdpa"):
        free = hmoe.regression(descents.centred(TRUTH), INPUTS, position)
        assert_allclose(free, hmoe.regression(TRUTH, INPUTS, position), atol=1e-14)
        assert descents.loss_2(descents.centred(TRUTH), TRUTH, INPUTS, position) < 1e-12


@pytest.mark.parametrize(("position", "at_5"), [("value", 2.7e-5), ("sdpa", 3.2e-5)])
def test_a_split_channel_moves_a_gated_function_by_the_square(position, at_5):
    def change(delta, position):
        apart = descents.split(TRUTH, np.array([delta, 0.0]))
        return hmoe.regression(apart, INPUTS, position) - hmoe.regression(TRUTH, INPUTS, position)

    distance, half = (np.sqrt(np.mean(change(d, position) ** 2)) for d in (0.05, 0.025))
    assert_allclose(np.log2(distance / half), 2.0, atol=1e-3)
    assert_allclose(distance, at_5, rtol=0.02)
    assert_allclose(change(0.5, "none"), 0.0, atol=1e-14)


def test_samples_leave_parameters_unknown():
    """The median least standard deviation is 56 and 37: no slope of Figure 1 is an estimator's."""
    free = np.delete(np.arange(32), [7, 8, 9, 13, 14, 15])
    for position, median in (("value", 56.0), ("sdpa", 37.0)):
        deviations = hmoe.cramer_rao_sd(
            hmoe.jacobian(TRUTH, INPUTS, position)[:, free], 0.1, 10**5, 0
        )
        assert_allclose(np.median(deviations), median, rtol=0.1)
