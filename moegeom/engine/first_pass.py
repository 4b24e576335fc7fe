"""Traces of many files before and during a scan: a first pass over them, and routers in step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moegeom import __version__ as moegeom_version
from moegeom.core.digest import digest_of
from moegeom.core.files import WorkFolder, is_there, writing
from moegeom.core.router import Router, RouterSet
from moegeom.core.text import number_of
from moegeom.core.tokens import TokenSource
from moegeom.engine.out import early_out
from moegeom.engine.request import ScanRequest
from moegeom.engine.run_facts import files_identity
from moegeom.engine.sources import known_routers
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.reductions.sketches import CAPACITY
from moegeom.results.plans import FILES_FOLDER, PLAN_FILE, is_begun
from moegeom.tokens.source import Company
from moegeom.tokens.traces.source import TraceSource
from moegeom.tokens.traces.survey import FileJournal

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
        error.add_note(
            f"what the first pass found in {number_of(_count(folder), 'file')} is kept in "
            f"{work.path}; the same command goes on there"
        )
        raise
    finally:
        work.release(is_last=not is_begun(work.path))


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*.npz"))


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
