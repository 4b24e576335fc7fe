"""Data to stdout, everything else to stderr."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path


class Format(StrEnum):
    """How results are printed."""

    table = "table"
    json = "json"
    md = "md"
    html = "html"


def error_line(message: str, hint: str, notes: str = "", columns: int | None = None) -> str:
    """An error as it is printed: one sentence, then what to try.

    With ``columns`` it is folded, but for a hint with options, which must survive copying.
    """
    from moegeom.document.untrusted import (
        printable,  # names come from files that nobody vouches for
    )

    lines = [
        folded(f"error: {printable(message)}", columns, " " * 7),
        *(folded(f"  note: {printable(n)}", columns, " " * 8) for n in notes.splitlines()),
    ]
    if hint:
        hint_line = f"  hint: {printable(hint)}"
        lines.append(hint_line if "--" in hint else folded(hint_line, columns, " " * 8))
    return "\n".join(lines)


def folded(text: str, columns: int | None, indent: str) -> str:
    """Lines of at most ``columns``, all but the first indented; a longer word stays whole.

    None leaves the text as it is.
    """
    if columns is None:
        return text
    return textwrap.fill(
        text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def width(unknown: int = 100) -> int:
    """Columns of the terminal, between 76 and 120; ``unknown`` when the output is no terminal."""
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return unknown
    return _terminal_width()


def error_width() -> int | None:
    """The same for errors; None when they go to a log, where a line is what is searched."""
    is_screen = "COLUMNS" in os.environ or sys.stderr.isatty()
    return _terminal_width() if is_screen else None


def open_closed_streams() -> None:
    """Streams that the caller has closed (``>&-``) lead nowhere: the exit code is what is asked."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # it takes the number of the closed one, which no file that is written may get
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - never closed
            setattr(sys, name, nowhere)


def put_out(text: str, is_error: bool = False) -> None:
    """Text to standard output or error; what follows goes nowhere where the reader has left.

    As ``| head`` does: what a command decides is its exit code all the same. Where an error cannot
    be written there is no other place to say it.
    """
    stream = sys.stderr if is_error else sys.stdout
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if not (is_error or isinstance(error, BrokenPipeError)):
            raise
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _terminal_width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 76), 120)


def has_colours() -> bool:
    """Colours only for a terminal that has some and has not asked for none (no-color.org)."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and not _is_dumb()


def _is_dumb() -> bool:
    return os.environ.get("TERM") == "dumb"


#: The handler of ``--verbose``.
_VERBOSE = "moegeom --verbose"


def log_to_stderr(is_verbose: bool) -> bool:
    """Lets what moegeom logs appear on stderr or not, with the seconds since Python began."""
    logger = logging.getLogger("moegeom")
    for handler in [one for one in logger.handlers if one.name == _VERBOSE]:
        logger.removeHandler(handler)
    if is_verbose:
        from moegeom.document.untrusted import printable

        class Printable(logging.Formatter):
            def format(self, record: logging.LogRecord) -> str:
                return printable(f"{record.relativeCreated / 1000:8.2f} s  {record.getMessage()}")

        handler = logging.StreamHandler()
        handler.set_name(_VERBOSE)
        handler.setFormatter(Printable())
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    return is_verbose


#: Said when the first kernel is compiled, by whether it is kept: the bar stands still meanwhile.
COMPILING = {
    True: "compiling kernels, once per machine and version of moegeom ...",
    False: "compiling kernels, and again in each run: neither the folder of moegeom nor the user's "
    "cache can be written. NUMBA_CACHE_DIR names a folder that keeps them.",
}


class Silence:
    """No progress: stderr is no terminal, or --quiet, which says nothing at all."""

    def __init__(self, quiet: bool, unit: str) -> None:
        self._quiet, self._unit, self._listening = quiet, unit, ExitStack()

    def start(self, num_tokens: int, unit: str = "") -> None:
        """Until the end the first kernel that is compiled is announced; weights alone need none."""
        self._unit = unit or self._unit
        if not self._quiet and self._unit != "routers":
            from moegeom.kernels.cpu.compilation import told_once

            self._listening.enter_context(told_once(lambda is_kept: self.say(COMPILING[is_kept])))

    def begin(self, what: str) -> None: ...

    def advance(self, num_tokens: int) -> None: ...

    def say(self, text: str) -> None:
        if not self._quiet:
            print(folded(text, error_width(), "  "), file=sys.stderr)

    def close(self) -> None:
        self._listening.close()


class ProgressBar(Silence):
    """One line on stderr with rate and time left, in tokens times routers or another ``unit``."""

    def __init__(self, unit: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(False, unit)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:3.0f} %"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, rate="")

    def start(self, num_tokens: int, unit: str = "") -> None:
        if unit:  # another kind of work, from its beginning
            self._progress.reset(self._task, rate="")
        self._progress.update(self._task, total=num_tokens)
        self._progress.start()
        super().start(num_tokens, unit)

    def begin(self, what: str) -> None:
        self._progress.update(self._task, description=f"{what:<10}")

    def advance(self, num_tokens: int) -> None:
        self._progress.advance(self._task, num_tokens)
        speed = self._progress.tasks[0].speed
        if speed:
            self._progress.update(self._task, rate=f"{speed:,.0f} {self._unit}/s")

    def say(self, text: str) -> None:
        lines = folded(text, error_width(), "  ")
        self._progress.console.print(lines, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        super().close()
        self._progress.stop()


def watching(quiet: bool, unit: str = "tokens") -> Silence:
    """What listens to the work: a progress bar where somebody can see it."""
    is_still = quiet or _is_dumb() or not sys.stderr.isatty()
    return Silence(quiet, unit) if is_still else ProgressBar(unit)
