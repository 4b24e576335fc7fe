"""The output along a line through a boundary: request and record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moegeom.core.option import option
from moegeom.core.shapes import Float64
from moegeom.core.tokens import SampleCounts
from moegeom.engine.request import BudgetTerms, StudyRequest


@dataclass(frozen=True)
class ContinuityRequest(BudgetTerms, StudyRequest):
    """The options of ``continuity``, each with what it means."""

    _: dataclasses.KW_ONLY
    smooth: str = option(
        "The smoothed gate: extra=N more experts a token, or eps=X of score.", "extra=0.5"
    )
    at: int | None = option("The token [default: the highest jump].", min=0)
    radius: float = option("Half of the line, in rms lengths of the input.", 0.01)
    yes: bool = option("Read more than 2 GB of experts.", False)
    out: Path | None = option("Write lines and spreads: FILE.parquet.")


@dataclass(frozen=True, eq=False)
class Along:
    """The output of one gate along the line, and how far it spreads within each radius.

    ``line`` is the coordinate that jumps most, at the offsets of the crossing. ``spread`` is over
    all outputs, ``spread_coordinate`` over that one; slopes are d ln G / d ln r between adjacent
    radii, nan for the first. ``slope_near`` is their median over the smallest decade, ``steepest``
    the largest spread over its radius.
    """

    gate: Literal["hard", "smooth"]
    line: Float64[np.ndarray, "points"]
    spread: Float64[np.ndarray, "radii"]
    slope: Float64[np.ndarray, "radii"]
    spread_coordinate: Float64[np.ndarray, "radii"]
    slope_coordinate: Float64[np.ndarray, "radii"]
    slope_near: float
    steepest: float


@dataclass(frozen=True, eq=False)
class BoundaryCrossing:
    """The line through the boundary point of one token, and what the output does on it.

    ``pair`` are the experts that change places, ``distance`` is that of the token to the boundary
    and ``jump`` the height of the jump; ``output`` is the length of the output at the token.
    ``offset`` and ``radius`` are in units of the router input, ``rms`` is that of the token's.
    ``fades_at`` is how far the expert that is left is below the last chosen one at the ends of the
    line, over eps: from 0.9 on the smoothed gate has begun to let go of it. nan without one.
    """

    token: int
    pair: tuple[int, int]
    distance: float
    rms: float
    jump: float
    output: float
    coordinate: int
    offset: Float64[np.ndarray, "points"]
    radius: Float64[np.ndarray, "radii"]
    hard: Along
    smooth: Along | None
    fades_at: float

    @property
    def relative(self) -> float:
        """Height of the jump over the length of the output."""
        return self.jump / self.output if self.output else float("inf")


@dataclass(frozen=True, eq=False)
class RouterContinuity:
    """One router: how many tokens were looked at, and the line of one of them.

    ``num_known`` tokens have a boundary point that is known; ``num_tried`` of these were tried,
    highest jump first, until the line of one met no other boundary. Of large experts the jumps of
    ``num_jumps`` alone were computed, those whose exchanged experts weigh most. ``eps`` is the
    width of the strip in which experts run too, in units of the selection score ``unit``, and
    ``extra`` how many more a token it brings in the mean; ``reason`` says why there is no smoothed
    gate.
    """

    router: str
    hidden_size: int
    num_tokens: int
    num_known: int
    num_tried: int
    num_jumps: int
    eps: float
    extra: float
    unit: str
    steepest_activation: float
    experts_read: int
    expert_bytes: int
    crossing: BoundaryCrossing
    has_groups: bool = False
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Continuity:
    """Every router that could be looked at; ``left_out`` are the others, with the reason."""

    run: Mapping[str, Any]
    routers: tuple[RouterContinuity, ...]
    left_out: tuple[tuple[str, str], ...]
    smooth: str
    radius: float
    sample: SampleCounts
    seed: int
    written: str | None = None
