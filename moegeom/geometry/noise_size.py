"""How large the noise on router inputs is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16


# ------------------------------------------------------------------------------ from two recordings
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


# --------------------------------------------------------------------------- from the flips it made
#: Scales that are tried: a factor of root 2 apart.
_SCALES = 2.0 ** np.arange(-20.0, 4.5, 0.5)
_STEP = 0.5 * np.log(2.0)

#: Spreads that are tried: standard deviation of the logarithm of a token's own scale. A token that
#: attends to others which met another expert has several times the noise of its neighbours.
_SPREADS = (0.0, 0.5, 1.0, 1.5)

#: Shares of flips that have nothing to do with distance, which are tried beside 0.
_EXCESSES = np.concatenate([[0.0], np.geomspace(1e-5, 0.5, 19)])

#: Probabilities are kept this far from 0 and 1: no noise is exactly normal.
_FLOOR = 1e-9

#: Scales beyond which a normal number does not fall: its chance is less than any float64.
_NEVER = 40.0

#: Twice a difference of log-likelihoods beyond which an excess is believed: 10^-7 by chance.
_BELIEVED = 28.0


@dataclass(frozen=True)
class UpstreamNoise:
    """Noise that fits the flips best, and what it leaves.

    ``scale`` is its standard deviation per coordinate for the median token, in the units of the
    distances, ``spread`` that of the logarithm of the tokens' own scales; ``excess`` the share of
    the tokens that flip whatever their distance, 0 where chance could explain it. ``expected`` is
    the share of tokens that the noise alone flips, ``observed`` the share that did,
    ``expected_error`` the standard error of a share with that mean.
    """

    scale: float
    spread: float
    excess: float
    expected: float
    observed: float
    expected_error: float

    def chance(
        self, distances: Float64[np.ndarray, "tokens boundaries"]
    ) -> Float64[np.ndarray, "tokens"]:
        """Probability that the noise flips each token, without the excess."""
        steps, weights = _steps(self.spread)
        chances = [flip_chance(distances, self.scale * float(np.exp(s))) for s in steps]
        return np.asarray(weights @ np.array(chances))


def flip_chance(
    distances: Float64[np.ndarray, "tokens boundaries"], scale: float
) -> Float64[np.ndarray, "tokens"]:
    r""":math:`1 - \prod_w \Phi(r_w / s)`, as if boundaries were crossed one apart from the other.

    The nearest boundaries of each token suffice. 0 for scale 0 and where none is nearer than 40
    scales (chances below 1e-340 are no numbers), one half on a single boundary.
    """
    from scipy.special import log_ndtr

    chance = np.zeros(len(distances))
    if scale == 0.0:
        return chance
    far = distances > _NEVER * scale
    near = np.flatnonzero(~far.all(axis=1))
    with np.errstate(over="ignore"):
        chance[near] = -np.expm1(log_ndtr(distances[near] / scale).sum(axis=1))
    return chance


def upstream_noise(
    distances: Float[np.ndarray, "tokens boundaries"], flipped: Bool[np.ndarray, "tokens"]
) -> UpstreamNoise:
    r"""Maximum likelihood of :math:`P(\text{flip}) = 1 - (1 - e)(1 - \bar P_{s, \tau})`.

    :math:`\bar P` is the mean of :func:`flip_chance` over scales that are log-normal around s,
    with spread :math:`\tau`; ``distances`` are those of the nearest boundaries of each token. The
    excess e takes what no noise explains, so that a few flips far from any boundary do not pass for
    large noise: it is 0 unless the likelihood falls by more than e^14 without it. Scale 0 where
    nothing flipped; nan without tokens. Source: docs/theory.md A9, E4 (iv). Oracle in tests: noise
    of known size on known inputs.
    """
    tokens = len(flipped)
    if not tokens:
        return UpstreamNoise(*(np.nan,) * 6)
    observed = float(flipped.mean())
    if observed == 0.0:
        return UpstreamNoise(*(0.0,) * 6)
    r = distances.astype(np.float64)
    chances = np.stack([flip_chance(r, float(scale)) for scale in _SCALES])
    likelihoods = np.stack([_likelihoods(_spread(chances, spread), flipped) for spread in _SPREADS])
    plain = np.unravel_index(int(np.argmax(likelihoods[:, :, 0])), likelihoods.shape[:2])
    best = np.unravel_index(int(np.argmax(likelihoods)), likelihoods.shape)
    gained = 2.0 * float(likelihoods[best] - likelihoods[(*plain, 0)])
    at, row, excess = best if gained > _BELIEVED else (*plain, 0)
    scale = _between(likelihoods[at, :, excess], int(row))
    noise = UpstreamNoise(scale, _SPREADS[at], float(_EXCESSES[excess]), 0.0, observed, 0.0)
    expected = float(noise.chance(r).mean())
    error = float(np.sqrt(expected * (1.0 - expected) / tokens))
    return UpstreamNoise(scale, noise.spread, noise.excess, expected, observed, error)


def _steps(spread: float) -> tuple[Float64[np.ndarray, "steps"], Float64[np.ndarray, "steps"]]:
    """Logarithms of scales over the median one, on the grid, and their weights."""
    if spread == 0.0:
        return np.zeros(1), np.ones(1)
    reach = int(np.ceil(3.0 * spread / _STEP))
    steps = _STEP * np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (steps / spread) ** 2)
    return steps, weights / weights.sum()


def _spread(
    chances: Float64[np.ndarray, "scales tokens"], spread: float
) -> Float64[np.ndarray, "scales tokens"]:
    """Chances with the scale spread; beyond the grid its last scale stands for all."""
    steps, weights = _steps(spread)
    offsets = np.rint(steps / _STEP).astype(np.int64)
    rows = np.arange(len(chances))
    mixed = np.zeros_like(chances)
    for offset, weight in zip(offsets, weights, strict=True):
        mixed += weight * chances[np.clip(rows + offset, 0, len(chances) - 1)]
    return mixed


def _likelihoods(
    chances: Float64[np.ndarray, "scales tokens"], flipped: Bool[np.ndarray, "tokens"]
) -> Float64[np.ndarray, "scales excesses"]:
    stays = 1.0 - np.clip(chances, _FLOOR, 1.0 - _FLOOR)
    log_stay = np.log(stays[:, ~flipped]).sum(axis=1)
    num_stay, left = int((~flipped).sum()), stays[:, flipped]
    return np.stack(
        [
            log_stay + num_stay * np.log1p(-excess) + np.log1p(-(1.0 - excess) * left).sum(axis=1)
            for excess in _EXCESSES
        ],
        axis=1,
    )


def _between(likelihoods: Float64[np.ndarray, "scales"], row: int) -> float:
    """The scale at the top of the parabola through the best and its neighbours."""
    if not 0 < row < len(likelihoods) - 1:
        return float(_SCALES[row])
    before, here, after = likelihoods[row - 1 : row + 2]
    bend = before - 2.0 * here + after
    shift = 0.0 if bend == 0.0 else 0.5 * (before - after) / bend
    return float(_SCALES[row] * np.exp(np.clip(shift, -1.0, 1.0) * _STEP))
