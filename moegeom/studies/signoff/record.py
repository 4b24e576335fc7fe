"""The record of a sign-off: four lines, each with a state, and the exit code that follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from moegeom.core.finding import EXIT_FAILED, EXIT_INCONCLUSIVE, EXIT_OK
from moegeom.core.option import argument, option
from moegeom.engine.request import CHECKPOINT, Terms, Tokens
from moegeom.studies.diff.record import Side
from moegeom.studies.log_probs import LOG_PROBS, LogProbs


@dataclass(frozen=True)
class SignOffRequest(Terms):
    """What was asked for. ``a`` is the checkpoint as it was trained, ``b`` the export.

    ``tokens`` holds nothing, or a recording of each; ``rerun`` is a recording of A run again on the
    same text. ``max_flipped`` is the share of (token, layer) pairs above which routing on text
    fails. ``log_probs`` is a file of log-probabilities of both.
    """

    a: str = argument(f"The checkpoint as trained: {CHECKPOINT}.")
    b: str = argument("What was exported or quantised from it: the same.")
    _: dataclasses.KW_ONLY
    tokens: Sequence[Tokens] = option("Recording with choices; twice: of A, then of B.", ())
    rerun: Tokens | None = option(
        "Recording of A run again: what A differs from itself.", is_list=False
    )
    max_flipped: float | None = option("Share of (token, layer) pairs above which routing fails.")
    log_probs: Path | None = option(LOG_PROBS)


LineName = Literal["storage", "effective router", "up to rotation", "routing on text"]

#: In the order in which they are told.
LINE_NAMES: tuple[LineName, ...] = get_args(LineName)

#: Worst first. ``not judged``: it was measured, and nothing was given to hold it against.
LineState = Literal["failed", "inconclusive", "not judged", "passed"]

STATES: tuple[LineState, ...] = get_args(LineState)


@dataclass(frozen=True)
class Flips:
    """How often two recordings of one text hold different choices.

    A layer-token is a token at a router; it differs when the sets of experts do, in any order.
    ``num_recorded`` tokens are in the first recording, ``num_tokens`` of them in the second too and
    counted: without the first of documents, and ``num_non_finite`` that are not finite.
    ``error`` is the standard error of ``share`` over documents, None with a single one.
    ``tokens_share`` is the share of tokens that differ at one router or more, ``by_router`` the
    share of tokens that differ at each. ``notes`` say how tokens were matched, ``log_probs`` what
    flips have to do with log-probabilities, where a file holds them.
    """

    num_recorded: int
    num_tokens: int
    num_non_finite: int
    num_documents: int
    share: float
    error: float | None
    tokens_share: float
    by_router: Mapping[str, float]
    notes: tuple[str, ...] = ()
    log_probs: LogProbs | None = None

    @property
    def worst(self) -> str:
        """The router at which most tokens differ, the first of equal ones."""
        return max(self.by_router, key=lambda router: self.by_router[router])


@dataclass(frozen=True)
class Line:
    """What was looked at, how it ended, and the sentence with the numbers.

    ``details`` are further sentences, ``commands`` what to type next, ``evidence`` the numbers.
    """

    name: LineName
    state: LineState
    sentence: str
    details: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SignOff:
    """Both sides, the lines in the order of ``LINE_NAMES``, and what nobody looked at."""

    sides: tuple[Side, Side]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    not_looked_at: tuple[str, ...] = ()

    def in_state(self, state: LineState) -> tuple[Line, ...]:
        """Lines that ended so."""
        return tuple(line for line in self.lines if line.state == state)

    @property
    def exit_code(self) -> int:
        """1 when a line failed, 0 when every line passed, else 4."""
        if self.in_state("failed"):
            return EXIT_FAILED
        passed = self.in_state("passed")
        return EXIT_OK if len(passed) == len(self.lines) else EXIT_INCONCLUSIVE
