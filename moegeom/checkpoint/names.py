"""Names of tensors and files, as a file that nobody vouches for gives them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath

from moegeom.core import limits
from moegeom.core.errors import CheckpointError


def check_names(names: Collection[str], where: str) -> None:
    """Raise if there are more tensors than any checkpoint has, or one has a longer name."""
    if len(names) > limits.TENSORS:
        raise CheckpointError(
            f"{where} describes {len(names)} tensors, more than the {limits.TENSORS} allowed."
        )
    longest = max(map(len, names), default=0)
    if longest > limits.NAME_LENGTH:
        raise CheckpointError(
            f"{where} has a name of {longest} characters, more than the {limits.NAME_LENGTH} "
            "allowed."
        )


def is_inside(file: str) -> bool:
    """True for a path that stays in its folder, on every system."""
    path = PurePosixPath(file)
    leads_out = not path.parts or path.is_absolute() or ".." in path.parts
    return not leads_out and not any(c in file for c in "\\:\0")
