"""A GGUF model in several files: ``NAME-00001-of-00003.gguf`` and so on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moegeom.checkpoint.formats._gguf_header import (
    ALIGNMENT,
    DEFAULT_ALIGNMENT,
    Header,
    round_up,
)
from moegeom.core.errors import CheckpointError

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)

_COUNT = "split.count"
_NUMBER = "split.no"
_NUM_TENSORS = "split.tensors.count"

#: Public models have at most fifty.
_MOST_PARTS = 1000

_SAME = "Do all parts come from the same download?"


@dataclass(frozen=True)
class PartName:
    """What the name of a part says; parts are numbered from 1."""

    stem: str
    number: int
    count: int

    def of(self, number: int) -> str:
        """The file name of another part."""
        return f"{self.stem}-{number:05d}-of-{self.count:05d}.gguf"


def part_name(file: str) -> PartName | None:
    """The name of a part taken apart; None for the name of a model in one file."""
    match = _PART.fullmatch(file)
    return PartName(match[1], int(match[2]), int(match[3])) if match else None


def models(files: Sequence[str]) -> dict[str, str]:
    """One file of every model, by its name without numbers."""
    first: dict[str, str] = {}
    for file in files:
        part = part_name(file)
        first.setdefault(f"{part.stem} ({part.count} parts)" if part else file, file)
    return first


def parts(file: str, header: Header) -> list[str]:
    """All files of the model that ``file`` is, or is a part of, in their order.

    The name and the header of the file must agree.
    """
    count = _setting(header, _COUNT, default=1)
    if count <= 1:
        return [file]
    if count > _MOST_PARTS:
        raise CheckpointError(
            f"{file}: says that there are {count} parts, more than the {_MOST_PARTS} allowed."
        )
    number = 1 + _setting(header, _NUMBER)
    name = part_name(file)
    if name is None or (name.number, name.count) != (number, count):
        raise CheckpointError(
            f"{file}: is part {number} of {count}, expected a name that ends in "
            f"-{number:05d}-of-{count:05d}.gguf.",
            "Give every part its original name.",
        )
    return [name.of(n) for n in range(1, count + 1)]


def check_parts(headers: Sequence[Header]) -> None:
    """Raise unless the parts, in their order, are those of one model.

    Raises
    ------
    CheckpointError
        If a part says another number or count, if a tensor is missing or comes twice, or if
        nothing says where the tensors of a part begin.
    """
    first, *others = headers
    count = len(headers)
    for index, header in enumerate(headers):
        said = (_setting(header, _NUMBER), _setting(header, _COUNT))
        if said != (index, count):
            raise CheckpointError(
                f"{header.file}: says {_NUMBER} {said[0]} and {_COUNT} {said[1]}, expected "
                f"{index} and {count}.",
                _SAME,
            )
    for header in others:
        _check_alignment(first, header)
    found = sum(len(header.entries) for header in headers)
    expected = _setting(first, _NUM_TENSORS, default=found)
    if found != expected:
        raise CheckpointError(
            f"{first.file}: says {_NUM_TENSORS} {expected}, and the {count} parts hold {found}.",
            _SAME,
        )


def _check_alignment(first: Header, part: Header) -> None:
    """Raise if it is left open on which grid the tensors of a part lie.

    The first part alone holds the settings. Some writers keep its alignment in the other parts,
    and readers take each part by itself.
    """
    if ALIGNMENT not in part.settings and round_up(part.end, first.alignment) != part.data_start:
        raise CheckpointError(
            f"{part.file}: does not give {ALIGNMENT}, which is {first.alignment} in {first.file} "
            f"and {DEFAULT_ALIGNMENT} by default.",
            "Join the parts (llama-gguf-split --merge), or write them with the default.",
        )


def _setting(header: Header, key: str, default: int | None = None) -> int:
    """A count of the header; without ``default`` it must be given."""
    found: Any = header.settings.get(key, default)
    if type(found) is not int or found < 0:
        said = "is not given" if found is None else f"is {found!r}"
        raise CheckpointError(f"{header.file}: {key} {said}, expected a count.", _SAME)
    return found
