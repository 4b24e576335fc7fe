"""Claim: every command answers on full-size checkpoints within its budget of seconds and bytes.

Makes the members of the field one after the other (benchmarks/field/members.py), types every
command of the command line on each (benchmarks/field/lines.py) and deletes the member again: less
than 4 GB of the disk at a time. For each line processor seconds over those that it may take, bytes
at the peak of memory and bytes read over those that it may, what the screen says of the layer
whose router has collapsed, and how it ended. Lines on tokens are typed twice: on a layer whose
recording has an outlier, and on 4,096 tokens of the collapsed one.

    python -m benchmarks.field.every_command_answers_within_its_budget              all at night
    python -m benchmarks.field.every_command_answers_within_its_budget --small      minutes
    python -m benchmarks.field.every_command_answers_within_its_budget --page       the page alone

Rows are written to benchmarks/results/field/members.json as they come, those of other members and
lines staying what they are, and docs/benchmarks.md is written from them. Small ones are printed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import itertools
import json
import os
import platform
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.field.lines import Line, lines
from benchmarks.field.members import BY_DAY, MEMBERS, Member
from benchmarks.field.page import RESULTS, refresh

ROOT = Path(__file__).resolve().parents[2]

#: Processor seconds after which a command is ended.
MOST_SECONDS = 400

#: What a line may take: processor seconds, GB at the peak, GB read. Others may take the last.
BUDGETS: Mapping[str, tuple[float, float, float]] = {
    "imbalance": (4, 1.0, 1.5),
    "explain": (5, 1.0, 1.5),
    "research perturb": (10, 1.0, 1.5),
    "research regions": (20, 1.5, 4.0),
    "research cells": (20, 1.0, 1.5),
    "research outputs": (5, 1.5, 4.0),
    "research continuity": (10, 1.5, 2.0),
    "research attention": (3, 1.0, 1.5),
    "whatif": (9, 1.0, 1.5),
    "": (10, 1.0, 1.5),
}

#: What draws a bar again without saying anything new: colours, bars, seconds left.
_DRAWING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[━╸╺\s]|\d+:\d\d:\d\d|-:--:--")

COMPILING = "compiling kernels"

#: What is peculiar of the layer of a recording, by the recording's name.
RECORDINGS: Mapping[str, str] = {"rec": "outlier", "collapsed": "collapsed"}


@dataclass(frozen=True)
class Run:
    """How one line went.

    ``silence_s`` is the longest time by the clock in which the terminal said nothing new, over the
    whole time by the clock. ``planted`` is what the screen says of the collapsed layer.
    """

    seconds: float
    memory_bytes: int
    read_bytes: int
    exit_code: int
    ending: str
    clock_s: float
    silence_s: float
    has_bar: bool
    screen: str
    errors: str


def typed(words: Sequence[str], folder: Path, most_seconds: int) -> Run:
    """Runs ``moegeom`` with these words; its errors go to a terminal, as those of a person do."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TERM": "xterm",
    }
    master, terminal = pty.openpty()
    listener = _Listener(master)
    with tempfile.TemporaryFile() as screen:
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "moegeom_cli", *words],
            stdout=screen,
            stderr=terminal,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
        )
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (most_seconds, most_seconds + 5))
        os.close(terminal)
        listener.start()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        read = _bytes_read(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        clock = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        listener.join()
        os.close(master)
        screen.seek(0)
        text = screen.read().decode("utf-8", "replace")
    seconds, errors = usage.ru_utime + usage.ru_stime, listener.text
    return Run(
        round(seconds, 1),
        usage.ru_maxrss * 1024,
        read,
        process.returncode,
        _ending(process.returncode, errors),
        round(clock, 1),
        round(listener.silence, 1),
        "%" in errors,
        text,
        errors,
    )


def _bytes_read(process: int) -> int:
    """Bytes that an ended process asked to read, as Linux counts them."""
    counts = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
    return int(counts["rchar"])


def _ending(code: int, errors: str) -> str:
    if code < 0:
        return "out of time" if -code in (signal.SIGXCPU, signal.SIGKILL) else f"signal {-code}"
    if code == 5 or "Traceback" in errors:
        return "internal error"
    return {2: "refused", 3: "refused"}.get(code, "answered")


class _Listener(threading.Thread):
    """What arrives at a terminal, and how long nothing new does."""

    def __init__(self, master: int) -> None:
        super().__init__(daemon=True)
        self._master, self.text, self.silence = master, "", 0.0

    def run(self) -> None:
        last, before = time.monotonic(), ""
        while True:
            try:
                part = os.read(self._master, 1 << 16).decode("utf-8", "replace")
            except OSError:  # the terminal has no process any more
                part = ""
            now, new = time.monotonic(), _DRAWING.sub("", part)
            if (new and new != before) or not part:
                self.silence, last, before = max(self.silence, now - last), now, new
            if not part:
                return
            self.text = (self.text + part)[-100_000:]


@dataclass
class _Field:
    """Types lines on one member and writes their rows."""

    member: Member
    folder: Path
    write: Callable[[dict[str, Any]], None]
    screens: Path | None
    most_seconds: int

    def places(self, recording: str) -> dict[str, str]:
        layer = self.member.recorded if recording == "rec" else self.member.collapsed
        first = self.member.with_routers[0]
        names = ("model", "model_b", "step_1", "step_2", "rec_a", "rec_b")
        return {
            **{name: str(self.folder / name) for name in names},
            "rec": str(self.folder / recording),
            "trace": str(self.folder / "trace.npy"),
            "scan": str(self.folder / f"scan-of-{recording}"),
            "out": str(self.folder / "out"),
            "layer": str(layer),
            "four": f"{first}-{first + 3}",
        }

    def row(self, line: Line, recording: str) -> None:
        name = RECORDINGS.get(recording, "")
        row = {"member": self.member.name, "line": line.name, "recording": name}
        if line.reason:
            self.write({**row, "ending": "left out", "reason": line.reason})
            return
        places = self.places(recording or "rec")
        words = [word.format(**places) for word in line.words]
        if line.needs("scan") and "--out" not in words and not Path(places["scan"]).exists():
            scan = next(lines())  # of which the line prints the results
            self._typed([word.format(**places) for word in scan.words])
        run = self._typed(words)
        if COMPILING in run.errors:
            run = self._typed(words)
        limits = BUDGETS.get(line.name, BUDGETS[""])
        used = (run.seconds, run.memory_bytes / 1e9, run.read_bytes / 1e9)
        ratios = {
            what: round(one / most, 2)
            for what, one, most in zip(("seconds", "memory", "read"), used, limits, strict=True)
        }
        shown = asdict(run)
        screen, errors = shown.pop("screen"), shown.pop("errors")
        if self.screens is not None:
            at = "-".join((self.member.name, line.name.replace(" ", "_"), name)).rstrip("-")
            (self.screens / f"{at}.txt").write_text(f"{' '.join(words)}\n{screen}\n{errors}")
        verdict = _sentence(screen) or _sentence(_DRAWN.sub("", errors))
        planted = sentence_of(screen, self.member.collapsed)
        self.write({**row, **shown, "over": ratios, "verdict": verdict, "planted": planted})

    def _typed(self, words: Sequence[str]) -> Run:
        for option, place in itertools.pairwise(words):
            if option == "--out":
                shutil.rmtree(place, ignore_errors=True)
        return typed(words, self.folder, self.most_seconds)


_DRAWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

#: The beginning of the line that a person reads first.
_FIRST = re.compile(r"^(VERDICT|RESULT|error:|internal error)")


def _sentence(text: str) -> str:
    """The line that a person reads first, with those that it goes on in; else the first line."""
    rows = text.splitlines()
    at = next((i for i, row in enumerate(rows) if _FIRST.match(row)), None)
    if at is None:
        return next((row.strip() for row in rows if row.strip()), "")[:300]
    end = at + 1
    while end < len(rows) and rows[end].startswith("   "):
        end += 1
    return " ".join(" ".join(rows[at:end]).split())[:500]


#: Layers as screens name them: ``layer 3``, ``layers 0-1,3``, ``text/3``.
_LAYERS = re.compile(r"(?:layers?\s+|text/)(\d+(?:-\d+)?(?:,\s?\d+(?:-\d+)?)*)(?![\d.%])")


def sentence_of(screen: str, layer: int) -> str:
    """The first line that names a layer by its number, alone or in a range; else nothing."""
    for row in screen.splitlines():
        words = [re.match(r"\s*(\d+)\s{2,}", row), *_LAYERS.finditer(row)]
        spans = [span for one in words if one is not None for span in one[1].split(",")]
        ends = [(span.partition("-")[0], span.rpartition("-")[2]) for span in spans]
        if any(int(first) <= layer <= int(last) for first, last in ends):
            return " ".join(row.split())[:300]
    return ""


def rows_of(member: Member, names: Sequence[str]) -> Iterator[tuple[Line, str]]:
    """Lines on a member with the recording of each."""
    for line in lines():
        if names and line.name not in names:
            continue
        if line.needs("rec") or line.needs("rec_a") or line.needs("scan"):
            yield line, "rec"
            if not line.needs("rec_b"):  # which is of the layer with the outlier
                yield line, "collapsed"
        else:
            yield line, ""


def facts() -> dict[str, Any]:
    """Where and with what figures are taken."""
    names = Path("/proc/cpuinfo").read_text().splitlines()
    core = next((row.split(":")[1].strip() for row in names if row.startswith("model name")), "")
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, text=True
    )
    return {
        "claim": "every command answers on full-size checkpoints within its budget",
        "core": core,
        "cores": os.cpu_count(),
        "numpy": importlib.metadata.version("numpy"),
        "python": platform.python_version(),
        "commit": commit.strip(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }


def _writer(path: Path) -> Callable[[dict[str, Any]], None]:
    def write(row: dict[str, Any]) -> None:
        document = json.loads(path.read_text("utf-8")) if path.is_file() else {"rows": []}
        key = tuple(row[name] for name in ("member", "line", "recording"))
        rows = {
            tuple(one[name] for name in ("member", "line", "recording")): one
            for one in document["rows"]
        }
        rows[key] = row
        path.parent.mkdir(parents=True, exist_ok=True)
        ordered = [rows[one] for one in sorted(rows)]
        path.write_text(json.dumps({**facts(), "rows": ordered}, indent=1) + "\n", "utf-8")
        place = f"{row['member']:14} {row['line']:20} {row['recording']:10}"
        if "over" not in row:
            print(f"{place} {row['ending']}: {row['reason']}", flush=True)
            return
        over = "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["over"].items())
        print(f"{place} {row['ending']:14} of its budget: {over}  ({row['seconds']} s)", flush=True)

    return write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="members cut to four layers")
    parser.add_argument("--page", action="store_true", help="write docs/benchmarks.md and stop")
    parser.add_argument("--members", nargs="*", choices=MEMBERS, help="default: all, small two")
    parser.add_argument("--lines", nargs="*", default=[], help="names of lines; default: all")
    parser.add_argument("--on", choices=["outlier", "collapsed"], help="one recording alone")
    parser.add_argument("--most", type=int, default=MOST_SECONDS, help="seconds of one line")
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--screens", type=Path, help="a folder that keeps what was printed")
    arguments = parser.parse_args()
    if arguments.page:
        refresh()
        return
    names = arguments.members or (BY_DAY if arguments.small else tuple(MEMBERS))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}"}
    if arguments.screens:
        arguments.screens.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="moegeom-") as place:
        small = ["--small"] if arguments.small else []
        path = arguments.results or (Path(place) / "small.json" if arguments.small else RESULTS)
        for name in names:
            folder = Path(place) / "member"
            # a process of its own: what it holds would count as memory of those that begin here
            make = [sys.executable, "-m", "benchmarks.field.making", name, str(folder), *small]
            subprocess.run(make, check=True, cwd=ROOT, env=environment)
            member = MEMBERS[name].small() if arguments.small else MEMBERS[name]
            of_member = _Field(member, folder, _writer(path), arguments.screens, arguments.most)
            for line, recording in rows_of(member, arguments.lines):
                if arguments.on and RECORDINGS.get(recording, arguments.on) != arguments.on:
                    continue
                if line.has_member or line.reason or name == names[0]:
                    of_member.row(line, recording)
            shutil.rmtree(folder)
    if path == RESULTS:
        refresh()


if __name__ == "__main__":
    main()
