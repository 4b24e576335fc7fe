"""Second and third line of a sign-off: the effective router W diag(g), and it up to rotation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moegeom.core.text import all_of, percent
from moegeom.document.verdict_text import places
from moegeom.studies.changes.edit import Judgement
from moegeom.studies.changes.record import Change
from moegeom.studies.signoff.judgement import ROTATED, STATES, JudgedRouter
from moegeom.studies.signoff.record import Line, LineState

_NOTHING_IN_COMMON = "the two have no router in common."


def router_line(judged: Sequence[JudgedRouter], names: Sequence[str]) -> Line:
    """The worst state of all routers and what happened to them; ``names`` are all routers of A."""
    if not judged:
        return Line("effective router", "failed", _NOTHING_IN_COMMON)
    same = sum(one.is_identical for one in judged)
    phrases = [f"{_where(group, names)} {_phrases(group)}" for group in _groups(judged)]
    if same == len(judged):
        phrases = [f"{_compared(judged)} are the same numbers in {all_of(same, 'router')}"]
    elif same:
        phrases.append(f"{same} of {len(judged)} routers are the same numbers")
    return Line(
        "effective router",
        _worst(judged),
        f"{'; '.join(phrases)}.",
        tuple(_explained(judged, names)),
        (),
        {"routers": {one.name: _evidence(one) for one in judged}},
    )


def rotation_line(judged: Sequence[JudgedRouter], names: Sequence[str]) -> Line:
    """Whether a rotation, which keeps W diag(g)^2 W^T, explains the change of the rows."""
    if not judged:
        return Line("up to rotation", "inconclusive", _NOTHING_IN_COMMON)
    rotated = [one for one in judged if one.rotation is not None]
    moved = [one for one in judged if one not in rotated and _have_rows_failed(one)]
    parts, details = [], ()
    if rotated:
        worst = max(rotated, key=_gram_noise)
        most = f" (most: {_where([worst], names)})" if len(rotated) > 1 else ""
        parts.append(f"{_where(rotated, names)}{most}: {_rotation(worst)[1].why.removesuffix('.')}")
        if _rotation(worst)[1].state == "passed":
            details = (_rotation(worst)[0].meaning,)
    if moved:
        parts.append(f"no rotation explains what happened to {_where(moved, names)}")
    has_failed = moved or any(_rotation(one)[1].state == "failed" for one in rotated)
    places = "changed places and did not turn" if _have_moved(judged) else "are where they were"
    sentence = "; ".join(parts) or f"not needed, rows {places}"
    evidence = {"gram_noise": {one.name: _gram_noise(one) for one in rotated}}
    state = "failed" if has_failed else "passed"
    return Line("up to rotation", state, f"{sentence}.", details, (), evidence)


def _compared(judged: Sequence[JudgedRouter]) -> str:
    """What was compared: gains only where they are known on both sides."""
    has_gains = any("gain equal" in one.beside for one in judged)
    return "weights, gains and biases" if has_gains else "weights and biases"


def _have_moved(judged: Sequence[JudgedRouter]) -> bool:
    return any(one.is_permuted for one in judged)


def _worst(judged: Sequence[JudgedRouter]) -> LineState:
    states = {one.state for one in judged}
    return next(state for state in STATES if state in states)


def _have_rows_failed(one: JudgedRouter) -> bool:
    return any(j.state == "failed" and _is_of_rows(change) for change, j in one.changes)


def _is_of_rows(change: Change) -> bool:
    return change.subject == "rows"


def _rotation(one: JudgedRouter) -> tuple[Change, Judgement]:
    return next(pair for pair in one.changes if pair[0].word == ROTATED)


def _gram_noise(one: JudgedRouter) -> float:
    return float(_rotation(one)[0].evidence["gram_noise"])


def _groups(judged: Sequence[JudgedRouter]) -> list[list[JudgedRouter]]:
    """Routers grouped by their changes, identical ones left out; the worst first."""
    groups: dict[tuple[str, ...], list[JudgedRouter]] = {}
    for one in judged:
        if not one.is_identical:
            phrases = (change.phrase for change, _ in one.changes)
            texts = (other.why for other in one.others)
            groups.setdefault((one.state, *phrases, *texts), []).append(one)
    return sorted(groups.values(), key=lambda group: (STATES.index(group[0].state), -len(group)))


def _phrases(group: Sequence[JudgedRouter]) -> str:
    """What happened to all of a group, with the range of its sizes."""
    alike = zip(*([change for change, _ in one.changes] for one in group), strict=True)
    others = [other.why.removesuffix(".") for other in group[0].others]
    return " and ".join([*(_phrase(changes) for changes in alike), *others])


def _phrase(changes: Sequence[Change]) -> str:
    phrase, sizes = changes[0].phrase, [c.size for c in changes if c.size is not None]
    if not sizes:
        return phrase
    low, high = percent(min(sizes)), percent(max(sizes))
    both = low if low == high else f"{low.removesuffix(' %')} to {high}"
    return phrase.replace("{size}", both)


def _explained(judged: Sequence[JudgedRouter], names: Sequence[str]) -> Iterator[str]:
    """Each word once for each state, worst first: the largest change, and what it means."""
    seen: set[tuple[str, str]] = set()
    entries = [(change, verdict, one) for one in judged for change, verdict in one.changes]
    entries.sort(key=lambda entry: (STATES.index(entry[1].state), -(entry[0].size or 0.0)))
    for change, verdict, one in entries:
        if change.word == ROTATED:
            continue
        if (change.word, verdict.state) not in seen:
            seen.add((change.word, verdict.state))
            begin = f"{'In' if change.size is None else 'Most in'} {_where([one], names)}"
            detail = f" {begin}: {change.detail}." if change.detail else ""
            yield f"{change.word}: {verdict.why}{detail}"
    if any(one.rotation is not None for one in judged):
        yield "rotated: judged in the next line."


def _evidence(one: JudgedRouter) -> dict[str, Any]:
    changes = [
        {
            "word": change.word,
            "state": verdict.state,
            "said": verdict.why,
            "size": change.size,
            "detail": change.detail,
            "evidence": change.evidence,
        }
        for change, verdict in one.changes
    ]
    others = [other.why for other in one.others]
    return {"state": one.state, "changes": changes, "others": others, "beside": one.beside}


def _where(group: Sequence[JudgedRouter], names: Sequence[str]) -> str:
    run = {"routers": [{"name": name} for name in names]}
    return places([one.name for one in group], run)
