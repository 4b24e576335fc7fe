"""Chosen sets of a sample of tokens, kept beside a series so that steps can be compared later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moegeom.core.digest import digest_of
from moegeom.core.errors import NonFiniteError
from moegeom.core.limits import CHOICES_BYTES
from moegeom.core.router import Router
from moegeom.core.shapes import Float64, Int16
from moegeom.core.tokens import TokenSource
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import draw_sample, drawn_tokens
from moegeom.geometry.consistency import overlap_share
from moegeom.geometry.statistics import jackknife_error
from moegeom.results.reader import Results
from moegeom.tokens.foreign.npy import read_sealed, write_sealed

#: What tells texts apart, token by token.
_TEXT = ("document", "position", "token_id")


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


def choices(routers: Sequence[Router], source: TokenSource, options: ComputeOptions) -> Choices:
    """Chosen sets of a sample of the tokens, computed again from the recording.

    Without routers at which one of them is not finite: rows of different steps would no longer
    stand side by side.
    """
    token, chosen, labels = drawn_tokens(source, options), {}, None
    for router in routers:
        if router.name not in source.facts.routers:
            continue
        try:
            sample = draw_sample(router, source, options, ("chosen", "block", *_TEXT), at=token)
        except NonFiniteError:
            continue
        if not sample.num_non_finite:
            chosen[router.name] = np.sort(sample.chosen, axis=1).astype(np.int16)
            labels = sample
    if labels is None:
        return Choices("", np.empty(0, np.int16), {})
    text = [getattr(labels, name) for name in _TEXT]
    is_known = all((values >= 0).all() for values in text)
    return Choices(digest_of(*text) if is_known else "", labels.block.astype(np.int16), chosen)


def write_choices(path: Path, sample: Choices, results: Results) -> None:
    """Writes the file whole or not at all, beside the results of the same routers and tokens."""
    facts = {"tokens": sample.tokens, "plan": _plan(results)}
    write_sealed(path, facts, {"block": sample.block, **sample.chosen})


def read_choices(path: Path, results: Results) -> Choices | None:
    """What :func:`write_choices` wrote for these results; None when nothing is there, or something
    else, such as what a run left that was stopped between the two.
    """
    facts, chosen = read_sealed(path, CHOICES_BYTES) or ({}, {})
    if not chosen or facts["plan"] != _plan(results):
        return None
    return Choices(facts["tokens"], chosen.pop("block"), chosen)


def _plan(results: Results) -> str:
    """The digest of the plan: everything that determines the results."""
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
