"""How large the noise on router inputs must be to make the switches that were observed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64

#: Scales that are tried, a factor of 2 apart, and between neighbours of the best afterwards.
_SCALES = np.geomspace(2.0**-20, 4.0, 23)
_BETWEEN = 17

#: Shares of switches that have nothing to do with distance, which are tried beside 0.
_EXCESSES = np.concatenate([[0.0], np.geomspace(1e-5, 0.5, 19)])

#: Probabilities are kept this far from 0 and 1: no noise is exactly normal.
_FLOOR = 1e-9

#: Twice a difference of log-likelihoods beyond which an excess is believed: 10^-7 by chance.
_BELIEVED = 28.0


@dataclass(frozen=True)
class UpstreamNoise:
    """Noise that fits the switches best, and what it leaves.

    ``scale`` is its standard deviation per coordinate, in the units of the distances; ``excess``
    the share of the tokens that switch whatever their distance, 0 where chance could explain it.
    ``expected`` is the share of tokens that the noise alone switches, ``observed`` the share that
    did, ``expected_error`` the standard error of a share with that mean.
    """

    scale: float
    excess: float
    expected: float
    observed: float
    expected_error: float


def switch_chance(
    distances: Float64[np.ndarray, "tokens walls"], scale: float
) -> Float64[np.ndarray, "tokens"]:
    r""":math:`1 - \prod_w \Phi(r_w / s)`, as if walls were crossed one apart from the other.

    The nearest walls of each token suffice. 0 for scale 0, one half on a single wall.
    """
    from scipy.special import log_ndtr

    if scale == 0.0:
        return np.zeros(len(distances))
    with np.errstate(over="ignore"):
        return -np.expm1(log_ndtr(distances / scale).sum(axis=1))


def upstream_noise(
    distances: Float[np.ndarray, "tokens walls"], switched: Bool[np.ndarray, "tokens"]
) -> UpstreamNoise:
    r"""Maximum likelihood of :math:`P(\text{switch}) = 1 - (1 - e) \prod_w \Phi(r_w / s)`.

    ``distances`` are those of the nearest walls of each token. The excess e takes what no noise
    explains, so that a few switches far from any wall do not pass for large noise: it is 0 unless
    the likelihood falls by more than e^14 without it. Scale 0 where nothing switched; nan without
    tokens. Source: THEORY.md A9, E4 (iv). Oracle in tests: noise of known size on known inputs.
    """
    tokens = len(switched)
    if not tokens:
        return UpstreamNoise(np.nan, np.nan, np.nan, np.nan, np.nan)
    observed = float(switched.mean())
    if observed == 0.0:
        return UpstreamNoise(0.0, 0.0, 0.0, 0.0, 0.0)
    r = distances.astype(np.float64)
    likely, scale, excess = _best(r, switched, _EXCESSES[:1])
    with_excess = _best(r, switched, _EXCESSES[1:])
    if 2.0 * (with_excess[0] - likely) > _BELIEVED:
        _, scale, excess = with_excess
    expected = float(switch_chance(r, scale).mean())
    error = float(np.sqrt(expected * (1.0 - expected) / tokens))
    return UpstreamNoise(scale, excess, expected, observed, error)


def _best(
    r: Float64[np.ndarray, "tokens walls"],
    switched: Bool[np.ndarray, "tokens"],
    excesses: Float64[np.ndarray, "excesses"],
) -> tuple[float, float, float]:
    """Largest log-likelihood, its scale and its excess."""
    at = int(np.argmax(_likelihoods(r, switched, _SCALES, excesses).max(axis=1)))
    around = _SCALES[max(at - 1, 0)], _SCALES[min(at + 1, len(_SCALES) - 1)]
    scales = np.geomspace(*around, _BETWEEN)
    found = _likelihoods(r, switched, scales, excesses)
    row, column = np.unravel_index(np.argmax(found), found.shape)
    return float(found[row, column]), float(scales[row]), float(excesses[column])


def _likelihoods(
    r: Float64[np.ndarray, "tokens walls"],
    switched: Bool[np.ndarray, "tokens"],
    scales: Float64[np.ndarray, "scales"],
    excesses: Float64[np.ndarray, "excesses"],
) -> Float64[np.ndarray, "scales excesses"]:
    found = np.zeros((len(scales), len(excesses)))
    for row, scale in enumerate(scales):
        stays = 1.0 - np.clip(switch_chance(r, float(scale)), _FLOOR, 1.0 - _FLOOR)
        for column, excess in enumerate(excesses):
            kept = (1.0 - excess) * stays
            found[row, column] = np.log(kept[~switched]).sum() + np.log1p(-kept[switched]).sum()
    return found
