"""What libraries run or obey beside installed packages: none of it may belong to what is judged.

Numba unpickles the index of its kernels and takes settings from the working directory; CuPy and the
driver of the device load kernels that they have compiled before. Whoever wrote a checkpoint could
have written these too, and decided the answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from moegeom.core.errors import UsageError

PACKAGE = Path(__file__).resolve().parents[1]

#: What the top of a working tree holds.
_TOPS = (".git", ".hg", ".svn", ".jj")

#: Settings that Numba reads in the working directory, the folder of its kernels among them.
_SETTINGS = ".numba_config.yaml"


def kernels_of_numba() -> list[Path]:
    """Where Numba keeps kernels of moegeom: one or two folders, which need not exist.

    The folder of ``NUMBA_CACHE_DIR``; else that of the package or, where nobody may write there,
    the user's cache. Oracle: the locators of ``numba.core.caching``.
    """
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(named)]
    if os.access(PACKAGE, os.W_OK):
        return [PACKAGE]
    home = Path("~").expanduser()
    if sys.platform == "win32":
        users = Path(os.environ.get("LOCALAPPDATA", home), "numba", "Cache")
    elif sys.platform == "darwin":
        users = home / "Library/Caches/numba"
    else:
        users = Path(os.environ.get("XDG_CACHE_HOME", home / ".cache"), "numba")
    return [PACKAGE, users]


def _loaded() -> Iterator[tuple[Path, str]]:
    """Each folder or file, and what to do where it lies in what is judged."""
    for folder in kernels_of_numba():
        if folder == PACKAGE:
            yield folder, "Install moegeom elsewhere, or judge a folder beside it."
        else:
            yield folder, "Set NUMBA_CACHE_DIR to a folder outside of it."
    for name in ("CUPY_CACHE_DIR", "CUDA_CACHE_PATH"):
        if named := os.environ.get(name):
            yield Path(named), f"Set {name} to a folder outside of it."
    if os.path.lexists(_SETTINGS):
        yield Path(_SETTINGS), "Remove it, or start in another folder: Numba obeys it."


def trees_around(*paths: Path) -> Iterator[tuple[Path, Path]]:
    """Each folder that one of ``paths`` is or lies in, and the working tree around it, else that
    folder.

    By name and behind links: who wrote a link wrote what lies beside it. Each is told once, however
    many files lie there.
    """
    places = ((place, path.is_dir()) for path in paths for place in _both(path))
    for folder in dict.fromkeys(place if is_dir else place.parent for place, is_dir in places):
        above = (folder, *folder.parents)
        tops = (top for top in above if any((top / mark).exists() for mark in _TOPS))
        yield folder, next(tops, folder)


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path, which need not exist, is in a folder by its name or behind its links."""
    return any(place.is_relative_to(folder) for place in _both(path))


def _both(path: Path) -> tuple[Path, Path]:
    """Where a path is by its name, and behind its links, which may go in circles."""
    return Path(os.path.normpath(path.absolute())), Path(os.path.realpath(path))


def refuse_code_within(*paths: Path) -> None:
    """Nothing that libraries load may lie in the folder of one of these, or in the tree around it.

    The package's own folder may lie in the same working tree, not in the folder itself.

    Raises
    ------
    UsageError
        Where something does.
    """
    loaded = tuple(_loaded())
    for folder, tree in trees_around(*paths):
        for code, hint in loaded:
            around = folder if code == PACKAGE else tree
            if lies_in(code, around):
                raise UsageError(f"{code}: would be loaded from {around}, which is judged.", hint)
