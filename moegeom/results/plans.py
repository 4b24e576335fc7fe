"""What unfinished results hold: the plan that they are known again by, and which tokens flipped."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from moegeom.core.errors import ResultsError, first_line
from moegeom.core.files import open_regular, writing
from moegeom.core.shapes import UInt8

# -------------------------------------------------------------------------------------------- plans
#: What is measured, and with what; by this file an unfinished run is known again.
PLAN_FILE = "plan.json"

#: What a first pass over the files of tokens found in each of them, made before the rest.
FILES_FOLDER = "files"

#: Parts of a plan whose names are not what a person would say.
_PARTS = {"checkpoint": "router weights", "token_files": "tokens"}


def differing_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the parts in which two plans differ; each option is a part."""
    parts = _differing(before, now)
    if "options" in parts:
        options = (before.get("options"), now.get("options"))
        one, other = (option if isinstance(option, Mapping) else {} for option in options)
        parts = [*(key for key in parts if key != "options"), *_differing(one, other)]
    return list(dict.fromkeys(_PARTS.get(part, part) for part in parts))


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*one, *other} if one.get(key) != other.get(key))


def is_begun(partial: Path) -> bool:
    """Whether unfinished results hold anything that a later run can go on with."""
    return any(any(partial.glob(f"{name}/*")) for name in ("parts", "snapshots", FILES_FOLDER))


# ------------------------------------------------------------------------------ tokens that flipped
def write_bitmap(
    folder: Path, variant: str, bits: Mapping[str, UInt8[np.ndarray, "bytes"]]
) -> None:
    """Keeps ``flipped`` and ``seen``, a bit for each token of the source."""
    with writing(folder):
        np.savez(_path(folder, variant), flipped=bits["flipped"], seen=bits["seen"])


def any_flipped(folders: Iterable[Path], variant: str) -> tuple[int, int] | None:
    """Tokens that flip at one router at least, and tokens that all routers saw; None without."""
    flipped, seen = None, None
    for folder in folders:
        path = _path(folder, variant)
        if not path.exists():
            continue
        with _stored(path) as bitmap:
            flipped = bitmap["flipped"] if flipped is None else flipped | bitmap["flipped"]
            seen = bitmap["seen"] if seen is None else seen & bitmap["seen"]
    if flipped is None or seen is None:
        return None
    return int(np.bitwise_count(flipped & seen).sum()), int(np.bitwise_count(seen).sum())


@contextlib.contextmanager
def _stored(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ResultsError(
            f"{path}: cannot be read ({first_line(error)}).", "--restart begins again."
        ) from None


def _path(folder: Path, variant: str) -> Path:
    return folder / f"flipped.{quote(variant, safe='+=,')}.npz"
