"""Angles between the rows of routers, and spectra."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64

# ----------------------------------------------------------------------------------- effective rows
#: Longer rows are left out: float64 holds no fourth power of them.
_LONGEST = 1e70


@dataclass(frozen=True, eq=False)
class EffectiveRows:
    """Rows of the effective router, and their Gram matrix after centring.

    ``centred`` are the rows less their mean, ``mean``; adding one vector to every row leaves them
    alone, and so does moving a factor between the gain and the weight. ``lengths`` are those of the
    rows before centring. Rows that are not finite are left out of everything; ``finite`` says which
    remain.
    """

    centred: Float64[np.ndarray, "kept hidden"]
    mean: Float64[np.ndarray, "hidden"]
    gram: Float64[np.ndarray, "kept kept"]
    lengths: Float64[np.ndarray, "kept"]
    finite: Bool[np.ndarray, "experts"]

    @property
    def squared_norms(self) -> Float64[np.ndarray, "kept"]:
        """Squared lengths of the centred rows."""
        return np.diag(self.gram)


def effective_rows(
    weight: Float[np.ndarray, "experts hidden"], gain: Float[np.ndarray, "hidden"] | None
) -> EffectiveRows:
    r"""Centred rows of :math:`W \operatorname{diag}(g)` and their Gram matrix, in float64.

    With a softmax or any affine rule routing depends on the centred rows alone: a vector added to
    every row adds one number to every logit. A column whose gain is not finite makes every row not
    finite; a row longer than 1e70 counts as not finite. Equal rows give zeros, not rounding.
    Source: docs/theory.md E3.
    """
    scale = np.ones(weight.shape[1]) if gain is None else gain.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.sqrt(np.einsum("ij,ij,j->i", weight, weight, scale**2, dtype=np.float64))
        finite = np.asarray(lengths <= _LONGEST)
    finite_rows = weight if finite.all() else weight[finite]
    if not len(finite_rows):
        empty = np.zeros((0, weight.shape[1]))
        return EffectiveRows(empty, np.zeros(weight.shape[1]), empty @ empty.T, lengths[:0], finite)
    # the mean of n equal numbers need not be that number: first make equal rows exactly 0
    rows = np.subtract(finite_rows, finite_rows[0], dtype=np.float64)
    rows *= scale
    rest = rows.mean(axis=0)
    rows -= rest
    mean = finite_rows[0] * scale + rest
    return EffectiveRows(rows, mean, rows @ rows.T, lengths[finite], finite)


# ------------------------------------------------------------------------------------ orthogonality
def cosines(gram: Float64[np.ndarray, "rows rows"]) -> Float64[np.ndarray, "rows rows"]:
    """Cosines between rows from their Gram matrix; nan where a row is zero. Clipped to [-1, 1]."""
    lengths = np.sqrt(np.maximum(np.diag(gram), 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(gram / (lengths[:, None] * lengths[None, :]), -1.0, 1.0)


def gram_score(cosine: Float64[np.ndarray, "rows rows"]) -> float:
    r""":math:`1 - \lVert G - I \rVert_F / \sqrt{E (E - 1)}`, that is 1 - rms of the cosines.

    1 for orthonormal rows, 0 for rows on one line. Zero rows (nan) are left out; nan with fewer
    than two others. Source: docs/theory.md D1 (S3 A.3.5, whose metric is undefined, F-27).
    """
    off = _pairs(cosine)
    return 1.0 - float(np.sqrt(np.mean(off**2))) if off.size else float("nan")


def mean_absolute_cosine(cosine: Float64[np.ndarray, "rows rows"]) -> float:
    """Mean of |cos| over pairs of rows; nan with fewer than two rows. Source: docs/theory.md D1."""
    off = _pairs(cosine)
    return float(np.mean(np.abs(off))) if off.size else float("nan")


@dataclass(frozen=True)
class SquaredCosines:
    """``mean`` of a squared cosine of random rows, ``variance`` of the average over their pairs."""

    mean: float
    variance: float


@cache
def random_squared_cosines(num_rows: int, dimension: int, is_centred: bool) -> SquaredCosines:
    r"""Moments of :math:`X = \binom{E}{2}^{-1} \sum_{i<j} \cos_{ij}^2` of Gaussian rows, for any D.

    Two rows are correlated by :math:`\rho = 0`, or by :math:`-1/(E-1)` where the mean of all is
    subtracted. Then :math:`E[X] = E[\cos_{12}^2]`, and :math:`E[X^2]` weighs the products of
    squared cosines of one pair, of two pairs that share a row, and of two that do not. nan with
    fewer than two rows. Relative error 1e-9, 1e-3 for three centred rows of two dimensions.
    Source: docs/theory.md D1. Oracle in tests: the closed form of the mean, and Monte Carlo.
    """
    if num_rows < 2:
        return SquaredCosines(float("nan"), float("nan"))
    if dimension == 1 or (num_rows == 2 and is_centred):
        return SquaredCosines(1.0, 0.0)  # all on one line
    correlation = -1.0 / (num_rows - 1.0) if is_centred else 0.0
    mean = _moment(((0, 1), (0, 1)), dimension, correlation)
    same = _moment(((0, 1),) * 4, dimension, correlation)
    adjacent = disjoint = 0.0
    if num_rows > 2:
        adjacent = _moment(((0, 1), (0, 1), (0, 2), (0, 2)), dimension, correlation)
    if num_rows > 3:
        disjoint = _moment(((0, 1), (0, 1), (2, 3), (2, 3)), dimension, correlation)
    others = num_rows - 2
    second = same + 2.0 * others * adjacent + others * (others - 1) / 2.0 * disjoint
    second /= num_rows * (num_rows - 1) / 2.0
    return SquaredCosines(mean, max(second - mean**2, 0.0))


def random_gram_score(num_rows: int, dimension: int, is_centred: bool) -> float:
    r"""Score of random rows: one minus the root of :math:`E[\cos^2]`, exact for every D.

    :math:`1 - 1/\sqrt{D}` for raw rows. The mean score of draws lies above it by
    :math:`V[X] / (8 E[X]^{3/2})`, far less than their spread. nan with fewer than two rows.
    Source: docs/theory.md D1. Oracle in tests: Monte Carlo.
    """
    return 1.0 - float(np.sqrt(random_squared_cosines(num_rows, dimension, is_centred).mean))


def random_gram_score_sd(num_rows: int, dimension: int, is_centred: bool = False) -> float:
    r"""Standard deviation of the score of random rows, :math:`\sqrt{V[X]} / (2 \sqrt{E[X]})`.

    From the exact moments of X, to first order in its spread: within 10 % of drawn rows for up to
    four of them, within 3 % for more. 0 where all cosines are 1 or -1, nan with fewer than two.
    Source: docs/theory.md D1 (E = 8, D = 128: .0113). Oracle in tests: Monte Carlo.
    """
    moments = random_squared_cosines(num_rows, dimension, is_centred)
    return float(np.sqrt(moments.variance / moments.mean) / 2.0)


def best_gram_score(num_rows: int, dimension: int, is_centred: bool) -> float:
    r"""The largest score possible: :math:`1 - \sqrt{(E - r) / (r (E - 1))}`, the Welch bound.

    r is the largest rank possible: min(E, D), one less than E for centred rows.
    Source: docs/theory.md D1 (E = 4, D = 3: .6667).
    """
    rank = min(num_rows - is_centred, dimension)
    if num_rows < 2 or rank < 1:
        return float("nan")
    return 1.0 - float(np.sqrt(max(num_rows - rank, 0) / (rank * (num_rows - 1.0))))


def _pairs(cosine: Float64[np.ndarray, "rows rows"]) -> Float64[np.ndarray, "pairs"]:
    off = cosine[_above_diagonal(len(cosine))]
    return off[~np.isnan(off)]


@lru_cache(4)  # routers of a checkpoint have a shape or two
def _above_diagonal(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.triu_indices(size, 1)


#: Nodes of the quadrature per row.
_NODES = 10


def _moment(pairs: tuple[tuple[int, int], ...], dimension: int, correlation: float) -> float:
    r"""Mean of a product of cosines of Gaussian rows that are correlated by one number.

    With :math:`g^{-a} = \int t^{a-1} e^{-t g} dt / \Gamma(a)` for each squared length the mean is
    an integral of products of inner products under the rows' own law, tilted by t; with
    :math:`v = 1 / (1 + 2t)` each v is a Beta(D/2, a) variable, and what is left is smooth. The
    tilted rows are Gaussian, so their products follow from all ways to pair the factors (Isserlis).
    """
    rows = 1 + max(max(pair) for pair in pairs)
    powers = [sum(pair.count(row) for pair in pairs) // 2 for row in range(rows)]
    nodes, weights = zip(*(_beta_rule(power, dimension) for power in powers), strict=True)
    v = np.stack([axis.ravel() for axis in np.meshgrid(*nodes)], axis=1)
    weight = np.prod([axis.ravel() for axis in np.meshgrid(*weights)], axis=0)
    off = correlation * (1.0 - np.eye(rows))
    tilt = np.eye(rows) + (1.0 - v)[:, :, None] * off
    spread = np.linalg.solve(tilt.swapaxes(1, 2), np.broadcast_to(np.eye(rows) + off, tilt.shape))
    root = np.sqrt(v)
    # the covariance of the tilted rows, over the root of v on either side
    spread = spread.swapaxes(1, 2) * root[:, None, :] / root[:, :, None]
    total = np.zeros(len(v))
    for (loops, factors), count in _pairings(pairs).items():
        total += (
            count
            * float(dimension) ** loops
            * np.prod([spread[:, i, j] for i, j in factors], axis=0)
        )
    mean = float((weight * total * np.linalg.det(tilt) ** (-dimension / 2.0)).sum())
    for power in powers:
        mean /= dimension if power == 1 else dimension * (dimension + 2.0)
    return mean


def _beta_rule(
    power: int, dimension: int
) -> tuple[Float64[np.ndarray, "nodes"], Float64[np.ndarray, "nodes"]]:
    """Gauss nodes and weights of a Beta(D/2, power) variable: eigenvalues of a Jacobi matrix."""
    k = np.arange(1.0, _NODES)
    a, b = power - 1.0, dimension / 2.0 - 1.0
    s = 2.0 * k + a + b
    diagonal = np.concatenate([[(b - a) / (a + b + 2.0)], (b - a) * (b + a) / (s * (s + 2.0))])
    off = np.sqrt(4.0 * k * (k + a) * (k + b) * (k + a + b) / (s**2 * (s + 1.0) * (s - 1.0)))
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1))
    return (1.0 + values) / 2.0, vectors[0] ** 2


@cache
def _pairings(
    pairs: tuple[tuple[int, int], ...],
) -> Counter[tuple[int, tuple[tuple[int, int], ...]]]:
    """Ways to pair the factors of a product of inner products: (loops, covariances), how often.

    Each factor is a sum over dimensions; the dimensions of factors in one loop are the same one.
    """
    ends = [row for pair in pairs for row in pair]
    pairings: Counter[tuple[int, tuple[tuple[int, int], ...]]] = Counter()
    for matching in _matchings(tuple(range(len(ends)))):
        partner = dict(matching) | {b: a for a, b in matching}
        left, loops = set(partner), 0
        while left:
            end, loops = min(left), loops + 1
            while end in left:
                left -= {end, end ^ 1}
                end = partner[end ^ 1]
        factors = sorted((min(ends[a], ends[b]), max(ends[a], ends[b])) for a, b in matching)
        pairings[loops, tuple(factors)] += 1
    return pairings


def _matchings(points: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    if not points:
        yield ()
    for place in range(1, len(points)):
        for rest in _matchings(points[1:place] + points[place + 1 :]):
            yield ((points[0], points[place]), *rest)


# ----------------------------------------------------------------------------------------- spectrum
#: Singular values below this share of the largest count as zero: squares in float64 resolve 1.5e-8.
RANK_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Spectrum:
    """Figures of the singular values; ``condition`` is inf when the rank is not full.

    ``effective_rank`` is exp of the entropy of the singular values as shares of their sum, between
    1 and the rank. nan throughout when every value is 0.
    """

    rank: int
    largest_possible_rank: int
    condition: float
    effective_rank: float


def row_spectrum(
    gram: Float64[np.ndarray, "rows rows"], dimension: int, is_centred: bool
) -> Spectrum:
    r"""Spectrum of rows in ``dimension`` dimensions with Gram matrix ``gram``.

    Singular values are roots of the eigenvalues. ``condition`` is the largest over the r-th, r =
    min(E, D), or min(E - 1, D) for centred rows, whose sum is zero. Effective rank: Roy and
    Vetterli 2007. Oracle in tests: numpy.linalg.svd.
    """
    rank = max(min(len(gram) - is_centred, dimension), 0)
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0)) if len(gram) else np.empty(0)
    if not rank or values[0] == 0.0:
        return Spectrum(0, rank, float("nan"), float("nan"))
    leading = values[:rank]
    nonzero = leading[leading > RANK_TOLERANCE * leading[0]]
    share = nonzero / nonzero.sum()
    full = len(nonzero) == rank
    return Spectrum(
        rank=len(nonzero),
        largest_possible_rank=rank,
        condition=float(leading[0] / leading[-1]) if full else float("inf"),
        effective_rank=float(np.exp(-(share * np.log(share)).sum())),
    )


def symmetric_root(gram: Float64[np.ndarray, "rows rows"]) -> Float64[np.ndarray, "rows rows"]:
    r"""The positive semidefinite A with :math:`A A = G`; eigenvalues below 0 count as 0.

    There is one, so that what is drawn through it is the same on all processors but for rounding;
    other roots differ by the signs of eigenvectors. Oracle in tests: scipy.linalg.sqrtm.
    """
    from scipy.linalg import eigh

    values, vectors = eigh(gram)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T


# ------------------------------------------------------------------------------------- directions
def mean_pairwise_cosine(resultant_length: float, num: int) -> float:
    r"""Mean cosine between two different of ``num`` unit vectors, from the length of their sum.

    :math:`|\sum u|^2 = T + T (T - 1) \overline{\cos}`. From -1 / (T - 1) to 1; nan for fewer than
    two. Source: docs/theory.md B10. Oracle in tests: scikit-learn.
    """
    return (resultant_length**2 - num) / (num * (num - 1)) if num > 1 else float("nan")
