"""The files of a source of tokens: paths and patterns, in natural order."""

from __future__ import annotations

import glob
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.files import open_regular
from moegeom.core.limits import TOKEN_FILES
from moegeom.core.text import natural, number_of

#: Bytes of the first line of a file that are looked at.
FIRST_LINE = 2**16


@dataclass(frozen=True)
class TokenFiles:
    """Several paths or patterns, whose files are one source."""

    paths: tuple[str, ...]

    @classmethod
    def of(cls, paths: Iterable[str | os.PathLike[str]]) -> TokenFiles | str | None:
        """Paths as one source of tokens: a single path as it is, None without paths."""
        named = tuple(os.fspath(path) for path in paths)
        return cls(named) if len(named) > 1 else named[0] if named else None


def are_paths(value: Any) -> bool:
    """Whether a value is a list or tuple of paths."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(path, str | os.PathLike) for path in value)
    )


def paths_of(tokens: str | Path | TokenFiles) -> tuple[Path, ...]:
    """The files and folders: of each path or pattern in natural order (``9.pt`` before ``10.pt``).

    A path that is there stands for itself, whatever characters it has; one path that is nowhere is
    left to be refused where it is opened.

    Raises
    ------
    RecordingError
        When a pattern matches nothing, or one of several paths is nowhere.
    UsageError
        When a file is named twice, or there are too many.
    """
    patterns = tokens.paths if isinstance(tokens, TokenFiles) else (os.fspath(tokens),)
    if len(patterns) == 1 and not _is_pattern(patterns[0]):
        return (Path(patterns[0]),)
    paths = [path for pattern in patterns for path in _matches(pattern)]
    if len(paths) > TOKEN_FILES:
        raise UsageError(
            f"{patterns[0]}: {number_of(len(paths), 'file')}; at most {TOKEN_FILES:,} are read."
        )
    seen: dict[str, Path] = {}
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise UsageError(f"{path} is named twice, also as {seen[real]}.", "Name it once.")
        seen[real] = path
    return tuple(paths)


def are_there(tokens: str | TokenFiles) -> bool:
    """Whether every path is there, and every pattern matches a file."""
    patterns = tokens.paths if isinstance(tokens, TokenFiles) else (tokens,)
    return all(Path(path).exists() or bool(_globbed(path)) for path in patterns)


def name_of(paths: Sequence[Path]) -> str:
    """The name of these files in messages and results."""
    if len(paths) == 1:
        return paths[0].resolve().name
    return f"{paths[0].name} and {len(paths) - 1:,} more"


def in_folder(folder: Path) -> list[Path]:
    """The files of a folder in natural order, without hidden ones and without folders in it."""
    files = (path for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    return sorted(files, key=lambda path: natural(path.name))


def refuse_damaged(path: Path) -> None:
    """Raises RecordingError for a file that is empty, or whose beginning or end is lost."""
    if not path.is_file():
        return
    flaw, ending = "", path.suffix.lower()
    if not path.stat().st_size:
        flaw = "empty: it has 0 bytes"
    elif ending == ".npz" and not zipfile.is_zipfile(path):
        flaw = f"truncated, or no npz file: its {path.stat().st_size:,} bytes end without the list "
        flaw += "of its arrays"
    elif ending in (".json", ".jsonl"):
        with open_regular(path, follows=True) as file:
            line = file.readline(FIRST_LINE)
        # a document may go on in further lines
        if ending == ".jsonl" and line.strip() and len(line) < FIRST_LINE and not _is_json(line):
            flaw = "line 1 is no JSON: truncated, or another kind of file"
        elif not line.lstrip().startswith((b"{", b"[", b"\xef\xbb\xbf")) and line.strip():
            flaw = "it does not begin as JSON does"
    if flaw:
        raise RecordingError(f"{path.name}: {flaw}.", "Was it copied before it was written whole?")


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line)
    except DocumentError:
        return False
    return True


def _is_pattern(path: str) -> bool:
    return glob.has_magic(path) and not os.path.lexists(path)


def _globbed(pattern: str) -> list[Path]:
    # Path.glob refuses absolute patterns
    return [Path(path) for path in glob.glob(pattern, recursive=True)]  # noqa: PTH207


def _matches(pattern: str) -> list[Path]:
    if not _is_pattern(pattern):
        if not os.path.lexists(pattern):
            raise RecordingError(f"{Path(pattern).name}: no such file or directory.")
        return [Path(pattern)]
    paths = _globbed(pattern)
    if not paths:
        raise RecordingError(
            f"{pattern}: no file matches.", "* stands for any characters of a name, ** for folders."
        )
    return sorted(paths, key=lambda path: [*map(natural, path.parts)])
