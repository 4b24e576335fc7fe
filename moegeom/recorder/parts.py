"""What the ranks of a distributed run write, and how it becomes one recording."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from moegeom.core.errors import RecordingError
from moegeom.tokens.recording.facts import FACTS_FILE
from moegeom.tokens.recording.merge import merge_recordings

_PART = re.compile(r"(\d{5})-of-(\d{5})")


def part_path(out: Path, rank: int, num_ranks: int) -> Path:
    """Where a rank writes: ``out`` itself when it is alone."""
    if num_ranks == 1:
        return out
    return parts_folder(out) / f"{rank:05d}-of-{num_ranks:05d}"


def parts_folder(out: Path) -> Path:
    """The folder with the parts of a recording."""
    return out.with_name(f"{out.name}.parts")


def merge_when_complete(out: Path, num_ranks: int) -> None:
    """Merges the parts of all ranks into ``out`` once the last of them is there.

    Whichever rank ends last does it. No rank waits for another, so that one that failed leaves
    the parts of the others as they are (``merge_parts`` says which are missing).
    """
    if num_ranks == 1:
        return
    folder = parts_folder(out)
    if len(_parts(folder)) < num_ranks or out.exists():
        return
    mark = folder / "merging"
    try:
        # of two ranks that end at the same time, one makes the folder
        mark.mkdir()
    except FileExistsError:
        return
    try:
        merge_parts(out)
    finally:
        shutil.rmtree(mark, ignore_errors=True)


def merge_parts(out: Path) -> Path:
    """The recording ``out`` from its parts, which are removed; for ranks that share no disk.

    Raises
    ------
    RecordingError
        When a part is missing, or two parts do not agree.
    """
    folder = parts_folder(out)
    parts = _parts(folder)
    counts = {int(part.name[-5:]) for part in parts}
    if len(counts) != 1:
        found = "no parts" if not counts else f"parts of runs of {sorted(counts)} ranks"
        raise RecordingError(
            f"{folder.name}: {found}; expected the parts of one run.",
            "Remove those of the other run.",
        )
    (num_ranks,) = counts
    there = {int(part.name[:5]) for part in parts}
    missing = sorted(set(range(num_ranks)) - there)
    if missing:
        raise RecordingError(
            f"{folder.name}: the parts of ranks {', '.join(map(str, missing))} of {num_ranks} are "
            "missing.",
            "Copy them here, or record again.",
        )
    merge_recordings(parts, out)
    shutil.rmtree(folder)
    return out


def _parts(folder: Path) -> list[Path]:
    """Complete parts, by rank."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if _PART.fullmatch(path.name) and (path / FACTS_FILE).is_file()
    )
