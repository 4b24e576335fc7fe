"""The first pass over traces of many files, before a scan: what it found of each file is kept in
``OUT.partial``, so that an interrupted one goes on, and a scan that goes on need not repeat it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moegeom import __version__ as moegeom_version
from moegeom.core.digest import digest_of
from moegeom.core.files import WorkFolder, is_there, writing
from moegeom.core.router import RouterSet
from moegeom.core.text import number_of
from moegeom.engine.out import early_out
from moegeom.engine.request import ScanRequest
from moegeom.engine.run_facts import files_identity
from moegeom.engine.sources import known_routers
from moegeom.results.plans import FILES_FOLDER, PLAN_FILE, is_begun
from moegeom.tokens.source import Company
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
