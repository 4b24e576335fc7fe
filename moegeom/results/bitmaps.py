"""Which tokens switched at a router under a variant: bits on disk, joined over the layers."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from moegeom.core.errors import ResultsError, first_line
from moegeom.core.files import open_regular, writing


def write_bitmap(
    folder: Path, variant: str, bits: Mapping[str, UInt8[np.ndarray, "bytes"]]
) -> None:
    """Keeps ``switched`` and ``seen``, a bit for each token of the source."""
    with writing(folder):
        np.savez(_path(folder, variant), switched=bits["switched"], seen=bits["seen"])


def any_switched(folders: Iterable[Path], variant: str) -> tuple[int, int] | None:
    """Tokens that switch at one router at least, and tokens that all routers saw; None without."""
    switched, seen = None, None
    for folder in folders:
        path = _path(folder, variant)
        if not path.exists():
            continue
        with _stored(path) as found:
            switched = found["switched"] if switched is None else switched | found["switched"]
            seen = found["seen"] if seen is None else seen & found["seen"]
    if switched is None or seen is None:
        return None
    return int(np.bitwise_count(switched & seen).sum()), int(np.bitwise_count(seen).sum())


@contextlib.contextmanager
def _stored(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as found:
            yield found
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ResultsError(
            f"{path}: cannot be read ({first_line(error)}).", "--restart begins again."
        ) from None


def _path(folder: Path, variant: str) -> Path:
    return folder / f"switched.{variant}.npz"
