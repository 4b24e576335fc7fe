"""Which population and which block a token counts for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.row_keys import OUTLIERS
from moegeom.core.shapes import Bool, Float64, Int32
from moegeom.core.tokens import TokenColumns
from moegeom.kernels.batch import NUM_BLOCKS, RUN_TOKENS

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


def is_outlier(
    norm: Float64[np.ndarray, "tokens"], typical_norm: float
) -> Bool[np.ndarray, "tokens"]:
    """True where an input is OUTLIER_FACTOR times longer or shorter than the typical one."""
    return (norm > OUTLIER_FACTOR * typical_norm) | (norm * OUTLIER_FACTOR < typical_norm)


def block_of(columns: TokenColumns, first_token: int) -> Int32[np.ndarray, "tokens"]:
    """Block of each token, by its document's number, else by that of its run of 256 tokens.

    Tokens of one document depend on each other, so a document must not be split between blocks.
    Unit n goes to block n + n // 16 modulo 16: each run of 16 units fills every block once, and
    domains that take turns with any short period are spread over all blocks, which n modulo 16
    would not do.
    """
    token = first_token + np.arange(len(columns.document))
    unit = np.where(columns.document >= 0, columns.document, token // RUN_TOKENS)
    return ((unit + unit // NUM_BLOCKS) % NUM_BLOCKS).astype(np.int32)
