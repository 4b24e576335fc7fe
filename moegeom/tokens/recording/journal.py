"""The folder of an unfinished recording, with or without a journal to go on from.

The journal says what is recorded, and has a line for each complete shard.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, structs, to_builtins

from moegeom.core.documents import DocumentError, parse_json, record_of, refused_as
from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.files import (
    WorkFolder,
    move_folder,
    open_regular,
    refuse_existing,
    remove,
    writing,
)
from moegeom.core.limits import JOURNAL_LINE_BYTES
from moegeom.core.registry import unknown_name
from moegeom.core.tokens import OUTPUT_KINDS, OutputKind, Stage, TokenColumns, TopLogits
from moegeom.tokens.recording.columns import DTYPES
from moegeom.tokens.recording.facts import Count, check_words, columns_file_name, tensor_file_name
from moegeom.tokens.stages import (
    CHOSEN,
    FLOAT_DTYPES,
    STAGE_TENSORS,
    TOP_EXPERT,
    TOP_LOGITS,
    StoredTensor,
    check_output_shapes,
    has_floats,
    stored_tensors,
)

JOURNAL_FILE = "journal.jsonl"

#: The folder, beside the journal, that becomes the recording.
FILES_FOLDER = "whole"

#: What to do about an unfinished recording that cannot be gone on with.
BEGIN_AGAIN = "Delete it, or begin again with restart."

#: The value of what only one of two plans names.
_ABSENT = object()


class Noted(Struct, frozen=True):
    """A complete shard, which is a line of the journal.

    ``num_bytes`` is the size of its files together, ``domains`` are those that got their numbers
    since the shard before, ``book`` is what the shards so far have fixed.
    """

    num_tokens: Count
    num_bytes: Count
    domains: tuple[str, ...]
    book: ShapeBook


def partial_path(path: Path) -> Path:
    """The folder of the unfinished recording ``path``."""
    return path.with_name(f"{path.name}.partial")


def shard_file_names(book: ShapeBook, shard: int) -> tuple[str, ...]:
    """The files of a shard of what ``book`` describes."""
    prefixes = dict.fromkeys(tensor.file_prefix for tensor in book.tensors)
    tensors = itertools.product(book.routers, prefixes)
    names = (tensor_file_name(prefix, router, shard) for router, prefix in tensors)
    return (columns_file_name(shard), *names)


class Journal:
    """``journal.jsonl`` in ``folder``, for the shards in ``folder/whole``.

    The first line is the plan, every further line a shard. A line is on the disk or it is not:
    what a killed process left of its last one counts as absent. ``book`` is that of a recording
    without shards.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any], book: ShapeBook) -> None:
        self._path, self._files = folder / JOURNAL_FILE, folder / FILES_FOLDER
        self._plan, self._book = _as_json(plan, folder.name), book
        self._name = folder.name
        self._where = f"{folder.name}/{JOURNAL_FILE}"
        self._file: FileIO | None = None
        self._end = 0

    def open(self) -> list[Noted]:
        """The shards that are complete; none for a new journal, which gets its plan.

        Raises
        ------
        UsageError
            When the journal is of another plan.
        RecordingError
            When it is damaged, or a file of a complete shard is not as it was.
        """
        self._path.touch()
        try:
            noted = self._read()
        except RecordingError as error:
            raise RecordingError(error.message, BEGIN_AGAIN) from None
        except RecursionError:
            raise RecordingError(f"{self._where} is nested too deeply.", BEGIN_AGAIN) from None
        self._file = FileIO(self._path, "r+")
        self._file.truncate(self._end)
        if not self._end:
            self._write(self._plan)
        return noted

    def _read(self) -> list[Noted]:
        noted: list[Noted] = []
        for number, (line, end) in enumerate(_complete_lines(self._path, self._where), start=1):
            if number == 1:
                self._agree(line)
            elif not self._files.is_dir():
                break  # they have become the recording, which is not there any more either
            else:
                entry = _parse_noted(line, self._book, f"{self._where}, line {number}")
                self._check_files(entry, len(noted))
                noted.append(entry)
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
        self._write(to_builtins(noted))

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
    folder = partial_path(path)
    if not (folder / FILES_FOLDER).is_dir():
        return 0
    expected = _as_json(journal, folder.name)
    num_tokens = 0
    try:
        for number, (line, _) in enumerate(_complete_lines(folder / JOURNAL_FILE, folder.name)):
            if number > 0:
                num_tokens += record_of(Noted, line).num_tokens
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


def _parse_noted(line: dict[str, Any], begun: ShapeBook, where: str) -> Noted:
    """The shard of a line; ``begun`` is the book of the recording without shards."""
    with refused_as(RecordingError, where):
        noted = record_of(Noted, line)
    book, where = noted.book, f"{where}: book"
    if (book.stage, book.routers) != (begun.stage, begun.routers):
        raise RecordingError(f"{where} is of other routers, or of another stage.")
    check_words(book.dtype, book.outputs, where)
    for router, tensor in itertools.product(book.routers, book.tensors):
        shape = book.row_shapes.get(router, {}).get(tensor.name, ())
        if len(shape) != len(tensor.row):
            raise RecordingError(
                f"{where}: '{tensor.name}' of {router} is {shape!r:.60}; "
                f"expected numbers for {', '.join(tensor.row)}."
            )
    return noted


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


# --------------------------------------------------------------------------------------- the folder


class Draft:
    """``<path>.partial`` with a lock, and in it the folder ``whole`` that becomes the recording.

    Unless it is published, nothing stays of it, nor of a killed one. With a journal it stays,
    however the process ends, as soon as one shard is complete.
    """

    def __init__(self, path: Path, journal: Journal | None = None, restart: bool = False) -> None:
        self._path, self._journal = path, journal
        self._is_new = restart or journal is None
        self._work = WorkFolder(partial_path(path), JOURNAL_FILE if journal else "draft")
        self._num_noted = 0

    @property
    def files(self) -> Path:
        """The folder that becomes the recording."""
        return self._work.path / FILES_FOLDER

    def begin(self) -> Sequence[Noted]:
        """Makes the folder, or takes over what is there: the shards that are complete."""
        refuse_existing(self._path)
        self._work.take()
        try:
            refuse_existing(self._path)  # another process may have finished in between
            if self._is_new:
                self._work.clear()
            with writing(self._work.path):
                noted = self._journal.open() if self._journal else []
                self.files.mkdir(exist_ok=True)
                self._remove_strays(noted)
        except BaseException:
            self._release(is_last=self._journal is None)
            raise
        self._num_noted = len(noted)
        return noted

    def _remove_strays(self, noted: Sequence[Noted]) -> None:
        """Removes what the unfinished shard, or an unfinished end, left."""
        books = enumerate(shard.book for shard in noted)
        names = {name for number, book in books for name in shard_file_names(book, number)}
        for path in self.files.iterdir():
            if path.name not in names:
                remove(path)

    def note(self, num_tokens: int, domains: tuple[str, ...], book: ShapeBook) -> None:
        """Counts the next shard as complete; without a journal a shard alone is of no use."""
        if self._journal is None:
            return
        files = [self.files / name for name in shard_file_names(book, self._num_noted)]
        for file in files:
            _sync(file)
        _sync_folder(self.files)
        size = sum(file.stat().st_size for file in files)
        self._journal.note(Noted(num_tokens, size, domains, book))
        self._num_noted += 1

    def publish(self) -> None:
        """Gives the recording its name."""
        _sync_folder(self.files)
        move_folder(self.files, self._path)
        _sync_folder(self._path.parent)
        self._num_noted = 0

    def leave(self) -> None:
        """Ends the work here, published or not."""
        self._release(is_last=not self._num_noted)

    def _release(self, is_last: bool) -> None:
        if self._journal is not None:
            self._journal.close()
        self._work.release(is_last)


def _sync(file: Path) -> None:
    """Waits until a file is on the disk: the journal must not know more than there is."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, where folders can be waited for."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -------------------------------------------------------------------------------- arrays of a shard


ByRouter = dict[str, dict[str, np.ndarray]]


def check_columns(columns: TokenColumns, num_domains: int, where: str) -> int:
    """The number of tokens, when all four columns agree on it and the domains have names."""
    lengths = {name: np.shape(getattr(columns, name)) for name in DTYPES}
    num_tokens = len(columns.document)
    if num_tokens < 1 or any(shape != (num_tokens,) for shape in lengths.values()):
        raise RecordingError(f"{where}: columns have shapes {lengths}; expected one length, >= 1.")
    if columns.domain.max() >= num_domains:
        raise RecordingError(
            f"{where}: domain number {columns.domain.max()}; only {num_domains} domains are named."
        )
    return num_tokens


def output_kinds(outputs: Mapping[str, Any] | None) -> tuple[OutputKind, ...]:
    """The kinds in ``outputs``, in the order of the format whatever the order of the mapping."""
    for kind in outputs or {}:
        if kind not in OUTPUT_KINDS:
            raise unknown_name("kind of output", kind, OUTPUT_KINDS)
    return tuple(kind for kind in OUTPUT_KINDS if kind in (outputs or {}))


def shard_tensors(
    stage: Stage,
    values: Mapping[str, Any] | None,
    chosen: Mapping[str, Any] | None,
    outputs: Mapping[str, Mapping[str, Any]] | None,
) -> ByRouter:
    """What was handed to ``append``, by router and tensor name."""
    tensors: ByRouter = {}
    for router, value in (values or {}).items():
        by_name = tensors.setdefault(router, {})
        if isinstance(value, TopLogits):
            by_name.update({TOP_LOGITS.name: value.logits, TOP_EXPERT.name: value.expert})
        else:
            by_name[STAGE_TENSORS[stage][0].name] = np.asarray(value)
    for router, ids in (chosen or {}).items():
        tensors.setdefault(router, {})[CHOSEN.name] = np.asarray(ids)
    for kind, by_router in (outputs or {}).items():
        for router, output in by_router.items():
            tensors.setdefault(router, {})[kind] = np.asarray(output)
    return tensors


class ShapeBook(Struct):
    """What the first shard fixed: the float dtype, the shapes of rows, and what is recorded."""

    stage: Stage
    routers: tuple[str, ...]
    dtype: str | None
    has_chosen: bool = False
    outputs: tuple[OutputKind, ...] = ()
    row_shapes: dict[str, dict[str, tuple[Annotated[int, Meta(ge=1)], ...]]] = {}

    @classmethod
    def of(cls, stage: Stage, routers: tuple[str, ...], dtype: str | None) -> ShapeBook:
        """The book of a recording without shards; UsageError for names that nothing has."""
        if stage not in STAGE_TENSORS:
            raise unknown_name("stage", stage, STAGE_TENSORS)
        if dtype is not None and dtype not in FLOAT_DTYPES:
            raise unknown_name("dtype", dtype, FLOAT_DTYPES)
        return cls(stage, routers, dtype)

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """What every router has in every shard."""
        return stored_tensors(self.stage, self.has_chosen, self.outputs)

    @property
    def stored_dtype(self) -> str | None:
        """What floats are stored as; None when there are none."""
        return self.dtype if has_floats(self.stage, self.outputs) else None

    def draft(self) -> ShapeBook:
        """A copy to try a shard on: when it is refused, nothing of it stays in this one."""
        shapes = {router: dict(by_name) for router, by_name in self.row_shapes.items()}
        return structs.replace(self, row_shapes=shapes)

    def accept(
        self, tensors: ByRouter, outputs: tuple[OutputKind, ...], num_tokens: int, where: str
    ) -> ByRouter:
        """The arrays as they are to be stored; an error when they do not fit the first shard."""
        if set(tensors) != set(self.routers):
            raise RecordingError(
                f"{where}: arrays for routers {sorted(tensors)}; expected {sorted(self.routers)}."
            )
        has_chosen = any(CHOSEN.name in arrays for arrays in tensors.values())
        if not self.row_shapes:
            self.has_chosen, self.outputs = has_chosen, outputs
        elif outputs != self.outputs:
            raise RecordingError(
                f"{where}: outputs {', '.join(outputs) or 'none'}; "
                f"expected {', '.join(self.outputs) or 'none'}, as in every shard."
            )
        return {
            router: self._accept_router(router, tensors[router], num_tokens, where)
            for router in self.routers
        }

    def _accept_router(
        self, router: str, arrays: dict[str, np.ndarray], num_tokens: int, where: str
    ) -> dict[str, np.ndarray]:
        names = [tensor.name for tensor in self.tensors]
        if set(arrays) != set(names):
            raise RecordingError(
                f"{where}: router {router} has {sorted(arrays)}; expected {sorted(names)} "
                f"at stage {self.stage}, as in every shard."
            )
        where = f"{where}: router {router}"
        shapes = self.row_shapes.setdefault(router, {})
        for tensor in self.tensors:
            self._check_shape(tensor, arrays[tensor.name].shape, num_tokens, shapes, where)
        check_output_shapes(shapes, where)
        return {
            tensor.name: self._storable(tensor, arrays[tensor.name], f"{where}: {tensor.name}")
            for tensor in self.tensors
        }

    def _check_shape(
        self,
        tensor: StoredTensor,
        shape: tuple[int, ...],
        num_tokens: int,
        shapes: dict[str, tuple[int, ...]],
        where: str,
    ) -> None:
        first = shapes.get(tensor.name)
        is_array = len(shape) == 1 + len(tensor.row) and 0 not in shape
        if not is_array or shape[0] != num_tokens or shape[1:] != (first or shape[1:]):
            expected = ", ".join(map(str, (num_tokens, *(first or tensor.row))))
            raise RecordingError(
                f"{where}: {tensor.name} has shape {shape}; expected ({expected})."
            )
        shapes[tensor.name] = shape[1:]

    def _storable(self, tensor: StoredTensor, array: np.ndarray, where: str) -> np.ndarray:
        if not tensor.is_float:
            return _expert_numbers(array, where)
        if self.dtype is None:
            self.dtype = str(array.dtype)
        if str(array.dtype) not in FLOAT_DTYPES or self.dtype not in FLOAT_DTYPES:
            raise RecordingError(
                f"{where} is {array.dtype}; expected one of {', '.join(FLOAT_DTYPES)}."
            )
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(array, FLOAT_DTYPES[self.dtype])
        if stored.dtype != array.dtype and (np.isinf(stored) & np.isfinite(array)).any():
            raise UsageError(
                f"{where}: values up to {np.abs(array[np.isfinite(array)]).max():.3g} do not fit "
                f"{self.dtype}.",
                "Record as bfloat16 or float32.",
            )
        return stored


def _expert_numbers(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype.kind not in "iu":
        raise RecordingError(f"{where} is {array.dtype}; expected integers.")
    if array.dtype.itemsize < 4:
        return np.ascontiguousarray(array)
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if low < -1 or high > np.iinfo(np.int32).max:
        raise RecordingError(f"{where} holds {low} to {high}; expected expert numbers, or -1.")
    return np.ascontiguousarray(array, np.int32)
