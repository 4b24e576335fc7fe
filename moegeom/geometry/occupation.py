r"""How long a moving router input is near a tie of n + 1 experts: bounds, closed forms, and draws.

The input moves as :math:`dx = \gamma\,dt + F\,dB` for the time T, :math:`\epsilon` is a Euclidean
distance. A flat is where given n + 1 experts have one logit, wherever the others are; the input
starts at the offset m from it, in n coordinates at right angles to it, in which noise has the
covariance :math:`\Sigma_\perp` per unit of time. Times are in units of T's.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int64
from moegeom.geometry.boundary.linear import RowDistances
from moegeom.geometry.boundary.order_distance import order_distance, row_coordinates
from moegeom.geometry.noise import boundary_sigmas
from moegeom.geometry.selection import top_k


# -------------------------------------------------------------------------------------- single flat
def occupation_integral(
    order: int, exponent: Float64[np.ndarray, "*shape"], horizon: float
) -> Float64[np.ndarray, "*shape"]:
    r"""The integral :math:`I_n(b, T) = \int_0^T t^{-n/2} e^{-b/t} dt` for b > 0.

    .. math:: I_1 = 2 \sqrt T e^{-b/T} - 2 \sqrt{\pi b}\, \mathrm{erfc} \sqrt{b/T}, \quad
              I_2 = E_1(b/T), \quad I_n = b^{1-n/2}\, \Gamma(n/2 - 1, b/T)

    The published I_1 lacks its exponential (F-11). At b = 0 that of n = 1 is :math:`2 \sqrt T`, the
    others are infinite. Source: docs/theory.md A10 (S0 Theorem 5.3). Oracle in tests: quadrature.
    """
    from scipy.special import erfc, exp1, gamma, gammaincc

    ratio = exponent / horizon
    if order == 1:
        root = 2.0 * math.sqrt(horizon) * np.exp(-ratio)
        return root - 2.0 * np.sqrt(np.pi * exponent) * erfc(np.sqrt(ratio))
    if order == 2:
        return exp1(ratio)
    half = order / 2.0 - 1.0
    with np.errstate(divide="ignore"):
        return exponent**-half * gamma(half) * gammaincc(half, ratio)


def capped_occupation(
    order: int, constant: Float64[np.ndarray, "*shape"], horizon: float
) -> Float64[np.ndarray, "*shape"]:
    r""":math:`\int_0^T \min(1, c\, t^{-n/2}) dt`: the bound for an input on the flat's tube, b = 0.

    With :math:`t_0 = c^{2/n}`: T up to t_0, then :math:`t_0 (1 + \ln(T/t_0))` for n = 2 and
    :math:`t_0 + c\, (T^{1-n/2} - t_0^{1-n/2}) / (1 - n/2)` for others. Finite for every n, where
    the published bound is not (F-11). Source: docs/theory.md A10. Oracle in tests: quadrature.
    """
    until = np.minimum(constant ** (2.0 / order), horizon)
    if order == 2:
        return until * (1.0 + np.log(horizon / until))
    power = 1.0 - order / 2.0
    return until + constant * (horizon**power - until**power) / power


def occupation_bound(
    order: int,
    sigmas: Float64[np.ndarray, "flats"],
    volume: Float64[np.ndarray, "flats"],
    width: float,
    horizon: float,
) -> Float64[np.ndarray, "flats"]:
    r"""Bound on the mean time within ``width`` of each flat, at most T.

    :math:`K_n \epsilon^n I_n(b, T)` with :math:`K_n = \omega_n / ((2 \pi)^{n/2} v)` and
    :math:`b = \delta_\epsilon^2 / 2`: ``sigmas`` are standard deviations to the nearest point of
    the tube, ``volume`` is :math:`v = \sqrt{\det \Sigma_\perp}`; where the tube is reached at once,
    :func:`capped_occupation`. For paths without drift. Source: docs/theory.md A10 (S0 Theorem 5.3).
    Oracle in tests: the closed form of :func:`slab_occupation`, and the exact time in a tube.
    """
    unit_ball = math.pi ** (order / 2.0) / math.gamma(order / 2.0 + 1.0)
    constant = unit_ball * width**order / ((2.0 * math.pi) ** (order / 2.0) * volume)
    is_off = sigmas > 0.0
    bound = capped_occupation(order, constant, horizon)
    away = constant[is_off] * occupation_integral(order, sigmas[is_off] ** 2 / 2.0, horizon)
    bound[is_off] = np.minimum(away, bound[is_off])
    return np.minimum(bound, horizon)


def slab_occupation(
    sigmas: Float64[np.ndarray, "*shape"], width: Float64[np.ndarray, "*shape"], horizon: float
) -> Float64[np.ndarray, "*shape"]:
    r"""Exact mean time within a slab: both sides of one boundary at ``sigmas`` m, half ``width`` e.

    :math:`J(e - m) - J(-e - m)` in standard deviations, J the mean time below a level,
    :math:`J(a) = T \Phi(s) + |a| \sqrt T \varphi(s) - a^2 \Phi(-s)` with
    :math:`s = |a| / \sqrt T` for a > 0, T less that of -a for a < 0, and T / 2 at 0. 0 at infinite
    m; absolute error 1e-15 T. Source: docs/theory.md A10. Oracle in tests: quadrature.
    """
    time = _time_below(width - sigmas, horizon) - _time_below(-width - sigmas, horizon)
    return np.where(np.isinf(sigmas), 0.0, np.maximum(time, 0.0))


def _time_below(
    level: Float64[np.ndarray, "*shape"], horizon: float
) -> Float64[np.ndarray, "*shape"]:
    """Mean time, up to the horizon, of standard Brownian motion from 0 below a level."""
    from scipy.special import ndtr

    root = math.sqrt(horizon)
    s = np.where(np.isinf(level), 0.0, np.abs(level)) / root
    density = np.exp(-0.5 * s * s) / math.sqrt(2.0 * math.pi)
    above = horizon * (ndtr(s) + s * density - s * s * ndtr(-s))
    return np.where(level >= 0.0, above, horizon - above)


@dataclass(frozen=True, eq=False)
class Flats:
    """All flats of one order: the experts that tie, and the inverse products of row differences."""

    tied: Int64[np.ndarray, "flats experts"]
    inverse: Float64[np.ndarray, "flats n n"]


def flats_of(rows: Float64[np.ndarray, "experts hidden"], order: int) -> Flats:
    """The C(E, n + 1) flats of n + 1 = ``order`` + 1 experts; dependent rows by the pseudo-inverse,
    whose distances are those to where the tie is nearest to being one.
    """
    choices = itertools.combinations(range(len(rows)), order + 1)
    tied = np.array(list(choices), dtype=np.int64).reshape(-1, order + 1)
    gram = rows @ rows.T
    first, rest = tied[:, :1], tied[:, 1:]
    products = gram[rest[:, :, None], rest[:, None, :]] + gram[first, first][:, :, None]
    products -= gram[first, rest][:, None, :] + gram[first, rest][:, :, None]
    return Flats(tied, np.linalg.pinv(products, hermitian=True))


def union_bound(
    logits: Float64[np.ndarray, "experts"],
    flats: Flats,
    width: float,
    horizon: float,
    scale: float = 1.0,
) -> float:
    r"""Sum over all flats of the bounds on the time near each, at most T: valid, and loose.

    :func:`slab_occupation` for n = 1, :func:`occupation_bound` for others, at the distances
    :math:`\sqrt{d^T (C C^T)^{-1} d}` of A4, for isotropic noise of standard deviation ``scale`` a
    coordinate per unit of time and no drift. Before it is cut off at T it may grow with n (F-11).
    Source: docs/theory.md A10. Oracle in tests: the flats one by one.
    """
    gaps = logits[flats.tied[:, 1:]] - logits[flats.tied[:, :1]]
    squares = np.einsum("fi,fij,fj->f", gaps, flats.inverse, gaps)
    distance, order = np.sqrt(np.maximum(squares, 0.0)), gaps.shape[1]
    if order == 1:
        widths = np.full(len(distance), width / scale)
        bounds = slab_occupation(distance / scale, widths, horizon)
    else:
        sigmas = np.maximum(distance - width, 0.0) / scale
        volume = np.full(len(distance), scale**order)
        bounds = occupation_bound(order, sigmas, volume, width, horizon)
    return min(float(bounds.sum()), horizon)


# -------------------------------------------------------------------------------- all flats at once
@dataclass(frozen=True)
class Occupation:
    """Share of the time near a tie of ``order`` + 1 experts at the border, over some draws.

    ``undecided`` is the share of draws of which a search did not find out; they are counted in.
    """

    order: int
    share: float
    error: float
    undecided: float


def occupations(
    logits: Float64[np.ndarray, "experts"],
    rows: Float64[np.ndarray, "experts hidden"],
    noise: Float64[np.ndarray, "experts noises"],
    distances: RowDistances,
    k: int,
    orders: tuple[int, ...],
    width: float,
    horizon: float,
    draws: int,
    generator: np.random.Generator,
    drift: Float64[np.ndarray, "experts"] | None = None,
    most_nodes: int = 1000,
) -> list[Occupation]:
    r"""Share of the time within ``width`` of the closed set of each order, ascending, without bias.

    :math:`E[A] / T = P(x_U \in T_\epsilon(\Gamma^{(n)}))` with U uniform on [0, T] and
    :math:`x_U \sim N(x_0 + \gamma U, U F F^T)`: one normal number a draw and coordinate, no path.
    ``rows`` are router rows or their :func:`row_coordinates`, ``distances`` theirs, ``noise`` those
    of :func:`~moegeom.geometry.noise.noisy_rows`, ``drift`` is :math:`W \gamma`. Whatever set is
    chosen on the way: it is near its own border. The error is a standard error, of at least one
    draw. Source: docs/theory.md A10 (S0 Theorem 5.3). Oracle in tests: the closed forms, and paths.
    """
    time = horizon * generator.random(draws)
    moves = row_coordinates(noise)
    spread = np.sqrt(time)[:, None] * generator.standard_normal((draws, moves.shape[1]))
    moved = logits + spread @ moves.T
    if drift is not None:
        moved += time[:, None] * drift
    chosen = top_k(moved, k)
    near = boundary_sigmas(moved, chosen, distances).min(axis=1, initial=np.inf) <= width
    by_order = []
    for order in sorted(set(orders)):
        if order == 1:
            is_in, undecided = near, 0
        else:
            near = near & _near_three(moved, distances, near, width)
            is_in, undecided = _near_order(moved, rows, near, k, order, width, most_nodes)
        near = is_in  # sets of higher order are within those of lower
        share = float(is_in.mean())
        # a share of none or all of the draws is known no better than to one of them
        spread_of_one = max(share * (1.0 - share), (1.0 - 1.0 / draws) / draws)
        error = math.sqrt(spread_of_one / draws)
        by_order.append(Occupation(order, share, error, undecided / draws))
    return by_order


def _near_three(
    logits: Float64[np.ndarray, "draws experts"],
    distances: RowDistances,
    near: Bool[np.ndarray, "draws"],
    width: float,
) -> Bool[np.ndarray, "draws"]:
    """Of the draws that are near, those where some three experts nearly tie two by two: else no
    tie of three or more is as near.
    """
    is_near = np.zeros(len(near), dtype=bool)
    for draw in np.flatnonzero(near).tolist():
        with np.errstate(over="ignore"):
            apart = np.abs(logits[draw][:, None] - logits[draw]) * distances.inverse
        pairs = (apart <= width) & ~np.eye(len(apart), dtype=bool)
        some = pairs.sum(axis=1) > 1
        links = pairs[np.ix_(some, some)].astype(np.float32)
        is_near[draw] = bool((links * (links @ links)).any())
    return is_near


def _near_order(
    logits: Float64[np.ndarray, "draws experts"],
    rows: Float64[np.ndarray, "experts dims"],
    near: Bool[np.ndarray, "draws"],
    k: int,
    order: int,
    width: float,
    most_nodes: int,
) -> tuple[Bool[np.ndarray, "draws"], int]:
    """Which draws near a lower order are near this one, and of how many that is not known."""
    is_in, undecided = np.zeros(len(near), dtype=bool), 0
    for draw in np.flatnonzero(near).tolist():
        bracket = order_distance(logits[draw], rows, k, order, most_nodes)
        is_in[draw] = bracket.lower <= width
        undecided += bracket.lower <= width < bracket.upper
    return is_in, undecided
