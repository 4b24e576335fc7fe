"""Where the tokens of a command come from, and what cannot be asked of them."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from moegeom import __version__ as moegeom_version
from moegeom.core.digest import digest_of
from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.core.files import WorkFolder, is_there, writing
from moegeom.core.router import Router, RouterSet
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, SourceFacts, TokenSource
from moegeom.engine.out import early_out
from moegeom.engine.parameters import option_of
from moegeom.engine.prepared import unavailable
from moegeom.engine.request import RunBTerms, ScanRequest, Terms, Tokens
from moegeom.engine.run_facts import files_identity
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.reduction import MOST_TOKENS
from moegeom.kernels.reductions.samples import CAPACITY
from moegeom.results.plans import FILES_FOLDER, PLAN_FILE, is_begun
from moegeom.tokens.files import TokenFiles
from moegeom.tokens.memory import HeldArrays
from moegeom.tokens.open import open_tokens
from moegeom.tokens.source import Company, KnownRouter
from moegeom.tokens.source import Request as Asked
from moegeom.tokens.traces.alignment import RunB, match_run_b
from moegeom.tokens.traces.source import CountedSource, TraceSource
from moegeom.tokens.traces.survey import FileJournal

#: Options of the file of A in a hint; each has a sister for B.
_OF_TOKENS = re.compile(r"(--(?:stage|dialect|expert-map|map))(?![\w-])")


def open_source(
    terms: Terms,
    tokens: Tokens | None,
    routers: Sequence[Router],
    whole: Sequence[Router],
    company: Company | None = None,
) -> TokenSource | None:
    """The tokens to route: a recording, a trace, or foreign files.

    ``whole`` are all routers of the checkpoint, which a trace is held against; ``company`` goes
    with the first pass over it.
    """
    names, all_routers = tuple(router.name for router in routers), known_routers(whole)
    if isinstance(tokens, HeldArrays):
        return tokens.open(Asked(terms.stage, terms.router_map, names, all_routers))
    if isinstance(tokens, str | TokenFiles):
        router_map = terms.router_map or None
        return open_tokens(
            *(tokens, terms.stage, router_map, names, all_routers, terms.dialect),
            *(terms.expert_map, company),
        )
    return tokens


def refuse_too_many(source: SourceFacts | None) -> None:
    """Raises RecordingError where sums of so many tokens cannot fit their counters.

    That is what can be known before: a counter belongs to one of NUM_BLOCKS blocks of documents.
    ``finish_passes`` tests each.
    """
    most = NUM_BLOCKS * MOST_TOKENS
    if source is not None and source.num_tokens > most:
        raise RecordingError(
            f"{source.name}: holds {number_of(source.num_tokens, 'token')}; sums in units of 2^-36 "
            f"hold {most:,} at most.",
            "Measure parts of the text apart, each into results of its own.",
        )


def heard_routers(routers: RouterSet, source: TokenSource | None) -> RouterSet:
    """The routers without the listed ones whose choices a source does not know.

    Raises
    ------
    RecordingError
        If it records a listed router and not what that chose, or if nothing else is left.
    """
    silent = [r for r in routers.routers if r.listed and not _is_heard(r, source)]
    if not silent:
        return routers
    remaining = tuple(router for router in routers.routers if router not in silent)
    if not remaining:
        raise RecordingError(
            f"{routers.checkpoint}: no choice of router {silent[0].name} is recorded, and it does "
            f"not follow from router and input: {silent[0].listed}.",
            _RECORD_CHOICES,
        )
    expected = routers.num_expected
    return replace(
        routers,
        routers=remaining,
        num_expected=None if expected is None else expected - len(silent),
    )


_RECORD_CHOICES = "Record the experts that the model chose: a recording of stage ids, or a trace."


def _is_heard(router: Router, source: TokenSource | None) -> bool:
    if source is None or router.name not in source.facts.routers:
        return False
    if not source.facts.has_chosen and not isinstance(source, CountedSource):
        raise RecordingError(
            f"{source.facts.name}: does not say what router {router.name} chose, and that does "
            f"not follow from router and input: {router.listed}.",
            f"{_RECORD_CHOICES} --layers leaves it out.",
        )
    return True


def open_run_b(
    request: ScanRequest, source: TokenSource | None, whole: Sequence[Router]
) -> RunB | None:
    """What another run chose, matched to the tokens of this one; None where none was named."""
    if request.run_b is None:
        return None
    if source is None or isinstance(source, CountedSource):
        raise UsageError("--run-b needs --tokens, a recording of the same text.")
    all_routers = known_routers(whole)
    opened = open_choices(request.run_b, request, all_routers)
    return match_run_b(source, opened, all_routers)


def open_choices(
    path: str,
    terms: RunBTerms,
    all_routers: tuple[KnownRouter, ...],
    company: Company | None = None,
) -> TokenSource:
    """What another run chose, token by token: a recording, a trace or a foreign file.

    Raises
    ------
    UsageError
        When it holds counts only.
    """
    names = tuple(router.name for router in all_routers)
    try:
        opened = open_tokens(
            *(path, terms.stage_b, terms.map_b or None, names, all_routers),
            *(terms.dialect_b, terms.expert_map_b, company),
        )
    except MoeGeomError as refusal:  # whose hints are those of --tokens
        refusal.hint = _OF_TOKENS.sub(r"\1-b", refusal.hint)
        raise
    if isinstance(opened, CountedSource):
        raise UsageError(
            f"{opened.facts.name}: holds counts only; they cannot be compared token by token.",
            "moegeom scan --tokens reads loads from them.",
        )
    return opened


def known_routers(whole: Sequence[Router]) -> tuple[KnownRouter, ...]:
    """What a trace is held against."""
    return tuple(KnownRouter(r.name, r.stack, r.layer, r.num_experts, r.rule.top_k) for r in whole)


def refuse_uncomparable(
    request: ScanRequest, routers: Sequence[Router], source: TokenSource | None
) -> None:
    """Raises RecordingError when other arithmetics are all that is asked for and none can be tried.

    Better said before the measuring than after it.
    """
    if not request.arithmetics or request.run_b is not None or request.checkpoint_b is not None:
        return
    assert source is not None, "a boundary report has tokens"
    recorded = [router for router in routers if router.name in source.facts.routers]
    reasons = [unavailable(router, source.facts).get("flip") for router in recorded]
    if isinstance(source, CountedSource):
        reasons = [f"{source.facts.name} holds counts only"]
    if None not in reasons:
        raise RecordingError(
            f"{source.facts.name}: no other arithmetic can be tried: "
            f"{reasons[0] if reasons else 'it records none of the routers asked for'}.",
            "Record what the routers read: moegeom capture "
            f"{shlex.quote(request.checkpoint)} --text FILE --keep hidden --out REC",
        )


def refuse_no_rows(request: ScanRequest, source: TokenSource | None) -> None:
    """Raises UsageError when a row per token is asked for and there are no tokens to give one."""
    if request.per_token and (source is None or isinstance(source, CountedSource)):
        what = "there are no tokens" if source is None else f"{source.facts.name} holds counts only"
        raise UsageError(f"--per-token: {what}.", "Name a recording with --tokens.")


def refuse_no_tokens(terms: Terms) -> None:
    """Raises UsageError for options that choose tokens, where there are none."""
    for name, is_given in (
        ("exclude_first", terms.exclude_first > 0),
        ("non_finite", terms.skips_non_finite),
    ):
        if is_given:
            raise UsageError(
                f"{option_of(name)} chooses tokens, and there are none.", "Add --tokens REC."
            )


def num_first_tokens(terms: Terms, source: TokenSource | None) -> int:
    """How many tokens ``exclude_first`` leaves out.

    Raises
    ------
    UsageError
        When nobody recorded where documents begin, and when every token would be left out.
    """
    if source is None or not terms.exclude_first:
        return 0
    option = f"--exclude-first {terms.exclude_first}"
    if not _has_positions(source):
        raise UsageError(
            f"{option}: {source.facts.name} holds no positions.",
            "It needs a recording that says where documents begin.",
        )
    total, num_first = source.facts.num_tokens, 0
    for start in range(0, total, TILE):
        columns = source.read_columns(start, min(start + TILE, total))
        num_first += int((~terms.counted(columns)).sum())
    if num_first == total:
        raise UsageError(
            f"{option} leaves none of the {number_of(total, 'token')} of {source.facts.name}.",
            "Documents are shorter than that: leave out fewer.",
        )
    return num_first


def _has_positions(source: TokenSource) -> bool:
    """Whether the first tokens have one; a file may hold documents without."""
    if not source.facts.has_documents:
        return False
    first = source.read_columns(0, min(TILE, source.facts.num_tokens))
    return bool((first.position >= 0).all())


# --------------------------------------------------------------------------------------- first pass


#: Seconds between two words on how far it is.
_SECONDS = 10.0

#: Bytes of traces that are read without a word.
_UNSAID = 20_000_000


@contextmanager
def first_pass_of(
    request: ScanRequest, routers: RouterSet, on_message: Callable[[str], None] | None
) -> Iterator[Company]:
    """What goes with the first pass over the tokens of a scan.

    ``OUT.partial`` is held meanwhile. Of a single file, and beside results that are there already,
    nothing is kept.

    Raises
    ------
    UsageError
        When another process writes these results, or somebody else made the folder.
    """
    out = early_out(request, routers.fingerprint)
    if out is None or is_there(out):
        yield Company(begun=begun(on_message), advanced=_told(on_message))
        return
    work = WorkFolder(out.with_name(f"{out.name}.partial"), PLAN_FILE)
    work.take()
    folder = work.path / FILES_FOLDER
    try:
        if request.restart:
            work.clear()
        with writing(work.path):
            folder.mkdir(exist_ok=True)
        places = [] if request.expert_map is None else files_identity(request.expert_map)
        terms = (moegeom_version, request.dialect, places, known_routers(routers.routers))
        journal = FileJournal(folder, digest_of(*terms))
        if on_message is not None and journal.num_kept:
            files = number_of(journal.num_kept, "file")
            on_message(f"going on in {work.path}: the first pass over {files} is done")
        yield Company(journal, begun(on_message), _told(on_message))
    except KeyboardInterrupt as error:
        files = number_of(len([*folder.glob("*.npz")]), "file")
        error.add_note(
            f"what the first pass found in {files} is kept in {work.path}; the same command goes "
            "on there"
        )
        raise
    finally:
        work.release(is_last=not is_begun(work.path))


def begun(on_message: Callable[[str], None] | None) -> Callable[[int], None] | None:
    """Says how much is read before a scan begins, where that takes seconds; None where nobody
    listens.
    """

    def say(num_bytes: int) -> None:
        if on_message is not None and num_bytes > _UNSAID:
            on_message(f"reads {num_bytes / 1e6:,.0f} MB of traces first: some 5 s for each 100 MB")

    return None if on_message is None else say


def _told(on_message: Callable[[str], None] | None) -> Callable[[int, int], None] | None:
    """Says how far it is, every few seconds; None where nobody listens."""
    if on_message is None:
        return None
    last = time.monotonic()

    def advanced(number: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS:
            on_message(f"first pass: {number:,} of {number_of(total, 'file')}")
            last = time.monotonic()

    return advanced


#: Bytes of the sums of the routers that are in step.
_MOST_BYTES = 1 << 30


def in_step(
    routers: Sequence[Router], sources: Sequence[TokenSource | None]
) -> Iterator[tuple[Router, ...]]:
    """The routers in their order, in groups that read the tokens of the sources together; one group
    where there are none to read.
    """
    group: list[Router] = []
    for router in routers:
        if group and not _fits(router, group, sources):
            yield tuple(group)
            group = []
        group.append(router)
    if group:
        yield tuple(group)


def _fits(router: Router, group: Sequence[Router], sources: Sequence[TokenSource | None]) -> bool:
    """Whether some source is a trace of the group and of the router, and their sums have room."""
    members = (*group, router)
    if sources[0] is None:
        return True
    if not any(isinstance(source, TraceSource) for source in sources):
        return False
    heard = [source.facts for source in sources if source is not None]
    if any(one.name not in facts.routers for facts in heard for one in members):
        return False
    return sum(_state_bytes(one, heard[0].num_tokens) for one in members) <= _MOST_BYTES


def _state_bytes(router: Router, num_tokens: int) -> int:
    """What the largest sums of a router take at most: pairs of experts, sets of them, and a bit for
    each token that flips.

    Sets are an entry of key, count and members each; as many again wait to be sorted in.
    """
    pairs = 8 * NUM_BLOCKS * router.num_experts**2
    sets = 2 * min(num_tokens, CAPACITY) * (16 + 2 * router.rule.top_k)
    return pairs + sets + num_tokens // 8
