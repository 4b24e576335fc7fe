"""Two results beside each other: each finding stands once, on its side, each figure as its own report
has it.
"""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

import moegeom as mg
from moegeom.core.errors import ResultsError
from moegeom.document.model import Fact, Gallery, Headline, Table, View
from moegeom.document.results import layer_columns, results_document
from moegeom.document.summary import summarise
from moegeom.testing.synthetic import SyntheticModel, write_checkpoint
from moegeom_cli.app import app

#: A has a duplicate row in layer 1 and a zero row in layer 0, B the first of them and one in 2.
ROWS = {"a": {"duplicate": (1,), "zero": (0,)}, "b": {"duplicate": (1,), "zero": (2,)}}


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> dict[str, mg.ScanReport]:
    folder = tmp_path_factory.mktemp("beside")
    models = {n: SyntheticModel(hidden=32, experts=8, top_k=2, layers=3, **ROWS[n]) for n in ROWS}
    return {
        name: mg.scan(write_checkpoint(folder / name, model), out=folder / f"{name}.moegeom")
        for name, model in models.items()
    }


def blocks(scans, kind: type) -> list:
    document = scans["a"].beside(scans["b"]).tell((scans["a"].value, scans["b"].value), View())
    flat = [block for section in document.sections for block in section]
    return [b for block in flat for b in getattr(block, "page", [block]) if isinstance(b, kind)]


def test_each_finding_stands_on_the_side_that_has_it(scans):
    label, sides = "", {}
    for fact in blocks(scans, Fact)[3:]:
        label = fact.label or label
        sides.setdefault(label, set()).add(" ".join(fact.text.split()[:3]).rstrip(":"))
    assert "MGI103 layer 0" in sides["A alone"]
    assert "MGI103 layer 2" in sides["B alone"]
    assert "MGI104 layer 1" in sides["both"]
    assert not sides["A alone"] & sides["B alone"]
    (headline,) = blocks(scans, Headline)
    a, b = (
        {(finding.code, r) for finding in summarise(scan.value).findings for r in finding.routers}
        for scan in scans.values()
    )
    sizes = [len(a - b), len(b - a), len(a & b)]
    assert [int(number) for number, _, _ in headline.numbers] == sizes


def test_each_cell_is_that_of_its_own_report(scans):
    (table,) = blocks(scans, Table)
    for side, scan in enumerate(scans.values()):
        summary = summarise(scan.value)
        columns = layer_columns(summary)
        own = [[c.text(c.value(row)) for c in columns] for row in summary.layers]
        assert [list(row[1 + side :: 2]) for row in table.rows] == own


def test_a_curve_is_drawn_of_figures_that_differ_and_none_of_equal_results(scans):
    (gallery,) = blocks(scans, Gallery)
    (chart,) = gallery.figures()
    titles = {panel.title for panel in chart.panels}
    assert "zero rows" in titles
    assert "dup. rows" not in titles
    assert blocks({"a": scans["a"], "b": scans["a"]}, Gallery)[0].figures() == []


def test_results_without_a_router_in_common_and_a_third_one_are_refused(scans):
    elsewhere = {**scans["b"].run, "routers": [{"name": "vision/7"}]}
    unrelated = mg.ScanReport(replace(scans["b"].value, run=elsewhere), results_document)
    with pytest.raises(ResultsError, match="in common: text/0, text/1, text/2 and vision/7"):
        scans["a"].beside(unrelated)
    paths = [str(scan.value.path) for scan in scans.values()]
    refused = CliRunner().invoke(app, ["report", *paths, paths[0]])
    assert "3 results; expected two at most" in str(refused.exception)
    assert CliRunner().invoke(app, ["report", *paths]).exit_code == 0
    counts = CliRunner().invoke(app, ["report", *paths, "--counts", "c.npy"])
    assert "expected one at most" in str(counts.exception)
