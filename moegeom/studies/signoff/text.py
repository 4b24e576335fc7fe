"""Last line of a sign-off: what A and B chose on the same text, beside what A chose run again."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from moegeom.core.router import Router
from moegeom.core.text import number_of, percent
from moegeom.core.tokens import bytes_per_token
from moegeom.document.header import size
from moegeom.document.verdict_text import places
from moegeom.studies.signoff.record import Flips, Line, LineState

#: Tokens that ``moegeom capture`` records when nothing is said.
_TOKENS = 16_384

#: Without a limit, B may differ from A so many times as often as A differs from itself.
_TIMES_RERUN = 2.0


def unrecorded_line(a: str, b: str, routers: Sequence[Router]) -> Line:
    """Inconclusive: the commands that record A, B and A once more, and then sign off."""
    recorded = size(_TOKENS * sum(_ids_bytes(router) for router in routers))
    sentence = (
        f"not known until both ran over the same text ({_TOKENS:,} tokens of choices are "
        f"{recorded} and one forward pass each). Equal routers do not decide it: what they read "
        "comes from the rest of the model."
    )
    commands = (
        capture_command(a, "--out REC_A"),
        capture_command(b, "--out REC_B"),
        capture_command(a, "--eager --out REC_A2"),
        shlex.join(["moegeom", "signoff", a, b])
        + " --tokens REC_A --tokens REC_B --rerun REC_A2 --max-flipped SHARE",
    )
    engines = (
        "capture runs folders of transformers; for any other model the trace of choices "
        "that an engine writes serves as a recording (docs/capture/engines.md)."
    )
    return Line("routing on text", "inconclusive", sentence, (engines,), commands)


def capture_command(checkpoint: str, rest: str) -> str:
    """What records the choices of a checkpoint on a text; ``rest`` are further options."""
    return f"moegeom capture {shlex.quote(checkpoint)} --text FILE --keep ids {rest}"


def incomparable_line() -> Line:
    """Inconclusive: experts of the two cannot be held against each other by their numbers."""
    sentence = "not compared: no router of B has as many experts, and chooses as many, as in A."
    return Line("routing on text", "inconclusive", sentence)


def measured_line(
    between: Flips,
    rerun: Flips | None,
    limit: float | None,
    names: Sequence[str],
    again: str,
) -> Line:
    """Fails above the limit; inconclusive where a router was not recorded on both sides.

    The limit is ``limit``, else twice what A differs from itself; with neither nothing is judged.
    ``names`` are the routers to be compared, ``again`` is the command that records A once more,
    told where there is no rerun.
    """
    absent = [name for name in names if name not in between.by_router]
    judged_by = _limit(limit, rerun)
    state: LineState = "inconclusive" if absent else "passed"
    if judged_by is None:
        state = "not judged"
    elif between.share > judged_by[0]:
        state = "failed"
    details = [_rerun_sentence(between, rerun), *map(_sentence, between.notes)]
    if between.log_probs is not None:
        details.append(_sentence(between.log_probs.sentence.removesuffix(".")))
    if absent:
        details.insert(0, f"{_where(absent, names)} not recorded on both sides.")
    evidence = {
        "between": dataclasses.asdict(between),
        "rerun": None if rerun is None else dataclasses.asdict(rerun),
        "limit": None if judged_by is None else judged_by[0],
        "times_rerun": _times(between, rerun),
    }
    commands = () if rerun is not None else (again,)
    sentence = f"{_measured(between, names)} {_limit_sentence(between, judged_by, rerun)}"
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
        f"{_percent(between.by_router[name])} in the {place} ({_where([name], names)})"
        for place, name in (("first", first), ("worst", worst))
    ]
    return f"{text}; {', '.join(shares)}."


def _limit(limit: float | None, rerun: Flips | None) -> tuple[float, str] | None:
    """The largest share that passes, and where it comes from; None where nothing says."""
    if limit is not None:
        return limit, "--max-flipped"
    if rerun is None or rerun.share == 0.0:
        return None  # of a run that repeats itself to the bit no limit follows
    return _TIMES_RERUN * rerun.share, "twice what A run again shows: --rerun"


def _limit_sentence(between: Flips, limit: tuple[float, str] | None, rerun: Flips | None) -> str:
    if limit is None:
        why = (
            "no limit was given (--max-flipped, or --rerun)"
            if rerun is None
            else "A run again (--rerun) repeats itself, so that no limit follows; give "
            "--max-flipped"
        )
        return f"Measured, not judged: {why}."
    judged = "More than" if between.share > limit[0] else "Within"
    return f"{judged} the limit of {_percent(limit[0])} ({limit[1]})."


def _rerun_sentence(between: Flips, rerun: Flips | None) -> str:
    if rerun is None:
        return (
            "How often A differs from itself in another run is not known: record A again, in other "
            "batches or with other kernels, and add --rerun REC_A2."
        )
    text = (
        f"A run again differs from itself in {_percent(rerun.share)} of (token, layer) pairs, "
        f"{_percent(rerun.tokens_share)} of {rerun.num_tokens:,} tokens at one layer or more"
    )
    times = _times(between, rerun)
    if times is None:
        return f"{text}: nothing to hold B against."
    return f"{text}: B differs {times:.2g} times as often."


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}."


def _percent(share: float) -> str:
    """A share with three figures, so that one near its limit does not look equal to it."""
    return percent(share, ".3g")


def _times(between: Flips, rerun: Flips | None) -> float | None:
    """None where the rerun is not known, or 0."""
    return between.share / rerun.share if rerun is not None and rerun.share > 0.0 else None


def _ids_bytes(router: Router) -> int:
    return bytes_per_token("ids", router.num_experts, router.rule.top_k, router.hidden_size)


def _where(group: Sequence[str], names: Sequence[str]) -> str:
    return places(group, {"routers": [{"name": name} for name in names]})
