"""Whatever the bytes of any file that moegeom opens: a value or a MoeGeomError, soon and small.

Every kind of file is mutated by edits that know its language. An input may take two seconds of
processor time and 512 MB beside its own size, may print no warning, and must not end in anything
but a value or one of our errors. The same inputs are tried in every run; at night a million.
"""

from __future__ import annotations

import io
import json
import os
import pickletools
import random
import subprocess
import sys
import threading
import time
import tomllib
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moegeom.checkpoint.open import FORMATS
from moegeom.core.errors import MoeGeomError
from moegeom.tokens.source import SOURCES
from moegeom.tokens.traces.dialect import DIALECTS
from tests.fuzz import mutations
from tests.fuzz.kinds import KINDS
from tests.unit.tokens.dialects import test_counts
from tests.unit.tokens.dialects.written import WRITERS

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Tally:
    """How the inputs of one kind ended."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    largest_seconds: float = 0.0
    megabytes: int = 0

    def add(self, found: Mapping[str, Any]) -> None:
        self.outcomes[found["outcome"]] += 1
        self.seconds += found["seconds"]
        self.largest_seconds = max(self.largest_seconds, found["seconds"])
        self.megabytes = max(self.megabytes, found["megabytes"])


@dataclass
class Figures:
    """The tallies by kind, and what else happened than values and errors."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    others: list[dict[str, Any]] = field(default_factory=list)

    def add(self, found: dict[str, Any]) -> None:
        self.tallies.setdefault(found["kind"], Tally()).add(found)
        if found["outcome"] not in ("value", "error"):
            self.others.append(found)

    def table(self) -> str:
        lines = [f"{'kind':24} {'inputs':>8} {'values':>8} {'errors':>8} {'others':>7} {'mean ms':>8} {'max s':>6} {'max MB':>7}"]  # fmt: skip
        for kind, tally in self.tallies.items():
            inputs, found = tally.outcomes.total(), tally.outcomes
            other = inputs - found["value"] - found["error"]
            lines.append(
                f"{kind:24} {inputs:8} {found['value']:8} {found['error']:8} {other:7} "
                f"{1000 * tally.seconds / inputs:8.2f} {tally.largest_seconds:6.2f} {tally.megabytes:7}"
            )
        return "\n".join(lines)

    def distinct(self) -> list[str]:
        """One line for each place in which something else happened: how often, and one input."""
        first: dict[tuple[str, ...], dict[str, Any]] = {}
        count: Counter[tuple[str, ...]] = Counter()
        for found in self.others:
            place = (found["kind"], found["outcome"], found.get("detail", "").partition(": ")[0])
            first.setdefault(place, found)
            count[place] += 1
        return [
            f"{n} x {' | '.join(place)}: input {first[place]['number']}, {first[place].get('done')}: "
            f"{first[place].get('detail')}"
            for place, n in count.most_common()
        ]


def fuzz(counts: Mapping[str, int], folder: Path) -> Figures:
    """Inputs 0 to ``counts[kind]`` of each kind; a worker that dies of one is followed by another."""
    figures = Figures()
    waiting = [
        [kind, 0, count, str(folder / f"{i}" / "sound")]
        for i, (kind, count) in enumerate(counts.items())
    ]
    while waiting:
        worker = _Worker(waiting)
        for found in worker.answers():
            figures.add(found)
            waiting[0][1] = found["number"] + 1
            if waiting[0][1] == waiting[0][2]:
                waiting.pop(0)
            if found["outcome"] in ("stuck", "large"):
                break  # what it left behind is not the next one's
        else:
            if waiting:
                figures.add(worker.death(*waiting[0][:2]))
                waiting[0][1] += 1
                if waiting[0][1] == waiting[0][2]:
                    waiting.pop(0)
    return figures


class _Worker:
    """One process that goes through kinds; ``answers`` ends when it does."""

    def __init__(self, work: list[list[Any]]) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", json.dumps(work)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._said: list[str] = []

    def answers(self) -> Iterator[dict[str, Any]]:
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

    def death(self, kind: str, number: int) -> dict[str, Any]:
        """What stands for the input that the process died of."""
        said = "".join(self._said[-30:])
        if "AssertionError: " in said or "ImportError" in said:
            raise AssertionError(said)  # the fault is the fuzzer's
        own = [line.strip() for line in self._said if "/moegeom/" in line]
        detail = own[0].rpartition("/moegeom/")[2] if own else said[-300:]
        died = {"outcome": "died", "detail": detail, "seconds": 0.0, "megabytes": 0}
        return {"kind": kind, "number": number, **died}


def _counts(total: int) -> dict[str, int]:
    """The same number of every kind, less where a use is slow; ``total`` or a few more in all."""
    each = total / sum(kind.share for kind in KINDS.values())
    return {name: int(each * kind.share) + 1 for name, kind in KINDS.items()}


def _check(counts: Mapping[str, int], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = fuzz(counts, folder)
    with capsys.disabled():
        sys.stdout.write(f"\n{figures.table()}\n")
    assert {k: t.outcomes.total() for k, t in figures.tallies.items()} == counts
    assert figures.others == [], "\n".join(figures.distinct())
    for name, tally in figures.tallies.items():  # the mutations bite, and not all of them
        assert tally.outcomes["error"] > 0 or name in _NEVER_REFUSED
        assert tally.outcomes["value"] > 0 or KINDS[name].is_refused


#: What the first two hold is kept to save work: where it is damaged, the work is done again. The
#: third are sound files, each other weights.
_NEVER_REFUSED = {"range cache", "kept first pass", "odd weights"}


def test_mutated_inputs_of_every_kind_end_in_a_value_or_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _check(_counts(2_000), tmp_path, capsys)


#: Kinds and numbers of inputs that a run of a million found to end in something else.
FOUND = (
    ("config", 3075),
    ("log-probs in jsonl", 6181),
    ("npy", 16567),
    ("npz", 10422),
    ("recording facts", 4140),
    ("results tables", 714),
    ("results tables", 4650),
    ("results tables", 6640),
    ("compressed npz", 5203),
    ("counts of imatrix", 11648),
    ("counts of sglang", 13304),
    ("weights", 8450),
    ("tokens in pt", 15655),
    ("run.json", 2305),
    ("results of tokens", 3911),
    ("unfinished results", 3350),
    ("baseline", 1376),
    ("odd weights", 35),
)


def test_what_a_million_inputs_found_stays_mended(tmp_path: Path) -> None:
    work = []
    for kind, number in FOUND:
        folder = tmp_path / f"{kind} {number}".replace(" ", "_")
        folder.mkdir()
        work.append([kind, number, number + 1, str(folder / "sound")])
    ended = {(one["kind"], one["number"]): one["outcome"] for one in _Worker(work).answers()}
    assert ended.keys() == set(FOUND)
    assert set(ended.values()) <= {"value", "error"}, ended


@pytest.mark.nightly
def test_a_million_mutated_inputs_end_in_a_value_or_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _check(_counts(1_000_000), tmp_path, capsys)


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
    names = {f"trace of {name}" for name in WRITERS} | {
        f"counts of {n}" for n in test_counts.WRITERS
    }
    assert names <= set(KINDS)


def _fails() -> None:
    raise KeyError("x")


def _warns() -> None:
    warnings.warn("x", RuntimeWarning, stacklevel=1)


def _refuses(length: int) -> None:
    raise MoeGeomError("x" * length)


def _computes() -> None:
    sum(range(10**6))


def _fills() -> None:
    bytearray(600 << 20)[::4096].count(1)


#: Each way in which an input can fail; none of them may count as an answer.
_FAULTS: dict[str, Callable[[], None]] = {
    "value": lambda: None, "error": lambda: _refuses(10), "long message": lambda: _refuses(5000),
    "KeyError": _fails, "warning": _warns, "slow": _computes, "large": _fills,
    "stuck": lambda: time.sleep(9),
}  # fmt: skip


def test_the_worker_sees_every_fault() -> None:
    # in a process of their own: memory and signals are those of a process
    script = (
        "import json, random, sys; from tests.fuzz import worker; from tests.fuzz import test_every_kind as t\n"
        "import signal\n"
        "def alarm(*_): raise worker._Stuck\n"
        "signal.signal(signal.SIGALRM, alarm)\n"
        "for outcome, fault in t._FAULTS.items():\n"
        "    worker._STUCK = 2.0 if outcome == 'stuck' else 60.0\n"
        "    worker.SECONDS = 0.0 if outcome == 'slow' else 5.0\n"
        "    print(json.dumps([outcome, worker.measured(fault, 0)['outcome']]))\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"}
    found = subprocess.check_output([sys.executable, "-c", script], env=environment, cwd=ROOT)
    ended = dict(json.loads(line) for line in found.splitlines())
    assert ended == {outcome: outcome for outcome in _FAULTS}


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].is_refused])
def test_a_third_of_the_edits_of_a_language_stay_readable_by_its_parser(
    kind: str, tmp_path: Path
) -> None:
    KINDS[kind].build(tmp_path)
    for glob, language in KINDS[kind].targets.items():
        if language not in _PARSERS:
            continue
        raw = next(p for p in sorted(tmp_path.glob(glob)) if p.is_file()).read_bytes()
        draw = random.Random(kind)
        edits = [mutations.mutated(raw, language, draw) for _ in range(90)]
        assert len(set(edits)) > 30
        assert sum(_is_readable(edit, _PARSERS[language]) for edit in edits) > 30


_PARSERS: dict[str, Callable[[bytes], object]] = {
    "json": json.loads,
    "pickle": lambda raw: list(pickletools.genops(raw)),
    "zip": lambda raw: zipfile.ZipFile(io.BytesIO(raw)).namelist(),
    "toml": lambda raw: tomllib.loads(raw.decode()),
    "parquet": lambda raw: pq.read_table(io.BytesIO(raw)),
}


def _is_readable(raw: bytes, parse: Callable[[bytes], object]) -> bool:
    try:
        parse(raw)
    except (*mutations.UNREADABLE, pa.ArrowException):
        return False
    return True
