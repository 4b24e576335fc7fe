"""Normalisations in front of a router."""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, Float64


def normed(
    values: Float[np.ndarray, "tokens hidden"],
    kind: Literal["rms", "layer"],
    eps: float,
    gain: Float[np.ndarray, "hidden"],
    bias: Float[np.ndarray, "hidden"] | None = None,
) -> Float32[np.ndarray, "tokens hidden"]:
    r"""Router inputs from the inputs of the norm, :math:`g \odot x / \sqrt{mean(x^2) + \epsilon}`.

    A bias is added to that. For ``layer`` the mean of each token is subtracted first. Statistics in
    float64, rounded once.
    Source: docs/theory.md E3. Oracle in tests: torch.nn.functional.rms_norm, layer_norm.
    """
    x = values.astype(np.float64)
    if kind == "layer":
        x = x - x.mean(axis=1, keepdims=True)
    scale = np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)
    return (x / scale * gain + (0.0 if bias is None else bias)).astype(np.float32)


def unit_rows(
    values: Float[np.ndarray, "tokens hidden"],
) -> Float64[np.ndarray, "tokens hidden"]:
    """Each row over its Euclidean length; 0 for a zero row, nan or 0 for one that is not finite."""
    rows = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths != 0.0)
