"""Oracle: a scan of the stored recording of the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from moegeom.core.errors import NonFiniteError, RecordingError, UsageError
from moegeom.core.tokens import TILE
from moegeom.pipeline import ScanRequest, scan
from moegeom.recorder import RouterRecorder
from moegeom.results.reader import open_results
from tests.by_day import by_day
from tests.unit.capture.conftest import NAMES, sample_of
from tests.unit.capture.test_recorder import record


def assert_same_results(mine: Path, theirs: Path) -> None:
    """Every table, bit for bit; what to type next names the tokens, and there are none here."""
    tables = sorted(path.name for path in theirs.glob("*.parquet"))
    assert sorted(path.name for path in mine.glob("*.parquet")) == tables
    for name in tables:
        a, b = (pq.read_table(folder / name) for folder in (mine, theirs))
        if name == "findings.parquet":
            a, b = a.drop_columns("next_command"), b.drop_columns("next_command")
        assert a.equals(b), name


#: Six tiles, the last one short: two more than the smaller samples have.
TOKENS = 5 * TILE + 100


def fold_pieces(model, out, pieces: Iterable[tuple[int, int]], num_tokens, group=None) -> None:
    layers = model.model.layers
    inputs = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(0))
    folding = RouterRecorder(model, out, fold=True, num_tokens=num_tokens, group=group)
    with torch.no_grad(), folding as recorder:
        for start, stop in pieces:
            token = torch.arange(start, stop)[None]
            recorder.tokens(
                torch.zeros(1, stop - start, dtype=torch.long),
                documents=token // 100,
                positions=token % 100,
            )
            for layer in layers:
                layer.mlp.gate(layer.post_attention_layernorm(inputs)[start:stop])


#: Documents: less than a tile of tokens, exactly one, and several.
CASES = [(name, num_documents) for name in NAMES for num_documents in (5, 16, 64)]


@pytest.mark.parametrize(
    ("name", "num_documents"), by_day(CASES, {"groups, biases": ("deepseek-tiny", 5)})
)
@torch.no_grad()
def test_folded_results_are_those_of_a_scan_of_the_recording(name, tmp_path, num_documents):
    sample = sample_of(name)
    documents = range(num_documents)
    domains = sample.recording.facts.domains
    record(sample, tmp_path / "rec", documents, keep="hidden", domains=domains)
    announced = {"num_tokens": 64 * num_documents, "domains": domains}
    record(sample, tmp_path / "folded", documents, fold=True, **announced)
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


def test_neither_cuts_of_the_passes_nor_counts_before_change_a_fold(balanced, tmp_path):
    """What the routers read depends on the batch; so the same inputs are fed in other pieces. Up to
    the size of the samples it need not be said how many tokens come.
    """
    for name, cuts, num_tokens in (
        ("whole", (0, 2500), 2500),
        ("pieces", (0, 1, 700, 1024, 2047, 2499, 2500), None),
    ):
        fold_pieces(balanced.model, tmp_path / name, itertools.pairwise(cuts), num_tokens)
    assert_same_results(tmp_path / "whole", tmp_path / "pieces")


def test_fewer_tokens_than_announced_are_counted_and_more_refused(balanced, tmp_path):
    domains = balanced.recording.facts.domains
    with pytest.raises(RecordingError, match="128 tokens have come; num_tokens said 100"):
        record(balanced, tmp_path / "out", range(2), fold=True, num_tokens=100, domains=domains)
    with pytest.raises(UsageError, match="domain 'code' was not announced"):
        record(balanced, tmp_path / "out", range(1), fold=True)
    assert not list(tmp_path.iterdir())
    record(balanced, tmp_path / "folded", range(2), fold=True, num_tokens=4096, domains=domains)
    assert open_results(tmp_path / "folded").run["tokens"]["num_tokens"] == 2 * 64


def test_a_token_that_is_not_finite_stops_the_fold(balanced, tmp_path):
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
