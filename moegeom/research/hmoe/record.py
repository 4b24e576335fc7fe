"""Gated attention as a mixture: request and record of ranks and of descents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moegeom.core.option import argument, option
from moegeom.engine.request import OutTerms, WorkerOptions
from moegeom.geometry.hmoe import Position

#: ``ranks`` is what derivatives tell, ``rates`` also what descents from many starts do.
What = Literal["rates", "ranks"]

#: Attention without a gate, and the two settings of S2.
Model = Literal["mha", "1", "2"]

#: What the control says of a rate. ``none``: no rate exists. ``explained``: it stands still.
#: ``undecided``: its interval allows both. ``away``: it falls because noise drove descents away
#: from the truth that they began at. ``beyond``: it falls, and descents came nearer to the truth.
State = Literal["none", "explained", "undecided", "away", "beyond"]


@dataclass(frozen=True, kw_only=True)
class HmoeRequest(WorkerOptions, OutTerms):
    """What was asked for.

    ``sizes`` are numbers of samples, ``starts`` exponents p: a descent begins at the truth plus
    normal numbers of deviation ``start_size`` (n / 100,000)^-p. The control, p = 0, is always run.
    What is empty or None is that of the full experiment, or with ``quick`` of one of seconds.
    ``out`` is a Parquet file.
    """

    what: What = argument(
        "rates: ranks, and slopes of descents; ranks: those alone.", default="rates"
    )
    models: tuple[str, ...] = option(
        "mha (no activation), 1 and 2 (settings of S2).", ("mha", "1", "2"), is_list=False
    )
    channels: tuple[int, ...] = option("Channels that are fitted [default: 3,4].", ())
    sizes: tuple[str, ...] = option("Numbers of samples [default: 1e4,3e4,1e5].", (), is_list=False)
    starts: tuple[str, ...] = option(
        "Exponents p: starts n^-p from the truth; 0, the control, is always run "
        "[default: 0,0.083,0.3,0.5].",
        (),
        is_list=False,
    )
    start_size: float = option("How far from the truth starts are at n = 1e5.", 0.385)
    repeats: int | None = option("Seeds of each [default: 10].", min=1)
    epochs: int | None = option("Steps of a descent [default: 1000].", min=1)
    quick: bool = option("Two sizes, two repeats, 100 epochs: seconds.", False)
    seed: int = option("Seed of descents.", 0, min=0)
    out: Path | None = option("Write every descent: FILE.parquet.")


@dataclass(frozen=True)
class Design:
    """Every combination of these is a series of descents, one for each size."""

    models: tuple[Model, ...]
    channels: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[float, ...]
    repeats: int
    epochs: int
    start_size: float
    seed: int


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
    """The median over parameters of what no unbiased estimator is below, at the largest size."""

    model: Model
    size: int
    median: float


@dataclass(frozen=True)
class DescentRun:
    """A descent: L_2 and the distance of the functions where it began and where it ended."""

    model: Model
    channels: int
    start: float
    repeat: int
    size: int
    start_loss: float
    loss: float
    start_error: float
    error: float
    epochs: int
    settled: bool


@dataclass(frozen=True)
class Exponent:
    """Slope of a logarithm against log n, mean over repeats; half of its 95 % interval, or nan."""

    value: float
    half_width: float


@dataclass(frozen=True)
class StartRates:
    """Slopes of descents from starts with one exponent: of L_2, of L_2 where they began, and of
    the distance of the functions.
    """

    start: float
    loss: Exponent
    start_loss: Exponent
    error: Exponent


@dataclass(frozen=True)
class ModelRates:
    """One model with so many channels: slopes by start, the control first, and what they say."""

    model: Model
    channels: int
    state: State
    starts: tuple[StartRates, ...]


@dataclass(frozen=True)
class Mixtures:
    """Ranks by position and, for ``rates``, descents."""

    ranks: tuple[PositionRank, ...]
    design: Design | None = None
    deviations: tuple[LeastDeviation, ...] = ()
    rates: tuple[ModelRates, ...] = ()
    runs: tuple[DescentRun, ...] = ()
    written: str = ""

    @property
    def num_settled(self) -> int:
        """Descents that found nothing lower before their steps ran out."""
        return sum(run.settled for run in self.runs)
