"""Float32 scores keep the order of logits that are further apart than the stated resolution.

Oracle: torch.softmax and torch.sigmoid in float32.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moegeom.geometry.rounding import score_resolution

SCORES = {"softmax": lambda z: torch.softmax(z, dim=1), "sigmoid": torch.sigmoid}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 60.0])
def test_scores_order_as_logits_that_are_further_apart_than_the_resolution(
    score: str, scale: float
) -> None:
    generator = np.random.default_rng(3)
    near = (10.0 ** generator.uniform(-8, 0, (20_000, 1))) * generator.choice([-1, 1], (20_000, 1))
    last = scale * generator.standard_normal((20_000, 1))
    logits = np.concatenate([last, last - np.abs(near)], axis=1).astype(np.float32)
    top = np.maximum(scale * np.abs(generator.standard_normal((20_000, 1))), logits.max(1)[:, None])
    logits = np.concatenate([top.astype(np.float32), logits], axis=1)
    first, kth, following = logits.astype(np.float64).T
    apart = kth - following > score_resolution(score, first, kth, following)
    scores = SCORES[score](torch.from_numpy(logits)).numpy()
    assert apart.sum() > 1000
    np.testing.assert_array_less(scores[apart, 2], scores[apart, 1])


@pytest.mark.parametrize(
    ("score", "logits"),
    [("softmax", (110.0, 2.0, 1.0)), ("sigmoid", (40.0, 30.0, 25.0)), ("sigmoid", (1, -120, -121))],
)
def test_the_resolution_is_wider_than_the_gap_where_float32_scores_tie(
    score: str, logits: tuple[float, float, float]
) -> None:
    scores = SCORES[score](torch.tensor([logits], dtype=torch.float32))[0]
    assert scores[1] == scores[2], "the case must be a tie to say anything"
    first, kth, following = (np.array([value], dtype=np.float64) for value in logits)
    np.testing.assert_array_less(kth - following, score_resolution(score, first, kth, following))


def test_raw_logits_have_no_resolution_but_their_own() -> None:
    zero = np.zeros(2)
    np.testing.assert_array_equal(score_resolution("identity", zero, zero, zero), zero)
