"""What a worker needs to know: router, source, labels, kernels."""

from __future__ import annotations

from dataclasses import dataclass

from moegeom.core.input_noise import InputNoise
from moegeom.core.tokens import TokenSource
from moegeom.engine.labels import Populations
from moegeom.engine.prepared import PreparedRouter
from moegeom.kernels.reduction import Kernels
from moegeom.tokens.traces.other_side import OtherSide
from moegeom.variants.emulated import Emulated


@dataclass(frozen=True, eq=False)
class Task:
    """One router, one source, and the costly quantities that somebody asked for.

    ``typical_norm`` is the usual length of a router input, by which outlier tokens are told (None:
    not told); tokens at the first ``exclude_first`` positions of a document are left out.
    Where ``switch`` is wanted, the choice of the router as stored, or of ``reference``, is compared
    with that of ``variant``, with what ``other`` chose, or with that of the router ``against``;
    ``noise`` is what inputs are disturbed by where that is wanted, drawn from ``seed``.
    """

    prepared: PreparedRouter
    source: TokenSource
    populations: Populations
    kernels: Kernels
    wanted: frozenset[str] = frozenset({"distance", "matches_recording"})
    typical_norm: float | None = None
    exclude_first: int = 0
    variant: Emulated | None = None
    reference: Emulated | None = None
    other: OtherSide | None = None
    against: PreparedRouter | None = None
    noise: InputNoise | None = None
    seed: int = 0

    @property
    def compares(self) -> bool:
        """Whether another choice is compared with that of the router."""
        return not (self.variant is None and self.other is None and self.against is None)
