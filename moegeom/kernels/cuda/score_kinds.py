"""Scores by the numbers that ``scores.cuh`` knows them by."""

from __future__ import annotations

SCORE_KINDS = {"identity": 0, "softmax": 1, "sigmoid": 2, "sqrt_softplus": 3}
