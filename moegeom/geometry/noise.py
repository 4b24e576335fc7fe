"""How large the noise on router inputs is, and how often it flips a choice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.router import Rule
from moegeom.core.shapes import Bool, Float, Float64, Int32, Int64
from moegeom.geometry.boundary.linear import NEVER, NO_BOUNDARY, RowDistances, row_distances
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16
from moegeom.geometry.selection import route
from moegeom.geometry.set_code import chosen_mask


# -------------------------------------------------------------------------------------- two choices
def shares_expert(
    chosen: Int32[np.ndarray, "tokens k"], other: Int32[np.ndarray, "tokens k2"]
) -> Bool[np.ndarray, "tokens k"]:
    """Which experts of ``chosen`` are in ``other`` as well."""
    return (chosen[:, :, None] == other[:, None, :]).any(axis=2)


def certainly_differs(
    compared: Float[np.ndarray, "tokens experts"], chosen: Int32[np.ndarray, "tokens k"]
) -> Bool[np.ndarray, "tokens"]:
    """True where no way of breaking exact ties of ``compared`` gives the set ``chosen``.

    A set is possible when it holds every expert above its own least score. False for a set that
    is chosen by some way of breaking them. Oracle in tests: all ways.
    """
    of_chosen = np.take_along_axis(compared, chosen.astype(np.int64), axis=1)
    least = of_chosen.min(axis=1, keepdims=True)
    return (compared > least).sum(axis=1) != (of_chosen > least).sum(axis=1)


def weight_moved(
    weights: Float64[np.ndarray, "tokens k"],
    chosen: Int32[np.ndarray, "tokens k"],
    other: Int32[np.ndarray, "tokens k2"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Share of the routing weight on experts of ``chosen`` that ``other`` leaves out, 0 to 1.

    :math:`\sum_{i \in S \setminus S'} g_i / \sum_{i \in S} g_i`; 0 for equal sets, nan where all
    weights are 0. Oracle in tests: Python's sets.
    """
    stays = shares_expert(chosen, other)
    with np.errstate(invalid="ignore", divide="ignore"):
        moved = np.where(stays, 0.0, weights).sum(axis=1) / weights.sum(axis=1)
    return np.where(stays.all(axis=1), 0.0, moved)


def swapped_pairs(
    chosen: Int32[np.ndarray, "tokens k"], other: Int32[np.ndarray, "tokens k"]
) -> Int32[np.ndarray, "swaps 3"]:
    """(token, expert out, expert in) of every exchange, in order of rank.

    Where several experts change, the first that leaves is paired with the first that comes.
    """
    leaves, comes = ~shares_expert(chosen, other), ~shares_expert(other, chosen)
    token, rank = np.nonzero(leaves)
    into = other[comes]  # as many in each row, in the same order of rows
    return np.stack([token.astype(np.int32), chosen[token, rank], into], axis=1)


# ------------------------------------------------------------------------------------------ one gap
#: Of a deviation and a step, the less counts for nothing below this share of the other.
_SMALL_TIE = 1e-4


def flip_prediction(
    gap: Float64[np.ndarray, "tokens"],
    deviation: Float64[np.ndarray, "tokens"],
    step: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Probability that noise in a gap, and rounding of its two logits after it, turn it round.

    .. math:: p = P(g + \sigma N + \delta U < 0) = \frac{\sigma}{2 \delta}
              \left(I\left(\tfrac{\delta - g}{\sigma}\right)
              - I\left(\tfrac{-\delta - g}{\sigma}\right)\right),
              \quad I(x) = x \Phi(x) + \varphi(x)

    with N normal and U uniform on [-1, 1]. ``gap`` g is the logit difference of the nearest
    boundary, ``deviation`` the standard deviation of the noise in it, ``step`` the spacing of the
    output format there. Rounding never turns two logits round, it makes those that are x apart
    equal with probability 1 - |x| / step, and of ties half fall to either side: together one half
    less x / (2 step), as if the gap moved by U. Phi(-g / deviation) for step 0, the ramp alone for
    deviation 0, 0 for both. Source: docs/theory.md E4. Oracle in tests: simulation.
    """
    from scipy.special import ndtr  # takes longer to import than many a scan takes to run

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        crossed = np.where(deviation > 0.0, ndtr(-gap / deviation), 0.0)
        ramp = np.clip(0.5 - 0.5 * gap / step, 0.0, 1.0)
        upper, lower = (step - gap) / deviation, (-step - gap) / deviation
        between = (_integral(upper) - _integral(lower)) * deviation / (2.0 * step)
    # a step that is nothing beside the noise, or the other way round: the quotients lose digits
    both = np.where(deviation > _SMALL_TIE * step, between, ramp)
    return np.clip(np.where(step > _SMALL_TIE * deviation, both, crossed), 0.0, 1.0)


def _integral(x: Float64[np.ndarray, "tokens"]) -> Float64[np.ndarray, "tokens"]:
    r"""x Phi(x) + phi(x), whose derivative is Phi."""
    from scipy.special import ndtr

    return x * ndtr(x) + np.exp(-0.5 * x * x) / np.sqrt(2.0 * np.pi)


def spacing(values: Float64[np.ndarray, "tokens"], unit: float) -> Float64[np.ndarray, "tokens"]:
    r"""Distance of neighbouring numbers of a format with unit u around each value.

    :math:`2 u \cdot 2^{\lfloor \log_2 |x| \rfloor}`; 0 for 0. Oracle in tests: numpy.spacing.
    """
    mantissa, exponent = np.frexp(np.abs(values))
    return np.where(mantissa > 0.0, np.ldexp(unit, exponent), 0.0)


# -------------------------------------------------------------------------- distances in deviations
#: A covariance of the router input: one standard deviation for all coordinates, one for each, or a
#: factor F of the covariance F F^T.
Factor = float | Float64[np.ndarray, "hidden"] | Float64[np.ndarray, "hidden noises"]


def noisy_rows(
    weight: Float[np.ndarray, "experts hidden"], factor: Factor
) -> Float64[np.ndarray, "experts noises"]:
    """W F: what standard normal numbers, through the factor, do to the logits."""
    rows = weight.astype(np.float64)
    return rows @ factor if np.ndim(factor) == 2 else rows * factor


def noisy_distances(
    weight: Float[np.ndarray, "experts hidden"],
    factor: Factor,
    bias: Float[np.ndarray, "experts"] | None = None,
) -> RowDistances:
    """1 / |F^T (w_i - w_j)|: inverse standard deviations of the differences of two logits.

    NO_BOUNDARY for a pair whose difference the noise leaves alone; 0, as without noise, for a
    permanent tie. Source: docs/theory.md A9. Oracle in tests: the covariance, entry by entry.
    """
    apart = row_distances(noisy_rows(weight, factor), bias)
    inverse = apart.inverse
    for i, j in apart.permanent_ties:
        # rows that differ only where there is no noise are no permanent tie
        if (weight[i] != weight[j]).any():
            inverse[i, j] = inverse[j, i] = NO_BOUNDARY
    ties = np.argwhere(np.triu(inverse == 0.0)).astype(np.int32)
    return RowDistances(inverse, inverse.min(axis=1), ties)


def boundary_sigmas(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: RowDistances,
) -> Float64[np.ndarray, "tokens boundaries"]:
    r"""Gap over standard deviation, :math:`r_{ij} = (z_i - z_j) / |F^T (w_i - w_j)|`, of each
    boundary.

    The k (E - k) pairs of a chosen expert i, in order of rank, and another j, in order of number;
    no column for k = E. 0 on a boundary and at a permanent tie, inf where the noise cannot reach.
    With the plain :func:`~moegeom.geometry.boundary.linear.row_distances` they are Euclidean
    distances. For affine rules. Source: docs/theory.md A9.
    """
    tokens, experts = logits.shape
    others = np.nonzero(~chosen_mask(chosen, experts))[1].reshape(tokens, experts - chosen.shape[1])
    z = logits.astype(np.float64)
    ahead = np.take_along_axis(z, chosen.astype(np.int64), axis=1)
    gaps = ahead[:, :, None] - np.take_along_axis(z, others, axis=1)[:, None, :]
    with np.errstate(over="ignore"):  # NO_BOUNDARY times a large gap is inf, which is meant
        sigmas = gaps * rows.inverse[chosen[:, :, None], others[:, None, :]]
    sigmas[sigmas > NEVER] = np.inf
    return sigmas.reshape(tokens, chosen.shape[1] * others.shape[1])


# -------------------------------------------------------------------- logits that move on their own
#: Thresholds between the two sides, and how far they reach beyond them in standard deviations.
_STEPS, _REACH = 128, 6.0

#: The same for the few experts that are nearest to each other.
_LAST, _FIRST, _FEW_STEPS, _FEW_REACH = 4, 8, 12, 3.5

#: Numbers held at once.
_AT_ONCE = 2**20


def logit_deviations(distances: RowDistances) -> Float64[np.ndarray, "experts"]:
    r"""Standard deviation of each logit's own noise that fits those of the differences best.

    Least squares of :math:`s_i^2 + s_j^2` on the squared row distances over all pairs; exact when
    the noises of the logits are independent but for a common one, which changes no choice.
    0 for a single expert, and where the fit would be negative. Equal rows are at distance 0.
    """
    experts = len(distances.inverse)
    with np.errstate(divide="ignore"):
        squares = np.where(distances.inverse > 0.0, distances.inverse**-2.0, 0.0)
    np.fill_diagonal(squares, 0.0)
    if experts < 3:
        return np.sqrt(squares.sum(axis=1) / 2.0)
    sums = squares.sum(axis=1)
    total = sums.sum() / (2.0 * (experts - 1))
    return np.sqrt(np.maximum((sums - total) / (experts - 2), 0.0))


def independent_flip(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    distances: RowDistances,
    scale: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Probability that the best expert left out comes before the worst chosen one.

    .. math:: 1 - \int \prod_{j \notin S} \Phi\Big(\frac{c - z_j}{s_j}\Big)\,
              d\Big(-\prod_{i \in S} \Phi\Big(\frac{z_i - c}{s_i}\Big)\Big)

    with s of :func:`logit_deviations` times ``scale``: exact for rows that are orthogonal once a
    common row is taken off, an estimate otherwise. Error 5e-3 of the value and 1e-9.
    0 for k = E and for scale 0. Source: docs/theory.md A9, E4. Oracle in tests: Monte Carlo.
    """
    tokens, k = chosen.shape
    experts = logits.shape[1]
    flip = np.zeros(tokens)
    if k == experts:
        return flip
    deviations = logit_deviations(distances)
    size = max(1, _AT_ONCE // (experts * (_STEPS + 1)))
    noisy = np.flatnonzero(scale * deviations.max(initial=0.0) > 0.0)
    for start in range(0, len(noisy), size):
        part = noisy[start : start + size]
        flip[part] = _flip(logits[part].astype(np.float64), chosen[part], deviations, scale[part])
    return flip


def nearest_flip(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    deviation: Float64[np.ndarray, "tokens experts"],
) -> Float64[np.ndarray, "tokens"]:
    """The same, quicker, for a standard deviation of each logit of each token.

    The last 4 chosen and the first 8 others stand for all: within 6 % of the value of all of them.
    ``chosen`` is best first. 0 for k = E; deviations must be finite.
    Oracle in tests: Monte Carlo.
    """
    tokens, k = chosen.shape
    experts = logits.shape[1]
    flip = np.zeros(tokens)
    if k == experts:
        return flip
    last = chosen[:, -_LAST:].astype(np.int64)
    size = max(1, _AT_ONCE // max((_LAST + _FIRST) * (_FEW_STEPS + 1), experts))
    for start in range(0, tokens, size):
        part = slice(start, start + size)
        z = logits[part].astype(np.float64)
        others = z.copy()
        np.put_along_axis(others, chosen[part].astype(np.int64), -np.inf, axis=1)
        first = _largest(others, min(_FIRST, experts - k))
        spread = np.maximum(deviation[part], np.finfo(np.float64).tiny)
        near = [
            np.take_along_axis(a, rows, axis=1) for rows in (last[part], first) for a in (z, spread)
        ]
        flip[part] = _overtaken(*near)
    return flip


def _largest(values: Float64[np.ndarray, "tokens experts"], count: int) -> np.ndarray:
    """Columns of the ``count`` largest numbers of each row, in any order."""
    if count == values.shape[1]:
        return np.broadcast_to(np.arange(count), values.shape)
    return np.argpartition(values, -count, axis=1)[:, -count:]


def _overtaken(
    ahead: Float64[np.ndarray, "tokens last"],
    own: Float64[np.ndarray, "tokens last"],
    behind: Float64[np.ndarray, "tokens first"],
    others: Float64[np.ndarray, "tokens first"],
) -> Float64[np.ndarray, "tokens"]:
    """Over thresholds: the least of ``ahead`` lies there, and one of ``behind`` above it."""
    from scipy.special import ndtr

    # nearly all of the distribution of the least
    low = (ahead - _FEW_REACH * own).min(axis=1)[:, None]
    high = (ahead + _FEW_REACH * own).min(axis=1)[:, None]
    threshold = low + (high - low) * np.linspace(0.0, 1.0, _FEW_STEPS + 1)
    survival, below = np.ones(threshold.shape), np.ones(threshold.shape)
    with np.errstate(over="ignore"):
        for column in range(ahead.shape[1]):
            survival *= ndtr((ahead[:, [column]] - threshold) / own[:, [column]])
        for column in range(behind.shape[1]):
            below *= ndtr((threshold - behind[:, [column]]) / others[:, [column]])
    falling = survival[:, :-1] - survival[:, 1:]
    rising = 1.0 - 0.5 * (below[:, :-1] + below[:, 1:])
    return (rising * falling).sum(axis=1) / falling.sum(axis=1)


def _flip(
    z: Float64[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    deviations: Float64[np.ndarray, "experts"],
    scale: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    from scipy.special import log_ndtr

    is_chosen = chosen_mask(chosen, z.shape[1])
    spread = np.maximum(scale[:, None] * deviations, np.finfo(np.float64).tiny)
    # below `least` no chosen expert falls, above `largest` no other one rises
    least = np.where(is_chosen, z - _REACH * spread, np.inf).min(axis=1)
    largest = np.where(is_chosen, -np.inf, z + _REACH * spread).max(axis=1)
    width = np.maximum(largest - least, 0.0)
    threshold = least[:, None] + width[:, None] * np.linspace(0.0, 1.0, _STEPS + 1)
    sign = np.where(is_chosen, 1.0, -1.0)[:, None, :]
    with np.errstate(over="ignore"):
        above = sign * (z[:, None, :] - threshold[:, :, None]) / spread[:, None, :]
    logs = log_ndtr(above)
    survival = np.exp(np.where(is_chosen[:, None, :], logs, 0.0).sum(axis=2))
    overtaken = -np.expm1(np.where(is_chosen[:, None, :], 0.0, logs).sum(axis=2))
    falling = survival[:, :-1] - survival[:, 1:]
    return (0.5 * (overtaken[:, :-1] + overtaken[:, 1:]) * falling).sum(axis=1)


# ------------------------------------------------------------------------------- noise on the input
#: Below this the sum over boundaries is the estimate: boundaries are rarely crossed together.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, eq=False)
class FlipProbability:
    """Bounds on the probability that the chosen set differs, and an estimate between them."""

    lower: Float64[np.ndarray, "tokens"]
    upper: Float64[np.ndarray, "tokens"]
    estimate: Float64[np.ndarray, "tokens"]


def flip_bounds(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    distances: RowDistances,
    scale: Float64[np.ndarray, "tokens"],
) -> FlipProbability:
    r"""Chance that normal noise on the router input of each token changes its chosen set.

    .. math:: \Phi(-r_{\min} / s) \le P(\text{differs}) \le \min(1, \sum_{ij} \Phi(-r_{ij} / s))

    with r of :func:`~moegeom.geometry.noise.boundary_sigmas`. For isotropic noise
    ``distances`` are the plain row distances and ``scale`` is its standard deviation per
    coordinate, in units of the router input; for any other noise they are
    :func:`~moegeom.geometry.noise.noisy_distances` and the scale multiplies it (1 for
    all). One of two runs is noisy and the other is the reference; when both are, with noise of
    equal size, pass root 2 times the scale.

    The estimate is that of :func:`~moegeom.geometry.noise.independent_flip`, kept
    between the bounds, and the upper bound where that is below 1e-6. All 0 for k = E, and for scale
    0 off the boundaries; the lower bound is one half on a boundary. For affine rules.
    Source: docs/theory.md A9, E4. Oracle in tests: Monte Carlo.
    """
    from scipy.special import ndtr

    tokens, k = chosen.shape
    num_boundaries = k * (logits.shape[1] - k)
    lower, upper = np.zeros(tokens), np.zeros(tokens)
    size = max(1, _AT_ONCE // max(num_boundaries, 1))
    for start in range(0, tokens if num_boundaries else 0, size):
        part = slice(start, start + size)
        sigmas = boundary_sigmas(logits[part], chosen[part], distances)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(sigmas == 0.0, 0.0, sigmas / scale[part, None])
        crossing = ndtr(-ratio)
        lower[part] = crossing.max(axis=1)
        upper[part] = np.minimum(crossing.sum(axis=1), 1.0)
    estimate = upper.copy()
    near = np.flatnonzero(upper > _NEGLIGIBLE)
    estimate[near] = independent_flip(logits[near], chosen[near], distances, scale[near])
    return FlipProbability(lower, upper, np.clip(estimate, lower, upper))


def simulate_flip(
    values: Float[np.ndarray, "tokens hidden"],
    weight: Float[np.ndarray, "experts hidden"],
    rule: Rule,
    scale: Float64[np.ndarray, "#tokens #hidden"],
    draws: int,
    generator: np.random.Generator,
    logit_bias: Float[np.ndarray, "experts"] | None = None,
    selection_bias: Float[np.ndarray, "experts"] | None = None,
) -> Int64[np.ndarray, "tokens"]:
    """How many of ``draws`` noisy copies of each input have another chosen set, by the rule itself.

    Normal noise, independent between coordinates, with standard deviation ``scale``: one number,
    or one for each token, each coordinate or both, as the shape says. Any rule, curved and grouped
    ones too; float64 throughout. Costs one product with the weight per draw.
    """
    rows = weight.astype(np.float64).T
    offset = 0.0 if logit_bias is None else logit_bias.astype(np.float64)
    flipped = np.zeros(len(values), dtype=np.int64)
    spread = np.broadcast_to(scale, values.shape)
    size = max(1, _AT_ONCE // max(values.shape[1], 1))
    for start in range(0, len(values), size):
        part = slice(start, start + size)
        exact = values[part].astype(np.float64)
        before = np.sort(route(exact @ rows + offset, rule, selection_bias).chosen, axis=1)
        for _ in range(draws):
            noisy = exact + spread[part] * generator.standard_normal(exact.shape)
            after = np.sort(route(noisy @ rows + offset, rule, selection_bias).chosen, axis=1)
            flipped[part] += (after != before).any(axis=1)
    return flipped


# --------------------------------------------------------------------------------------------- size
# ------------------------------------------------------------------------------ from two recordings
@dataclass(frozen=True, eq=False)
class NoiseCalibration:
    """Noise of one run, from the differences of two.

    ``scale`` is its standard deviation per coordinate, taken as isotropic, in units of the router
    input. ``kappa`` is the size of the *difference* in units of what rounding the input to bfloat16
    does: 1 when one run was rounded and the other was not. ``systematic_share`` is the share of the
    mean square difference that all tokens have in common, which is no noise: 1 / tokens by chance
    alone, 1 for a constant difference.
    """

    scale: float
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
    square is ruled by the largest values: a few massive activations can make up most of it. 0
    throughout for equal runs; nan without tokens.

    Source: docs/theory.md E4 (iv). Oracle in tests: planted noise, and rounding by ml_dtypes.
    """
    if not first.size:
        return NoiseCalibration(np.nan, np.nan, np.nan)
    a, b = first.astype(np.float64), second.astype(np.float64)
    change = a - b
    total = float((change**2).mean(axis=0).mean())
    if total == 0.0:
        return NoiseCalibration(0.0, 0.0, 0.0)
    size = float(np.sqrt(((a**2).mean() + (b**2).mean()) / 2.0))
    return NoiseCalibration(
        scale=float(np.sqrt(total / 2.0)),
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
