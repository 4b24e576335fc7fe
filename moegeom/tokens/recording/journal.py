"""The journal of an unfinished recording: what is recorded, and a line for each complete shard."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from moegeom.core.documents import DocumentError, parse_json, record_of, refused_as
from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.files import open_regular
from moegeom.core.limits import JOURNAL_LINE_BYTES
from moegeom.core.tokens import OutputKind
from moegeom.tokens.recording.facts import Count, check_words, columns_file_name, tensor_file_name
from moegeom.tokens.recording.shard_arrays import ShapeBook
from moegeom.tokens.stages import stored_tensors

JOURNAL_FILE = "journal.jsonl"

#: The folder, beside the journal, that becomes the recording.
FILES_FOLDER = "whole"

#: What to do about an unfinished recording that cannot be gone on with.
BEGIN_AGAIN = "Delete it, or begin again with restart."

#: The value of what only one of two plans names.
_ABSENT = object()


@dataclass(frozen=True)
class Noted:
    """A complete shard.

    ``num_bytes`` is the size of its files together, ``domains`` are those that got their numbers
    since the shard before, ``book`` is what the shards so far have fixed.
    """

    num_tokens: int
    num_bytes: int
    domains: tuple[str, ...]
    book: ShapeBook


def shard_file_names(book: ShapeBook, shard: int) -> tuple[str, ...]:
    """The files of a shard of what ``book`` describes."""
    prefixes = dict.fromkeys(tensor.file_prefix for tensor in book.tensors)
    tensors = itertools.product(book.routers, prefixes)
    names = (tensor_file_name(prefix, router, shard) for router, prefix in tensors)
    return (columns_file_name(shard), *names)


class Journal:
    """``journal.jsonl`` in ``folder``, for the shards in ``folder/whole``.

    The first line is the plan, every further line a shard. A line is on the disk or it is not:
    what a killed process left of its last one counts as absent.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self._path, self._files = folder / JOURNAL_FILE, folder / FILES_FOLDER
        self._plan = _as_json(plan, folder.name)
        self._name = folder.name
        self._where = f"{folder.name}/{JOURNAL_FILE}"
        self._file: FileIO | None = None
        self._end = 0
        self._has_book = False

    def open(self, book: ShapeBook) -> list[Noted]:
        """The shards that are complete; none for a new journal, which gets its plan.

        ``book`` is that of a recording without shards.

        Raises
        ------
        UsageError
            When the journal is of another plan.
        RecordingError
            When it is damaged, or a file of a complete shard is not as it was.
        """
        self._path.touch()
        try:
            noted = self._read(book)
        except RecordingError as error:
            raise RecordingError(error.message, BEGIN_AGAIN) from None
        except RecursionError:
            raise RecordingError(f"{self._where} is nested too deeply.", BEGIN_AGAIN) from None
        self._file = FileIO(self._path, "r+")
        self._file.truncate(self._end)
        if not self._end:
            self._write(self._plan)
        self._has_book = bool(noted)
        return noted

    def _read(self, book: ShapeBook) -> list[Noted]:
        noted: list[Noted] = []
        for number, (line, end) in enumerate(_complete_lines(self._path, self._where), start=1):
            if number == 1:
                self._agree(line)
            elif not self._files.is_dir():
                break  # they have become the recording, which is not there any more either
            else:
                entry = _parse_noted(line, book, f"{self._where}, line {number}")
                self._check_files(entry, len(noted))
                noted.append(entry)
                book = entry.book
            self._end = end
        return noted

    def _agree(self, before: Any) -> None:
        difference = _first_difference(before, self._plan)
        if difference:
            key, was, now = difference
            raise UsageError(
                f"{self._name} holds an unfinished recording of something else: {key} was {was} "
                f"and is {now} now.",
                BEGIN_AGAIN,
            )

    def _check_files(self, noted: Noted, shard: int) -> None:
        num_bytes = 0
        for name in shard_file_names(noted.book, shard):
            try:
                num_bytes += (self._files / name).stat().st_size
            except OSError as error:
                raise RecordingError(
                    f"{self._name}: {name} cannot be read ({error.strerror}); its shard was "
                    "complete."
                ) from None
        if num_bytes != noted.num_bytes:
            raise RecordingError(
                f"{self._name}: the files of shard {shard} have {num_bytes} bytes; "
                f"{JOURNAL_FILE} says {noted.num_bytes}."
            )

    def note(self, noted: Noted) -> None:
        """Writes down that a shard is complete; on the disk when this returns."""
        line: dict[str, Any] = {
            "num_tokens": noted.num_tokens,
            "num_bytes": noted.num_bytes,
            "domains": list(noted.domains),
        }
        if not self._has_book:
            line["book"] = noted.book.as_json()
        self._write(line)
        self._has_book = True

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            raise RecordingError(f"{self._where} is not open.")
        data = json.dumps(line).encode() + b"\n"
        # from the last complete line on: a line that did not fit on the disk leaves no trace
        self._file.seek(self._end)
        self._file.truncate()
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        os.fsync(self._file.fileno())
        self._end += len(data)

    def close(self) -> None:
        """Lets go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def recorded_tokens(path: Path, journal: Mapping[str, Any]) -> int:
    """Tokens in the complete shards of the unfinished recording ``path`` of this journal.

    ``journal`` is what the writer is going to be given. 0 where there is nothing to go on with, or
    something else: the writer says what is wrong.
    """
    folder = path.with_name(f"{path.name}.partial")
    if not (folder / FILES_FOLDER).is_dir():
        return 0
    expected = _as_json(journal, folder.name)
    num_tokens = 0
    try:
        for number, (line, _) in enumerate(_complete_lines(folder / JOURNAL_FILE, folder.name)):
            if number > 0:
                num_tokens += record_of(_Line, line).num_tokens
            elif _first_difference(line.get("journal"), expected):
                return 0
    except (OSError, DocumentError, RecordingError, RecursionError):
        return 0
    return num_tokens


def _complete_lines(path: Path, where: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Objects of the complete lines, and where each ends."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        number = 0
        while line := file.readline(JOURNAL_LINE_BYTES):
            number += 1
            try:
                entry = parse_json(line, JOURNAL_LINE_BYTES) if line.endswith(b"\n") else None
            except DocumentError:
                entry = None
            if isinstance(entry, dict):
                yield entry, file.tell()
            elif file.tell() < size:
                raise RecordingError(f"{where}: line {number} is damaged.")


class _Book(Struct):
    """What the first shard of a recording fixed; shapes by router and tensor."""

    dtype: str | None
    has_chosen: bool
    row_shapes: dict[str, dict[str, tuple[Annotated[int, Meta(ge=1)], ...]]]
    outputs: tuple[OutputKind, ...] = ()


class _Line(Struct):
    """A shard; the first one has the book."""

    num_tokens: Count
    num_bytes: Count
    domains: tuple[str, ...]
    book: _Book | None = None


def _parse_noted(line: dict[str, Any], book: ShapeBook, where: str) -> Noted:
    with refused_as(RecordingError, where):
        shard = record_of(_Line, line)
    if shard.book is not None:
        book = _checked(shard.book, book, f"{where}: book")
    elif not book.row_shapes:
        raise RecordingError(f"{where}: 'book' is missing.")
    return Noted(shard.num_tokens, shard.num_bytes, shard.domains, book)


def _checked(stored: _Book, book: ShapeBook, where: str) -> ShapeBook:
    """The book of a recording without shards with what its first shard fixed."""
    check_words(stored.dtype, stored.outputs, where)
    for router in book.routers:
        shapes = stored.row_shapes.get(router, {})
        for tensor in stored_tensors(book.stage, stored.has_chosen, stored.outputs):
            shape = shapes.get(tensor.name, ())
            if len(shape) != len(tensor.row):
                raise RecordingError(
                    f"{where}: '{tensor.name}' of {router} is {shape!r:.60}; "
                    f"expected numbers for {', '.join(tensor.row)}."
                )
    return replace(
        book,
        dtype=stored.dtype,
        has_chosen=stored.has_chosen,
        outputs=stored.outputs,
        row_shapes=stored.row_shapes,
    )


def _as_json(value: Mapping[str, Any], where: str) -> Any:
    """The value as it comes back from a file."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{where}: the journal cannot be written as JSON ({error}).",
            "Describe what is recorded by texts, finite numbers, lists and mappings.",
        ) from None


def _first_difference(before: Any, now: Any, key: str = "") -> tuple[str, str, str] | None:
    """Name and both values of the first entry that differs, as JSON; None when there is none."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [
            (f"{key}.{name}" if key else name, before.get(name, _ABSENT), now.get(name, _ABSENT))
            for name in {**now, **before}
        ]
    elif isinstance(before, list) and isinstance(now, list):
        both = itertools.zip_longest(before, now, fillvalue=_ABSENT)
        pairs = [(f"{key}[{n}]", was, is_now) for n, (was, is_now) in enumerate(both)]
    else:
        was, is_now = _shown(before), _shown(now)
        return (key, f"{was:.100}", f"{is_now:.100}") if was != is_now else None
    differences = (_first_difference(was, is_now, name) for name, was, is_now in pairs)
    return next((difference for difference in differences if difference), None)


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
