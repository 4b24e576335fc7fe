"""The two sides of an explanation: what each chose for the tokens that both have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float64, Int32, Int64
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, TokenColumns, TokenSource
from moegeom.engine.choice import chosen_by
from moegeom.engine.plan import by_tile
from moegeom.engine.prepared import PreparedRouter, check_width
from moegeom.engine.recorded import recorded_logits, through_norm
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import finite_tokens
from moegeom.engine.task import Task
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.table import load_kernels
from moegeom.tokens.rows import consecutive
from moegeom.tokens.stages import INPUT_STAGES
from moegeom.tokens.traces.alignment import RunB

#: Tokens whose choices are compared at all routers, and those that are routed again: in all, and
#: the most and the least at each.
MOST_TOKENS, ROUTED, MOST_ROUTED, LEAST_ROUTED = 65_536, 65_536, 16_384, 4096

#: Tokens that are routed at once.
_AT_ONCE = 2 * TILE


@dataclass(frozen=True, eq=False)
class Batch:
    """Some matched tokens: ``row`` counts them; inputs and their lengths where A recorded them."""

    row: Int64[np.ndarray, "tokens"]
    logits: Float[np.ndarray, "tokens experts"]
    values: Float[np.ndarray, "tokens hidden"] | None
    norm: Float64[np.ndarray, "tokens"] | None


@dataclass(frozen=True, eq=False)
class Sides:
    """A, B, and the tokens of A that B has: ``token`` ascending, with their ``columns``.

    ``num_matched`` are in both; of the first of these ``num_non_finite`` were left out.
    """

    source: TokenSource
    other: RunB
    token: Int64[np.ndarray, "tokens"]
    columns: TokenColumns
    kernels: Kernels
    num_matched: int
    num_non_finite: int = 0

    @property
    def has_other_inputs(self) -> bool:
        """Whether B recorded what its routers read."""
        return self.other.source.facts.stage in INPUT_STAGES

    def examined(self, num_routers: int) -> Int64[np.ndarray, "rows"]:
        """Matched tokens that are routed again at each of so many routers: whole documents, evenly
        spread, so that what stands beside a token is there too.
        """
        most = max(LEAST_ROUTED, min(MOST_ROUTED, ROUTED // max(num_routers, 1)))
        tokens = len(self.token)
        if tokens <= most:
            return np.arange(tokens)
        starts = np.flatnonzero(np.diff(self.columns.document, prepend=-2))
        stops = np.append(starts[1:], tokens)
        is_examined = np.zeros(tokens, bool)
        step = max(1, math.ceil(tokens / most))
        for start, stop in zip(starts[::step], stops[::step], strict=True):
            is_examined[start : min(stop, start + most - int(is_examined.sum()))] = True
        return np.flatnonzero(is_examined)

    def other_chosen(self, router: str) -> Int32[np.ndarray, "tokens k"]:
        """What B chose."""
        return self.other.read_chosen(router, self.token)

    def chosen(self, prepared: PreparedRouter) -> Int32[np.ndarray, "tokens k"]:
        """What A chose: as recorded, else as its router chooses."""
        name = prepared.router.name
        if self.source.facts.has_chosen:
            runs = consecutive(self.token)
            parts = [self.source.read_chosen(name, start, stop) for start, stop in runs]
            recorded = [part for part in parts if part is not None]
            if len(recorded) == len(parts):
                return np.concatenate(recorded)
        batches = self.batches(prepared, np.arange(len(self.token)))
        return np.concatenate([chosen_by(prepared, b.logits, self.kernels) for b in batches])

    def batches(self, prepared: PreparedRouter, rows: Int64[np.ndarray, "rows"]) -> Iterator[Batch]:
        """A's inputs and logits of some matched tokens, in runs of tiles of the recording."""
        task = Task(prepared, self.source, self.kernels)
        for start, those in by_tile(self.token[rows], _AT_ONCE):
            stop = int(self.token[rows[those]].max()) + 1
            batch = recorded_logits(task, start, stop)
            at = self.token[rows[those]] - start
            values, logits = batch.values, batch.logits
            if len(at) < len(logits):  # else every token, in order
                values = None if values is None else values[at]
                logits = logits[at]
            norm = None if values is None else self.kernels["input_norm"](values)
            yield Batch(rows[those], logits, values, norm)

    def other_values(
        self, router: Router, row: Int64[np.ndarray, "rows"]
    ) -> Float[np.ndarray, "rows hidden"]:
        """B's router inputs for some matched tokens, behind the norm."""
        source, values = self.other.source, self.other_recorded(router.name, row)
        check_width(router, source.facts.stage, values.shape[1], source.facts.name)
        if source.facts.stage == "router_input":
            return values
        return through_norm(values, router, source.facts.name)

    def other_recorded(
        self, router: str, row: Int64[np.ndarray, "rows"], output: str = ""
    ) -> Float[np.ndarray, "rows width"]:
        """B's inputs or logits as they are recorded, or an output, for some matched tokens."""
        source, there = self.other.source, consecutive(self.other.token[self.token[row]])
        if not output:
            return np.concatenate([source.read_values(router, *run) for run in there])
        parts = (source.read_output(router, output, *run) for run in there)
        return np.concatenate([part for part in parts if part is not None]).astype(np.float64)


def routed_choices(
    source: TokenSource, prepared: PreparedRouter, kernels: Kernels
) -> Int32[np.ndarray, "tokens k"]:
    """What the router chooses for all tokens of a recording of inputs or logits."""
    task = Task(prepared, source, kernels)
    parts = []
    for start in range(0, source.facts.num_tokens, _AT_ONCE):
        batch = recorded_logits(task, start, min(start + _AT_ONCE, source.facts.num_tokens))
        parts.append(chosen_by(prepared, batch.logits, kernels))
    return np.concatenate(parts)


def sides_of(
    source: TokenSource, other: RunB, routers: Sequence[str], options: ComputeOptions
) -> Sides:
    """The sides, limited to the first matched tokens that are examined.

    Raises
    ------
    RecordingError
        When none of them counts.
    """
    total = source.facts.num_tokens
    columns = source.read_columns(0, total)
    every = np.flatnonzero((other.token >= 0) & options.counted(columns))
    matched = every[:MOST_TOKENS]
    token = finite_tokens(source, routers, matched, options)
    there = other.token[token]
    token = token[np.isin(there, finite_tokens(other.source, routers, np.sort(there), options))]
    if not len(token):
        raise RecordingError(
            f"{source.facts.name}: none of its {number_of(total, 'token')} that the other run has "
            "counts: each is one of the first of its document, or not finite.",
            "Leave out fewer: --exclude-first.",
        )
    kernels, lost = load_kernels(options.backend), len(matched) - len(token)
    return Sides(source, other, token, columns.at(token), kernels, len(every), lost)
