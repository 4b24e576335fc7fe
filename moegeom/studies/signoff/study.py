"""``moegeom signoff A B``: may B, an export of A, stand for it? Four lines, each with a state."""

from __future__ import annotations

import dataclasses
import filecmp
import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from moegeom.core.errors import (
    PART_MISSING,
    STORAGE_UNKNOWN,
    RecordingError,
    RouterError,
    UsageError,
    about,
)
from moegeom.core.router import EXPERT_SCALE, Router, parse_layers
from moegeom.core.shapes import Float64, Int32, Int64
from moegeom.core.text import all_of, number_of, percent
from moegeom.core.tokens import TILE, SourceFacts, TokenSource, bytes_per_token
from moegeom.document.header import size
from moegeom.document.place import layers_without_router
from moegeom.engine.plan import on_all_cores
from moegeom.engine.request import ComputeOptions, Tokens
from moegeom.engine.sample import finite_tokens
from moegeom.engine.session import Session
from moegeom.engine.sources import known_routers
from moegeom.geometry.statistics import clustered_error
from moegeom.kernels.reference import same_set
from moegeom.pipeline import Watch
from moegeom.results.reader import is_results
from moegeom.router.expert_values import down_ratios
from moegeom.router.facts import compared_tables
from moegeom.studies.changes.edit import EDITS, Exported, Judgement
from moegeom.studies.changes.experts import (
    ExpertPair,
    ExpertsOfSide,
    NoPair,
    number_of_experts,
    pairs_of,
    with_experts,
)
from moegeom.studies.changes.operators.matrices import FOLDED, ROTATED
from moegeom.studies.changes.operators.rows import NOT_COMPARED, PERMUTED, PRUNED
from moegeom.studies.changes.record import (
    Change,
    ExpertsChange,
    RouterChange,
    differing,
    phrase_of,
    where,
)
from moegeom.studies.changes.router import compare_routers
from moegeom.studies.changes.row_pair import RoutersOfA
from moegeom.studies.diff.record import Side
from moegeom.studies.diff.study import (
    OpenedSide,
    compared_skipped,
    describe,
    experts_unseen,
    refuse_about_tokens,
    skipped_in_words,
    tokens_line,
)
from moegeom.studies.log_probs import log_probs
from moegeom.studies.signoff.record import (
    LINE_NAMES,
    STATES,
    Flips,
    Line,
    LineState,
    SignOff,
    SignOffRequest,
)
from moegeom.studies.signoff.storage import storage_line
from moegeom.studies.study import watched
from moegeom.tokens.memory import HeldArrays
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.alignment import match_run_b

_NOT_LOOKED_AT = (
    "all else that was quantised: it moves what routers read",
    "engines that made no recording: each has arithmetic of its own",
    "whether answers are as good: a flipped expert is not a wrong answer",
)


def sign_off(request: SignOffRequest, watch: Watch | None = None) -> SignOff:
    """The four lines. A side B whose storage cannot be read is a failed line, not an error.

    ``tokens`` is a pair of recordings of the same text, of ``a`` and of ``b``; ``rerun`` is one of
    ``a`` run again.

    Raises
    ------
    MoeGeomError
        When a side cannot be read for another reason, recordings do not belong to the two or are of
        different texts, or the request cannot be meant.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-balanced"
    >>> bool(mg.signoff(f"{sample}/step_1000", f"{sample}/step_1500"))
    False
    """
    _refuse_unmeant(request)
    with about("checkpoint", request.a):
        a = Session.of(request.a, request)
    try:
        # layers that B lacks are no mistake of the caller
        with about("checkpoint", request.b):
            b = Session.of(request.b, dataclasses.replace(request, layers=None))
    except RouterError as refusal:
        if refusal.code not in ABOUT_STORAGE:
            raise
        return _refused(request, a, refusal)
    layers = None if request.layers is None else parse_layers(request.layers)
    routers = (r for r in b.chosen if layers is None or r.layer in layers)
    return _compared(request, a, dataclasses.replace(b, chosen=tuple(routers)), watch)


def _described(target: str, side: Session, recorded: Session | None = None) -> Side:
    """A side as the header shows it."""
    tokens = "" if recorded is None else tokens_line(recorded.facts(recorded.chosen))
    return describe(OpenedSide(target, side.terms, side), tokens)


def _refused(request: SignOffRequest, a: Session, refusal: RouterError) -> SignOff:
    """Storage failed in the loader's words; nothing else is known."""
    storage = Line(
        "storage",
        "failed",
        f"the routers of B cannot be read: {refusal.message}",
        (refusal.hint,) if refusal.hint else (),
        evidence={"code": refusal.code},
    )
    text = "not checked: the routers of B cannot be read."
    lines = (storage, *(Line(name, "inconclusive", text) for name in LINE_NAMES[1:]))
    sides = _described(request.a, a), Side(request.b, "checkpoint", "", 0)
    return SignOff(sides, lines, (), ("expert weights", *_NOT_LOOKED_AT))


def _compared(request: SignOffRequest, a: Session, b: Session, watch: Watch | None) -> SignOff:
    there = {router.name: router for router in b.chosen}
    pairs = [(router, there[router.name]) for router in a.chosen if router.name in there]
    names = [router.name for router in a.chosen]
    others = RoutersOfA(a.chosen)
    compared = on_all_cores(lambda pair: compare_routers(*pair, others), pairs)
    changes = list(watched(compared, [one.name for one, _ in pairs], watch))
    experts = pairs_of(
        *(ExpertsOfSide(one.store, [p[n] for p in pairs]) for n, one in enumerate((a, b)))
    )
    judged = []
    for (one, other), change in zip(pairs, changes, strict=True):
        number = number_of_experts(experts[one.name], len(pairs))
        judged.append(judge(one, other, change, experts[one.name], number))
    tables = compared_tables(
        (a.store, b.store), (a.routers.tables, b.routers.tables), request.layers
    )
    skipped, odd = compared_skipped(a, b)
    others_by_id = [text for text, is_equal in tables if not is_equal]
    # none, or one for each
    recorded = [_recorded(*one) for one in zip((a, b), request.tokens, strict=False)]
    lines = (
        storage_line(
            a.chosen,
            b.chosen,
            {one.name for one in judged if one.is_pruned},
            [*_miscounts(judged, names), *odd, *others_by_id],
        ),
        router_line(judged, names),
        rotation_line(judged, names),
        _text_line(request, a, pairs, judged, recorded),
    )
    first, second = recorded or (None, None)
    sides = _described(request.a, a, first), _described(request.b, b, second)
    notes = tuple(_notes(request, a, b, recorded))
    of_experts = experts_unseen([one.experts for one in judged if one.experts is not None])
    unseen = (
        of_experts,
        *_NOT_LOOKED_AT,
        *_unseen(request, a, b, recorded),
        *skipped_in_words(skipped),
    )
    return SignOff(sides, lines, notes, unseen)


def _miscounts(judged: Sequence[JudgedRouter], names: Sequence[str]) -> Iterator[str]:
    """Routers of B with other numbers of experts than rows, where those of A could be read."""
    lost = [one for one in judged if one.experts is not None and one.experts.miscount]
    if lost and lost[0].experts is not None:
        yield f"{lost[0].experts.miscount} in {where([one.name for one in lost], names)} of B"


def _is_folded(pair: Exported, ratios: Float64[np.ndarray, "experts"] | None) -> bool:
    """Whether the scales of experts that went are in what these experts write."""
    if ratios is None:
        return False
    first, second = (
        np.ones(router.num_experts) if router.expert_scale is None else router.expert_scale
        for router in (pair.a, pair.b)
    )
    left = np.abs(second * ratios - first[pair.place])
    return bool((left <= _SCALE_ROUNDING * np.abs(first[pair.place])).all())


#: Two roundings to bfloat16.
_SCALE_ROUNDING = 2.0**-7

_IS_FOLDED = Judgement(
    "passed", "it is folded into the experts' outputs, as samples of their last matrices tell."
)


def _text_line(
    request: SignOffRequest,
    a: Session,
    pairs: Sequence[tuple[Router, Router]],
    judged: Sequence[JudgedRouter],
    recorded: Sequence[Session],
) -> Line:
    if not recorded:
        return unrecorded_line(request.a, request.b, a.chosen)
    routers = known_routers(
        [
            one
            for one, other in pairs
            if one.num_experts == other.num_experts and one.rule.top_k == other.rule.top_k
        ]
    )
    names = [router.name for router in a.chosen]
    if not routers:
        # experts of the two cannot be held against each other by their numbers
        text = "not compared: no router of B has as many experts, and chooses as many, as in A."
        return Line("routing on text", "inconclusive", text)
    first, second = map(_source, recorded)
    moved = {one.name: one.place for one in judged if one.is_permuted}
    between = flips(first, second, routers, moved, request, request.log_probs)
    rerun = None
    if request.rerun is not None:
        rerun = flips(first, _source(_recorded(a, request.rerun)), routers, {}, request)
    # a run with the same kernels in the same batches would repeat itself to the bit
    other_kernels = "" if "eager" in first.facts.engine else "--eager "
    again = capture_command(request.a, f"{other_kernels}--out REC_A2")
    line = measured_line(between, rerun, request.max_flipped, names, again)
    if line.state == "passed" and (what := _equal_bytes(*request.tokens)):
        text = f"{line.sentence} Their {what} are equal byte by byte, as those of a copy are."
        return dataclasses.replace(line, state="inconclusive", sentence=text)
    return line


def _recorded(side: Session, tokens: Tokens) -> Session:
    """A side opened with its recording, which has passed the tests of a scan."""
    session = side.on(tokens)
    refuse_without_choices(_source(session).facts)
    return session


def _source(recorded: Session) -> TokenSource:
    assert recorded.source is not None
    return recorded.source


def _refuse_unmeant(request: SignOffRequest) -> None:
    """Raises UsageError for options that contradict each other or the targets."""
    for target in (request.a, request.b):
        if is_results(target):
            raise UsageError(
                f"{target} holds results, which keep no weights; a sign-off compares weights.",
                "Name the checkpoint, or compare results with moegeom diff.",
            )
    if len(request.tokens) not in (0, 2):
        raise UsageError(
            f"--tokens is given {len(request.tokens)} times; expected once for A and once for B.",
            "One recording cannot tell what both models chose.",
        )
    flags = {
        "--rerun": request.rerun is not None,
        "--max-flipped": request.max_flipped is not None,
        "--logprobs": request.log_probs is not None,
    }
    refuse_about_tokens(request, bool(request.tokens), "recordings", flags)
    limit = request.max_flipped
    if limit is not None and not 0.0 <= limit < 1.0:
        raise UsageError(
            f"--max-flipped {limit:g}: expected a share from 0 to less than 1, such as 0.02.",
            "A limit of 1 could not be exceeded.",
        )
    tokens = [one for one in (*request.tokens, request.rerun) if one is not None]
    told_apart = {Path(one).resolve() if isinstance(one, str) else id(one) for one in tokens}
    if len(told_apart) < len(tokens):
        raise UsageError(
            "the same recording is named twice; it would agree with itself.",
            "Record A and B, each on its own, on the same text.",
        )


def _unseen(
    request: SignOffRequest, a: Session, b: Session, recorded: Sequence[Session]
) -> Iterator[str]:
    """What the lines of this run leave out, beside what every run does."""
    for letter, side in (("A", a), ("B", b)):
        unknown = sum(router.gain is None for router in side.chosen)
        if unknown:
            yield (
                f"the gains in front of {unknown} of {len(side.chosen)} routers of {letter} "
                "(none is known: their weights are compared without one)"
            )
        if left := len(side.routers.routers) - len(side.chosen):
            yield f"{left} of {len(side.routers.routers)} routers of {letter} (--layers)"
    if recorded and request.log_probs is None:
        yield "what a flip costs in log-probabilities (--logprobs FILE)"
    only_b = len({r.name for r in b.chosen} - {r.name for r in a.chosen})
    if only_b:
        yield f"{number_of(only_b, 'router')} that only B has"
    files = {"of A": request.tokens[:1], "of B": request.tokens[1:], "--rerun": (request.rerun,)}
    named = [(name, one) for name, tokens in files.items() for one in tokens if one is not None]
    for (one, first), (other, second) in itertools.combinations(named, 2):
        if what := _equal_bytes(first, second):
            yield (
                f"whether the recordings {one} and {other} are of two runs (their {what} are equal "
                "byte by byte, as those of a copy are, and of a run that repeats itself)"
            )
    for letter, one in zip("AB", recorded, strict=False):
        assert one.trust is not None
        if one.trust.overridden:
            yield f"whether the recording of {letter} is of {letter} (its tests failed, allowed)"
        elif one.trust.fingerprint == "unknown":
            yield f"whether the recording of {letter} is of {letter} (it names no fingerprint)"


def _equal_bytes(first: Tokens, second: Tokens) -> str:
    """What is equal byte by byte in two recordings: files, or arrays in memory; else empty."""
    if isinstance(first, HeldArrays) and isinstance(second, HeldArrays):
        return "arrays" if first.digest == second.digest else ""
    if not isinstance(first, str) or not isinstance(second, str):
        return ""
    files = [
        {path.relative_to(root): path for path in (root, *root.rglob("*")) if path.is_file()}
        for root in (Path(first), Path(second))
    ]
    is_equal = files[0].keys() == files[1].keys() and all(
        filecmp.cmp(path, files[1][name], shallow=False) for name, path in files[0].items()
    )
    return "files" if is_equal else ""


def _notes(
    request: SignOffRequest, a: Session, b: Session, recorded: Sequence[Session]
) -> Iterator[str]:
    for letter, side in (("A", a), ("B", b)):
        absent = layers_without_router(request.layers, (router.name for router in side.chosen))
        if absent:
            yield f"{letter}: {absent}."
    engines = [_source(one).facts.engine for one in recorded]
    if len(set(engines)) == 2 and all(engines):
        yield (
            f"A was recorded by '{engines[0]}', B by '{engines[1]}': what differs between the two "
            "engines is in the share."
        )
    if recorded and a.routers.fingerprint == b.routers.fingerprint:
        yield (
            "The routers of A and B have one fingerprint: which recording is whose rests on the "
            "order of --tokens."
        )


#: What the loader refuses because of how routers are stored; everything else ends the command.
ABOUT_STORAGE = frozenset({STORAGE_UNKNOWN, PART_MISSING})


# ------------------------------------------------------------- the same function, up to rotation
# B's router may differ from A's by what writing it once more in A's own precision leaves, and by
# nothing else. A fold of a smoothing scale and a rotation must write it again; that rounding is
# stated. A cast or a quantisation throws digits away that A has, and quantisers are meant to leave
# routers alone, so they fail however small they look: how many tokens they move only text tells.
# What is the same function by the rule itself passes, such as a common shift of all logits in front
# of a softmax. Renumbered experts are inconclusive: nothing here reads the experts, which must have
# moved along.
#: Words for what must move the other numbers of a router as well.
_MOVING = frozenset({FOLDED.name, ROTATED.name, PERMUTED.name, PRUNED.name})
_FOLLOWING = frozenset({"bias of the norm in front", "rows of the shared experts"})
_FOLLOWS = Judgement("inconclusive", "it changed, as the rows did; the two are not compared.")


@dataclass(frozen=True, eq=False)
class JudgedRouter:
    """One router of both sides: a judgement for each change, and for other unequal parts.

    Row i of B was row ``place[i]`` of A.
    """

    name: str
    changes: tuple[tuple[Change, Judgement], ...]
    others: tuple[Judgement, ...]
    place: Int64[np.ndarray, "experts"]
    beside: tuple[str, ...] = ()
    experts: ExpertsChange | None = None

    @property
    def state(self) -> LineState:
        """The worst of all."""
        states = {one.state for one in (*(verdict for _, verdict in self.changes), *self.others)}
        if "failed" in states:
            return "failed"
        return "inconclusive" if "inconclusive" in states else "passed"

    @property
    def is_identical(self) -> bool:
        """True when all numbers are the same."""
        return not self.changes and not self.others

    @property
    def is_permuted(self) -> bool:
        return any(change.word in (PERMUTED.name, PRUNED.name) for change, _ in self.changes)

    @property
    def is_pruned(self) -> bool:
        return any(change.word == PRUNED.name for change, _ in self.changes)

    @property
    def have_rows_failed(self) -> bool:
        return any(
            j.state == "failed" and one.subject == "rows" and one.word != PRUNED.name
            for one, j in self.changes
        )

    @property
    def rotation(self) -> tuple[Change, Judgement] | None:
        """The rotation that was found, and how it ends."""
        return next((pair for pair in self.changes if pair[0].word == ROTATED.name), None)


def judge(
    a: Router,
    b: Router,
    comparison: RouterChange | None = None,
    experts: ExpertPair | NoPair | None = None,
    number: int | None = None,
) -> JudgedRouter:
    """What happened to one router, and whether it is the same function.

    Of the ``experts`` of both, ``number`` are sampled: all, where their rows have other places.
    """
    comparison = comparison or compare_routers(a, b)
    place = np.array(comparison.place or range(b.num_experts), np.int64)
    words = {one.word for one in comparison.changes}
    every = None if words & {PERMUTED.name, PRUNED.name} else number
    comparison = with_experts(comparison, a, b, experts, every)
    sampled = comparison.experts
    pair = Exported(a, b, place, None if sampled is None else sampled.have_followed)
    ratios = None
    if isinstance(experts, ExpertPair) and EXPERT_SCALE in {c.subject for c in comparison.changes}:
        ratios = down_ratios(*experts.values, place)
    is_folded = _is_folded(pair, ratios)
    has_moved = bool(_MOVING & words)
    changes = tuple(
        (
            one,
            _FOLLOWS
            if has_moved and one.subject in _FOLLOWING
            else _IS_FOLDED
            if is_folded and one.subject == EXPERT_SCALE
            else EDITS[one.word].judge(one, pair),
        )
        for one in comparison.changes
    )
    return JudgedRouter(
        a.name, changes, tuple(_broken_parts(comparison, pair)), place, comparison.beside, sampled
    )


def _broken_parts(comparison: RouterChange, pair: Exported) -> Iterator[Judgement]:
    """Judgements of what is no change, and no router that works."""
    if NOT_COMPARED.name in {one.word for one in comparison.changes}:
        return
    a, b = pair.a, pair.b
    if a.non_finite_rows.size or b.non_finite_rows.size:
        yield Judgement("failed", "holds values that are not finite, as in A.")


_NOTHING_IN_COMMON = "the two have no router in common."


def router_line(judged: Sequence[JudgedRouter], names: Sequence[str]) -> Line:
    """The worst state of all routers and what happened to them; ``names`` are all routers of A."""
    if not judged:
        return Line("effective router", "failed", _NOTHING_IN_COMMON)
    same = sum(one.is_identical for one in judged)
    phrases = []
    for group in _groups(judged):
        # what happened to all of a group, with the range of its sizes
        alike = zip(*([change for change, _ in one.changes] for one in group), strict=True)
        others = [other.why.removesuffix(".") for other in group[0].others]
        happened = " and ".join([*map(phrase_of, alike), *others])
        phrases.append(f"{where([one.name for one in group], names)} {happened}")
    if same == len(judged):
        # gains only where they are known on both sides
        has_gains = any("gain equal" in one.beside for one in judged)
        compared = "weights, gains and biases" if has_gains else "weights and biases"
        phrases = [f"{compared} are the same numbers in {all_of(same, 'router')}"]
    elif same:
        phrases.append(f"{same} of {len(judged)} routers are the same numbers")
    return Line(
        "effective router",
        next(state for state in STATES if any(one.state == state for one in judged)),
        f"{'; '.join(phrases)}.",
        (*_explained(judged, names), *_experts(judged, names)),
        (),
        {"routers": {one.name: _evidence(one) for one in judged}},
    )


def _experts(judged: Sequence[JudgedRouter], names: Sequence[str]) -> Iterator[str]:
    """What samples of experts show beside routers, where they stand where their rows do."""
    looked_at = {one.name: one.experts for one in judged if one.experts and one.experts.sampled}
    alike = [name for name, one in looked_at.items() if not (one.other or one.unfolded)]
    if alike:
        number = sum(len(looked_at[name].sampled) for name in alike)
        folded = ", folded as the rows are" * any(looked_at[name].folded for name in alike)
        layers = where(alike, names)
        yield f"Experts: samples of {number:,} are those of their rows{folded}, in {layers}."
    if others := [name for name, one in looked_at.items() if one.changed]:
        text = differing([looked_at[name] for name in others])
        yield f"Experts: in {where(others, names)}, {text}; what they compute is not judged."


def rotation_line(judged: Sequence[JudgedRouter], names: Sequence[str]) -> Line:
    """Whether a rotation, which keeps W diag(g)^2 W^T, explains the change of the rows."""
    if not judged:
        return Line("up to rotation", "inconclusive", _NOTHING_IN_COMMON)
    rotated = {one.name: one.rotation for one in judged if one.rotation is not None}
    noise = {name: float(change.evidence["gram_noise"]) for name, (change, _) in rotated.items()}
    moved = [one.name for one in judged if one.name not in rotated and one.have_rows_failed]
    parts, details = [], ()
    if rotated:
        worst = max(noise, key=noise.__getitem__)
        change, judgement = rotated[worst]
        most = f" (most: {where([worst], names)})" if len(rotated) > 1 else ""
        parts.append(f"{where([*rotated], names)}{most}: {judgement.why.removesuffix('.')}")
        details = (change.meaning,) if judgement.state == "passed" else ()
    if moved:
        parts.append(f"no rotation is at issue in {where(moved, names)}, whose rows failed")
    has_failed = any(judgement.state == "failed" for _, judgement in rotated.values())
    have_moved = any(one.is_permuted for one in judged)
    places = "changed places and did not turn" if have_moved else "are where they were"
    sentence = "; ".join(parts) or f"not needed, rows {places}"
    state = "failed" if has_failed else "not judged" if moved else "passed"
    return Line("up to rotation", state, f"{sentence}.", details, (), {"gram_noise": noise})


def _groups(judged: Sequence[JudgedRouter]) -> list[list[JudgedRouter]]:
    """Routers grouped by their changes, identical ones left out; the worst first."""
    groups: dict[tuple[str, ...], list[JudgedRouter]] = {}
    for one in judged:
        if not one.is_identical:
            phrases = (change.phrase for change, _ in one.changes)
            texts = (other.why for other in one.others)
            groups.setdefault((one.state, *phrases, *texts), []).append(one)
    return sorted(groups.values(), key=lambda group: (STATES.index(group[0].state), -len(group)))


def _explained(judged: Sequence[JudgedRouter], names: Sequence[str]) -> Iterator[str]:
    """Each word once for each state, worst first: the largest change, and what it means."""
    seen: set[tuple[str, str]] = {(ROTATED.name, state) for state in STATES}
    entries = [(change, verdict, one.name) for one in judged for change, verdict in one.changes]
    entries.sort(key=lambda entry: (STATES.index(entry[1].state), -(entry[0].size or 0.0)))
    for change, verdict, name in entries:
        if (change.word, verdict.state) not in seen:
            seen.add((change.word, verdict.state))
            begin = f"{'In' if change.size is None else 'Most in'} {where([name], names)}"
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


# ---------------------------------------------------------------------------------- routing on text
#: Tokens that ``moegeom capture`` records when nothing is said.
_TOKENS = 16_384

#: Where none of n tokens differs, the share lies below this over n with 95 % confidence.
_NONE_SEEN = 3.0

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
        least = math.ceil(_NONE_SEEN / limit) if limit else 1
        if not is_above and between.num_tokens < least:
            state = "inconclusive"
            judged += f" Too few tokens to show that: {least:,} or more are needed."
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
    named = cast("TokenSource", _Renumbered(other, places)) if places else other
    side = match_run_b(reference, named, routers)
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

    def __getattr__(self, name: str) -> Any:
        """Whatever else a recording has."""
        return getattr(self.source, name)

    def read_chosen(
        self, router: str, start: int, stop: int
    ) -> Int32[np.ndarray, "tokens top_k"] | None:
        """Choices under their old numbers; an empty slot is -1 and stays so."""
        chosen, place = self.source.read_chosen(router, start, stop), self.places.get(router)
        if chosen is None or place is None:
            return chosen
        return np.append(place, -1).astype(np.int32)[chosen]
