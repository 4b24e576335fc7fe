"""Oracle: a scan of the stored recording of the same tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from moegeom.core.errors import NonFiniteError, RecordingError, UsageError
from moegeom.pipeline import ScanRequest, scan
from moegeom.recorder import RouterRecorder
from moegeom.results.reader import open_results
from tests.unit.capture.conftest import NAMES, Sample, sample_of
from tests.unit.capture.test_recorder import record
from tests.unit.capture.two_ranks import fold_pieces


def assert_same_results(mine: Path, theirs: Path) -> None:
    """Every table, bit for bit; what to type next names the tokens, and there are none here."""
    tables = sorted(path.name for path in theirs.glob("*.parquet"))
    assert sorted(path.name for path in mine.glob("*.parquet")) == tables
    for name in tables:
        a, b = (pq.read_table(folder / name) for folder in (mine, theirs))
        if name == "findings.parquet":
            a, b = a.drop_columns("next_command"), b.drop_columns("next_command")
        assert a.equals(b), name


#: Less than a tile, exactly one, and several; all but the first by night.
_SIZES = (5, 16, 64)
_BY_DAY = {(2, 0)}


@pytest.mark.parametrize(
    ("name", "num_documents"),
    [
        pytest.param(name, size, marks=() if (index, place) in _BY_DAY else pytest.mark.nightly)
        for index, name in enumerate(NAMES)
        for place, size in enumerate(_SIZES)
    ],
)
@torch.no_grad()
def test_folded_results_are_those_of_a_scan_of_the_recording(
    name: str, tmp_path: Path, num_documents: int
) -> None:
    sample = sample_of(name)
    documents = range(num_documents)
    domains = sample.recording.facts.domains
    record(sample, tmp_path / "rec", documents, keep="hidden", domains=domains)
    record(
        sample,
        tmp_path / "folded",
        documents,
        fold=True,
        num_tokens=64 * num_documents,
        domains=domains,
    )
    request = ScanRequest(
        checkpoint=str(sample.path), out=tmp_path / "scanned", tokens=str(tmp_path / "rec")
    )
    scan(request)
    assert_same_results(tmp_path / "folded", tmp_path / "scanned")
    run = open_results(tmp_path / "folded").run
    assert run["trust"]["fingerprint"] == "matches"
    assert run["trust"]["share_reproduced"] == 1.0
    assert run["tokens"]["num_tokens"] == 64 * num_documents
    assert run["tokens"]["num_documents"] == num_documents


def test_how_the_passes_are_cut_changes_nothing(balanced: Sample, tmp_path: Path) -> None:
    """What the routers read depends on the batch; so the same inputs are fed in other pieces."""
    for name, cuts in (("a", (0, 5000)), ("b", (0, 1, 700, 1024, 2047, 4999, 5000))):
        fold_pieces(balanced.model, tmp_path / name, itertools.pairwise(cuts), 5000)
    assert_same_results(tmp_path / "a", tmp_path / "b")


def test_up_to_the_size_of_the_samples_it_need_not_be_said_how_many_tokens_come(
    balanced: Sample, tmp_path: Path
) -> None:
    for name, told in (("told", 4000), ("open", None)):
        fold_pieces(balanced.model, tmp_path / name, [(0, 1500), (1500, 4000)], told)
    assert_same_results(tmp_path / "open", tmp_path / "told")


def test_fewer_tokens_than_announced_are_counted(balanced: Sample, tmp_path: Path) -> None:
    domains = balanced.recording.facts.domains
    record(balanced, tmp_path / "folded", range(20), fold=True, num_tokens=4096, domains=domains)
    run = open_results(tmp_path / "folded").run
    assert run["tokens"]["num_tokens"] == 20 * 64


def test_more_tokens_than_announced_are_refused(balanced: Sample, tmp_path: Path) -> None:
    domains = balanced.recording.facts.domains
    with pytest.raises(RecordingError, match="1,280 tokens have come; num_tokens said 1000"):
        record(balanced, tmp_path / "out", range(20), fold=True, num_tokens=1000, domains=domains)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "logits"}, "measures router inputs"),
        ({"rank": 0, "num_ranks": 2}, "fold=True on 2 ranks that nothing connects"),
        ({}, "domain 'code' was not announced"),
    ],
)
def test_what_cannot_be_folded_is_refused(
    balanced: Sample, tmp_path: Path, options: dict, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        record(balanced, tmp_path / "out", range(1), fold=True, **options)


def test_a_token_that_is_not_finite_stops_the_fold(balanced: Sample, tmp_path: Path) -> None:
    names = balanced.recording.facts.routers
    inputs = {name: balanced.recording.read_values(name, 0, 64).copy() for name in names}
    inputs["text/1"][7, 3] = np.nan
    with (
        pytest.raises(NonFiniteError, match="text/1"),
        RouterRecorder(balanced.model, tmp_path / "out", fold=True, num_tokens=64) as recorder,
    ):
        recorder.tokens(torch.zeros(1, 64, dtype=torch.long))
        for layer, name in zip(balanced.model.model.layers, names, strict=True):
            layer.mlp.gate(torch.from_numpy(inputs[name]))
    assert not (tmp_path / "out").exists()
