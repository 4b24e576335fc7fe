"""How large the noise on router inputs is, from two recordings of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from moegeom.geometry.arithmetic.rounding import ROUNDING_RMS, UNIT_BFLOAT16


@dataclass(frozen=True, eq=False)
class NoiseCalibration:
    """Noise of one run, from the differences of two.

    ``scale`` is its standard deviation per coordinate, taken as isotropic, and ``scales`` that of
    each coordinate, in units of the router input. ``kappa`` is the size of the *difference* in
    units of what rounding the input to bfloat16 does: 1 when one run was rounded and the other was
    not. ``systematic_share`` is the share of the mean square difference that all tokens have in
    common, which is no noise: 1 / tokens by chance alone, 1 for a constant difference.
    """

    scale: float
    scales: Float64[np.ndarray, "hidden"]
    kappa: float
    systematic_share: float


def noise_between(
    first: Float[np.ndarray, "tokens hidden"], second: Float[np.ndarray, "tokens hidden"]
) -> NoiseCalibration:
    r"""Standard deviation :math:`s = \mathrm{rms}(y_A - y_B) / \sqrt 2` of the noise of one run.

    And :math:`\kappa = \mathrm{rms}(y_A - y_B) / (0.4247 \cdot 2^{-8}\, \mathrm{rms}(y))` over both
    runs. Row t of both is the same token at the same router. Assumed: each run is the truth plus
    noise, independent between the runs and of mean 0, and of one size in both and for all tokens; a
    run without noise (a float32 reference) has the other's noise at root 2 times ``scale``. A mean
    square is ruled by the largest values: a few massive activations can make up most of it, and
    then ``scales`` says in which coordinates. 0 throughout for equal runs; nan without tokens.

    Source: docs/theory.md E4 (iv). Oracle in tests: planted noise, and rounding by ml_dtypes.
    """
    if not first.size:
        nothing = np.full(first.shape[1], np.nan)
        return NoiseCalibration(np.nan, nothing, np.nan, np.nan)
    a, b = first.astype(np.float64), second.astype(np.float64)
    change = a - b
    squares = (change**2).mean(axis=0)
    total = float(squares.mean())
    if total == 0.0:
        return NoiseCalibration(0.0, np.zeros(len(squares)), 0.0, 0.0)
    size = float(np.sqrt(((a**2).mean() + (b**2).mean()) / 2.0))
    return NoiseCalibration(
        scale=float(np.sqrt(total / 2.0)),
        scales=np.sqrt(squares / 2.0),
        kappa=float(np.sqrt(total)) / (ROUNDING_RMS * UNIT_BFLOAT16 * size),
        systematic_share=float((change.mean(axis=0) ** 2).mean()) / total,
    )
