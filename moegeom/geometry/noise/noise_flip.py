"""How often noise on the router input changes the chosen set, at a single time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int32, Int64

from moegeom.core.router import Rule
from moegeom.geometry.boundary.linear import RowDistances
from moegeom.geometry.noise.boundary_sigmas import boundary_sigmas
from moegeom.geometry.noise.independent import independent_flip
from moegeom.geometry.selection.route import route

#: Boundaries, or coordinates of inputs, held at once.
_AT_ONCE = 2**20

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

    with r of :func:`~moegeom.geometry.noise.boundary_sigmas.boundary_sigmas`. For isotropic noise
    ``distances`` are the plain row distances and ``scale`` is its standard deviation per
    coordinate, in units of the router input; for any other noise they are
    :func:`~moegeom.geometry.noise.boundary_sigmas.noisy_distances` and the scale multiplies it (1
    for all). One of two runs is noisy and the other is the reference; when both are, with noise of
    equal size, pass root 2 times the scale.

    The estimate is that of :func:`~moegeom.geometry.noise.independent.independent_flip`, kept
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


@dataclass(frozen=True, eq=False)
class SimulatedFlip:
    """How many of ``draws`` noisy inputs of each token had another chosen set."""

    flipped: Int64[np.ndarray, "tokens"]
    draws: int

    @property
    def share(self) -> float:
        """Mean over the tokens of the estimated probability; nan without tokens."""
        return float(self.flipped.mean()) / self.draws if len(self.flipped) else np.nan

    @property
    def standard_error(self) -> float:
        """Of the share, for these very tokens: what the draws leave open, not their choice.

        With a single draw the tokens count as if all had the mean probability, which is cautious.
        """
        if not len(self.flipped):
            return np.nan
        p = self.flipped / self.draws
        if self.draws == 1:
            return float(np.sqrt(self.share * (1.0 - self.share) / len(p)))
        return float(np.sqrt((p * (1.0 - p)).sum() / (self.draws - 1))) / len(p)


def simulate_flip(
    values: Float[np.ndarray, "tokens hidden"],
    weight: Float[np.ndarray, "experts hidden"],
    rule: Rule,
    scale: Float64[np.ndarray, "#tokens #hidden"],
    draws: int,
    generator: np.random.Generator,
    logit_bias: Float[np.ndarray, "experts"] | None = None,
    selection_bias: Float[np.ndarray, "experts"] | None = None,
) -> SimulatedFlip:
    """Noisy copies of some inputs, routed by the rule itself, against the inputs as they are.

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
    return SimulatedFlip(flipped, draws)
