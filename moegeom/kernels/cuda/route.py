"""The fused kernel: from logits to chosen experts, margins, distances, histograms and counts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moegeom.core.router import GroupMask
from moegeom.geometry.histogram import NUM_BINS
from moegeom.geometry.rounding import LARGEST_EXPONENT, LARGEST_SIZE
from moegeom.kernels.batch import RUN_TOKENS
from moegeom.kernels.cuda.device import DeviceArray, Queue
from moegeom.kernels.cuda.program import (
    MAX_EXPERTS,
    MAX_TOP_K,
    SCORE_KINDS,
    TALLY_DEFINES,
    LaneLayout,
    Program,
    layout_of,
)

#: Tokens of a block of threads, which share their counters: a run, so that they share its label.
BLOCK_TOKENS = RUN_TOKENS

_PARTS = ("lanes.cuh", "selection.cuh", "scores.cuh", "groups.cuh", "boundaries.cuh", "tally.cuh")

#: Counters that a block of threads shares: five histograms, and two pairs of counts.
_SHARED_COUNTERS = 5 * NUM_BINS + 4


@dataclass(frozen=True)
class RouteRule:
    """What the kernel is compiled for.

    ``terms`` is 1, or 3 where the logits are the sum of three products; ``is_affine`` says that
    logits are compared and distances may be asked for, else ``score`` + selection bias.
    """

    num_experts: int
    top_k: int
    score: str
    is_affine: bool
    has_logit_bias: bool
    groups: GroupMask | None
    terms: int = 1

    @property
    def refusal(self) -> str:
        """Why there is no kernel for this rule; empty where there is one."""
        if self.num_experts > MAX_EXPERTS or self.top_k > MAX_TOP_K:
            return f"more than {MAX_EXPERTS} experts or {MAX_TOP_K} slots"
        return "" if self.score in SCORE_KINDS else f"{self.score} scores"

    @property
    def layout(self) -> LaneLayout:
        return layout_of(self.num_experts, self.top_k)

    @cached_property
    def warps(self) -> int:
        """Warps of a block: as many as the shared memory has room for."""
        layout = self.layout
        row_bytes = (4 if self.is_affine else 8) * self.num_experts * layout.tokens_in_warp
        token_bytes = 2 * (self.top_k + 1) + 2 + (48 if self.is_affine else 56)
        fixed = 4 * (_SHARED_COUNTERS + self.num_experts)
        return layout.warps(fixed, row_bytes + 32 * token_bytes)

    @cached_property
    def program(self) -> Program:
        groups = self.groups or GroupMask(1, 1, "max", -np.inf)
        fill = "(-INF)" if np.isneginf(groups.fill) else f"({float(groups.fill)!r})"
        named = {
            "TERMS": self.terms,
            "CURVED": int(not self.is_affine),
            "GROUPED": int(self.groups is not None),
            "HAS_BIAS": int(self.has_logit_bias),
            "SCORE": SCORE_KINDS[self.score],
            "NUM_GROUPS": groups.num_groups,
            "NUM_KEPT": groups.num_kept,
            "TOP2_SUM": int(groups.score == "top2_sum"),
            "FILL": fill,
            "BLOCK_TOKENS": BLOCK_TOKENS,
            "RUN_TOKENS": RUN_TOKENS,
            "LARGEST_EXPONENT": LARGEST_EXPONENT,
            "LARGEST_SIZE": LARGEST_SIZE,
        }
        fields = dataclasses.fields(RouteNumbers)
        named |= {field.name.upper(): place for place, field in enumerate(fields)}
        defines = tuple((name, str(value)) for name, value in named.items())
        shared = (*self.layout.defines(self.warps), *TALLY_DEFINES)
        return Program("route", (*_PARTS, "route.cu"), (*shared, *defines))


@dataclass(frozen=True)
class RouteNumbers:
    """Scalar kernel parameters.

    ``typical_norm`` is 0 where outliers are not told apart; ``outliers`` is their population.
    ``two_gamma``, ``underflow``, ``longest_row`` and ``largest_bias`` bound the error of a logit,
    ``slope``, ``unit`` and ``largest_selection_bias`` that of a curved score; ``noise_factor`` over
    ``root_hidden`` is the rounding noise of an input of length 1. ``unlabelled`` is the population
    of tokens without a domain.
    """

    typical_norm: float
    outlier_factor: float
    two_gamma: float
    underflow: float
    longest_row: float
    largest_bias: float
    noise_factor: float
    root_hidden: float
    slope: float
    unit: float
    largest_selection_bias: float
    outliers: float
    fits_float32: float
    unlabelled: float

    def array(self) -> np.ndarray:
        return np.array(dataclasses.astuple(self), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class RouteTables:
    """Arrays of the router on the device; ``inverse`` is None where no distance is wanted."""

    logit_bias: DeviceArray | None
    selection_bias: DeviceArray
    inverse: DeviceArray | None
    rounded: DeviceArray | None
    smallest: DeviceArray | None
    number: DeviceArray


@dataclass(frozen=True, eq=False)
class RouteOutputs:
    """What the kernel writes of each token; None is not written.

    ``label`` is that of the outliers where a token is one, ``NOT_COUNTED`` where it is lost.
    """

    is_lost: DeviceArray | None = None
    logits: DeviceArray | None = None
    chosen: DeviceArray | None = None
    margin: DeviceArray | None = None
    group_margin: DeviceArray | None = None
    distance: DeviceArray | None = None
    pair: DeviceArray | None = None
    label: DeviceArray | None = None
    last_score: DeviceArray | None = None
    near_tie: DeviceArray | None = None


@dataclass(frozen=True, eq=False)
class RouteCounters:
    """What the kernel adds to, by the name of the reduction whose counters these are."""

    token_counts: DeviceArray | None = None
    expert_counts: DeviceArray | None = None
    expert_pairs: DeviceArray | None = None
    margin_histogram: DeviceArray | None = None
    effective_margin_histogram: DeviceArray | None = None
    distance_histogram: DeviceArray | None = None
    relative_distance_histogram: DeviceArray | None = None
    noise_sigmas_histogram: DeviceArray | None = None
    ambiguity: DeviceArray | None = None


#: Reductions whose counters the kernel keeps.
ON_DEVICE = tuple(field.name for field in dataclasses.fields(RouteCounters))


def launch_route(
    queue: Queue,
    rule: RouteRule,
    tokens: int,
    logits: DeviceArray,
    tables: RouteTables,
    norm: DeviceArray | None,
    label: DeviceArray | None,
    outputs: RouteOutputs,
    counters: RouteCounters,
    start: int = 0,
) -> None:
    """Routes the first ``tokens`` rows of ``logits``, [rows, terms * experts] in float32.

    ``label`` is population * 16 + block of each token as uint16, or ``NOT_COUNTED``. Without it
    the first row is token ``start`` of a stream that tells no documents and domains. Counters are
    uint64, shaped as the states of their reductions.
    """
    # fields in their order; dataclasses.fields would take longer than the launch
    arrays = (v for record in (tables, outputs, counters) for v in vars(record).values())
    # without labels a block takes a run, and the first one may begin before the first token
    lead = 0 if label is not None else start % BLOCK_TOKENS
    grid = -(-(tokens + lead) // BLOCK_TOKENS)
    sizes = (np.int64(tokens), np.int64(start), np.int64(lead))
    arguments = (*sizes, logits, norm, label, *arrays)
    queue.launch(rule.program, grid, 32 * rule.warps, arguments)
