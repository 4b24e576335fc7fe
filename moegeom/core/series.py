"""A series of checkpoints of one training run, as it is measured, printed and exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moegeom.core.finding import EXIT_OK, Verdict


@dataclass(frozen=True)
class SeriesStep:
    """One checkpoint. ``step`` is the number in its name, by which the series is ordered."""

    name: str
    step: float
    results: str
    num_tokens: int | None
    num_left_out: int = 0
    is_stale: bool = False
    is_reused: bool = False


@dataclass(frozen=True)
class Curve:
    """One figure of one router over the steps; None where it is not known.

    ``slope`` is the change per 1000 steps, ``slope_half_width`` half its 95 % interval, ``onset``
    the step from which on the value has left that of the first step for good.
    """

    router: str
    column: str
    values: tuple[float | None, ...]
    errors: tuple[float | None, ...]
    slope: float | None = None
    slope_half_width: float | None = None
    onset: float | None = None


@dataclass(frozen=True)
class Driver:
    """An expert or a domain, and its share of the change of a router's load between the ends.

    ``first`` and ``last`` are loads in fair shares of an expert, MaxVio of a domain.
    """

    router: str
    kind: str
    name: str
    first: float
    last: float
    contribution: float | None = None


@dataclass(frozen=True)
class Series:
    """Everything about a series; ``skipped`` and ``notes`` say what is missing and why.

    ``rule`` says what the rule is, and at which steps recorded choices have verified it.
    ``verdict`` is that of the checks of a series, ``run`` the facts of the last step, under the
    name of the series. ``usage`` is the load of every expert: router, step, expert, load.
    """

    name: str
    steps: tuple[SeriesStep, ...]
    curves: tuple[Curve, ...]
    drivers: tuple[Driver, ...] = ()
    expert_loads: tuple[Curve, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = field(default=())
    rule: str = ""
    verdict: Verdict | None = None
    usage: tuple[tuple[str, float, int, float], ...] = field(default=(), repr=False)
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """That of the verdict; 0 where nobody judged."""
        return EXIT_OK if self.verdict is None else self.verdict.exit_code

    def routers(self) -> tuple[str, ...]:
        """Names of the routers, in the order of the checkpoint."""
        return tuple(dict.fromkeys(curve.router for curve in self.curves))

    def of_column(self, column: str) -> tuple[Curve, ...]:
        """The curve of each router that has the column."""
        return tuple(curve for curve in self.curves if curve.column == column)


@dataclass(frozen=True)
class SeriesColumn:
    """A figure worth following: what it is in a word or two, and which direction is bad."""

    name: str
    words: str
    worse: str = ""


#: What a series shows, in this order. ``worse`` is up, down, or empty where neither is.
SERIES_COLUMNS = (
    SeriesColumn("max_vio_global", "busiest expert, MaxVio", "up"),
    SeriesColumn("load_cv_ddof0", "load CV", "up"),
    SeriesColumn("num_dead", "dead experts", "up"),
    SeriesColumn("underused_share", "underused experts", "up"),
    SeriesColumn("routing_entropy_normalised", "routing entropy (of 1)"),
    SeriesColumn("margin_p50", "margin, median"),
    SeriesColumn("boundary_distance_over_norm_p50", "distance over norm, median"),
    SeriesColumn("bf16_flip_share_isotropic", "flip under bf16 rounding", "up"),
    SeriesColumn("z_loss", "z-loss", "up"),
    SeriesColumn("mean_resultant_length", "inputs point one way", "up"),
    SeriesColumn("domain_information_share", "domain specialisation"),
    SeriesColumn("expert_set_coverage", "expert sets already seen"),
    SeriesColumn("expert_set_collision_nats", "collision entropy of expert sets"),
    SeriesColumn("pair_overlap", "experts that two tokens share"),
    SeriesColumn("gram_score_centred", "Gram score"),
    SeriesColumn("bias_range", "selection bias, range", "up"),
    SeriesColumn("row_drift_median", "row drift since the step before"),
    SeriesColumn("row_drift_max", "largest row drift"),
    SeriesColumn("overlap_with_last", "overlap with the last"),
    SeriesColumn("expert_set_churn", "sets changed since the step before"),
    SeriesColumn("overlap_with_previous", "overlap with the step before"),
)
