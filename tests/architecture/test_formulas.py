"""Every formula key that a column names has an entry in docs/formulas.md, and the other way round."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moegeom.metrics import METRICS

TEXT = (Path(__file__).resolve().parents[2] / "docs/formulas.md").read_text("utf-8")
ENTRIES = dict(re.findall(r"^### `(\w+)`\n(.+)$", TEXT, re.MULTILINE))
USED = sorted(
    {
        column.formula
        for metric in METRICS.all()
        for columns in metric.columns.values()
        for column in columns
        if column.formula
    }
)


@pytest.mark.parametrize("key", USED)
def test_every_formula_has_an_entry(key):
    assert key in ENTRIES, f"docs/formulas.md has no '### `{key}`'"


def test_no_entry_is_left_over():
    assert sorted(ENTRIES) == USED


@pytest.mark.parametrize("key", sorted(ENTRIES))
def test_an_entry_is_more_than_a_name(key):
    assert len(ENTRIES[key]) > 60
    assert ENTRIES[key].endswith(".")


def test_no_key_is_described_twice():
    assert len(re.findall(r"^### `", TEXT, re.MULTILINE)) == len(ENTRIES)
