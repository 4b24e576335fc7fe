r"""Code length of the chosen experts, given the scores of a noisy top-k, and of their numbers.

The model: expert e is chosen where its score, disturbed by logistic noise of scale T, exceeds the
boundary of its token. What is predicted well costs nothing, what is near the boundary about a bit,
and nothing costs more than naming the set outright.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moegeom.core.shapes import Bool, Float, Float32, Float64, Integer

#: A set that the scores do not predict at all happens this often, for whatever reason.
OUTRIGHT = 2.0**-10

#: Scores of experts that tie at the boundary, in noise scales, where ties are broken by number.
_TIED = 6.0

#: Ways to break ties: by chance, to the lowest numbers, to the highest.
TIE_WAYS = ("chance", "lowest", "highest")

#: Distances from the boundary, in noise scales, beyond which a bit count no longer changes.
FAR = 60.0

#: Tokens that biases are fitted to, steps at most, and the noise scales in gaps between scores.
_FITTED, _STEPS, _SOFT = 4096, 20, (0.5, 0.12, 0.03)

#: Offsets that move by less than this share of the noise scale are there.
_STEADY = 1e-3


@dataclass(frozen=True, eq=False)
class SetDistances:
    """How far each expert is on the wrong side of its token's boundary, in units of the scores.

    ``wrong`` is positive where B's choice contradicts the score and negative where it agrees,
    ``is_chosen`` marks B's experts and ``is_tied`` those exactly on the boundary; ``spacing`` is
    the median gap between the last chosen and the first other score. ``outright`` are the bits of
    any one set.
    """

    wrong: Float32[np.ndarray, "tokens experts"]
    is_chosen: Bool[np.ndarray, "tokens experts"]
    is_tied: Bool[np.ndarray, "tokens experts"] | None
    spacing: float
    outright: float

    @property
    def is_met(self) -> Bool[np.ndarray, "tokens"]:
        """Whether the set is a top-k of the scores, whichever way ties are broken."""
        return np.asarray((self.wrong <= 0.0).all(axis=1))

    def at(self, rows: np.ndarray) -> SetDistances:
        """Those of some tokens."""
        tied = None if self.is_tied is None else self.is_tied[rows]
        return SetDistances(
            self.wrong[rows], self.is_chosen[rows], tied, self.spacing, self.outright
        )

    def bits(self, temperature: float, ties: str = "chance") -> Float64[np.ndarray, "tokens"]:
        r"""Bits of each set: :math:`L = \sum_e \log_2(1 + e^{d_e/T})`, never far above outright.

        With the chance :math:`\epsilon = 2^{-10}` that a set has nothing to do with its scores:
        :math:`-\log_2((1-\epsilon) 2^{-L} + \epsilon / \binom{E}{k})`.
        """
        own = self._by_expert(temperature, ties).sum(axis=1, dtype=np.float64)
        with np.errstate(under="ignore"):
            bits = -np.logaddexp2(
                math.log2(1.0 - OUTRIGHT) - own, math.log2(OUTRIGHT) - self.outright
            )
        return np.maximum(bits, 0.0, out=bits)

    def _by_expert(self, temperature: float, ties: str) -> Float32[np.ndarray, "tokens experts"]:
        """The same bits by expert, of the scores alone."""
        with np.errstate(over="ignore"):  # clipped
            scaled = self.wrong / np.float32(temperature)
        np.clip(scaled, -FAR, FAR, out=scaled)
        if self.is_tied is not None and ties != "chance":
            # nearest numbers first: among those that tie the first ones would be taken
            scaled = self._broken(scaled, ties)
        # in place: a new array for each step would be most of the time
        np.log1p(np.exp(scaled, out=scaled), out=scaled)
        return np.multiply(scaled, np.float32(1.0 / math.log(2.0)), out=scaled)

    def _broken(
        self, scaled: Float32[np.ndarray, "tokens experts"], ties: str
    ) -> Float32[np.ndarray, "tokens experts"]:
        assert self.is_tied is not None
        rows = np.flatnonzero(self.is_tied.any(axis=1))
        if not len(rows):
            return scaled
        tied, out = self.is_tied[rows], scaled.copy()
        is_chosen = tied & self.is_chosen[rows]  # of those that tie, as many are taken
        taken = is_chosen.sum(axis=1, keepdims=True)
        number = tied.cumsum(axis=1)
        count = number[:, -1:]
        is_first = number <= taken if ties == "lowest" else number > count - taken
        out[rows] = np.where(tied, np.where(is_first == is_chosen, -_TIED, _TIED), out[rows])
        return out


def set_distances(
    selection: Float[np.ndarray, "tokens experts"], chosen: Integer[np.ndarray, "tokens k"]
) -> SetDistances:
    r"""Signed distances :math:`\mp (s_e - \mu)` from :math:`\mu = (s_{(k)} + s_{(k+1)}) / 2`.

    A token with a score that is nan costs all it can; :math:`-\infty` is never near a boundary.
    With k = E every set is certain: no distance. Oracle in tests: the product of logistic chances.
    """
    tokens, experts = selection.shape
    k = chosen.shape[1]
    outright = log2_sets(experts, k)
    is_chosen = chosen_mask(chosen, experts)
    # a choice between two numbers for each entry takes three times as long
    sign = np.float32(1.0) - np.float32(2.0) * is_chosen
    if k == experts:
        surely = np.full((tokens, experts), -np.inf, np.float32)
        return SetDistances(surely, is_chosen, None, 1.0, 0.0)
    own = selection.astype(np.float64, copy=False)
    last, following = last_and_next(_as_lowest(selection), k)
    last, following = last.astype(np.float64), following.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = last - following
        middle = np.where(np.isfinite(following), 0.5 * (last + following), last)
        apart = own - middle[:, None]
    spacing = _spacing(gap)
    is_edge = ~np.isfinite(following)
    if is_edge.any():  # nothing else could be chosen: the chosen ones stand clear
        few = np.isneginf(last)[:, None]  # too few are left: those that are dropped tie
        apart[is_edge] = np.where(few & np.isneginf(own), 0.0, apart + spacing)[is_edge]
    is_tied = None
    if (gap == 0.0).any():
        is_tied = (apart == 0.0) & (gap == 0.0)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        wrong = np.multiply(sign, apart, out=apart).astype(np.float32)
    is_unknown = np.isnan(wrong)
    if is_unknown.any():
        wrong[is_unknown] = np.inf
    return SetDistances(wrong, is_chosen, is_tied, spacing, outright)


def _as_lowest(
    selection: Float[np.ndarray, "tokens experts"],
) -> Float[np.ndarray, "tokens experts"]:
    """The same with nan as the lowest number there is."""
    is_unknown = np.isnan(selection)
    return np.where(is_unknown, -np.inf, selection) if is_unknown.any() else selection


def chosen_mask(
    chosen: Integer[np.ndarray, "tokens k"], experts: int
) -> Bool[np.ndarray, "tokens experts"]:
    """Which experts each token chose."""
    is_chosen = np.zeros((len(chosen), experts), bool)
    np.put_along_axis(is_chosen, chosen.astype(np.int64), True, axis=1)
    return is_chosen


def _spacing(gap: Float64[np.ndarray, "tokens"]) -> float:
    """The median of the finite gaps above 0; 1 where there are none."""
    positive = gap[np.isfinite(gap) & (gap > 0.0)]
    positive.sort()
    number = len(positive)
    return 0.5 * float(positive[(number - 1) // 2] + positive[number // 2]) if number else 1.0


def boundary(
    selection: Float[np.ndarray, "tokens experts"], k: int
) -> tuple[Float32[np.ndarray, "tokens"], float]:
    r""":math:`\mu = (s_{(k)} + s_{(k+1)}) / 2`, and the spacing of :class:`SetDistances`.

    The k-th score where no other is finite, and :math:`-\infty` for k = E. nan counts as
    :math:`-\infty`.
    """
    experts = selection.shape[1]
    if k == experts:
        return np.full(len(selection), -np.inf, np.float32), 1.0
    last, following = last_and_next(_as_lowest(selection), k)
    with np.errstate(invalid="ignore"):
        middle = np.where(np.isfinite(following), 0.5 * (last + following), last)
        gap = last.astype(np.float64) - following.astype(np.float64)
    return middle.astype(np.float32), _spacing(gap)


def last_and_next(
    selection: Float[np.ndarray, "tokens experts"], k: int
) -> tuple[Float[np.ndarray, "tokens"], Float[np.ndarray, "tokens"]]:
    r"""The last chosen score and the first other, :math:`s_{(k)} \ge s_{(k+1)}`; k < E."""
    # a sort by vector instructions takes an eighth of a partition at two places
    ordered = np.sort(selection, axis=1)
    return ordered[:, -k], ordered[:, -k - 1]


@lru_cache(2**16)
def log2_sets(experts: int, k: int) -> float:
    r""":math:`\log_2 \binom{E}{k}`."""
    total = math.lgamma(experts + 1) - math.lgamma(k + 1) - math.lgamma(experts - k + 1)
    return total / math.log(2.0)


def fitted_bias(
    selection: Float[np.ndarray, "tokens experts"], theirs: Integer[np.ndarray, "tokens k"]
) -> Float64[np.ndarray, "experts"]:
    r"""Offsets under which each expert is chosen as often as B chose it, soft by the usual gap.

    Solves :math:`\sum_t \sigma((s_{te} + b_e - \mu_t)/T) = n_e` by damped steps in the log odds;
    :math:`\mu_t` is the boundary of the token under the offsets so far. Steps end where no offset
    moves by a thousandth of T, or after twenty for each of three T, the last of them .03 gaps.
    """
    step = max(1, len(selection) // _FITTED)
    scores, chosen = selection[::step].astype(np.float64), theirs[::step].astype(np.int64)
    finite = np.where(np.isfinite(scores), scores, np.nan)
    experts, k = scores.shape[1], chosen.shape[1]
    total = np.nansum if np.isnan(finite).any() else np.sum
    counts = np.bincount(chosen.ravel(), minlength=experts).astype(np.float64)
    _, spacing = boundary(scores, k)
    bias = np.zeros(experts)
    for soft in _SOFT:
        scale = soft * spacing
        for _ in range(_STEPS):
            moved = finite + bias
            middle = 0.5 * np.sum(last_and_next(moved, k), axis=0)
            with np.errstate(over="ignore"):
                chance = 1.0 / (1.0 + np.exp(-(moved - middle[:, None]) / scale))
            expected = total(chance, axis=0)
            slope = total(chance * (1.0 - chance), axis=0) / scale
            change = (counts - expected) / np.maximum(slope, 1e-3 * slope.max() + 1e-12)
            before = bias
            bias = bias + np.clip(change, -4.0 * scale, 4.0 * scale)
            bias -= np.median(bias)
            if np.abs(bias - before).max() <= _STEADY * scale:
                break
    return bias


# ------------------------------------------------------------------------------ numbers beside sets
#: The finest scale of noise: numbers that are nearer are equal. Bfloat16 rounds by a tenth of it
#: where logits are compared, and routing weights by 16 times as much.
FINEST = 2.0**-12


def contrasts(
    observed: Float[np.ndarray, "tokens values"], predicted: Float[np.ndarray, "tokens values"]
) -> Float64[np.ndarray, "tokens values"]:
    r"""Differences :math:`d_{ti} = u_{ti} - v_{ti}` less their mean in each token.

    A common number of a token says nothing: logits are known up to one, and routing weights up to a
    factor. nan in all of a token where one number is not finite.
    """
    with np.errstate(invalid="ignore"):
        apart = observed.astype(np.float64) - predicted
        return apart - apart.mean(axis=1, keepdims=True)


#: Contrasts beyond which no bit is added: of weights of 0 they are infinite.
_FARTHEST = 2.0**64


def contrast_bits(
    apart: Float64[np.ndarray, "tokens values"], scale: float
) -> Float64[np.ndarray, "tokens"]:
    r"""Bits of the contrasts of each token under Cauchy noise of scale s, less those of zeros.

    .. math:: \frac{m - 1}{m} \sum_i \left(\log_2 \frac{s}{s_0} + \log_2(1 + (d_{ti}/s)^2)\right)

    for m numbers, of which one is given by the others; :math:`s_0 = 2^{-12}`. Never below 0, since
    no scale is finer. 0 where a number is not known.
    """
    number = apart.shape[1]
    own = np.log1p(np.square(np.clip(apart, -_FARTHEST, _FARTHEST) / scale)) / math.log(2.0)
    bits = (own.sum(axis=1) / number + math.log2(scale / FINEST)) * (number - 1)
    return np.where(np.isnan(bits), 0.0, bits)
