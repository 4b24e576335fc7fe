"""One process at a time in a folder: a lock that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import IO

from moegeom.core.errors import UsageError

LOCK_FILE = "lock"

#: Where files cannot be locked, this one says who writes; it outlives a killed process.
_OWNER_FILE = "owner"

LOCK_FILES = frozenset({LOCK_FILE, _OWNER_FILE})


class FolderLock:
    """The lock of ``folder``, which must hold a file ``lock`` (``LOCK_FILE``).

    Where the platform or the file system cannot lock files, a file ``owner`` stands for the lock:
    nobody can tell whether a process that was killed left it, so the refusal says so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._owner: Path | None = None

    def take(self) -> None:
        """Holds the lock from here on.

        Raises
        ------
        UsageError
            When another process holds it, or the folder cannot be written to.
        """
        try:
            while self._file is None:
                file = (self._folder / LOCK_FILE).open("r+b")
                self._file = self._locked(file)
        except FileNotFoundError:
            raise self._busy() from None
        except OSError as error:
            raise UsageError(
                f"{self._folder.name} cannot be written to ({error.strerror}).",
                "Choose another output.",
            ) from None

    def _locked(self, file: IO[bytes]) -> IO[bytes] | None:
        """The file, locked; None when it was removed by the one who had it before."""
        try:
            with contextlib.ExitStack() as closing:
                closing.callback(file.close)
                if not _try_flock(file):
                    self._own()
                is_same = os.path.samestat(
                    os.fstat(file.fileno()), (self._folder / LOCK_FILE).stat()
                )
                if is_same:
                    closing.pop_all()
                return file if is_same else None
        except BlockingIOError:
            raise self._busy() from None

    def _own(self) -> None:
        path = self._folder / _OWNER_FILE
        try:
            with path.open("x", encoding="utf-8") as owner:
                owner.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._owner = path
        except FileExistsError:
            found = path.read_text("utf-8", errors="replace")[:200]
            raise UsageError(
                f"{self._folder.name} is being written by {found}, or was when that was killed: "
                "this file system cannot lock files.",
                f"When it has ended, delete {self._folder.name}/{_OWNER_FILE}.",
            ) from None

    def _busy(self) -> UsageError:
        return UsageError(
            f"{self._folder.name} is being written by another process.",
            "Wait for it, or choose another output.",
        )

    def release(self, is_last: bool = False) -> None:
        """Lets go of the lock; with ``is_last`` its files are removed, for the folder goes too."""
        if self._file is None:
            return
        if self._owner is not None:
            self._owner.unlink(missing_ok=True)
            self._owner = None
        if is_last:
            # while it is still held: who waits for it then sees that it is gone
            with contextlib.suppress(OSError):
                (self._folder / LOCK_FILE).unlink()
        self._file.close()
        self._file = None


def _try_flock(file: IO[bytes]) -> bool:
    """Whether the file is locked now; False where files cannot be locked at all.

    Raises
    ------
    BlockingIOError
        When another process has it.
    """
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
