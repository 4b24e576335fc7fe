"""The tokens that a slice is laid through, and that are drawn on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int32, Int64
from threadpoolctl import threadpool_limits

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.router import Router
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, TokenSource
from moegeom.engine.batch import LazyBatch
from moegeom.engine.plan import sample_tiles
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.kernels.reduction import Kernels
from moegeom.tokens.stages import INPUT_STAGES


@dataclass(frozen=True, eq=False)
class SliceTokens:
    """What the router reads of some tokens, and what it chooses; ``token`` are their numbers.

    ``distance`` to the nearest facet in all dimensions, a lower bound of curved and grouped rules.
    ``left_out`` tokens are not finite.
    """

    token: Int64[np.ndarray, "tokens"]
    inputs: Float[np.ndarray, "tokens hidden"]
    chosen: Int32[np.ndarray, "tokens k"]
    distance: Float64[np.ndarray, "tokens"] | None
    left_out: int

    def rows_of(self, numbers: tuple[int, ...], source: str) -> Int64[np.ndarray, "asked"]:
        """Rows of tokens by number; UsageError for one that is not in the sample."""
        row_of = {number: row for row, number in enumerate(self.token.tolist())}
        for number in numbers:
            if number not in row_of:
                raise UsageError(
                    f"{source}: token {number} is not among the "
                    f"{number_of(len(self.token), 'token')} that "
                    "are looked at.",
                    f"Tokens {self.token[0]} to {self.token[-1]} are, in whole tiles of {TILE}.",
                )
        return np.array([row_of[number] for number in numbers])


def token_sample(router: Router, source: TokenSource, kernels: Kernels, seed: int) -> SliceTokens:
    """A seeded sample of at most 20 000 tokens, whole tiles.

    Raises RecordingError where the recording does not hold what the router reads.
    """
    if source.facts.stage not in INPUT_STAGES:
        raise RecordingError(
            f"{source.facts.name}: holds {source.facts.stage.replace('_', ' ')}; slices are laid "
            "through router inputs.",
            "moegeom capture --keep hidden records them.",
        )
    task, total = Task(prepare(router), source, kernels), source.facts.num_tokens
    names = ("token", "input", "chosen") + (("distance",) if router.rule.is_affine else ())
    parts, left_out = [], 0
    with threadpool_limits(1, user_api="blas"):  # the arithmetic of the scan
        for tile in sample_tiles(total, seed):
            batch = LazyBatch(task, tile * TILE, min((tile + 1) * TILE, total))
            left_out += len(batch.non_finite)
            parts.append([getattr(batch, name) for name in names])
    token, inputs, chosen, *distance = map(np.concatenate, zip(*parts, strict=True))
    return SliceTokens(token, inputs, chosen, distance[0] if distance else None, left_out)
