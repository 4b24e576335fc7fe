"""Routers that compare unit rows with a projection of their input: one affine map, and a length."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64

#: Shorter vectors are divided by this instead of their length.
LEAST_LENGTH = 1e-12


def unit_length(rows: Float[np.ndarray, "rows size"]) -> Float64[np.ndarray, "rows size"]:
    """Rows over their Euclidean length, at least 1e-12: a row of zeros stays one.

    Source: torch.nn.functional.normalize.
    """
    exact = rows.astype(np.float64)
    length = np.sqrt(np.einsum("ij,ij->i", exact, exact))
    return exact / np.maximum(length, LEAST_LENGTH)[:, None]


def composed_rows(
    rows: Float[np.ndarray, "experts projected"],
    projection: Float[np.ndarray, "projected hidden"],
    bias: Float[np.ndarray, "projected"] | None,
) -> tuple[Float64[np.ndarray, "experts hidden"], Float64[np.ndarray, "experts"] | None]:
    r"""W and b of :math:`W y + b = U (P y + c)`, U the rows made unit length.

    Products are taken in float64: an entry is within :math:`\gamma_{p+4} |u|^T |P|` of the exact
    one, :math:`\gamma_n = n u / (1 - n u)` with u = 2^-53 and p projected dimensions, so W is
    nearer to the stored numbers than any float32 engine. The bias is None where c is.
    Source: microsoft/tutel tutel/gates/cosine_top.py. Oracle in tests: torch.
    """
    unit = unit_length(rows)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is looked at later
        weight = unit @ projection.astype(np.float64)
        return weight, None if bias is None else unit @ bias.astype(np.float64)


def cosine_scale(
    length: Float64[np.ndarray, "tokens"], scale: float
) -> Float64[np.ndarray, "tokens"]:
    r"""The factor :math:`s / |P y + c|` from ``W y + b`` to cosine logits, for each token.

    Positive, and the same for all experts: it changes no choice. ``length`` is that of the
    projected input, at least 1e-12 counts.
    """
    return scale / np.maximum(length, LEAST_LENGTH)
