"""Which tokens flipped at a router under a variant: bits on disk, joined over the layers."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import numpy as np

from moegeom.core.errors import ResultsError, first_line
from moegeom.core.files import open_regular, writing
from moegeom.core.shapes import UInt8


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
