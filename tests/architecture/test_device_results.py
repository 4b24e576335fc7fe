"""What the documentation says about a GPU is what result files show."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks/results").glob("*.json"))
PAGE = (ROOT / "docs/gpu.md").read_text("utf-8")
FACTS = ("claim", "device", "driver", "cuda_runtime", "cupy", "numpy", "python", "commit", "date")
#: What names a row, by benchmark.
NAMES = ("kernel", "scan", "road")

#: Rows of the page's table: the figure in the result file, and how it is written.
FIGURES = {
    "inputs on the device: share of the floor": ("resident_over_floor", ".2f"),
    "streamed: time over the copy to the device": ("streamed_over_upload", ".2f"),
    "plain torch over moegeom": ("torch_over_resident", ".0f"),
    "plain CuPy over moegeom, without the product": ("cupy_routing_over_ours", ".0f"),
}


def problems(document: dict) -> list[str]:
    """What a result file lacks, or shows against its own claim."""
    found = [f"no {name}" for name in FACTS if not document.get(name)]
    if not re.fullmatch(r"[0-9a-f]{7,40}", str(document.get("commit"))):
        found.append("the commit is none")
    rows = document.get("rows") or []
    if not rows:
        found.append("no rows")
    for row in rows:
        name = next((row[key] for key in NAMES if row.get(key)), str(row.get("hidden")))
        if row.get("failure"):
            found.append(f"{name}: not measured ({row['failure']})")
        if row.get("difference"):
            found.append(f"{name}: differs from the reference ({row['difference']})")
        if row.get("differ_beyond_bound"):
            found.append(f"{name}: {row['differ_beyond_bound']} tokens choose otherwise")
        found += [
            f"{name}: not {k}" for k in ("lost_equal", "repeat_equal") if not row.get(k, True)
        ]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_result_file_says_where_it_was_taken_and_shows_no_difference_in_meaning(file):
    assert (ROOT / "benchmarks" / f"{file.stem}.py").is_file()
    assert problems(json.loads(file.read_text("utf-8"))) == []


@pytest.mark.parametrize("claim", FIGURES)
def test_the_page_says_what_the_result_file_shows(claim):
    name, form = FIGURES[claim]
    (file,) = [file for file in FILES if file.stem == "gpu_scan_runs_near_its_floor"]
    values = [row[name] for row in json.loads(file.read_text("utf-8"))["rows"]]
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {claim} |")]
    said = line.split("|")[3].strip(" *")
    assert said == f"{min(values):{form}} to {max(values):{form}}"


def test_problems_of_a_result_file_are_found():
    good = dict.fromkeys(FACTS, "x") | {"commit": "0123abc", "rows": [{"kernel": "top_k"}]}
    assert problems(good) == []
    for change in (
        {"driver": ""},
        {"commit": "HEAD"},
        {"rows": []},
        {"rows": [{"kernel": "top_k", "difference": "ties"}]},
        {"rows": [{"scan": "softmax", "differ_beyond_bound": 1}]},
        {"rows": [{"scan": "softmax", "repeat_equal": False}]},
        {"rows": [{"road": "fold", "failure": "DeviceError: no room"}]},
    ):
        assert problems(good | change), change
