"""Heads of attention: how far gates close on tokens, where heads look, which are dead or alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.geometry.gram import RANK_TOLERANCE
from moegeom.geometry.statistics import jackknife_error

# ---------------------------------------------------------------------------------------- on tokens
#: A gate below is as good as closed: it lets a hundredth of the energy through.
CLOSED = 0.1

#: Queries before see so few tokens that much of their attention lies on the first in any case.
FIRST_QUERY = 4

#: What is added up of each head, over tokens or over queries from the FIRST_QUERY-th on.
SUMS = (
    *("gate", "closed", "entropy", "random_gate", "random_closed", "before", "after"),
    *("first", "first_4", "left", "uniform"),
    *("query_gate", "query_gate_2", "query_first_2", "query_gate_first"),
)

Heads = Float64[np.ndarray, "heads"]
Blocks = Float64[np.ndarray, "blocks heads"]


@dataclass(frozen=True)
class HeadFigure:
    """A figure of each head, its mean over heads and the standard error of that; nan where not
    known.
    """

    value: Heads
    mean: float
    mean_error: float


def gating_figures(
    sums: Mapping[str, Blocks],
    tokens: Int64[np.ndarray, "blocks"],
    queries: Int64[np.ndarray, "blocks"],
) -> dict[str, HeadFigure]:
    r"""What sums over tokens say of each head, with jackknife errors over blocks of documents.

    With gates :math:`g` and what they multiply :math:`o`, means over tokens and channels:

    ``gate_mean`` :math:`\overline g`; ``gate_closed_share`` the share of :math:`g < 0.1`;
    ``gate_entropy_nats`` :math:`\overline{-g \ln g - (1-g) \ln(1-g)}`, 0 where gates are open or
    shut, :math:`\ln 2` at one half; ``energy_removed_share`` :math:`1 - \sum |g o|^2 /
    \sum |o|^2`. Over queries from the fifth of a sequence on: ``first_token_mass`` and
    ``first_4_mass``, the attention on the first token and the first four, ``sink_mass`` what is
    left to 1, which a learned sink takes, ``uniform_mass`` what the first token would have if a
    query saw all of its keys alike; and ``gate_first_correlation``, Pearson's of the mean gate of
    the head at a query and ``first_token_mass`` there. Float64; nan where nothing was added up,
    where no energy is, and of a correlation where one side does not vary. Errors are nan with fewer
    than two blocks that hold tokens. Source: docs/attention.md.
    Oracle in tests: NumPy on the gates and weights of transformers, scipy.stats.pearsonr.
    """
    has_tokens = tokens > 0
    parts = {name: blocks[has_tokens] for name, blocks in sums.items()}
    parts["tokens"] = tokens[has_tokens, None].astype(np.float64)
    parts["queries"] = queries[has_tokens, None].astype(np.float64)
    whole = {name: blocks.sum(axis=0) for name, blocks in parts.items()}
    without = {name: whole[name] - blocks for name, blocks in parts.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        return {name: _figure(of(whole), of(without)) for name, of in FIGURES.items()}


def _figure(value: Heads, without: Blocks) -> HeadFigure:
    is_finite = np.isfinite(value)
    mean, means = math.nan, without[:, :0].sum(axis=1)
    if is_finite.any():
        mean, means = float(value[is_finite].mean()), without[:, is_finite].mean(axis=1)
    return HeadFigure(value, mean, float(jackknife_error(means)))


_Sums = Mapping[str, np.ndarray]


def _per(name: str, of: str) -> Callable[[_Sums], np.ndarray]:
    return lambda sums: sums[name] / sums[of]


def _correlation(sums: _Sums) -> np.ndarray:
    n = sums["queries"]
    gate, first = sums["query_gate"] / n, sums["first"] / n
    spread = (sums["query_gate_2"] / n - gate**2) * (sums["query_first_2"] / n - first**2)
    # what does not vary leaves rounding, of either sign
    spread = np.where(spread > 1e-20, spread, np.nan)
    return (sums["query_gate_first"] / n - gate * first) / np.sqrt(spread)


#: Each figure from sums of one kind.
FIGURES: Mapping[str, Callable[[_Sums], np.ndarray]] = {
    "gate_mean": _per("gate", "tokens"),
    "gate_closed_share": _per("closed", "tokens"),
    "gate_entropy_nats": _per("entropy", "tokens"),
    "gate_mean_random": _per("random_gate", "tokens"),
    "gate_closed_share_random": _per("random_closed", "tokens"),
    "energy_removed_share": lambda sums: 1.0 - sums["after"] / sums["before"],
    "first_token_mass": _per("first", "queries"),
    "first_4_mass": _per("first_4", "queries"),
    "sink_mass": _per("left", "queries"),
    "uniform_mass": _per("uniform", "queries"),
    "gate_first_correlation": _correlation,
}


def gate_pull(
    total: Float64[np.ndarray, "*heads rows"],
    squares: Float64[np.ndarray, "*heads rows"],
    tokens: int,
) -> Float64[np.ndarray, "*heads"]:
    r"""How much of a gate is decided before any token: :math:`\mathrm{rms}_c(\bar z_c) /
    \mathrm{rms}_{t,c}(z_{tc} - \bar z_c)`.

    From sums and sums of squares over tokens of what is in front of the gate's function, bias
    included, c the rows of a head. Dimensionless; inf where no token differs from another and a
    mean is not 0, nan where nothing is. Not taken off, unlike of a router's scores: what all rows
    share, which closes or opens a gate. Source: docs/attention.md.
    Oracle in tests: the definition on what transformers projects.
    """
    if not tokens:
        return np.full(total.shape[:-1], math.nan)
    mean = total / tokens
    pull = (mean**2).mean(axis=-1)
    rest = np.maximum((squares / tokens - mean**2).mean(axis=-1), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(pull / rest)


# ------------------------------------------------------------------------ output times value matrix
#: Directions on which products are compared before pairs of them are.
_PROBES = 8

#: Pairs whose cosine on these directions is below are not looked at further.
_LEAST_PROBED = 0.9


def product_spectra(
    values: Float[np.ndarray, "values channels inputs"],
    outputs: Float[np.ndarray, "heads hidden channels"],
) -> Float64[np.ndarray, "heads channels"]:
    r"""Singular values of :math:`O_h V_{v(h)}` of each head, descending; v(h) = h V / H.

    The product of hidden x inputs numbers is never formed: with :math:`O = Q R` and
    :math:`V^\top = P S` it has the singular values of :math:`R S^\top`, which is channels x
    channels. Zeros stand behind them where hidden or inputs are fewer than channels. Error
    1e-13 of the largest. Oracle in tests: numpy.linalg.svd of the explicit product.
    """
    heads, _, channels = outputs.shape
    group = heads // len(values)
    right = [np.linalg.qr(one.T.astype(np.float64), mode="r") for one in values]
    spectra = np.zeros((heads, channels))
    for head in range(heads):
        left = np.linalg.qr(outputs[head].astype(np.float64), mode="r")
        core = left @ right[head // group].T
        spectrum = np.linalg.svd(core, compute_uv=False)
        spectra[head, : len(spectrum)] = spectrum
    return spectra


def spectrum_rank(spectrum: Float64[np.ndarray, "values"]) -> tuple[int, float]:
    r"""Rank and effective rank of a matrix with these singular values.

    Values s above 1e-7 of the largest count; effective rank :math:`\exp(-\sum p \ln p)` with
    :math:`p = s / \sum s` over these. 0 and 0.0 for zeros. Source: Roy and Vetterli 2007. Oracle in
    tests: numpy.linalg.matrix_rank, equal values.
    """
    nonzero = spectrum[spectrum > RANK_TOLERANCE * spectrum.max(initial=0.0)]
    if not len(nonzero):
        return 0, 0.0
    share = nonzero / nonzero.sum()
    return len(nonzero), float(np.exp(-(share * np.log(share)).sum()))


def dead_heads(norms: Float64[np.ndarray, "heads"]) -> Bool[np.ndarray, "heads"]:
    r"""Heads whose product is shorter than a hundredth of the median, or is zero.

    ``norms`` are Frobenius norms of the products. Where most are zero the median is, and all that
    are zero count. Oracle in tests: planted heads.
    """
    return (norms < 0.01 * np.median(norms)) | (norms == 0.0) if len(norms) else norms != norms


def alike_heads(
    values: Float[np.ndarray, "values channels inputs"],
    outputs: Float[np.ndarray, "heads hidden channels"],
    least: float = 0.99,
) -> list[tuple[int, int, float]]:
    r"""Pairs of heads whose products have a cosine of at least ``least``, and that cosine.

    :math:`\cos(A, B) = \langle A, B \rangle_F / (|A|_F |B|_F)`, unmoved by a factor and by mixing
    channels inside a head. From :math:`\langle O V, O' V' \rangle = \mathrm{tr}\,(O^\top O')
    (V' V^\top)`, for pairs that agree on 8 random directions (cosine .9 there, seed 0): one with
    the cosine .99 is missed where a ratio of lengths, F(8r, 8r) for rank r, is above 10:
    probability 2e-3 for r = 1, 1e-9 for r = 4. Zero products are like none. Oracle in tests:
    explicit products.
    """
    heads, _, _ = outputs.shape
    group = heads // len(values)
    probes = np.random.default_rng(0).standard_normal((values.shape[2], _PROBES))
    seen = np.stack([outputs[h] @ (values[h // group] @ probes) for h in range(heads)])
    flat = seen.reshape(heads, -1)
    length = np.linalg.norm(flat, axis=1)
    nonzero = np.flatnonzero(length > 0.0)
    flat = flat[nonzero] / length[nonzero, None]
    close = flat @ flat.T > _LEAST_PROBED
    pairs = [
        (nonzero[i], nonzero[j])
        for i, j in (pair for pair in itertools.combinations(range(len(close)), 2) if close[pair])
    ]
    alike = []
    for one, two in pairs:
        cosine = _product_cosine(
            (values[one // group], outputs[one]), (values[two // group], outputs[two])
        )
        if cosine >= least:
            alike.append((int(one), int(two), cosine))
    return alike


def _product_cosine(
    one: tuple[np.ndarray, np.ndarray], two: tuple[np.ndarray, np.ndarray]
) -> float:
    one, two = ((v.astype(np.float64), o.astype(np.float64)) for v, o in (one, two))

    def inner(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> float:
        return float(((a[1].T @ b[1]) * (a[0] @ b[0].T)).sum())

    return inner(one, two) / float(np.sqrt(inner(one, one)) * np.sqrt(inner(two, two)))
