"""Ranges of mutated inputs, each in a process that may die of one.

A range may be run by itself and another day: ``python -m tests.fuzz.ranges 0 500`` uses inputs 0 to
499 of every kind, ``python -m tests.fuzz.ranges 500 800 npz baseline`` more of two. Of each input
that ends in something else than a value or an error there is a line of JSON, at the end of each
kind its milliseconds of the processor.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]

Input = dict[str, Any]


def fuzz(ranges: Sequence[tuple[str, int, int]], folder: Path) -> Iterator[Input]:
    """How inputs of kinds end; a worker that dies of one is followed by another."""
    names = list(dict.fromkeys(kind for kind, _, _ in ranges))
    waiting = [[*one, str(folder / f"{names.index(one[0])}" / "sound")] for one in ranges]
    while waiting:
        worker = _Worker(waiting)
        for answer in worker.answers():
            yield answer
            waiting[0][1] = answer["number"] + 1
            if waiting[0][1] == waiting[0][2]:
                waiting.pop(0)
            if answer["outcome"] in ("stuck", "large"):
                break  # what it left behind is not the next one's
        else:
            if waiting:
                yield worker.death(*waiting[0][:2])
                waiting[0][1] += 1
                if waiting[0][1] == waiting[0][2]:
                    waiting.pop(0)


def distinct(inputs: Sequence[Input]) -> str:
    """One line for each place in which something happened: how often, and one input."""
    places: dict[tuple[str, ...], list[Input]] = {}
    for one in inputs:
        place = one["detail"].partition(": ")[0]
        places.setdefault((one["kind"], one["outcome"], place), []).append(one)
    return "\n".join(f"{len(alike)} x {place}: {alike[0]}" for place, alike in places.items())


def environment() -> dict[str, str]:
    more = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1"}
    folders = {"HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"}
    return os.environ | more | folders


class _Worker:
    """One process that goes through kinds; ``answers`` ends when it does."""

    def __init__(self, work: list[list[Any]]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", json.dumps(work)],
            cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._said: list[str] = []

    def answers(self) -> Iterator[Input]:
        out, complaints = self._process.stdout, self._process.stderr
        assert out is not None
        assert complaints is not None
        reader = threading.Thread(target=lambda: self._said.extend(complaints), daemon=True)
        reader.start()
        try:
            for line in out:
                yield json.loads(line)
        finally:
            self._process.kill()
            self._process.wait()
            reader.join(10)
            out.close()
            complaints.close()

    def death(self, kind: str, number: int) -> Input:
        said = "".join(self._said[-30:])
        if "AssertionError: " in said or "ImportError" in said:
            raise AssertionError(said)  # the fault is the fuzzer's
        own = [line.strip() for line in self._said if "/moegeom/" in line]
        detail = own[0].rpartition("/moegeom/")[2] if own else said[-300:]
        return {"kind": kind, "number": number, "outcome": "died", "detail": detail}


def offenders_of(inputs: Iterable[Input], ends: Counter[tuple[str, str]]) -> list[Input]:
    """Inputs that end in something else than a value or an error; ``ends`` counts all."""
    offenders = []
    for one in inputs:
        ends[one["kind"], one["outcome"]] += 1
        if one["outcome"] not in ("value", "error"):
            offenders.append(one)
    return offenders


def main() -> None:
    """Prints each offender as it is found, and at the end a line for each kind and one for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int, help="the first number of the inputs of each kind")
    parser.add_argument("stop", type=int, help="the number behind the last; the next range's first")
    parser.add_argument("kinds", nargs="*", metavar="kind", help="all, unless some are named")
    request = parser.parse_args()
    ends: Counter[tuple[str, str]] = Counter()
    seconds: Counter[str] = Counter()

    def say(kind: str) -> None:
        counts: Counter[str] = Counter()
        for (name, end), number in ends.items():
            counts[end] += number * (kind in (name, "all"))
        spent = seconds[kind] if kind in seconds else seconds.total()
        told = ", ".join(f"{end} {number:,}" for end, number in counts.items() if number)
        rate = 1000.0 * spent / counts.total()
        sys.stdout.write(f"{kind}: {counts.total():,} inputs, {rate:.1f} ms each; {told}\n")
        sys.stdout.flush()

    def inputs(ranges: Sequence[tuple[str, int, int]], folder: Path) -> Iterator[Input]:
        for one in fuzz(ranges, folder):
            seconds[one["kind"]] += one.get("seconds", 0.0)
            if one["outcome"] not in ("value", "error"):
                sys.stdout.write(f"{json.dumps(one)}\n")
            yield one

    num_offenders = 0
    for kind in request.kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            one_kind = [(kind, request.first, request.stop)]
            num_offenders += len(offenders_of(inputs(one_kind, Path(folder)), ends))
        say(kind)
    say("all")
    sys.exit(bool(num_offenders))


if __name__ == "__main__":
    main()
