"""Where the tests keep compiled kernels: a folder outside the tree, for all workers, clones and runs.

Numba asks ``Shared`` by its variable ``NUMBA_CACHE_LOCATOR_CLASSES``, in the processes that tests start
too. Its own caches know the source of a kernel, not of what the kernel calls in other modules: here
the folder is named by the sources of all that is compiled.
"""

import functools
import getpass
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from numba.core import caching

PACKAGE = Path(__file__).resolve().parents[1] / "moegeom"

#: Kernels of so many versions of the sources stay, those that were used last.
VERSIONS = 12


def decides(file: Path, source: bytes) -> bool:
    """Is this compiled, or a number that compiled functions take from ``geometry``?"""
    compiled = b"numba" in source or b"moegeom.kernels.cpu" in source
    return compiled or PACKAGE / "geometry" in file.parents


@functools.cache
def folder() -> Path:
    """The folder of these sources; the oldest of others' are removed."""
    every = Path(os.environ.get("MOEGEOM_TEST_KERNELS") or _of_this_user())
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        source = file.read_bytes()
        if decides(file, source):
            digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + source)
    mine = every / digest.hexdigest()[:20]
    if not mine.exists():
        others = sorted((p for p in every.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
        for old in others[: 1 - VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)
        mine.mkdir(exist_ok=True)
    mine.touch()
    return mine


def _of_this_user() -> Path:
    """A folder that nobody else can write: what lies in it is unpickled."""
    every = Path(tempfile.gettempdir()) / f"moegeom-test-kernels-{getpass.getuser()}"
    every.mkdir(mode=0o700, exist_ok=True)
    status = every.lstat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o077):
        raise PermissionError(f"{every} is not this user's alone: remove it")
    return every


class Shared(caching.UserProvidedCacheLocator):
    """Kernels of moegeom in :func:`folder`, under their own paths in the package."""

    def __init__(self, py_func, py_file):
        self._py_file = py_file
        self._lineno = py_func.__code__.co_firstlineno
        parent = Path(py_file).parent.relative_to(PACKAGE)
        self._cache_path = str(folder() / parent)

    @classmethod
    def from_function(cls, py_func, py_file):
        if not Path(py_file).is_relative_to(PACKAGE):
            return None
        return super(caching.UserProvidedCacheLocator, cls).from_function(py_func, py_file)
