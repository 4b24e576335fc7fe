"""Full-size routers: what is planted is found, at its layer, and nothing where nothing is planted.

Tokens lean to a common mean and some are 1000 times as long as the rest, as attention sinks are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.tokens import TokenColumns
from moegeom.results.reader import Results, open_results
from moegeom.router.load import load_routers
from moegeom.testing.synthetic import SyntheticModel, synthetic_inputs, write_checkpoint
from moegeom.tokens.recording.writer import RecordingWriter
from tests.by_day import by_day

SHAPES = {
    "softmax": SyntheticModel("qwen3_moe", hidden=2048, experts=64, top_k=8, layers=4),
    "grouped": SyntheticModel("deepseek_v3", hidden=7168, experts=256, top_k=8, layers=4),
}

NUM_TOKENS, NUM_SINKS = 1024, 4

#: How far tokens lean to their common mean. Random rows are not trained against a lean: at 0.3 the
#: luckiest of 64 gets three fair shares, and a healthy model would not look like one.
LEAN = 0.05

#: Layer 0 is healthy in both models; the damaged one has a defect in each of the others.
PLANTED = {"duplicate": (1,), "zero": (2,), "long": (3,)}
FOUND = {("MGI104", "text/1"), ("MGI103", "text/2"), ("MGB203", "text/3")}


def write_tokens(path, model: SyntheticModel) -> None:
    routers = load_routers(open_checkpoint(path.parent / "model")).routers
    values = {
        r.name: synthetic_inputs(model, r.layer, NUM_TOKENS, NUM_SINKS, LEAN) * r.gain
        for r in routers
    }
    token = np.arange(NUM_TOKENS)
    unknown = np.full(NUM_TOKENS, -1)
    columns = TokenColumns(
        token // 64, (token % 64).astype(np.int32), unknown.astype(np.int32), unknown.astype("i2")
    )
    with RecordingWriter(path, "router_input", tuple(values)) as writer:
        writer.append(columns, values)


def scan(moegeom, folder, model: SyntheticModel) -> Results:
    write_checkpoint(folder / "model", model)
    write_tokens(folder / "rec", model)
    ran = moegeom(folder, "scan", "model", "--tokens", "rec", "--out", "out", "--quiet")
    assert ran.code == 0, ran.err
    return open_results(folder / "out")


def findings(results: Results) -> set[tuple[str, str]]:
    rows = [row for row in results.rows("findings") if row["severity"] != "note"]
    return {(row["code"], router) for row in rows for router in row["routers"]}


@pytest.mark.parametrize("shape", by_day(SHAPES, ["softmax"]))
def test_planted_defects_are_found_and_nothing_else(moegeom, tmp_path, shape):
    found = findings(scan(moegeom, tmp_path, replace(SHAPES[shape], **PLANTED)))
    assert found >= FOUND
    assert {entry for entry in found if entry[1] == "text/0"} == set()
    # a zero row never wins and a long one leaves others underused: one cause, two findings
    underused = {("MGB201", "text/2"), ("MGB201", "text/3")}
    # and the weights alone tell that the long row is long
    assert found - FOUND - underused <= {
        *(("MGG203", "text/3"), ("MGG205", "text/3")),
        # and a long row sees more of the mean input than the others
        ("MGG302", "text/3"),
    }


@pytest.mark.parametrize("shape", by_day(SHAPES, ["softmax"]))
def test_the_healthy_duplicate_has_no_finding(moegeom, tmp_path, shape):
    assert findings(scan(moegeom, tmp_path, replace(SHAPES[shape], layers=2))) == set()
