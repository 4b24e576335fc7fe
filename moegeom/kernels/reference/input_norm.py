"""Euclidean norm of router inputs."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64


def input_norm(values: Float[np.ndarray, "tokens hidden"]) -> Float64[np.ndarray, "tokens"]:
    """|y| of each token; nan or inf exactly when a coordinate is not finite."""
    with np.errstate(invalid="ignore"):
        return np.sqrt((values.astype(np.float64) ** 2).sum(axis=1))
