"""Counts for load balancers: as numpy, torch and JSON read them, and equal to the choices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import moegeom as mg
from moegeom.core.errors import ResultsError, UsageError
from moegeom.results.counts import expert_counts, write_counts
from moegeom.results.reader import open_results
from tests.unit.document.records import SAMPLE, scanned_sample


@pytest.fixture(scope="module")
def scanned():
    return scanned_sample()


def test_counts_are_those_of_the_recorded_choices(scanned):
    counts, source = scanned.counts(), mg.recording(SAMPLE / "rec/step_1500").open()
    num_tokens = source.facts.num_tokens
    assert counts.routers == source.facts.routers
    for row, router in zip(counts.counts, counts.routers, strict=True):
        ids = source.read_chosen(router, 0, num_tokens)
        np.testing.assert_array_equal(row, np.bincount(ids.ravel(), minlength=16))
    np.testing.assert_array_equal(counts.counts.sum(axis=1), num_tokens * 4)


def test_every_form_is_read_back_by_who_takes_it(scanned, tmp_path):
    found = scanned.counts()
    for ending in ("npy", "pt", "json", "jsonl"):
        write_counts(found, tmp_path / f"c.{ending}")
    weight = torch.load(tmp_path / "c.pt", weights_only=True)
    assert (weight.dtype, tuple(weight.shape)) == (torch.int64, (3, 16))
    read = [
        np.load(tmp_path / "c.npy"),
        weight.numpy(),
        json.loads((tmp_path / "c.json").read_text()),
    ]
    for counts in read:
        np.testing.assert_array_equal(counts, found.counts)
    # what vLLM does with a record: loads of places, scattered to the experts that lie there
    record = json.loads((tmp_path / "c.jsonl").read_text())
    assert record["record_type"] == "eplb_load_stats"
    load, places = (torch.tensor(record[key]) for key in ("expert_load", "p2l_map"))
    logical = torch.zeros_like(load).scatter_add_(1, places, load)
    np.testing.assert_array_equal(logical, found.counts)


def test_weights_alone_have_no_counts_and_endings_are_told(scanned, tmp_path):
    with pytest.raises(ResultsError, match="no tokens were counted at router text/0"):
        mg.scan(SAMPLE / "step_1500").counts()
    with pytest.raises(UsageError, match=r"expected a name that ends in \.npy, \.pt"):
        write_counts(scanned.counts(), tmp_path / "c.csv")


#: Values of one row of ``experts.parquet`` that no scan writes.
DAMAGE = {"num_slots": (np.nan, 1.5, -1, -(2**62)), "expert": (16, 2**40, -1)}


def test_tables_that_hold_no_counts_are_refused(tmp_path):
    mg.scan(SAMPLE / "step_1500", SAMPLE / "rec/step_1500", out=tmp_path / "whole", layers="0")
    for column, values in DAMAGE.items():
        for number, value in enumerate(values):
            folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"{column}_{number}"))
            table = pq.read_table(folder / "experts.parquet")
            held = table.column(column).to_pylist()
            held[3] = value
            kind = pa.float64() if isinstance(value, float) else pa.int64()
            place = table.schema.get_field_index(column)
            changed = pa.array(held, kind)
            pq.write_table(table.set_column(place, column, changed), folder / "experts.parquet")
            with pytest.raises(ResultsError):
                expert_counts(open_results(folder))
