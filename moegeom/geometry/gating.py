"""How far gates of attention close on tokens, what they take away, and where heads look."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float64, Int64
from moegeom.geometry.statistics import jackknife_error

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
    """A figure of each head, its mean over heads, and standard errors; nan where not known."""

    value: Heads
    error: Heads
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
    return HeadFigure(value, jackknife_error(without), mean, float(jackknife_error(means)))


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
