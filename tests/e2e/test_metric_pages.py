"""docs/metrics follows from the code: run `python docs/refresh_metrics.py` when this fails."""

import importlib.util
import re
from pathlib import Path

import pytest

from moegeom.metrics import METRICS

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("refresh_metrics", DOCS / "refresh_metrics.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_a_metric_says_what_its_code_says_and_explains_itself(pages):
    """More than a sentence: what it is, how to read it."""
    for name in METRICS.names():
        text = (DOCS / "metrics" / f"{name}.md").read_text("utf-8")
        before, mark, example = text.partition(pages.EXAMPLE)
        assert mark, f"{name}: no example"
        assert before.split() == pages.reference(METRICS[name]).split(), name
        pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", example)
        assert (
            pictures
            or "| `" in example
            or METRICS[name].columns.keys() != {"layers"}
            or name in ("affine_carrier", "expert_capacity", "output_overlap", "set_sizes")
        ), name
        for picture in pictures:
            assert (DOCS / "metrics" / picture).stat().st_size > 1000
        assert len(METRICS[name].page.split()) > 25, f"{name}: its docstring is the page"


def test_the_index_lists_every_page_and_no_page_is_left_over(pages):
    assert (DOCS / "metrics/README.md").read_text("utf-8") == pages.index()
    found = {path.stem for path in (DOCS / "metrics").glob("*.md")} - {"README"}
    assert found == set(METRICS.names())
