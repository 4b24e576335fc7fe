"""Gated attention as a mixture: request and record of ranks and of least deviations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moegeom.core.option import option
from moegeom.geometry.hmoe import Position

#: Attention without a gate, and the two settings of S2.
Model = Literal["mha", "1", "2"]


@dataclass(frozen=True, kw_only=True)
class HmoeRequest:
    """``seed`` is that of the inputs and of rows of gates."""

    seed: int = option("Seed of inputs and of gates.", 0, min=0)


@dataclass(frozen=True)
class PositionRank:
    """Rank of the derivatives of f, by where the non-linearity stands.

    ``gauge`` directions are those of scores that all grow alike, ``beyond`` the other flat ones.
    ``least`` and ``rest`` are the singular values on both sides of the threshold.
    """

    position: Position
    activation: str
    parameters: int
    rank: int
    gauge: int
    beyond: int
    least: float
    rest: float


@dataclass(frozen=True)
class LeastDeviation:
    """The median over parameters of what no unbiased estimator from ``size`` samples is below."""

    model: Model
    size: int
    median: float


@dataclass(frozen=True)
class Mixtures:
    """Ranks by position, and how well the parameters could be estimated at most.

    ``unmet`` are the assumptions of S2 that its own parameters do not meet.
    """

    ranks: tuple[PositionRank, ...]
    deviations: tuple[LeastDeviation, ...]
    unmet: tuple[str, ...]
