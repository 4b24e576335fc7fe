"""``moegeom signoff A B``: may B, an export of A, stand for it? Four lines, each with a state."""

from __future__ import annotations

import dataclasses
import filecmp
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from moegeom.checkpoint.dtypes import PLAIN_FLOATS
from moegeom.core.errors import PART_MISSING, STORAGE_UNKNOWN, RouterError, UsageError, about
from moegeom.core.router import Norm, Router, parse_layers
from moegeom.core.text import all_of, number_of
from moegeom.core.tokens import TokenSource
from moegeom.document.requested_layers import layers_without_router
from moegeom.engine.plan import on_all_cores
from moegeom.engine.request import Tokens
from moegeom.engine.session import Session
from moegeom.engine.sources import known_routers
from moegeom.pipeline import Watch
from moegeom.results.reader import is_results
from moegeom.studies.changes.record import where
from moegeom.studies.changes.router import is_same_norm, rule_differences, shape_text
from moegeom.studies.changes.row_pair import RoutersOfA
from moegeom.studies.diff.record import Side
from moegeom.studies.diff.study import OpenedSide, describe, refuse_about_tokens, tokens_line
from moegeom.studies.signoff.function import JudgedRouter, judge, rotation_line, router_line
from moegeom.studies.signoff.record import LINE_NAMES, Line, SignOff, SignOffRequest
from moegeom.studies.signoff.text import (
    capture_command,
    flips,
    measured_line,
    refuse_without_choices,
    unrecorded_line,
)
from moegeom.tokens.memory import HeldArrays

_NOT_LOOKED_AT = (
    "expert weights, and all else that was quantised: it moves what routers read",
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
    return _compared(request, a, dataclasses.replace(b, chosen=tuple(routers)))


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
    return SignOff(sides, lines, (), _NOT_LOOKED_AT)


def _compared(request: SignOffRequest, a: Session, b: Session) -> SignOff:
    there = {router.name: router for router in b.chosen}
    pairs = [(router, there[router.name]) for router in a.chosen if router.name in there]
    names = [router.name for router in a.chosen]
    others = RoutersOfA(a.chosen)
    judged = list(on_all_cores(lambda pair: judge(pair[0], pair[1], others), pairs))
    # none, or one for each
    recorded = [_recorded(*one) for one in zip((a, b), request.tokens, strict=False)]
    lines = (
        storage_line(a.chosen, b.chosen),
        router_line(judged, names),
        rotation_line(judged, names),
        _text_line(request, a, pairs, judged, recorded),
    )
    first, second = recorded or (None, None)
    sides = _described(request.a, a, first), _described(request.b, b, second)
    notes = tuple(_notes(request, a, b, recorded))
    unseen = (*_NOT_LOOKED_AT, *_unseen(request, a, b, recorded))
    return SignOff(sides, lines, notes, unseen)


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
    return measured_line(between, rerun, request.max_flipped, names, again)


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
        if side.routers.skipped:
            yield number_of(
                len(side.routers.skipped),
                f"tensor of {letter} that looks like a router",
                f"tensors of {letter} that look like routers",
            )
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


def storage_line(a: Sequence[Router], b: Sequence[Router]) -> Line:
    """Fails for routers of A that B lacks, and for another shape, rule or norm in front.

    Quantised storage that the loader can decode passes and is named: what it did to the router is
    the business of the next line. Routers that only B has are told and not compared.
    """
    by_name = {router.name: router for router in b}
    pairs = [(router, by_name[router.name]) for router in a if router.name in by_name]
    names = [router.name for router in a]
    wrong = [*_missing(a, by_name), *_others(pairs, names)]
    stored = f"stored {stored_as(a)} in A, {stored_as(b)} in B"
    if stored_as(a) == stored_as(b):
        stored = f"stored {stored_as(a)} in both"
    only_b = [name for name in by_name if name not in names]
    more = (f"Only in B and not compared: {', '.join(only_b[:4])}.",) if only_b else ()
    evidence = {"stored": {side: stored_as(routers) for side, routers in (("a", a), ("b", b))}}
    evidence |= {"only_in_a": [n for n in names if n not in by_name], "only_in_b": only_b}
    if wrong:
        return Line("storage", "failed", f"{'; '.join(wrong)}; {stored}.", more, (), evidence)
    count = all_of(len(a), "router of A is", "routers of A are")
    sentence = f"{count} in B with the same shape and rule; {stored}."
    return Line("storage", "passed", sentence, more, (), evidence)


def stored_as(routers: Sequence[Router]) -> str:
    """``bf16``, or ``bf16 (46), f8_e4m3 with scales (2)`` where they differ."""
    dtypes = (router.provenance.stored_dtype for router in routers)
    counted = Counter(f"{d.lower()}{' with scales' * (d not in PLAIN_FLOATS)}" for d in dtypes)
    if len(counted) < 2:
        return next(iter(counted), "nothing")
    return ", ".join(f"{storage} ({count})" for storage, count in counted.most_common())


def _missing(a: Sequence[Router], b: dict[str, Router]) -> Iterator[str]:
    missing = [router.name for router in a if router.name not in b]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        yield f"{len(missing)} of {len(a)} routers missing in B: {', '.join(missing[:4])}{more}"


def _others(pairs: Sequence[tuple[Router, Router]], names: Sequence[str]) -> Iterator[str]:
    """Shapes, rules and norms that differ: the first of each kind, and in how many routers."""
    kinds: dict[str, list[tuple[str, str]]] = {"shape": [], "rule": [], "norm": []}
    for a, b in pairs:
        if a.weight.shape != b.weight.shape:
            kinds["shape"].append((a.name, f"{shape_text(a)} in A, {shape_text(b)} in B"))
        if rules := rule_differences(a.rule, b.rule):
            kinds["rule"].append((a.name, "; ".join(rules)))
        if not is_same_norm(a.norm, b.norm):
            kinds["norm"].append((a.name, f"{_norm(a.norm)} in A, {_norm(b.norm)} in B"))
    for kind, others in kinds.items():
        if others:
            yield f"another {kind} in {where([name for name, _ in others], names)}: {others[0][1]}"


def _norm(norm: Norm | None) -> str:
    """A gain that is stored with another offset is the same norm."""
    return "none" if norm is None else f"{norm.kind} norm with epsilon {norm.eps:g}"
