"""A sample of the tokens of a router, with all that laws are fitted to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64, Int32, Int64
from threadpoolctl import threadpool_limits

from moegeom.core.errors import NonFiniteError
from moegeom.core.router import Router
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, TokenSource
from moegeom.engine.batch import LazyBatch
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS, sample_tiles
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.kernels.batch import RUN_TOKENS
from moegeom.kernels.reduction import Kernels


@dataclass(frozen=True, eq=False)
class SpaceSample:
    """Tokens at one router: logits as the rule takes them, scores without bias and mask, inputs
    where they are recorded, what was chosen, the document (or run of 256 tokens), and its block.
    """

    logits: Float[np.ndarray, "tokens experts"]
    scores: Float[np.ndarray, "tokens experts"]
    inputs: Float32[np.ndarray, "tokens hidden"] | None
    chosen: Int32[np.ndarray, "tokens k"]
    weights: Float64[np.ndarray, "tokens k"]
    distance: Float64[np.ndarray, "tokens"] | None
    unit: Int64[np.ndarray, "tokens"]
    block: Int32[np.ndarray, "tokens"]


def read_sample(
    router: Router,
    source: TokenSource,
    kernels: Kernels,
    seed: int,
    advanced: Callable[[int], None] = lambda tokens: None,
) -> SpaceSample:
    """A seeded sample of at most 4096 tokens, whole tiles.

    Raises
    ------
    NonFiniteError
        When a token of the sample is not finite at this router.
    """
    prepared = prepare(router)
    task = Task(prepared, source, kernels)
    is_linear = prepared.rows is not None and prepared.curved is None
    total = source.facts.num_tokens
    parts, inputs, distances = [], [], []
    with threadpool_limits(1, user_api="blas"):  # the arithmetic of the scan
        for tile in sample_tiles(total, seed, SMALL_SAMPLE_TOKENS):
            start, stop = tile * TILE, min((tile + 1) * TILE, total)
            q = LazyBatch(task, start, stop)
            if lost := q.non_finite:
                raise NonFiniteError(
                    f"{source.facts.name}: {number_of(len(lost), 'token')} at router "
                    f"{router.name} are not finite (first: token {lost[0]}).",
                    "Record again in float32; laws cannot be fitted to scores that overflow.",
                )
            columns = (q.chosen, q.weights, q.document, q.token, q.block)
            parts.append((q.logits, q.scores, *columns))
            inputs.append(q.input)
            distances.append(q.distance if is_linear else None)
            advanced(stop - start)
    logits, scores, chosen, weights, document, token, block = map(
        np.concatenate, zip(*parts, strict=True)
    )
    unit = np.where(document >= 0, document, -1 - token // RUN_TOKENS)
    return SpaceSample(
        logits, scores, _joined(inputs), chosen, weights, _joined(distances), unit, block
    )


def _joined(parts: list[Any]) -> Any:
    """All parts; None where they are not known."""
    return None if any(part is None for part in parts) else np.concatenate(parts)
