"""Untrusted text: records of JSON, encodings of ids, a table-driven reader of replies, CSV.

A record is a line, one object, or an object of a list. Ids are nested lists, base64 of an npy file,
or bytes whose shape stands elsewhere. ``ReplyFields`` is the table of what a reply says of its
requests.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import math
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from msgspec import Meta

from moegeom.core.documents import DocumentError, json_value, record_of, refused_as
from moegeom.core.errors import RecordingError
from moegeom.core.files import open_regular
from moegeom.core.limits import (
    BLANK_LINES,
    LIST_DEPTH,
    RECORD_BYTES,
    RECORD_VALUES,
    SEQUENCE_TOKENS,
)
from moegeom.core.shapes import Int64, Integer
from moegeom.tokens.foreign.npy import parse_npy
from moegeom.tokens.traces.trace import (
    BEGINNING,
    WITHOUT_IDS,
    Entry,
    Pieces,
    Place,
    RequestTrace,
    in_pieces,
)

T = TypeVar("T")

#: A step, a layer, a token by its number.
Number = Annotated[int, Meta(ge=0, lt=2**31)]

#: Bytes that are searched to recognise a file: past long texts and token ids of first answers.
_SEARCHED = 8_000_000

_SUFFIXES = (".jsonl", ".ndjson", ".json")


def shows(path: Path, *patterns: bytes) -> bool:
    """Whether a JSON file has every one of ``patterns`` near its beginning."""
    if not path.name.endswith(_SUFFIXES) or not path.is_file():
        return False
    with open_regular(path, follows=True) as stream:
        beginning = stream.read(_SEARCHED)
    return all(re.search(pattern, beginning) for pattern in patterns)


@dataclass(frozen=True)
class JsonRecord:
    """An object, its place in the file in words, and where it begins.

    Objects of one document begin at ``BEGINNING``: none can be read without the others.
    """

    where: str
    value: dict[str, Any]
    place: Place

    def of(self, kind: type[T]) -> T:
        """The record of this kind that the object is; RecordingError where a field is none."""
        with refused_as(RecordingError, self.where):
            return record_of(kind, self.value)


def json_records(path: Path, place: Place = BEGINNING) -> Iterator[JsonRecord]:
    """Every record from ``place`` on, lines one by one, whatever the size of the file.

    Raises
    ------
    RecordingError
        When a record is too large, malformed, or no object.
    """
    with open_regular(path, follows=True) as stream:
        first = stream.readline(RECORD_BYTES + 1)
        stream.seek(place[0])
        if first.strip().startswith(b"{") and first.strip().endswith(b"}"):  # a record of its own
            yield from _lines(path.name, stream.readline, place)
        else:
            yield from _document(path.name, stream.read(RECORD_BYTES + 1))


def _lines(name: str, read: Callable[[int], bytes], place: Place) -> Iterator[JsonRecord]:
    offset, number = place
    left = BLANK_LINES
    while line := read(RECORD_BYTES + 1):
        place = (offset, number)
        number += 1
        offset += len(line)
        if line.strip():
            where = f"{name}: line {number}"
            yield JsonRecord(where, _object(_parse(line, where), where), place)
        elif (left := left - 1) < 0:
            raise RecordingError(f"{name}: has more than {BLANK_LINES:,} lines without anything.")


def _document(name: str, raw: bytes) -> Iterator[JsonRecord]:
    document = _parse(raw, name)
    for number, item in enumerate(document if isinstance(document, list) else [document], start=1):
        where = f"{name}: entry {number}" if isinstance(document, list) else name
        yield JsonRecord(where, _object(item, where), BEGINNING)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordingError(f"{where}: holds a {type(value).__name__}; expected an object.")
    return value


def _parse(raw: bytes, where: str) -> Any:
    if len(raw) > RECORD_BYTES:
        raise RecordingError(
            f"{where}: has more than the {RECORD_BYTES:,} bytes allowed for one record.",
            "Write one response per line (JSONL).",
        )
    values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values > RECORD_VALUES:
        raise RecordingError(
            f"{where}: has {values:,} values, more than the {RECORD_VALUES:,} allowed in one "
            "record.",
            "Write one response per line; newer engines write ids as base64.",
        )
    try:
        return json_value(raw.removeprefix(BOM_UTF8))
    except DocumentError as error:
        raise RecordingError(f"{where}: {error!s:.120}.", "Is it whole? Copy it again.") from None


# ------------------------------------------------------------------------------------- encodings

Ids = Integer[np.ndarray, "..."]

#: base64 of the first six bytes of every npy file.
_NPY_START = "k05VTVBZ"


def nested_ids(value: Any, where: str) -> Ids:
    """Lists of lists of integers, of one length at each depth; nothing else is converted."""
    shape, flat = [], [value]
    while len(shape) < LIST_DEPTH and set(map(type, flat)) == {list}:
        lengths = set(map(len, flat))
        if len(lengths) > 1:
            raise RecordingError(f"{where}: lists of unequal length ({_some(lengths)}).")
        shape.append(lengths.pop())
        flat = list(itertools.chain.from_iterable(flat))
    kinds = {kind.__name__ for kind in map(type, flat)} or {"nothing"}
    if kinds != {"int"} or not shape:
        raise RecordingError(f"{where}: holds {_some(kinds)}; expected nested lists of integers.")
    try:
        return np.array(flat, np.int64).reshape(shape)
    except OverflowError:
        raise RecordingError(f"{where}: holds an integer beyond 64 bits.") from None


def _some(values: set[Any]) -> str:
    return ", ".join(sorted(map(str, values))[:4])


def npy_ids(value: Any, where: str) -> Ids:
    """base64 of what ``numpy.save`` writes."""
    return parse_npy(from_base64(value, where), where)


def flat_int32(value: Any, where: str) -> Ids:
    """base64 of little-endian 32-bit integers, whose shape is not stored."""
    raw = from_base64(value, where)
    if len(raw) % 4:
        raise RecordingError(
            f"{where}: {len(raw)} bytes are no whole number of 32-bit integers.",
            "It is truncated, or written by another engine (--dialect).",
        )
    return np.frombuffer(raw, "<i4").astype(np.int32, copy=False)


def shaped(raw: bytes, dtype: np.dtype, shape: list[int], where: str) -> Ids:
    """Little-endian numbers in a shape that they must fill."""
    needed = math.prod(shape) * dtype.itemsize
    if needed != len(raw):
        raise RecordingError(
            f"{where}: {len(raw)} bytes; shape {shape} of {dtype} needs {needed}.",
            "It is truncated, or the dtype is not the one that was written.",
        )
    return np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)


def from_base64(value: Any, where: str) -> bytes:
    """The bytes of a base64 text."""
    if not isinstance(value, str):
        raise RecordingError(f"{where}: holds {type(value).__name__}; expected a base64 text.")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise RecordingError(
            f"{where}: {len(value)} characters that are no base64.", "Is the text cut off?"
        ) from None


#: Decoders by what a value looks like; a dialect takes the ones that its engine writes.
Encodings = Mapping[str, Callable[[Any, str], Ids]]


def decoded(encodings: Encodings, value: Any, where: str) -> Ids:
    """The ids, by the first encoding that this value looks like.

    Raises
    ------
    RecordingError
        When the dialect has no such encoding, or the value is damaged.
    """
    look = _look(value)
    if look not in encodings:
        raise RecordingError(
            f"{where}: ids are {look}; expected {' or '.join(encodings)}.",
            "Another engine wrote it (--dialect)?",
        )
    return encodings[look](value, where)


def _look(value: Any) -> str:
    if isinstance(value, str):
        return "base64 of npy" if value.startswith(_NPY_START) else "base64 without shape"
    looks = {list: "nested lists", dict: "an object with data, shape and dtype"}
    return looks.get(type(value), type(value).__name__)


# --------------------------------------------------------------------------------------- replies

Paths = tuple[str, ...]


@dataclass(frozen=True)
class ReplyFields:
    """Where a record holds its requests: the table that describes a dialect of replies.

    A path is keys joined by dots. ``items`` leads from the record to what may hold ids:
    ``choices[]`` is each object of a list, ``choices[0]`` the first, "" the record itself. Other
    paths begin at the item, behind a slash at the record; of several, the first with a value
    counts.

    Parameters
    ----------
    decode
        Turns what stands at ``ids`` into an array.
    before
        Ids of the prompt, where they stand apart.
    numbers, name
        What names the record: whole numbers together, else a text or number. Of several requests
        each has its own number behind it.
    prompt, generated
        Token ids. Where ``needs_tokens``, a request without them is refused.
    num_prompt, num_generated
        Counts of tokens; not read where they are those of several choices together.
    num_omitted, start
        Tokens that were cached; the position of the first row.
    label
        What messages call an item, in front of its number; "" where there is one.
    """

    items: str
    decode: Callable[[Any, str], Ids]
    ids: str = "routed_experts"
    before: Paths = ()
    numbers: Paths = ()
    name: Paths = ("/id", "/request_id", "/rid")
    prompt: Paths = ("prompt_token_ids", "/prompt_token_ids")
    generated: Paths = ("token_ids",)
    needs_tokens: bool = False
    num_prompt: Paths = ("/usage.prompt_tokens",)
    num_generated: Paths = ("/usage.completion_tokens",)
    num_omitted: Paths = ()
    start: Paths = ()
    label: str = "choice"


def replies(
    writer: str,
    tables: Sequence[ReplyFields],
    missing: str = f"replies {WITHOUT_IDS}",
    select: Callable[[Sequence[RequestTrace]], Sequence[RequestTrace]] | None = None,
    left_out: str = "",
) -> Callable[[Path, Place], Pieces]:
    """The reader, by pieces, of files whose records are described by the first of ``tables`` whose
    items they have.

    Records without ids are counted as ``missing``; what ``select`` leaves out of the requests of a
    record, as ``left_out``.
    """

    def entries(path: Path, place: Place) -> Iterator[Entry]:
        for record in json_records(path, place):
            of_record = list(_requests(record.value, tables, record.where))
            chosen = of_record if select is None else select(of_record)
            counts = {missing: not of_record, left_out: len(of_record) - len(chosen)}
            if len(chosen) == 1:
                chosen = [replace(chosen[0], name=chosen[0].name.rpartition("/")[0])]
            yield record.place, chosen, counts

    return lambda path, place: in_pieces(path.name, writer, entries(path, place))


def _requests(
    record: Mapping[str, Any], tables: Sequence[ReplyFields], where: str
) -> Iterator[RequestTrace]:
    """A request for each item with ids, named by the record and the number of the item."""
    items: list[Mapping[str, Any]] = []
    for fields in tables:
        items = _items(record, fields.items, where)
        if items:
            break
    for number, item in enumerate(items):
        value, _ = _at(item, record, (fields.ids,))
        if value is None:
            continue
        at = f"{where}: {fields.label} {number}" if fields.label else where
        ids = fields.decode(value, at)
        before, _ = _at(item, record, fields.before)
        if before is not None:
            ids = _joined_ids(fields.decode(before, at), ids, at)
        name, is_place = _name(item, record, fields, where)
        prompt, generated = (
            _token_ids(item, record, paths, at) for paths in (fields.prompt, fields.generated)
        )
        sequence = None
        if prompt is not None and generated is not None:
            sequence = np.concatenate([prompt, generated])
        elif fields.needs_tokens:
            raise RecordingError(
                f"{at}: {fields.ids} without {fields.prompt[0]} and {fields.generated[0]}.",
                "The writer puts all three into one item.",
            )
        num_prompt = _count(item, record, fields.num_prompt, at)
        num_tokens = None
        if len(record.get("choices") or ()) < 2:  # the counts of a reply add up its choices
            num_generated = _count(item, record, fields.num_generated, at)
            if num_prompt is not None and num_generated is not None:
                num_tokens = num_prompt + num_generated
        yield RequestTrace(
            f"{name}/{number}",
            ids,
            token_ids=sequence,
            num_tokens=num_tokens,
            num_prompt=num_prompt if prompt is None else len(prompt),
            num_omitted=_count(item, record, fields.num_omitted, at),
            start=_count(item, record, fields.start, at),
            is_place=is_place,
        )


def _items(record: Mapping[str, Any], path: str, where: str) -> list[Mapping[str, Any]]:
    """The objects at a path of the record; none where there are none."""
    items = [record]
    for key in filter(None, path.split(".")):
        name, bracket, _ = key.partition("[")
        if bracket:
            most = 1 if key.endswith("[0]") else None
            items = [one for item in items for one in _objects(item, name, where)[:most]]
        else:
            items = [item[name] for item in items if isinstance(item.get(name), dict)]
    return items


def _objects(holder: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    """A list of objects; empty where the key is absent."""
    value = holder.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RecordingError(f"{where}: '{key}' is {value!r:.60}; expected a list of objects.")
    return value


def _at(item: Mapping[str, Any], record: Mapping[str, Any], paths: Paths) -> tuple[Any, str]:
    """The first value at one of the paths, and its key; None where there is none."""
    key = ""
    for path in paths:
        value: Any = record if path.startswith("/") else item
        for key in path.removeprefix("/").split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            return value, key
    return None, key


def _name(
    item: Mapping[str, Any], record: Mapping[str, Any], fields: ReplyFields, where: str
) -> tuple[str, bool]:
    """What the writer calls a record, else the place in the file; and whether it is that."""
    place = where.rpartition(": ")[2]
    numbers = [_at(item, record, (path,))[0] for path in fields.numbers]
    if numbers and all(type(number) is int and 0 <= number < 2**31 for number in numbers):
        return "-".join(map(str, numbers)), False
    for path in fields.name:
        value, _ = _at(item, record, (path,))
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)[:80], str(value)[:80] == place
    return place, True


def _count(
    item: Mapping[str, Any], record: Mapping[str, Any], paths: Paths, where: str
) -> int | None:
    """A number of tokens, or None where the reply does not count them."""
    value, key = _at(item, record, paths)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < SEQUENCE_TOKENS:
        raise RecordingError(f"{where}: '{key}' is {value!r:.40}; expected a number of tokens.")
    return value


def _token_ids(
    item: Mapping[str, Any], record: Mapping[str, Any], paths: Paths, where: str
) -> Int64[np.ndarray, "tokens"] | None:
    """A flat list of token ids, or None where there is none."""
    value, _ = _at(item, record, paths)
    if not isinstance(value, list):
        return None
    if set(map(type, value)) <= {int} and (
        not value or (min(value) >= 0 and max(value) < SEQUENCE_TOKENS)
    ):
        return np.array(value, np.int64)
    raise RecordingError(f"{where}: token ids are {value!r:.60}; expected numbers from 0 on.")


def _joined_ids(prompt: Ids, generated: Ids, where: str) -> Ids:
    """Rows of a prompt and of what was generated, where they stand apart."""
    if not generated.size:
        return prompt
    if prompt.shape[1:] != generated.shape[1:]:
        raise RecordingError(
            f"{where}: rows of the prompt have shape {prompt.shape[1:]}, those of the generation "
            f"{generated.shape[1:]}."
        )
    return np.concatenate([prompt, generated])
