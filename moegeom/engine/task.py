"""What a worker needs to know: router, source, kernels, what is folded, and which population and
block each token counts for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moegeom.core.router import Router
from moegeom.core.row_keys import OUTLIERS
from moegeom.core.shapes import Int32
from moegeom.core.tokens import InputNoise, TokenColumns, TokenSource
from moegeom.engine.prepared import PreparedRouter, unavailable
from moegeom.engine.request import DEFAULTS, ComputeOptions
from moegeom.kernels.batch import NUM_BLOCKS, RUN_TOKENS
from moegeom.kernels.reduction import REDUCTIONS, Kernels
from moegeom.tokens.traces.alignment import RunB
from moegeom.variants.emulated import Emulated
from moegeom.variants.what_if import FittedGate

#: Domains with figures of their own; the rest share one population (7 bits in an expert set key).
MAX_DOMAINS = 120


#: How far the length of an outlier's router input is from the usual one. A massive activation takes
#: over the whole input, so that after the norm its length is that of one coordinate's gain, and
#: before it a thousand times the usual one; ordinary tokens stay within a factor of 2.
OUTLIER_FACTOR = 4.0


@dataclass(frozen=True)
class Populations:
    """The domains of a source, one population for the rest, one for unlabelled tokens, outliers.

    Outlier tokens (attention sinks) belong to the last population whatever their domain.
    """

    domains: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Labels in the ``population`` column, in the order of the counters."""
        own = tuple(f"domain={name}" for name in self.domains[:MAX_DOMAINS])
        return (*own, "domain=(others)", "domain=(none)", OUTLIERS)

    @property
    def outliers(self) -> int:
        """Counter index of outlier tokens."""
        return self.unlabelled + 1

    @property
    def unlabelled(self) -> int:
        """Counter index of tokens without a domain."""
        return min(len(self.domains), MAX_DOMAINS) + 1

    def label(self, columns: TokenColumns) -> Int32[np.ndarray, "tokens"]:
        """Counter index of each token."""
        domain = columns.domain.astype(np.int32)
        own = min(len(self.domains), MAX_DOMAINS)
        return np.where(domain < 0, self.unlabelled, np.minimum(domain, own)).astype(np.int32)


def block_of(
    columns: TokenColumns, first_token: int, num_documents: int | None = None
) -> Int32[np.ndarray, "tokens"]:
    """Block of each token, by its document's number, else by that of its run of 256 tokens; runs
    also where all tokens are of one document, so that numbers have one unit however they are held.

    Tokens of one document depend on each other, so a document must not be split between blocks.
    Unit n goes to block n + n // 16 modulo 16: each run of 16 units fills every block once, and
    domains that take turns with any short period are spread over all blocks, which n modulo 16
    would not do.
    """
    token = first_token + np.arange(len(columns.document))
    has_document = (columns.document >= 0) & (num_documents != 1)
    unit = np.where(has_document, columns.document, token // RUN_TOKENS)
    return ((unit + unit // NUM_BLOCKS) % NUM_BLOCKS).astype(np.int32)


@dataclass(frozen=True, eq=False)
class MadeWhatIf:
    """A what-if made for one router, and what is known of it before any batch.

    ``router`` is what metrics are told of: its rule says whether sizes vary. ``other`` is that
    router made ready, where the what-if is a router of its own. Where other tokens matter to the
    choice, ``batch`` of them are tried together (whole tiles, or a part of one). ``quantities``
    are those that its choices come with, ``absent`` others with the reason; ``figures`` are what
    fit and sample say of it, by name.
    """

    name: str
    gate: FittedGate
    router: Router
    other: PreparedRouter | None
    batch: int
    quantities: frozenset[str]
    absent: Mapping[str, str]
    figures: Mapping[str, float]
    num_sampled: int


@dataclass(frozen=True, eq=False)
class Task:
    """One router, one source, and the reductions that its batches are folded into.

    ``typical_norm`` is the usual length of a router input, by which outlier tokens are told (None:
    not told); ``options`` say which tokens count, and seed what is drawn.
    The choice of the router as stored, or of ``reference``, is compared with that of ``variant`` or
    of the router ``checkpoint_b``, or with what ``run_b`` chose; ``noise`` is what inputs are
    disturbed by. A ``what_if`` chooses instead of the router, and is compared with it.
    """

    prepared: PreparedRouter
    source: TokenSource
    kernels: Kernels
    reductions: tuple[str, ...] = ()
    typical_norm: float | None = None
    options: ComputeOptions = DEFAULTS
    variant: Emulated | None = None
    reference: Emulated | None = None
    run_b: RunB | None = None
    checkpoint_b: PreparedRouter | None = None
    noise: InputNoise | None = None
    what_if: MadeWhatIf | None = None

    @cached_property
    def as_stored(self) -> Task:
        """The same without the what-if."""
        return dataclasses.replace(self, what_if=None)

    @cached_property
    def by_other(self) -> Task:
        """The same for the router that the what-if is."""
        assert self.what_if is not None and self.what_if.other is not None
        return dataclasses.replace(self.as_stored, prepared=self.what_if.other)

    @property
    def compares(self) -> bool:
        """Whether another choice is compared with that of the router."""
        others = (self.variant, self.run_b, self.checkpoint_b, self.what_if)
        return any(other is not None for other in others)

    def has_batches_of(self, other: Task) -> bool:
        """Whether both look at the same quantities, but for what a variant changes about them."""
        same = (
            getattr(self, field.name) is getattr(other, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("kernels", "reductions", "variant", "reference")
        )
        return self.kernels == other.kernels and self.what_if is None and all(same)

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
