"""The first screen says what the results hold, within its width."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moegeom.document.header import duration, size
from moegeom.document.model import View
from moegeom.document.render import render
from moegeom.document.results import results_document
from moegeom.pipeline import ScanRequest, scan
from moegeom.results.reader import Results, open_results
from moegeom.testing.synthetic import SyntheticModel, write_checkpoint, write_tokens

MODEL = SyntheticModel(hidden=64, experts=16, top_k=4, layers=3, duplicate=(1,))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("screen")
    write_checkpoint(root / "model", MODEL)
    write_tokens(root / "rec", MODEL, 2048)
    request = ScanRequest(str(root / "model"), root / "out", tokens=str(root / "rec"))
    return open_results(scan(request))


def rendered(results: Results, name: str, view: View) -> str:
    return render(results_document(results, view), name, view)


@pytest.mark.parametrize("width", [76, 80, 100, 120])
def test_only_commands_and_paths_are_longer_than_the_screen(results: Results, width: int) -> None:
    text = rendered(results, "table", View(width=width))
    long = [line for line in text.splitlines() if len(line) > width]
    assert [line for line in long if "next:" not in line and str(results.path) not in line] == []


def test_the_screen_names_the_duplicate_rows_and_their_layer(results: Results) -> None:
    text = rendered(results, "table", View())
    assert "ERROR MGI104  layer 1: experts 1 and 5 are the same row" in text
    assert "VERDICT  1 error" in text


def test_colour_codes_appear_only_when_asked_for(results: Results) -> None:
    assert "\x1b[" not in rendered(results, "table", View())
    assert "\x1b[" in rendered(results, "table", View(colours=True))


def test_json_is_one_strict_document_with_every_layer(results: Results) -> None:
    text = rendered(results, "json", View())
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"not strict: {name}"))
    stored = [row for row in document["layers"] if row["variant"] == "as_stored"]
    assert len({row["router"] for row in stored}) == MODEL.layers


def test_markdown_has_a_line_for_every_layer(results: Results) -> None:
    text = rendered(results, "md", View())
    assert sum(line.startswith(("| 0 |", "| 1 |", "| 2 |")) for line in text.splitlines()) == 3


def test_results_hold_no_path_and_no_token_id(results: Results) -> None:
    text = (results.path / "run.json").read_text()
    assert str(Path(results.path).parent) not in text
    assert '"token_id"' not in text


def test_sizes_and_times_read_as_a_person_would_write_them() -> None:
    assert [size(n) for n in (0, 999, 27_800_000, 61.1e9)] == ["0 B", "999 B", "27.8 MB", "61.1 GB"]
    assert [duration(s) for s in (0.004, 0.25, 12.0)] == ["4 ms", "0.2 s", "12.0 s"]
