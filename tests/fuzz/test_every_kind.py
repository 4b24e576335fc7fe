"""Whatever the bytes of any file that moegeom opens: a value or a MoeGeomError, soon and small.

Every kind of file is mutated by edits that know its language. An input may take two seconds of
processor time and 512 MB beside its own size, may print no warning, and must not end in anything
but a value or one of our errors. The same inputs are tried in every run; at night a million.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from moegeom.checkpoint.open import FORMATS
from moegeom.tokens.source import SOURCES
from moegeom.tokens.traces.trace import DIALECTS
from tests.fuzz.kinds import KINDS
from tests.fuzz.ranges import ROOT, distinct, environment, fuzz, offenders_of
from tests.fuzz.worker import FAULTS
from tests.unit.tokens.dialects import test_counts
from tests.unit.tokens.dialects.written import WRITERS

#: Numbers of the inputs of each kind: by day a few, at night a million in all.
BY_DAY, AT_NIGHT = 6, 1_000_000

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


def test_mutated_inputs_of_every_kind_end_in_a_value_or_an_error(tmp_path: Path) -> None:
    few = [(kind, 0, BY_DAY) for kind in KINDS]
    mended = [(kind, n, n + 1) for kind, numbers in FOUND.items() for n in numbers]
    ends: Counter[tuple[str, str]] = Counter()
    offenders = offenders_of(fuzz(few + mended, tmp_path), ends)
    assert offenders == [], distinct(offenders)
    assert ends.total() == BY_DAY * len(KINDS) + sum(map(len, FOUND.values()))
    # the mutations bite, and not all of them
    assert sum(ends[kind, "error"] > 0 for kind in KINDS) > 0.8 * len(KINDS)
    assert sum(ends[kind, "value"] > 0 for kind in KINDS) > 0.6 * len(KINDS)


@pytest.mark.nightly
def test_a_million_mutated_inputs_end_in_a_value_or_an_error(tmp_path: Path) -> None:
    each = AT_NIGHT / sum(kind.share for kind in KINDS.values())
    counts = {name: int(each * kind.share) + 1 for name, kind in KINDS.items()}
    ends: Counter[tuple[str, str]] = Counter()
    offenders = offenders_of(fuzz([(kind, 0, n) for kind, n in counts.items()], tmp_path), ends)
    assert offenders == [], distinct(offenders)
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
    ends = json.loads(subprocess.check_output(command, env=environment(), cwd=ROOT))
    assert ends == {fault: fault for fault in FAULTS}
