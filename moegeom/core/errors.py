"""Errors, one type per stage; each knows the exit code the command line ends with.

A message is one sentence: where, what was found, what was expected. The hint says what to try.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

#: How a system says that a file does not fit.
_FULL = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})


class MoeGeomError(Exception):
    """Base of every error that moegeom raises on purpose.

    Parameters
    ----------
    message
        One sentence: where, what was found, what was expected.
    hint
        What to try next; printed on a line of its own. Empty when there is nothing to try.
    """

    exit_code = 3

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython prints in place of the frames: they say nothing that these do not."""
        notes = [f"  note: {note}" for note in getattr(self, "__notes__", ())]
        return [f"{type(self).__name__}: {self}", *notes]


class UsageError(MoeGeomError):
    """The command cannot mean what was typed: unknown name, wrong flag, existing output."""

    exit_code = 2


class OutputError(UsageError):
    """An output cannot be written: a full disk, a folder that is read-only or not there."""

    @classmethod
    def of(cls, path: object, error: OSError) -> OutputError:
        """The same as an error of ours: the path that was asked for, and the system's reason."""
        reason = error.strerror or first_line(error)
        return cls(
            f"{path}: cannot be written ({reason}).",
            "Make room there, or name another place." if is_full(error) else "Name another place.",
        )


def is_full(error: OSError) -> bool:
    """Whether the system says that there is no room."""
    return error.errno in _FULL or "os error 28" in str(error).lower()


class CheckpointError(MoeGeomError):
    """A checkpoint file is unreadable, truncated, contradictory or beyond the limits."""


class RouterError(MoeGeomError):
    """No router was found, or one was found that cannot be interpreted.

    ``code`` is that of the integrity check whose statement is broken, where there is one: the gate
    reports it as a finding, every other command stops. ``checkpoint`` is the name of the file or
    folder, where it was opened.
    """

    def __init__(self, message: str, hint: str = "", code: str = "") -> None:
        super().__init__(message, hint)
        self.code = code
        self.checkpoint: str = ""


#: Codes of the integrity checks that reading itself can break (moegeom/checks/catalogue): config
#: and tensors contradict each other; storage that nobody knows, such as a scale tensor without a
#: rule; a part of a router is not there; the gating function is said nowhere; a value of the config
#: or of a tensor is one that no rule takes.
CONFIG_CONTRADICTED, STORAGE_UNKNOWN, PART_MISSING = "MGI105", "MGI106", "MGI107"
GATING_UNSAID, OUT_OF_RANGE = "MGI113", "MGI116"


class RouterRuleError(RouterError):
    """The selection rule does not have the property that an algorithm needs."""


class RecordingError(MoeGeomError):
    """A recording is unreadable, or does not belong to this checkpoint."""


class NonFiniteError(MoeGeomError):
    """Values that must be finite are not."""


class ResultsError(MoeGeomError):
    """A results directory is unreadable, incomplete or of another schema."""


class InternalError(MoeGeomError):
    """A promise inside moegeom is broken; always a bug."""

    exit_code = 5

    def _render_traceback_(self) -> list[str]:
        return traceback.format_exception(self)  # the frames show the bug


@contextmanager
def about(what: str, name: object) -> Iterator[None]:
    """A block whose errors say which ``what`` they are about, as it was named by the caller.

    Messages name files without their folders; two of one name cannot be told apart by these.
    """
    try:
        yield
    except MoeGeomError as error:
        note = f"{what}: {name}"
        is_bare = "/" not in str(name).rstrip("/")
        texts = [error.message, *getattr(error, "__notes__", ())]
        if name and not is_bare and not any(str(name) in text for text in texts):
            error.add_note(note)
        raise


def first_line(error: BaseException) -> str:
    """What somebody else's error says, in a line; its type where it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
