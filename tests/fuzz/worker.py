"""Uses mutated inputs one after the other and says of each how it ended, in a line of JSON.

Run by itself (``python -m tests.fuzz.worker``), so that it can die of an input without taking the
tests along, and so that time and memory are those of moegeom alone. One input again, number 31 of
``run.json``: ``python -m tests.fuzz.worker '[["run.json", 31, 32, "/tmp/again/sound"]]'``.
"""

import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.fuzz.mutations import mutated

T = TypeVar("T")

SECONDS = 2.0
MEGABYTES = 512

#: How long an input may compute before it is given up, and how long it may wait: a process of low
#: priority waits for others.
_STUCK, _WAITS = 10.0, 600.0

#: Beyond the memory of the process at its start; what a file asks for must not harm the machine.
_ADDRESS_SPACE = 3 << 30

_LONGEST_MESSAGE = 4000


class _Stuck(BaseException):
    """An input that waits, or that computes for too long."""


def odd_files() -> dict[str, Callable[[Path], None]]:
    """What else may stand where a file is expected."""
    return {
        "folder": lambda path: path.mkdir(),
        "pipe": os.mkfifo,
        "loop": lambda path: path.symlink_to(path.name),
        "dangling": lambda path: path.symlink_to("nowhere/at/all"),
        "device": lambda path: path.symlink_to("/dev/zero"),
        "empty": lambda path: path.touch(),
        "gone": lambda path: None,
    }


def _mutate(path: Path, language: str, draw: random.Random) -> str:
    if draw.random() < 0.02:
        what, make = draw.choice(sorted(odd_files().items()))
        path.unlink()
        make(path)
        return what
    path.write_bytes(mutated(path.read_bytes(), language, draw))
    return f"{path.stat().st_size} bytes"


def _outcome(use: Callable[[], object]) -> tuple[str, str]:
    """``value``, ``error``, or the name of what else happened, with the place."""
    from moegeom.core.errors import InternalError, MoeGeomError

    try:
        use()
    except InternalError as error:
        return "InternalError", str(error)[:300]
    except MoeGeomError as error:
        length = len(str(error))
        return ("error", "") if length < _LONGEST_MESSAGE else ("long message", str(error)[:300])
    except _Stuck as error:
        return "stuck", _place(error)
    except BaseException as error:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        return type(error).__name__, f"{_place(error)}: {str(error)[:200]}"
    return "value", ""


def _place(error: BaseException) -> str:
    """The innermost line of moegeom that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/moegeom/" in f.filename] or frames
    return f"{own[-1].filename.rpartition('/moegeom/')[2]}:{own[-1].lineno}"


def measured(
    use: Callable[[], object], size: int, limit: float = SECONDS, waits: float = _WAITS
) -> dict[str, Any]:
    """How the use of files of ``size`` bytes ended, and what it took."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    megabytes = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        signal.setitimer(signal.ITIMER_PROF, _STUCK)
        signal.setitimer(signal.ITIMER_REAL, waits)
        try:
            (outcome, detail), megabytes = memory_of(lambda: _outcome(use))
        except _Stuck as error:
            outcome, detail = "stuck", _place(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if outcome in ("value", "error"):
        if caught:
            first = caught[0]
            place = f"{first.filename.rpartition('/')[2]}:{first.lineno}"
            outcome, detail = "warning", f"{place}: {str(first.message)[:200]}"
        elif seconds > limit:
            outcome = "slow"
        elif megabytes > MEGABYTES + (size >> 20):
            outcome = "large"
    taken = {"seconds": round(seconds, 4), "megabytes": megabytes}
    return {"outcome": outcome, "detail": detail} | taken


def memory_of(use: Callable[[], T]) -> tuple[T, int]:
    """What a use returns, and the megabytes by which it raised the memory of this process."""
    # not ru_maxrss: it never falls, and begins at the peak of the process that started this one
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_kilobytes()
    return use(), (_peak_kilobytes() - before) >> 10


def _peak_kilobytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def _refuses(length: int) -> None:
    from moegeom.core.errors import MoeGeomError

    raise MoeGeomError("x" * length)


#: Each way in which an input can end.
FAULTS: dict[str, Callable[[], object]] = {
    "value": lambda: None, "error": lambda: _refuses(10), "long message": lambda: _refuses(5000),
    "KeyError": lambda: {}["x"], "warning": lambda: warnings.warn("x", RuntimeWarning, stacklevel=1), "slow": lambda: sum(range(10**6)),
    "large": lambda: bytearray(600 << 20)[::4096].count(1), "stuck": lambda: time.sleep(9),
}  # fmt: skip


def _ends_of_faults() -> dict[str, str]:
    """What each fault is called, with limits that the faults beyond them reach soon."""
    return {
        name: measured(fault, 0, 0.0 if name == "slow" else 5.0, 0.5 if name == "stuck" else 60.0)[
            "outcome"
        ]
        for name, fault in FAULTS.items()
    }


def _nobody_listens(host: Any, *_: Any, **__: Any) -> Any:
    raise socket.gaierror(f"no address of {host!r}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run(kind_name: str, first: int, stop: int, sound: Path, say: Callable[[Any], None]) -> None:
    """Inputs ``first`` to ``stop`` of one kind; what is sound is written to ``sound`` at first."""
    from tests.fuzz.kinds import KINDS

    kind = KINDS[kind_name]
    if not sound.exists():
        sound.mkdir(parents=True)
        kind.build(sound)
    folder = sound.with_name("used")
    _remove(folder)
    shutil.copytree(sound, folder)
    outcome, detail = _outcome(lambda: kind.use(folder, random.Random(0)))
    if (outcome == "value") is kind.is_refused:
        raise AssertionError(f"{kind_name}: what was built is no sound input: {outcome} {detail}")
    targets = {
        path.relative_to(sound): language
        for glob, language in kind.targets.items()
        for path in sound.glob(glob)
        if path.is_file()
    }
    for number in range(first, stop):
        if (number - first) % 10 == 0:
            # an input may wait or compute where no signal is listened to
            faulthandler.dump_traceback_later(2 * _WAITS, exit=True)
        if kind.writes:
            _remove(folder)
            shutil.copytree(sound, folder)
        draw = random.Random(f"{kind_name} {number}")
        name = draw.choice(sorted(targets))
        done = _mutate(folder / name, targets[name], draw)
        size = sum(path.lstat().st_size for path in folder.rglob("*"))
        found = measured(lambda: kind.use(folder, draw), size)  # noqa: B023 - used at once
        say({"kind": kind_name, "number": number, "done": f"{name}: {done}"} | found)
        if not kind.writes:
            _remove(folder / name)
            shutil.copyfile(sound / name, folder / name)


def main() -> None:
    """Takes ``[[kind, first, stop, folder], ...]`` as JSON, and writes a line for each input.

    Of ``"faults"`` it writes in one line what it calls each way to fail.
    """
    work = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def alarm(*_: Any) -> None:
        raise _Stuck

    def say(found: Any) -> None:
        print(json.dumps(found), file=out, flush=True)

    for signal_ in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(signal_, alarm)
    if work == "faults":
        say(_ends_of_faults())
        return
    socket.getaddrinfo = _nobody_listens  # type: ignore[assignment]
    os.environ["COLUMNS"] = "100"
    warnings.simplefilter("ignore")
    # before the limits: libraries map much and use little, and importing them is no input's work
    import sklearn.manifold  # noqa: F401

    import tests.fuzz.kinds  # noqa: F401
    from tests.e2e.warm_commands import run_nothing_of

    run_nothing_of(os.path.commonpath([folder for *_, folder in work]), has_url=False)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + _ADDRESS_SPACE, hard))
    for kind, first, stop, folder in work:
        run(kind, first, stop, Path(folder), say)


if __name__ == "__main__":
    main()
