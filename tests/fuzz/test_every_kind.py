"""Whatever the bytes of any file that moegeom opens: a value or a MoeGeomError, soon and small.

Every kind of file is mutated by edits that know its language. An input may take two seconds of
processor time and 512 MB beside its own size, may print no warning, and must not end in anything
but a value or one of our errors. The same inputs are tried in every run; at night a million.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moegeom.checkpoint.open import FORMATS
from moegeom.tokens.source import SOURCES
from moegeom.tokens.traces.dialect import DIALECTS
from tests.fuzz.kinds import KINDS
from tests.fuzz.worker import FAULTS
from tests.unit.tokens.dialects import test_counts
from tests.unit.tokens.dialects.written import WRITERS

ROOT = Path(__file__).resolve().parents[2]


#: Numbers of the inputs of each kind: by day a few, at night a million in all.
BY_DAY, AT_NIGHT = 8, 1_000_000

#: Inputs of which a million ended in something else than they should.
FOUND = {
    "config": (3075,),
    "log-probs in jsonl": (6181,),
    "npy": (16567,),
    "npz": (10422,),
    "recording facts": (4140,),
    "results tables": (714, 4650, 6640),
    "compressed npz": (5203,),
    "counts of imatrix": (11648,),
    "counts of sglang": (13304,),
    "weights": (8450,),
    "tokens in pt": (15655,),
    "run.json": (2305,),
    "results of tokens": (3911,),
    "unfinished results": (3350,),
    "baseline": (1376,),
    "odd weights": (35,),
}

#: What the first two hold is kept to save work: where it is damaged, the work is done again. The
#: third are sound files, each other weights.
_NEVER_REFUSED = {"range cache", "kept first pass", "odd weights"}

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


def _distinct(inputs: Sequence[Input]) -> str:
    """One line for each place in which something happened: how often, and one input."""
    places: dict[tuple[str, ...], list[Input]] = {}
    for one in inputs:
        place = one["detail"].partition(": ")[0]
        places.setdefault((one["kind"], one["outcome"], place), []).append(one)
    return "\n".join(f"{len(alike)} x {place}: {alike[0]}" for place, alike in places.items())


def _environment() -> dict[str, str]:
    more = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1"}
    folders = {"HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"}
    return os.environ | more | folders


class _Worker:
    """One process that goes through kinds; ``answers`` ends when it does."""

    def __init__(self, work: list[list[Any]]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", json.dumps(work)],
            cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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


def _offenders(inputs: Iterable[Input], ends: Counter[tuple[str, str]]) -> list[Input]:
    """Inputs that end in something else than a value or an error; ``ends`` counts all."""
    offenders = []
    for one in inputs:
        ends[one["kind"], one["outcome"]] += 1
        if one["outcome"] not in ("value", "error"):
            offenders.append(one)
    return offenders


def test_mutated_inputs_of_every_kind_end_in_a_value_or_an_error(tmp_path: Path) -> None:
    few = [(kind, 0, BY_DAY) for kind in KINDS]
    mended = [(kind, n, n + 1) for kind, numbers in FOUND.items() for n in numbers]
    ends: Counter[tuple[str, str]] = Counter()
    offenders = _offenders(fuzz(few + mended, tmp_path), ends)
    assert offenders == [], _distinct(offenders)
    assert ends.total() == BY_DAY * len(KINDS) + sum(map(len, FOUND.values()))
    # the mutations bite, and not all of them
    assert sum(ends[kind, "error"] > 0 for kind in KINDS) > 0.8 * len(KINDS)
    assert sum(ends[kind, "value"] > 0 for kind in KINDS) > 0.6 * len(KINDS)


@pytest.mark.nightly
def test_a_million_mutated_inputs_end_in_a_value_or_an_error(tmp_path: Path) -> None:
    each = AT_NIGHT / sum(kind.share for kind in KINDS.values())
    counts = {name: int(each * kind.share) + 1 for name, kind in KINDS.items()}
    ends: Counter[tuple[str, str]] = Counter()
    offenders = _offenders(fuzz([(kind, 0, n) for kind, n in counts.items()], tmp_path), ends)
    assert offenders == [], _distinct(offenders)
    for name, count in counts.items():
        assert ends[name, "error"] > 0 or name in _NEVER_REFUSED
        assert ends[name, "value"] > 0 or KINDS[name].is_refused
        assert ends[name, "error"] + ends[name, "value"] == count


#: What a kind stands for, where its name does not begin with it.
_FORMATS = {"safetensors", "pytorch", "dcp", "gguf"}
_SOURCES = {
    "npy": "npy", "npz": "npz", "safetensors": "tokens in safetensors", "recording": "recording",
    "parquet": "tokens in parquet", "pt": "tokens in pt", "trace": "trace of vllm",
}  # fmt: skip


def test_every_format_source_and_dialect_is_a_kind() -> None:
    assert set(FORMATS.names()) == _FORMATS
    assert all(any(kind.startswith(name) for kind in KINDS) for name in _FORMATS)
    assert set(SOURCES.names()) == set(_SOURCES)
    assert set(_SOURCES.values()) <= set(KINDS)
    written = {writer.dialect for writer in WRITERS.values()}
    assert len(set(DIALECTS.names()) - written) == len(test_counts.WRITERS)
    assert {f"trace of {name}" for name in WRITERS} <= set(KINDS)
    assert {f"counts of {name}" for name in test_counts.WRITERS} <= set(KINDS)


def test_the_worker_sees_every_fault() -> None:
    # in a process of its own: memory and signals are those of a process
    command = [sys.executable, "-m", "tests.fuzz.worker", json.dumps("faults")]
    ends = json.loads(subprocess.check_output(command, env=_environment(), cwd=ROOT))
    assert ends == {fault: fault for fault in FAULTS}
