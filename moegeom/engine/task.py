"""What a worker needs to know: router, source, kernels, and what is folded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from moegeom.core.tokens import InputNoise, TokenSource
from moegeom.engine.labels import Populations
from moegeom.engine.prepared import PreparedRouter, unavailable
from moegeom.kernels.reduction import REDUCTIONS, Kernels
from moegeom.tokens.traces.run_b import RunB
from moegeom.variants.emulated import Emulated


@dataclass(frozen=True, eq=False)
class Task:
    """One router, one source, and the reductions that its batches are folded into.

    ``typical_norm`` is the usual length of a router input, by which outlier tokens are told (None:
    not told); tokens at the first ``exclude_first`` positions of a document are left out.
    The choice of the router as stored, or of ``reference``, is compared with that of ``variant`` or
    of the router ``checkpoint_b``, or with what ``run_b`` chose; ``noise`` is what inputs are
    disturbed by, drawn from ``seed``.
    """

    prepared: PreparedRouter
    source: TokenSource
    kernels: Kernels
    reductions: tuple[str, ...] = ()
    typical_norm: float | None = None
    exclude_first: int = 0
    variant: Emulated | None = None
    reference: Emulated | None = None
    run_b: RunB | None = None
    checkpoint_b: PreparedRouter | None = None
    noise: InputNoise | None = None
    seed: int = 0

    @property
    def compares(self) -> bool:
        """Whether another choice is compared with that of the router."""
        return not (self.variant is None and self.run_b is None and self.checkpoint_b is None)

    @cached_property
    def populations(self) -> Populations:
        """What tokens are counted under."""
        return Populations(self.source.facts.domains)

    @cached_property
    def absent(self) -> Mapping[str, str]:
        """Quantities that router and source cannot give, each with the reason."""
        return unavailable(self.prepared.router, self.source.facts)

    @cached_property
    def needs(self) -> frozenset[str]:
        """Quantities that the reductions read."""
        return frozenset(need for name in self.reductions for need in REDUCTIONS[name].needs)
