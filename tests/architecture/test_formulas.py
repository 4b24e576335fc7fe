"""Every formula key that a column names has an entry in docs/formulas.md, and the other way round."""

import re
from pathlib import Path

from moegeom.metrics import METRICS, read_columns_of

TEXT = (Path(__file__).resolve().parents[2] / "docs/formulas.md").read_text("utf-8")
ENTRIES = dict(re.findall(r"^### `(\w+)`\n(.+)$", TEXT, re.MULTILINE))
USED = sorted(
    {
        column.formula
        for metric in METRICS.all()
        for table in metric.columns
        for column in read_columns_of(metric, table)
        if column.formula
    }
)


def test_every_formula_has_an_entry_and_no_entry_is_left_over():
    assert sorted(ENTRIES) == USED


def test_an_entry_is_more_than_a_name():
    thin = [key for key, text in ENTRIES.items() if len(text) <= 60 or not text.endswith(".")]
    assert thin == []


def test_no_key_is_described_twice():
    assert len(re.findall(r"^### `", TEXT, re.MULTILINE)) == len(ENTRIES)
