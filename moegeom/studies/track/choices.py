"""Chosen sets of a sample of tokens, kept beside a series so that steps can be compared later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int16
from threadpoolctl import threadpool_limits

from moegeom.core.digest import digest_of
from moegeom.core.router import Router
from moegeom.core.tokens import TILE, TokenSource
from moegeom.engine.batch import LazyBatch
from moegeom.engine.labels import block_of
from moegeom.engine.plan import sample_tiles
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.geometry.consistency import overlap_share
from moegeom.geometry.statistics import jackknife_error
from moegeom.kernels.table import load_kernels
from moegeom.results.reader import Results
from moegeom.tokens.foreign.sealed import read_sealed, write_sealed

#: Bytes of chosen sets: 20,000 tokens of a thousand routers that choose 16 experts.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class Choices:
    """Sorted chosen experts of the sampled tokens, by router; ``tokens`` tells the texts apart.

    ``tokens`` is a hash of document, position and token id of each sampled token: two steps can be
    compared token by token only where it is the same. Empty where the recording does not say all
    three: nothing then tells that two steps saw the same text.
    """

    tokens: str
    block: Int16[np.ndarray, "tokens"]
    chosen: Mapping[str, Int16[np.ndarray, "tokens k"]]


@dataclass(frozen=True, eq=False)
class Agreement:
    """Mean of |A and B| / k and share of tokens with another set, each with its standard error."""

    overlap: float
    overlap_error: float
    changed: float
    changed_error: float


def choices(
    routers: Sequence[Router], source: TokenSource, seed: int, exclude_first: int = 0
) -> Choices:
    """Chosen sets of a sample of at most 20 000 tokens, computed again from the recording.

    The first ``exclude_first`` tokens of each document are left out, as everywhere else.
    """
    tiles = sample_tiles(source.facts.num_tokens, seed)
    kernels = load_kernels("cpu")
    numbers, blocks, is_known = [], [], True
    ranges = [(t * TILE, min((t + 1) * TILE, source.facts.num_tokens)) for t in tiles]
    for start, stop in ranges:
        columns = source.read_columns(start, stop)
        for values in (columns.document, columns.position, columns.token_id):
            is_known &= bool((values >= 0).all())
            numbers.append(values)
        kept = columns.is_behind(exclude_first)
        blocks.append(block_of(columns, start)[kept].astype(np.int16))
    chosen = {}
    for router in routers:
        if router.name not in source.facts.routers:
            continue
        task = Task(prepare(router), source, kernels, exclude_first=exclude_first)
        parts, is_whole = [], True
        with threadpool_limits(1, user_api="blas"):  # the arithmetic of the scan
            for start, stop in ranges:
                batch = LazyBatch(task, start, stop)
                is_whole &= not batch.non_finite
                parts.append(np.sort(batch.chosen, axis=1).astype(np.int16))
        if is_whole:  # else rows of different steps would no longer stand side by side
            chosen[router.name] = np.concatenate(parts)
    tokens = digest_of(*numbers) if is_known else ""
    return Choices(tokens, np.concatenate(blocks), chosen)


def write_choices(path: Path, found: Choices, results: Results) -> None:
    """Writes the file whole or not at all, beside the results of the same routers and tokens."""
    facts = {"tokens": found.tokens, "plan": _plan(results)}
    write_sealed(path, facts, {"block": found.block, **found.chosen})


def read_choices(path: Path, results: Results) -> Choices | None:
    """What :func:`write_choices` wrote for these results; None when nothing is there, or something
    else, such as what a run left that was stopped between the two.
    """
    facts, chosen = read_sealed(path, _MOST_BYTES) or ({}, {})
    if not chosen or facts["plan"] != _plan(results):
        return None
    return Choices(facts["tokens"], chosen.pop("block"), chosen)


def _plan(results: Results) -> str:
    """All that decides results."""
    return digest_of(json.dumps(results.run["plan"], sort_keys=True))


def agreement(one: Choices, other: Choices, router: str) -> Agreement | None:
    """How far two steps choose alike; None where they cannot be compared token by token.

    Standard errors by leaving out one of the 16 blocks of documents.
    """
    first, second = one.chosen.get(router), other.chosen.get(router)
    if not one.tokens or one.tokens != other.tokens or first is None or second is None:
        return None
    if first.shape != second.shape:
        return None
    overlap = overlap_share(first.astype(np.int32), second.astype(np.int32))
    changed = (overlap < 1.0).astype(np.float64)
    return Agreement(
        float(overlap.mean()),
        _error_of_mean(overlap, one.block),
        float(changed.mean()),
        _error_of_mean(changed, one.block),
    )


def _error_of_mean(
    values: Float64[np.ndarray, "tokens"], block: Int16[np.ndarray, "tokens"]
) -> float:
    """Standard error of the mean by leaving out one block after the other; nan for one block."""
    number = np.bincount(block)
    total = np.bincount(block, values)
    present = number > 0
    left = (values.sum() - total[present]) / np.maximum(len(values) - number[present], 1)
    return float(jackknife_error(left))
