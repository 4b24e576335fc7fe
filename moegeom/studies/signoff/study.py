"""``moegeom signoff A B``: may B, an export of A, stand for it? Four lines, each with a state."""

from __future__ import annotations

import dataclasses
import filecmp
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from threadpoolctl import threadpool_limits

from moegeom.core.errors import RouterError, UsageError
from moegeom.core.layer_ranges import parse_layers
from moegeom.core.router import Router, RouterSet
from moegeom.core.text import number_of
from moegeom.core.tokens import TokenSource
from moegeom.document.asked_layers import layers_without_router
from moegeom.engine.plan import num_workers
from moegeom.engine.sources import known_routers
from moegeom.engine.trust import Trust
from moegeom.pipeline import ScanRequest, Terms, examine_tokens, open_source, select_layers
from moegeom.results.reader import is_results
from moegeom.studies.diff.record import Side
from moegeom.studies.diff.sides import Opened, describe, open_side
from moegeom.studies.signoff.function import rotation_line, router_line
from moegeom.studies.signoff.judgement import JudgedRouter, judge
from moegeom.studies.signoff.record import LINE_NAMES, Line, LineName, SignOff
from moegeom.studies.signoff.storage import ABOUT_STORAGE, refused_line, storage_line
from moegeom.studies.signoff.switches import refuse_without_choices, switches
from moegeom.studies.signoff.text import (
    capture_command,
    incomparable_line,
    measured_line,
    unrecorded_line,
)

_NOT_LOOKED_AT = (
    "expert weights, and all else that was quantised: it moves what routers read",
    "engines that made no recording: each has arithmetic of its own",
    "whether answers are as good: a switched expert is not a wrong answer",
)


@dataclass(frozen=True)
class SignOffRequest(Terms):
    """What was asked for. ``a`` is the checkpoint as it was trained, ``b`` the export.

    ``tokens`` holds nothing, or a recording of each; ``null`` is a recording of A run again on the
    same text. ``max_switched`` is the share of layer-tokens above which routing on text fails.
    """

    a: str
    b: str
    tokens: Sequence[str] = ()
    null: str | None = None
    max_switched: float | None = None


@dataclass(frozen=True, eq=False)
class _Looked:
    """A side, and those of its routers that are looked at."""

    opened: Opened
    routers: tuple[Router, ...]

    @property
    def whole(self) -> RouterSet:
        """All routers of the side, which a recording belongs to."""
        assert self.opened.routers is not None
        return self.opened.routers

    def described(self, tokens: str = "") -> Side:
        """The side as the header shows it."""
        looked = dataclasses.replace(self.whole, routers=self.routers)
        side = describe(dataclasses.replace(self.opened, routers=looked), None)
        return dataclasses.replace(side, tokens=tokens)


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A recording that belongs to its side, or was allowed to although it does not."""

    source: TokenSource
    trust: Trust

    @property
    def told(self) -> str:
        """What the header says of it."""
        facts = self.source.facts
        documents = (
            f" in {number_of(facts.num_documents, 'document')}" if facts.num_documents else ""
        )
        stale = self.trust.fingerprint == "differs"
        of = ", RECORDED FROM ANOTHER CHECKPOINT (stale inputs allowed)" if stale else ""
        failed = len(self.trust.overridden) > int(stale)
        tests = ", FAILED ITS TESTS (unverified inputs allowed)" if failed else ""
        return f"{facts.num_tokens:,}{documents} ({facts.name}){of}{tests}"


def sign_off(request: SignOffRequest) -> SignOff:
    """The four lines. A side B whose storage cannot be read is a failed line, not an error.

    Raises
    ------
    MoeGeomError
        When a side cannot be read for another reason, recordings do not belong to the two or are of
        different texts, or the request cannot be meant.
    """
    _refuse_unmeant(request)
    # a recording belongs to all routers, whatever layers are asked for
    shared = request.shared()
    shared["layers"] = None
    terms = Terms(**shared)
    first = open_side(request.a, terms)
    assert first.routers is not None
    a = _Looked(first, tuple(select_layers(first.routers, request.layers)))
    try:
        second = open_side(request.b, terms)
    except RouterError as refusal:
        if refusal.code not in ABOUT_STORAGE:
            raise
        return _refused(request, a, refusal)
    assert second.routers is not None
    wanted = None if request.layers is None else parse_layers(request.layers)
    kept = (r for r in second.routers.routers if wanted is None or r.layer in wanted)
    return _compared(request, a, _Looked(second, tuple(kept)))


def _refused(request: SignOffRequest, a: _Looked, refusal: RouterError) -> SignOff:
    """Storage failed in the loader's words; nothing else is known."""
    names: tuple[LineName, ...] = LINE_NAMES[1:]
    unknown = (
        Line(name, "inconclusive", "not looked at: the routers of B cannot be read.")
        for name in names
    )
    sides = a.described(), Side(request.b, "checkpoint", "", 0)
    return SignOff(sides, (refused_line(refusal), *unknown), (), _NOT_LOOKED_AT)


def _compared(request: SignOffRequest, a: _Looked, b: _Looked) -> SignOff:
    there = {router.name: router for router in b.routers}
    pairs = [(router, there[router.name]) for router in a.routers if router.name in there]
    names = [router.name for router in a.routers]
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(num_workers()) as pool:
        judged = list(pool.map(lambda pair: judge(*pair), pairs))
    recorded = [
        _recorded(request, side, path)
        for side, path in zip((a, b), request.tokens, strict=False)  # none, or one for each
    ]
    lines = (
        storage_line(a.routers, b.routers),
        router_line(judged, names),
        rotation_line(judged, names),
        _text_line(request, a, pairs, judged, recorded),
    )
    told = [one.told for one in recorded] or ["", ""]
    sides = a.described(told[0]), b.described(told[1])
    notes = tuple(_notes(request, a, b, pairs, recorded))
    unseen = (*_NOT_LOOKED_AT, *_unseen(request, a, b, recorded))
    return SignOff(sides, lines, notes, unseen)


def _text_line(
    request: SignOffRequest,
    a: _Looked,
    pairs: Sequence[tuple[Router, Router]],
    judged: Sequence[JudgedRouter],
    recorded: Sequence[_Recorded],
) -> Line:
    if not recorded:
        return unrecorded_line(request.a, request.b, a.routers)
    known = known_routers(
        [
            one
            for one, other in pairs
            if one.num_experts == other.num_experts and one.rule.top_k == other.rule.top_k
        ]
    )
    names = [router.name for router in a.routers]
    if not known:
        return incomparable_line()
    first, second = (one.source for one in recorded)
    moved = {one.name: one.place for one in judged if one.is_permuted}
    between = switches(first, second, known, moved)
    null = None
    if request.null is not None:
        null = switches(first, _recorded(request, a, request.null).source, known, {})
    # a run with the same kernels in the same batches would repeat itself to the bit
    other_kernels = "" if "eager" in first.facts.engine else "--eager "
    again = capture_command(request.a, f"{other_kernels}--out REC_A2")
    return measured_line(between, null, request.max_switched, names, again)


def _recorded(request: SignOffRequest, side: _Looked, path: str) -> _Recorded:
    """A recording of a side, believed after the tests of every scan."""
    asked = ScanRequest(checkpoint=side.opened.target, tokens=path, **request.shared())
    source = open_source(asked, side.routers, side.whole.routers)
    assert source is not None
    refuse_without_choices(source.facts)
    trust = examine_tokens(asked, side.whole, side.routers, source)
    assert trust is not None
    return _Recorded(source, trust)


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
    about_tokens = {
        "--null": request.null is not None,
        "--max-switched": request.max_switched is not None,
        "--stale-inputs": request.stale_inputs,
        "--unverified": request.unverified,
    }
    for flag, is_given in about_tokens.items():
        if is_given and not request.tokens:
            raise UsageError(f"{flag} is about recordings, and there are no --tokens.")
    limit = request.max_switched
    if limit is not None and not 0.0 <= limit < 1.0:
        raise UsageError(
            f"--max-switched {limit:g}: expected a share from 0 to less than 1, such as 0.02.",
            "A limit of 1 could not be exceeded.",
        )
    if request.layers is not None:
        parse_layers(request.layers)
    paths = [Path(path).resolve() for path in (*request.tokens, request.null) if path is not None]
    if len(set(paths)) < len(paths):
        raise UsageError(
            "the same recording is named twice; it would agree with itself.",
            "Record A and B, each on its own, on the same text.",
        )


def _unseen(
    request: SignOffRequest, a: _Looked, b: _Looked, recorded: Sequence[_Recorded]
) -> Iterator[str]:
    """What the lines of this run leave out, beside what every run does."""
    for letter, side in (("A", a), ("B", b)):
        unknown = sum(router.gain is None for router in side.routers)
        if unknown:
            yield (
                f"the gains in front of {unknown} of {len(side.routers)} routers of {letter} "
                "(none is known: their weights are compared without one)"
            )
        if left := len(side.whole.routers) - len(side.routers):
            yield f"{left} of {len(side.whole.routers)} routers of {letter} (--layers)"
        if side.whole.skipped:
            yield number_of(
                len(side.whole.skipped),
                f"tensor of {letter} that looks like a router",
                f"tensors of {letter} that look like routers",
            )
    only_b = len({r.name for r in b.routers} - {r.name for r in a.routers})
    if only_b:
        yield f"{number_of(only_b, 'router')} that only B has"
    paths = {"of A": request.tokens[:1], "of B": request.tokens[1:], "--null": (request.null,)}
    named = [(name, path) for name, given in paths.items() for path in given if path is not None]
    for (one, first), (other, second) in itertools.combinations(named, 2):
        if _holds_the_same(Path(first), Path(second)):
            yield (
                f"whether the recordings {one} and {other} are of two runs (their files are equal "
                "byte by byte, as those of a copy are, and of a run that repeats itself)"
            )
    for letter, one in zip("AB", recorded, strict=False):
        if one.trust.overridden:
            yield f"whether the recording of {letter} is of {letter} (its tests failed, allowed)"
        elif one.trust.fingerprint == "unknown":
            yield f"whether the recording of {letter} is of {letter} (it names no fingerprint)"


def _holds_the_same(first: Path, second: Path) -> bool:
    """Whether two files, or all files of two folders, are equal byte by byte."""
    files = [
        {path.relative_to(root): path for path in (root, *root.rglob("*")) if path.is_file()}
        for root in (first, second)
    ]
    return files[0].keys() == files[1].keys() and all(
        filecmp.cmp(path, files[1][name], shallow=False) for name, path in files[0].items()
    )


def _notes(
    request: SignOffRequest,
    a: _Looked,
    b: _Looked,
    pairs: Sequence[tuple[Router, Router]],
    recorded: Sequence[_Recorded],
) -> Iterator[str]:
    for letter, side in (("A", a), ("B", b)):
        absent = layers_without_router(request.layers, (router.name for router in side.routers))
        if absent:
            yield f"{letter}: {absent}."
    engines = [one.source.facts.engine for one in recorded]
    if len(set(engines)) == 2 and all(engines):
        yield (
            f"A was recorded by '{engines[0]}', B by '{engines[1]}': what differs between the two "
            "engines is in the share."
        )
    if recorded and a.whole.fingerprint == b.whole.fingerprint:
        yield (
            "The routers of A and B have one fingerprint: which recording is whose rests on the "
            "order of --tokens."
        )
