"""A sample of the tokens of a recording at one router: one rule for every command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float64, Int32, Int64
from moegeom.core.tokens import TILE, TokenSource
from moegeom.engine.batch import LazyBatch, refuse_non_finite
from moegeom.engine.plan import (
    SAMPLE_TOKENS,
    SMALL_SAMPLE_TOKENS,
    by_tile,
    one_blas_thread,
    sample_tiles,
)
from moegeom.engine.prepared import prepare
from moegeom.engine.request import ComputeOptions
from moegeom.engine.task import OUTLIER_FACTOR, Task
from moegeom.kernels.batch import RUN_TOKENS, TokenBatch
from moegeom.kernels.table import load_kernels


class Sample(TokenBatch):
    """Some tokens at one router, ascending, with the quantities that were asked for.

    ``num_non_finite`` more were drawn, and left out because they are not finite, and
    ``num_outliers`` because ``without_outliers`` was asked for.
    """

    num_non_finite: int
    num_outliers: int = 0
    logits: Float[np.ndarray, "tokens experts"]
    scores: Float[np.ndarray, "tokens experts"]
    selection: Float[np.ndarray, "tokens experts"]
    weights: Float64[np.ndarray, "tokens k"]
    document: Int64[np.ndarray, "tokens"]

    @property
    def num_drawn(self) -> int:
        """With those that were left out."""
        return len(self.token) + self.num_non_finite + self.num_outliers

    @property
    def inputs(self) -> Float[np.ndarray, "tokens hidden"]:
        """The router inputs, of a recording that holds them."""
        assert self.input is not None, "the study asks for a recording of router inputs"
        return self.input

    @property
    def unit(self) -> Int64[np.ndarray, "tokens"]:
        """What tokens have in common: the document, or a run of 256 tokens where there is none.

        Runs have negative numbers.
        """
        return np.where(self.document >= 0, self.document, -1 - self.token // RUN_TOKENS)

    @property
    def half(self) -> Int32[np.ndarray, "tokens"]:
        """0 or 1, the half of the documents: that of the even or of the odd blocks of a scan."""
        return self.block % 2

    def at(self, token: Int64[np.ndarray, "some"]) -> Sample:
        """Those of some of the tokens, by number: the others are not finite elsewhere."""
        lost = self.num_non_finite + len(self.token) - len(token)
        return self.part(np.searchsorted(self.token, token), num_non_finite=lost)

    @property
    def usual(self) -> Int64[np.ndarray, "usual"]:
        """Rows of those whose input is no more than 4 times as long or as short as the median one,
        as in a scan: one long token can outweigh the mean and the variance of all others. All of
        them where no inputs are recorded.
        """
        if self.input is None:
            return np.arange(len(self.token))
        norm = np.sqrt(np.einsum("th,th->t", self.input, self.input, dtype=np.float64))
        typical = float(np.median(norm))
        return np.flatnonzero(
            (norm <= OUTLIER_FACTOR * typical) & (norm * OUTLIER_FACTOR >= typical)
        )

    def without_outliers(self) -> Sample:
        """The ``usual`` ones."""
        rows, tokens = self.usual, len(self.token)
        return self if len(rows) == tokens else self.part(rows, num_outliers=tokens - len(rows))

    def part(self, rows: Int64[np.ndarray, "some"], **counts: int) -> Sample:
        """Some of the rows; what was left out before counts as it did, but for ``counts``."""
        values = {
            name: value[rows] if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }
        return type(self)(**values | counts)


def drawn_tokens(
    source: TokenSource, options: ComputeOptions, most: int = SAMPLE_TOKENS
) -> Int64[np.ndarray, "tokens"]:
    """Numbers of at most ``most`` tokens, ascending: the same for every router of a recording.

    All tokens of a few tiles, which seed and number of tokens decide, without the first ones of
    each document; where these are more than ``most``, as many of them by the same seed.

    Raises
    ------
    RecordingError
        When none is left.
    """
    total = source.facts.num_tokens
    tiles = sample_tiles(total, options.seed, max(most, SMALL_SAMPLE_TOKENS))
    parts = []
    for tile in tiles:
        start, stop = tile * TILE, min((tile + 1) * TILE, total)
        token = np.arange(start, stop)
        if options.exclude_first:
            token = token[options.counted(source.read_columns(start, stop))]
        parts.append(token)
    token = np.concatenate(parts)
    if not len(token):
        raise RecordingError(
            f"{source.facts.name}: --exclude-first {options.exclude_first} leaves none of the "
            f"{total:,} tokens that a sample is drawn from.",
            "Documents are shorter than that: leave out fewer.",
        )
    if len(token) > most:
        generator = np.random.default_rng([options.seed, total])
        token = np.sort(generator.choice(token, most, replace=False))
    return token


def draw_sample(
    router: Router,
    source: TokenSource,
    options: ComputeOptions,
    names: Sequence[str],
    most: int = SAMPLE_TOKENS,
    at: Int64[np.ndarray, "tokens"] | None = None,
    advance: Callable[[int], None] | None = None,
) -> Sample:
    """Quantities of the tokens ``at``, ascending, or of a drawn sample, at one router.

    ``names`` are those of :class:`~moegeom.kernels.batch.TokenBatch`; a quantity that recording or
    rule cannot give is None. ``advance`` is told how many tokens were read.

    Raises
    ------
    NonFiniteError
        When one of the tokens is not finite at this router, unless ``options`` skip such tokens and
        others are left.
    """
    token = drawn_tokens(source, options, most) if at is None else at
    task = Task(prepare(router), source, load_kernels(options.backend))
    total, lost, num_read = source.facts.num_tokens, [], 0
    whole: list[np.ndarray | None] = []  # filled in place: inputs are most of the memory
    with one_blas_thread():  # the arithmetic of the scan
        for start, those in by_tile(token):
            batch, among = LazyBatch(task, start, min(start + TILE, total)), token[those]
            lost += np.intersect1d(among, batch.non_finite).tolist()
            rows = np.flatnonzero(np.isin(batch.token, among))
            values = [getattr(batch, name) for name in ("token", *names)]
            whole = whole or [None if v is None else _room(v, len(token)) for v in values]
            for column, value in zip(whole, values, strict=True):
                if column is not None:
                    column[num_read : num_read + len(rows)] = value[rows]
            num_read += len(rows)
            if advance is not None:
                advance(len(among))
    if not options.skips_non_finite or len(lost) == len(token):
        refuse_non_finite(router.name, source.facts.name, tuple(lost), len(token))
    columns = (column if column is None else column[:num_read] for column in whole)
    values = dict(zip(("token", *names), columns, strict=True))
    if source.facts.num_documents == 1 and values.get("document") is not None:
        values["document"] = np.full_like(values["document"], -1)  # runs are the unit of chance
    return Sample(**values, num_non_finite=len(lost))


def _room(part: np.ndarray, number: int) -> np.ndarray:
    return np.empty((number, *part.shape[1:]), part.dtype)


def finite_tokens(
    source: TokenSource,
    routers: Sequence[str],
    token: Int64[np.ndarray, "tokens"],
    options: ComputeOptions,
) -> Int64[np.ndarray, "finite"]:
    """Those of the tokens, ascending, of which a recording holds finite values at every router.

    All of them where it holds choices alone.

    Raises
    ------
    NonFiniteError
        For a token that is not finite, unless ``options`` skip it.
    """
    stage = source.facts.stage
    if stage in ("ids", "counts"):
        return token
    is_finite = np.ones(len(token), bool)
    for router in routers:
        for _, rows in by_tile(token):
            start, stop = int(token[rows[0]]), int(token[rows[-1]]) + 1
            if stage == "top_logits":
                values = source.read_top_logits(router, start, stop).logits
            else:
                values = source.read_values(router, start, stop)
            is_finite[rows] &= np.isfinite(values[token[rows] - start]).all(axis=1)
        if not options.skips_non_finite:
            lost = tuple(token[~is_finite].tolist())
            refuse_non_finite(router, source.facts.name, lost, len(token))
    return token[is_finite]


def refuse_tokens_beyond(numbers: Sequence[int], source: TokenSource, option: str) -> None:
    """Raises UsageError for numbers of tokens that the recording does not hold."""
    total = source.facts.num_tokens
    beyond = [number for number in numbers if not 0 <= number < total]
    if beyond:
        raise UsageError(
            f"{option} {beyond[0]}: {source.facts.name} holds tokens 0 to {total - 1:,}."
        )
