"""Last line of a sign-off: what A and B chose on one text, beside what A chose run again."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.router import Router
from moegeom.core.shapes import Float32, Int32, Int64, Shaped
from moegeom.core.text import number_of, percent
from moegeom.core.tokens import (
    TILE,
    SourceFacts,
    TokenColumns,
    TokenSource,
    TopLogits,
    bytes_per_token,
)
from moegeom.document.header import size
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import finite_tokens
from moegeom.geometry.statistics import clustered_error
from moegeom.kernels.reference import same_set
from moegeom.studies.changes.record import where
from moegeom.studies.log_probs import log_probs
from moegeom.studies.signoff.record import Flips, Line, LineState
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.alignment import match_run_b

#: Tokens that ``moegeom capture`` records when nothing is said.
_TOKENS = 16_384

#: Without a limit, B may differ from A so many times as often as A differs from itself.
_TIMES_RERUN = 2.0


def unrecorded_line(a: str, b: str, routers: Sequence[Router]) -> Line:
    """Inconclusive: the commands that record A, B and A once more, and then sign off."""
    ids_bytes = sum(
        bytes_per_token("ids", router.num_experts, router.rule.top_k, router.hidden_size)
        for router in routers
    )
    recorded = size(_TOKENS * ids_bytes)
    sentence = (
        f"not tested. Record what both choose on one text ({_TOKENS:,} tokens: one forward pass "
        f"and {recorded} each): equal routers can choose otherwise where other parts changed."
    )
    commands = (
        capture_command(a, "--out REC_A"),
        capture_command(b, "--out REC_B"),
        capture_command(a, "--eager --out REC_A2"),
        shlex.join(["moegeom", "signoff", a, b])
        + " --tokens REC_A --tokens REC_B --rerun REC_A2 --max-flipped SHARE",
    )
    engines = (
        "capture runs folders of transformers; of any engine, the trace of its choices serves as "
        "well (docs/capture/engines.md)."
    )
    return Line("routing on text", "inconclusive", sentence, (engines,), commands)


def capture_command(checkpoint: str, rest: str) -> str:
    """What records the choices of a checkpoint on a text; ``rest`` are further options."""
    return f"moegeom capture {shlex.quote(checkpoint)} --text FILE --keep ids {rest}"


def measured_line(
    between: Flips, rerun: Flips | None, limit: float | None, names: Sequence[str], again: str
) -> Line:
    """Fails above the limit; inconclusive where a router was not recorded on both sides.

    The limit is ``limit``, else twice what A differs from itself; with neither nothing is judged.
    ``names`` are the routers to be compared, ``again`` is the command that records A once more,
    told where there is no rerun.
    """
    absent = [name for name in names if name not in between.by_router]
    times, source = None, "--max-flipped"
    if rerun is not None and rerun.share > 0.0:
        times = between.share / rerun.share
        if limit is None:
            limit = _TIMES_RERUN * rerun.share
            source = "twice what A run again shows: --rerun"
    state: LineState = "inconclusive" if absent else "passed"
    if limit is None:  # of a run that repeats itself to the bit none follows
        state = "not judged"
        why = "no limit was given (--max-flipped, or --rerun)"
        if rerun is not None:
            why = "A run again (--rerun) repeats itself, so that no limit follows; give "
            why += "--max-flipped"
        judged = f"Measured, not judged: {why}."
    else:
        is_above = between.share > limit
        state = "failed" if is_above else state
        side = "More than" if is_above else "Within"
        judged = f"{side} the limit of {_percent(limit)} ({source})."
    details = [_rerun_sentence(rerun, times), *map(_sentence, between.notes)]
    if between.log_probs is not None:
        details.append(_sentence(between.log_probs.sentence.removesuffix(".")))
    if absent:
        details.insert(0, f"{where(absent, names)} not recorded on both sides.")
    evidence = {
        "between": dataclasses.asdict(between),
        "rerun": None if rerun is None else dataclasses.asdict(rerun),
        "limit": limit,
        "times_rerun": times,
    }
    commands = () if rerun is not None else (again,)
    sentence = f"{_measured(between, names)} {judged}"
    return Line("routing on text", state, sentence, tuple(details), commands, evidence)


def _measured(between: Flips, names: Sequence[str]) -> str:
    error = ""
    if between.error is not None:
        over = number_of(between.num_documents, "document")
        error = f" (standard error {_percent(between.error)}, over {over})"
    text = (
        f"A and B choose differently in {_percent(between.share)} of (token, layer) pairs{error}; "
        f"{_percent(between.tokens_share)} of {between.num_tokens:,} tokens differ at one layer or "
        "more"
    )
    if between.num_non_finite:
        text += f"; {number_of(between.num_non_finite, 'token')} not finite and left out"
    if between.share == 0.0:
        return f"{text}."
    first, worst = next(iter(between.by_router)), between.worst
    shares = [
        f"{_percent(between.by_router[name])} in the {place} ({where([name], names)})"
        for place, name in (("first", first), ("worst", worst))
    ]
    return f"{text}; {', '.join(shares)}."


def _rerun_sentence(rerun: Flips | None, times: float | None) -> str:
    if rerun is None:
        return (
            "How often A differs from itself is not known: record A again, in other batches or "
            "with other kernels, and add --rerun REC_A2."
        )
    text = (
        f"A run again differs from itself in {_percent(rerun.share)} of (token, layer) pairs, "
        f"{_percent(rerun.tokens_share)} of {rerun.num_tokens:,} tokens at one layer or more"
    )
    if times is None:
        return f"{text}: nothing to hold B against."
    return f"{text}: B differs {times:.2g} times as often."


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}."


def _percent(share: float) -> str:
    """A share with three figures, so that one near its limit does not look equal to it."""
    return percent(share, ".3g")


#: Row i of B was row ``place[i]`` of A, by router; only where rows changed places.
Places = Mapping[str, Int64[np.ndarray, "experts"]]

#: With fewer tokens in common the two are taken for recordings of different texts.
_LEAST_MATCHED = 0.5


def flips(
    reference: TokenSource,
    other: TokenSource,
    routers: Sequence[KnownRouter],
    places: Places,
    options: ComputeOptions,
    scored: Path | None = None,
) -> Flips:
    """Sets of experts that differ, token by token, at every router that both record.

    Experts of ``other`` are called what ``reference`` calls them, by ``places``; ``scored`` holds
    log-probabilities of both.

    Raises
    ------
    RecordingError
        When one of the two holds no choices, or they are of different texts; with counts.
    NonFiniteError
        When what a router read is recorded and not finite, unless ``options`` skip such tokens.
    """
    for source in (reference, other):
        refuse_without_choices(source.facts)
    side = match_run_b(reference, _Renumbered(other, places) if places else other, routers)
    num_tokens = reference.facts.num_tokens
    matched = side.is_matched(0, num_tokens)
    num_matched = int(matched.sum())
    if num_matched < _LEAST_MATCHED * num_tokens:
        raise RecordingError(
            f"{other.facts.name} has {num_matched:,} of the {number_of(num_tokens, 'token')} of "
            f"{reference.facts.name}; expected recordings of the same text.",
            "Record both on the same --text with the same --tokens and --length.",
        )
    columns = reference.read_columns(0, num_tokens)
    matched &= options.counted(columns)
    num_behind = int(matched.sum())
    for source, its in ((reference, np.arange(num_tokens)), (other, side.token)):
        names = [one.name for one in routers if one.name in source.facts.routers]
        finite = finite_tokens(source, names, np.sort(its[matched]), options)
        matched &= np.isin(its, finite)
    num_counted = int(matched.sum())
    if not num_counted:
        raise RecordingError(
            f"{reference.facts.name} and {other.facts.name}: no token that both have counts: each "
            "is one of the first of its document, or not finite.",
            "Leave out fewer: --exclude-first.",
        )
    flipped = np.zeros(num_tokens, np.int64)
    by_router = {}
    for router in routers:
        if not all(router.name in source.facts.routers for source in (reference, other)):
            continue
        differs = np.zeros(num_tokens, np.bool_)
        for start in range(0, num_tokens, TILE):
            token = start + np.flatnonzero(matched[start : start + TILE])
            if not len(token):
                continue
            mine = reference.read_chosen(router.name, start, min(start + TILE, num_tokens))
            if mine is None:
                name = reference.facts.name
                raise RecordingError(f"{name}: holds no choices of router {router.name}.")
            differs[token] = ~same_set(mine[token - start], side.read_chosen(router.name, token))
        by_router[router.name] = float(differs[matched].mean())
        flipped += differs
    columns = columns.at(np.flatnonzero(matched))
    document = columns.document
    of_token = flipped[matched] / len(by_router)
    share = float(of_token.mean())
    return Flips(
        num_recorded=num_tokens,
        num_tokens=num_counted,
        num_non_finite=num_behind - num_counted,
        num_documents=len(np.unique(document)),
        share=share,
        error=clustered_error((of_token - share) / num_counted, document),
        tokens_share=float((flipped[matched] > 0).mean()),
        by_router=by_router,
        notes=side.notes,
        log_probs=None if scored is None else log_probs(scored, columns, flipped[matched]),
    )


def refuse_without_choices(facts: SourceFacts) -> None:
    """Raises RecordingError for a recording that does not say what was chosen, token by token."""
    if facts.has_chosen and facts.stage != "counts":
        return
    stage = facts.stage.replace("_", " ")
    raise RecordingError(
        f"{facts.name}: holds {stage} and not what was chosen; expected recorded choices, because "
        "what the router would choose is not what the exported model chose.",
        "moegeom capture records them, --keep ids nothing else; traces of engines hold them.",
    )


@dataclass(frozen=True, eq=False)
class _Renumbered:
    """A recording whose experts have the numbers that they had before they changed places."""

    source: TokenSource
    places: Places

    @property
    def facts(self) -> SourceFacts:
        return self.source.facts

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return self.source.read_columns(start, stop)

    def read_values(self, router: str, start: int, stop: int) -> Shaped[np.ndarray, "tokens width"]:
        return self.source.read_values(router, start, stop)

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        return self.source.read_top_logits(router, start, stop)

    def read_chosen(
        self, router: str, start: int, stop: int
    ) -> Int32[np.ndarray, "tokens top_k"] | None:
        chosen = self.source.read_chosen(router, start, stop)
        place = self.places.get(router)
        if chosen is None or place is None:
            return chosen
        # an empty slot is -1 and stays so
        return np.append(place, -1).astype(np.int32)[chosen]

    def read_output(
        self, router: str, kind: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens *width"] | None:
        return self.source.read_output(router, kind, start, stop)
