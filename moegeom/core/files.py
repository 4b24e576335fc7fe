"""Writing files and folders: whole or not at all, and never through what others put there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from moegeom.core.errors import MoeGeomError, OutputError, UsageError, first_line
from moegeom.core.text import spelled

if TYPE_CHECKING:
    from filelock import BaseFileLock

#: What a file is to hold: text, bytes, or something that writes itself into an open file.
Content: TypeAlias = str | bytes | Callable[[IO[bytes]], object]

#: A new file or nothing: no link is followed, nothing that is there is opened.
_NEW = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)

#: A file for reading: a pipe is not waited for.
_OLD = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)

_LOCK_FILE = "lock"

#: Stands for the lock where files cannot be locked.
_OWNER_FILE = "owner"

#: How a file system says that it has no locks.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


@contextlib.contextmanager
def reading(path: Path, kind: type[MoeGeomError], hint: str = "") -> Iterator[None]:
    """A block in which every error of the system is one of ``kind`` about the input ``path``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise kind(f"{path.name}: cannot be read ({reason}).", hint) from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block in which every error of the system is one about the output ``path``."""
    try:
        yield
    except OSError as error:
        raise OutputError.of(path, error) from error


def write_whole(path: Path, content: Content, mode: int = 0o666, follows: bool = True) -> None:
    """Writes the file so that no reader ever sees half of it, whatever ends the process.

    A link stays a link: the file that it names is replaced. What is no regular file, such as
    ``/dev/stdout``, is written to directly. Unless it ``follows``, whatever has the name gives way.
    ``mode`` is less what the umask takes away.

    Raises
    ------
    OutputError
        When it cannot be written; what was there before is untouched then.
    """
    with writing(path):
        target = Path(os.path.realpath(path)) if follows else path
        if follows and _is_special(target):
            with target.open("wb") as file:
                _fill(file, content)
            return
        beside, descriptor = _new_file(target.parent, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                _fill(file, content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise


def refuse_unwritable(path: Path) -> None:
    """Raises OutputError when no file could be written at ``path``: before work, not after it."""
    with writing(path):
        target = Path(os.path.realpath(path))
        if _is_special(target):
            return
        beside, descriptor = _new_file(target.parent, 0o600)
        os.close(descriptor)
        beside.unlink()


def _is_special(target: Path) -> bool:
    """True for a device or a pipe; OSError for a folder."""
    try:
        kind = target.stat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    return not stat.S_ISREG(kind)


def _new_file(folder: Path, mode: int) -> tuple[Path, int]:
    """A file of a name that nobody can know before; its descriptor is the caller's to close."""
    path = folder / f".moegeom-{secrets.token_hex(8)}.tmp"
    return path, os.open(path, _NEW, mode)


def _fill(file: IO[bytes], content: Content) -> None:
    if callable(content):
        content(file)
    else:
        file.write(spelled(content).encode() if isinstance(content, str) else content)


def open_regular(path: Path, follows: bool = False) -> BufferedReader:
    """A regular file, opened for reading.

    Raises
    ------
    OSError
        For a link, unless ``follows``, and for anything that is no regular file: a pipe would be
        waited for, a device read without end.
    """
    return BufferedReader(open_raw(path, follows))


def read_regular(path: Path, most: int, follows: bool = False) -> bytes:
    """What a regular file of up to ``most`` bytes holds; OSError as above, or for a larger one."""
    with open_regular(path, follows) as file:
        # a buffer of what the file has, and not of all that it might have
        content = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    return content


def open_raw(path: Path, follows: bool = False) -> FileIO:
    """As ``open_regular``, without a buffer."""
    descriptor = os.open(path, _OLD | (0 if follows else getattr(os, "O_NOFOLLOW", 0)))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def is_there(path: Path) -> bool:
    """True when the name is taken, be it by a link that leads nowhere."""
    return os.path.lexists(path)


def refuse_existing(
    path: Path,
    hint: str = "Choose another output.",
    may_replace: Callable[[Path], bool] | None = None,
) -> None:
    """Raises UsageError when ``path`` may not be written, before anything is read or computed.

    What ``may_replace`` says yes to may be replaced, and nothing else.
    """
    if not is_there(path):
        pass
    elif may_replace is None:
        raise UsageError(f"{path} exists already.", hint)
    elif path.is_symlink() or not may_replace(path):
        raise UsageError(f"{path} is no folder of results; it is not replaced.", "Move it away.")
    if not path.name:
        raise UsageError(f"--out {path} names no directory.")


def move_folder(folder: Path, path: Path, replaced: Path | None = None) -> None:
    """Gives a folder its name, in one step; OutputError where that is taken or cannot be had.

    With ``replaced`` what has the name is moved there; where the system can do it, at no moment has
    neither the name.
    """
    with writing(path):
        if replaced is not None and is_there(path):
            if _exchange(folder, path):
                folder.rename(replaced)
                return
            path.rename(replaced)
        if is_there(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        folder.rename(path)


def _exchange(one: Path, other: Path) -> bool:
    """Gives each of two the name of the other in one step; False where there is no such step."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def new_folder(path: Path) -> Path:
    """An empty folder beside ``path``, of a name that nobody can know before."""
    with writing(path):
        folder = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        return folder


def remove(path: Path) -> None:
    """Removes a file or a folder with all it holds; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


class WorkFolder:
    """``OUT.partial``: the folder of an unfinished output, for one process at a time.

    It is made in one step, for its owner alone, with the empty file ``plan`` in it, by which it is
    known again. One that is there is taken over when it can only have come from this user: a real
    folder with a ``plan``, and in it nothing but files and folders of the same owner.

    Parameters
    ----------
    path
        Where the folder is.
    plan
        Name of the file that says what is being made; empty where there is nothing to go on with.
    """

    def __init__(self, path: Path, plan: str) -> None:
        self.path = path
        self.plan: Path = path / plan
        self._lock: BaseFileLock | None = None

    def take(self) -> None:
        """Makes the folder or takes it over, and holds its lock from here on.

        Raises
        ------
        UsageError
            When another process holds it, when it is not one of this user's, or when it cannot be
            written to.
        """
        made = new_folder(self.path)
        try:
            with writing(self.path):
                os.close(os.open(made / self.plan.name, _NEW, 0o600))
            user = made.lstat().st_uid  # as this file system calls whoever runs this
            if not is_there(self.path):
                with contextlib.suppress(OSError):  # another process was faster: theirs counts
                    made.rename(self.path)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        self._refuse_foreign(user)
        self._take_lock()

    def _refuse_foreign(self, user: int) -> None:
        try:
            doubt = _doubt(self.path, self.plan, user)
        except FileNotFoundError:  # the process that had it removed it just now
            raise self._busy() from None
        except OSError as error:
            raise OutputError.of(self.path, error) from None
        if doubt:
            raise UsageError(
                f"{self.path}: {doubt}, so it is not gone on with: another recording or scan is "
                "being written or was cut off, or somebody else made it.",
                "When nothing writes to it, delete it; or choose another output.",
            )

    def _take_lock(self) -> None:
        from filelock import FileLock, SoftFileLock, Timeout

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a file system has no locks is not news
                lock: BaseFileLock = FileLock(self.path / _LOCK_FILE, thread_local=False)
                try:
                    lock.acquire(blocking=False)
                except OSError as error:
                    if isinstance(error, Timeout) or error.errno not in _NO_LOCKS:
                        raise
                    lock = SoftFileLock(self.path / _OWNER_FILE, thread_local=False)
                    lock.acquire(blocking=False)
        except (Timeout, FileNotFoundError):
            raise self._busy() from None
        except OSError as error:
            raise OutputError.of(self.path, error) from None
        self._lock = lock

    def _busy(self) -> UsageError:
        return UsageError(
            f"{self.path} is being written by another process.",
            "Wait for it, or choose another output.",
        )

    def clear(self, spared_folder: str = "") -> None:
        """Discards what was made; the plan first, for what is left is then never gone on with.

        The folder of that name, ``spared_folder``, stays.
        """
        with writing(self.path):
            self.forget()
            for entry in self.path.iterdir():
                if entry.name not in (_LOCK_FILE, _OWNER_FILE, self.plan.name, spared_folder):
                    remove(entry)

    def forget(self) -> None:
        """Empties the plan."""
        write_whole(self.plan, b"")

    def release(self, is_last: bool = False) -> None:
        """Lets go of the lock; with ``is_last`` the folder is removed with all it holds."""
        if self._lock is None:
            return
        if is_last:
            with contextlib.suppress(OutputError):
                self.forget()  # what an end in the middle leaves is never gone on with
            # while the lock is held: who waits for it then sees that it is gone
            shutil.rmtree(self.path, ignore_errors=True)
        is_left = is_last and is_there(self.path)  # some systems keep a file that is open
        self._lock.release()
        self._lock = None
        if is_left:
            with contextlib.suppress(OSError):
                (self.path / _LOCK_FILE).unlink(missing_ok=True)
                self.path.rmdir()


def _doubt(folder: Path, plan: Path, user: int) -> str:
    """Why an unfinished folder may be somebody else's; empty when it can only be the user's own."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if status.st_uid != user:
        return "belongs to another user"
    if not is_there(plan):
        return f"holds no {plan.name}"
    for path in _below(folder):
        name, entry = path.relative_to(folder), path.lstat()
        if not (stat.S_ISREG(entry.st_mode) or stat.S_ISDIR(entry.st_mode)):
            return f"holds {name}, which is neither a file nor a folder"
        if entry.st_uid != user:
            return f"holds {name}, which belongs to another user"
    return "" if stat.S_ISREG(plan.lstat().st_mode) else f"holds {plan.name}, which is no file"


def _below(folder: Path) -> Iterator[Path]:
    def stop(error: OSError) -> Any:
        raise error

    for base, folders, files in os.walk(folder, onerror=stop):
        yield from (Path(base, name) for name in (*folders, *files))
