"""Parts of a scan, for many machines: each folds its share of the tiles, and the states add up.

States are integers and merge in any order, so parts give what one machine gives, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from moegeom.checkpoint.remote.url import scheme_of
from moegeom.core.digest import digest_of_file
from moegeom.core.documents import parse_json, record_of, refused_as
from moegeom.core.errors import ResultsError, UsageError
from moegeom.core.files import (
    move_folder,
    new_folder,
    read_regular,
    reading,
    refuse_existing,
    remove,
    write_whole,
)
from moegeom.core.limits import MOST_JSON, SCAN_PARTS
from moegeom.core.text import number_of
from moegeom.engine.loop import NAMED, Progress, read_snapshot, write_snapshot
from moegeom.engine.parameters import family_parameters, option_of, parameters_of, request_of
from moegeom.engine.request import ScanRequest
from moegeom.kernels.reduction import REDUCTIONS
from moegeom.results.plans import differing_parts
from moegeom.tokens.files import TokenFiles

PART_FILE = "part.json"

SCHEMA = 1

_PART = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")

#: A share of the tiles of a pass folded: its progress.
Work = Callable[[Sequence[int]], Progress]


@dataclass(frozen=True)
class Share:
    """The ``number``-th of ``count`` parts, from 1 on."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def tiles(self, tiles: Sequence[int], num_tiles: int, together: int = 1) -> Sequence[int]:
        """Its share of the tiles: neighbours, in runs of ``together`` that stay whole.

        Every tile is in one part of all; a part may have none.
        """
        groups = math.ceil(num_tiles / together)
        first, last = (
            groups * place // self.count * together for place in (self.number - 1, self.number)
        )
        if isinstance(tiles, range):
            return range(min(first, num_tiles), min(last, num_tiles))
        return [tile for tile in tiles if first <= tile < last]


def parse_part(text: str) -> Share:
    """``3/64``; UsageError for anything else."""
    match = _PART.fullmatch(text)
    if match is None or not int(match[1]) <= int(match[2]) <= SCAN_PARTS:
        raise UsageError(f"--part {text[:40]}: expected i/n, such as 3/64, with i from 1 to n.")
    return Share(int(match[1]), int(match[2]))


def merged(progresses: Sequence[Progress]) -> Progress:
    """What one fold of all the tokens would have: the parts have no token in common.

    States are integers and sorted rows, so that neither the order of the parts nor how they are
    put together changes a bit. Each part has the reductions of the first; there is one at least.
    """
    first, *others = progresses
    states = dict(first.states)
    for other in others:
        states = {
            name: REDUCTIONS[name].merge(state, other.states[name])
            for name, state in states.items()
        }
    lost = sorted(token for part in progresses for token in part.non_finite)
    return Progress(
        next_tile=max(part.next_tile for part in progresses),
        num_tokens=sum(part.num_tokens for part in progresses),
        non_finite=tuple(lost[:NAMED]),
        num_non_finite=sum(part.num_non_finite for part in progresses),
        states=states,
    )


# ------------------------------------------------------------------------------------------ writing
class PartWriter:
    """The folder of one part: its states, and ``part.json`` that says what they are of."""

    is_whole = False

    def __init__(
        self, out: Path, part: Share, request: ScanRequest, plan: Mapping[str, Any], num_tiles: int
    ) -> None:
        may_replace = is_part if request.overwrite else None
        refuse_existing(out, "Choose another --out, or --overwrite.", may_replace)
        self._out, self._part, self._plan = out, part, plan
        self._overwrite = request.overwrite
        self._request = parameters_of_part(request)
        self._num_tiles = num_tiles
        self._states: list[dict[str, Any]] = []

    def __enter__(self) -> PartWriter:
        self._work = new_folder(self._out)
        self._folder = self._work / "whole"  # with the rights of a folder that is made now
        self._folder.mkdir()
        return self

    def fold(
        self, router: str, name: str, tiles: Sequence[int], together: int, work: Work
    ) -> Progress:
        """Folds the share of this part and keeps its states."""
        progress = work(self._part.tiles(tiles, self._num_tiles, together))
        file = f"{len(self._states):06d}.npz"
        write_snapshot(self._folder / file, progress)
        self._states.append(
            {
                "router": router,
                "pass": name,
                "file": file,
                "num_tokens": progress.num_tokens,
                "digest": _digest(self._folder / file),
            }
        )
        return progress

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            remove(self._work)

    def _finish(self) -> None:
        record = {
            "schema": SCHEMA,
            "part": str(self._part),
            "request": self._request,
            "plan": self._plan,
            "states": self._states,
        }
        write_whole(self._folder / PART_FILE, json.dumps(record, indent=1))
        # what is there was seen to hold a part
        move_folder(self._folder, self._out, self._work / "replaced" if self._overwrite else None)


def is_part(path: Path) -> bool:
    """Whether the folder is a part of a scan."""
    return (path / PART_FILE).is_file()


#: Fields of a request that do not go into parts: where, and how fast.
_NOT_TOLD = frozenset(
    "out part engine restart overwrite remote device num_workers batch_tokens".split()
)


def parameters_of_part(request: ScanRequest) -> dict[str, Any]:
    """The parameters of the request, as JSON has them, but for those with their usual values.

    Raises
    ------
    UsageError
        Where one is no text, number or list of these: tokens in memory, noise; or a URL, but for
        the checkpoint: whoever merges fetches nothing that a part names.
    """
    usual = ScanRequest(request.checkpoint)
    parameters = {f.name: getattr(request, f.name) for f in dataclasses.fields(ScanRequest)}
    parameters |= family_parameters(parameters.pop("requested_family"))
    standing = {**vars(usual), **family_parameters(usual.requested_family)}
    return {
        name: _told(name, value)
        for name, value in parameters.items()
        if name not in _NOT_TOLD and (name == "checkpoint" or value != standing[name])
    }


def _told(name: str, value: Any) -> Any:
    """A parameter as JSON has it, and as a request takes it again."""
    if isinstance(value, TokenFiles):
        value = value.paths
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_told(name, one) for one in value]
    if isinstance(value, Mapping):
        return {key: _told(name, one) for key, one in value.items()}
    is_url = name != "checkpoint" and isinstance(value, str) and bool(scheme_of(value))
    if name == "per_token" or is_url or not isinstance(value, str | int | float):
        raise UsageError(
            f"{option_of(name)} cannot be cut into parts: a part holds files and numbers alone."
        )
    return value


def _digest(path: Path) -> str:
    with reading(path, ResultsError):
        return digest_of_file(path)


# ------------------------------------------------------------------------------------------ merging
class StoredState(Struct, frozen=True, rename={"pass_name": "pass"}):
    """What a pass over a router folded: a file, and what it hashes to."""

    router: str
    pass_name: str
    file: Annotated[str, Meta(pattern=r"^[0-9]{6}\.npz\Z")]
    digest: str


class _Version(Struct):
    schema: int


class _PartFile(Struct):
    part: str
    request: dict[str, Any]
    plan: dict[str, Any]
    states: tuple[StoredState, ...]


@dataclass(frozen=True)
class StoredPart:
    """One part as it was written."""

    folder: Path
    part: Share
    request: ScanRequest
    plan: Mapping[str, Any]
    states: tuple[StoredState, ...]

    def progress(self, router: str, name: str) -> Progress:
        """What it folded of a pass; ResultsError where that is not as it was written."""
        matches = [s for s in self.states if (s.router, s.pass_name) == (router, name)]
        if not matches:
            raise ResultsError(
                f"{self.folder.name}: holds nothing of router {router[:60]}, pass {name[:60]}.",
                _AGAIN,
            )
        path = self.folder / matches[0].file
        progress = read_snapshot(path)
        if progress is None or _digest(path) != matches[0].digest:
            raise ResultsError(f"{self.folder.name}/{path.name}: is not as it was written.", _AGAIN)
        return progress


_AGAIN = "Make this part again: moegeom scan ... --part i/n."


def read_part(folder: Path) -> StoredPart:
    """``part.json`` of a folder that anyone may have written.

    Raises
    ------
    ResultsError
        When it is no part, or one of another version.
    """
    where = f"{folder.name}/{PART_FILE}"
    if not is_part(folder):
        raise ResultsError(
            f"{folder}: no part of a scan (no {PART_FILE} in it).",
            "Parts are what moegeom scan ... --part i/n --out FOLDER writes.",
        )
    with reading(folder / PART_FILE, ResultsError):
        raw = read_regular(folder / PART_FILE, MOST_JSON, follows=True)
    with refused_as(ResultsError, where, _AGAIN):
        document = parse_json(raw)
        if (schema := record_of(_Version, document).schema) != SCHEMA:
            raise ResultsError(f"{where}: schema {schema}; this moegeom reads schema {SCHEMA}.")
        stored = record_of(_PartFile, document)
    try:
        part, request = parse_part(stored.part), _request(stored.request, where)
    except UsageError as error:
        raise ResultsError(error.message, error.hint) from None
    return StoredPart(folder, part, request, stored.plan, stored.states)


def _request(fields: Mapping[str, Any], where: str) -> ScanRequest:
    """The request whose parameters a part writes as these, word for word; no other is taken."""
    names = parameters_of(ScanRequest).keys() - _NOT_TOLD
    if fields.keys() <= names and isinstance(fields.get("checkpoint"), str):
        request = request_of(ScanRequest, **fields)
        are_files = isinstance(request.tokens, str | TokenFiles | None)
        if are_files and parameters_of_part(request) == fields:
            return request
    raise ResultsError(f"{where}: holds a request that no part has.", _AGAIN)


@dataclass(frozen=True)
class MissingParts:
    """Parts of ``count`` that are not among these ``folders``."""

    numbers: tuple[int, ...]
    count: int
    folders: tuple[str, ...]


def _of_copies(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan without what a copy of a file of tokens does not share with it."""
    files = plan.get("token_files")
    named = files if isinstance(files, list) else []
    return {**plan, "token_files": [one[:4] if isinstance(one, list) else one for one in named]}


@dataclass(frozen=True)
class MergedParts:
    """All parts of one scan, in their order: a folding that reads and adds."""

    parts: tuple[StoredPart, ...]
    is_whole = True

    @classmethod
    def of(cls, folders: Sequence[Path]) -> MergedParts | MissingParts:
        """The parts in these folders, or which are missing.

        Raises
        ------
        ResultsError
            For a folder that is no part, parts of different scans, and two that differ of one
            number.
        """
        by_number: dict[int, StoredPart] = {}
        first: StoredPart | None = None
        for one in map(read_part, folders):
            first = first or one
            if one.part.count != first.part.count:
                raise ResultsError(
                    f"{one.folder}: part {one.part}, while {first.folder} is part {first.part}.",
                    "Give the parts of one scan.",
                )
            if differing := differing_parts(*map(_of_copies, (first.plan, one.plan))):
                raise ResultsError(
                    f"{one.folder}: of another scan than {first.folder}: "
                    f"{', '.join(d[:60] for d in differing[:20])} differ.",
                    "Give the parts of one scan.",
                )
            other = by_number.setdefault(one.part.number, one)
            if other.states != one.states:
                raise ResultsError(
                    f"{one.folder} and {other.folder} are both part {one.part}, and differ.",
                    "Give each part once.",
                )
        if first is None:
            raise UsageError("no part was given.", "moegeom merge PART... --out OUT.")
        numbers = range(1, first.part.count + 1)
        if missing := tuple(n for n in numbers if n not in by_number):
            return MissingParts(missing, first.part.count, tuple(map(str, folders)))
        return cls(tuple(by_number[number] for number in numbers))

    def same_plan(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """The plan that parts were made by, which is that of a scan here but for devices.

        Raises
        ------
        ResultsError
            Where checkpoint, tokens or versions here are not those of the parts.
        """
        before = dict(self.parts[0].plan)
        here = json.loads(json.dumps(plan))
        options = before.get("options")
        if not isinstance(options, dict) or "device" not in options:
            raise ResultsError(f"{self.parts[0].folder}: its plan names no device.", _AGAIN)
        here["options"]["device"] = options["device"]
        if differing := differing_parts(*map(_of_copies, (before, here))):
            raise ResultsError(
                f"{self.parts[0].folder}: {', '.join(d[:60] for d in differing[:20])} here are not "
                "those that the parts were made with.",
                "Merge with the same version beside the same checkpoint and tokens.",
            )
        return before

    def fold(
        self, router: str, name: str, tiles: Sequence[int], together: int, work: Work
    ) -> Progress:
        """The states of all parts added up in their order, two of them in memory."""
        states = (part.progress(router, name) for part in self.parts)
        return functools.reduce(lambda first, other: merged([first, other]), states)

    def __str__(self) -> str:
        return number_of(len(self.parts), "part")


#: Where the progress of a pass comes from, if not from a loop over all of its tiles. ``is_whole``:
#: it is that of all tokens. ``fold`` takes tiles of which runs of ``together`` are not cut.
Folding = PartWriter | MergedParts
