"""What experts give on recorded tokens: request and record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.core.option import option
from moegeom.core.tokens import SampleCounts
from moegeom.engine.request import StudyRequest


@dataclass(frozen=True)
class OutputsRequest(StudyRequest):
    """The options of ``outputs``, each with what it means."""

    sample: int | None = option(
        "Tokens that experts are computed on [default: 512, down to 32 of wide experts].", min=2
    )
    every_expert: bool = option("Every expert on every token, chosen or not.", False)
    yes: bool = option("Read more than 2 GB of experts.", False)
    out: Path | None = option("A recording with these outputs, or FILE.parquet: experts.")


@dataclass(frozen=True)
class ExpertOutput:
    """One expert on the tokens that chose it; means over them, None where no token did.

    ``contribution_norm`` is the length of what it adds to the output of the block: its output times
    the routing weight. ``energy_share`` are the squares of these over those of all experts.
    """

    expert: int
    num_tokens: int
    weight: float | None
    output_norm: float | None
    contribution_norm: float | None
    energy_share: float


@dataclass(frozen=True)
class RouterOutputs:
    """The outputs of one layer, means over the sample.

    Norms are Euclidean lengths. A mean share is |mean y|^2 / mean |y|^2 (docs/theory.md B11).
    ``overlap`` is the mean cosine of what two chosen experts give on one token, ``overlap_centred``
    the same less the mean output of each expert; ``overlap_every`` and ``overlap_every_centred``
    are those of any two experts, None unless every expert was computed. ``adds_up`` is the length
    of the routed output over the sum of the lengths of the contributions. ``shared`` is "none",
    "computed", or why shared experts are not; their figures are None then. ``num_bytes`` of
    ``num_read`` experts were read. ``errors`` are the standard errors of ``routed_mean_share`` and
    ``overlap`` over tokens.
    """

    router: str
    num_experts: int
    top_k: int
    num_tokens: int
    num_read: int
    num_bytes: int
    input_norm: float
    routed_norm: float
    routed_mean_share: float
    shared: str
    shared_norm: float | None
    shared_mean_share: float | None
    shared_energy_share: float | None
    routed_energy_share: float | None
    total_norm: float | None
    total_mean_share: float | None
    overlap: float
    overlap_centred: float
    overlap_every: float | None
    overlap_every_centred: float | None
    adds_up: float
    errors: tuple[float, float]
    experts: tuple[ExpertOutput, ...]

    @property
    def chosen(self) -> list[ExpertOutput]:
        """Experts that some token of the sample chose, the largest contribution first."""
        experts = [one for one in self.experts if one.contribution_norm is not None]
        return sorted(experts, key=lambda one: -(one.contribution_norm or 0.0))


@dataclass(frozen=True)
class Outputs:
    """Every router whose experts could be computed; ``left_out`` are the others, with the reason.

    ``num_dropped`` tokens of the sample are left out: not finite at some router. ``kinds`` are the
    kinds of outputs in the recording ``written``.
    """

    run: Mapping[str, Any]
    routers: tuple[RouterOutputs, ...]
    left_out: tuple[tuple[str, str], ...]
    num_tokens: int
    every_expert: bool
    sample: SampleCounts
    seed: int
    kinds: tuple[str, ...] = ()
    written: str | None = None
