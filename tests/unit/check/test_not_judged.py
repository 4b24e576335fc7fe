"""Where a figure is missing nothing is fine: the check says that it did not judge, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moegeom.checks import CHECKS, Check, Measured, measured_results, run_checks
from moegeom.checks.baseline import baseline_of
from moegeom.checks.check import without_saying
from moegeom.checks.measured import measured_rows
from moegeom.checks.profile import DEFAULT
from moegeom.pipeline import ScanRequest, results_of
from moegeom.studies.check.study import drifts_since
from moegeom.testing.synthetic import write_tokens
from tests.unit.check.conftest import Case, keep, write_model

#: Checks with a figure that a router can lack for no reason but that it cannot be computed.
OF_FIGURES = [check for check in CHECKS.all() if check.needs and check.concerns != without_saying]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> list[Measured]:
    """Checkpoints with and without a selection bias on tokens, each beside its own baseline."""
    found = []
    for family in ("deepseek_v3", "qwen3_moe"):
        folder, case = tmp_path_factory.mktemp(family), Case(family=family, layers=8)
        model = str(write_model(folder, case, keep))
        tokens = str(write_tokens(folder / "rec", case.model, 2048, "sha256:0", 0, 0.05))
        results = results_of(ScanRequest(model, tokens=tokens, stale_inputs=True, num_workers=1))
        before = baseline_of(results)
        drifts = drifts_since(results, before)
        found.append(measured_results(results, model, tokens, before, "", drifts))
    return found


def _judged(check: Check, healthy: list[Measured]) -> Measured:
    """The one that the check judges in full."""
    ends = [(_outcome(one, check.code), one) for one in healthy]
    return next(one for end, one in ends if (end.state, end.num_open) == ("passed", 0))


def _without(measured: Measured, column: str, routers: set[str]) -> Measured:
    def blank(row: Any) -> Any:
        return type(row)({**row, column: None}) if row["router"] in routers else row

    return dataclasses.replace(measured, layers=[blank(row) for row in measured.layers])


def _outcome(measured: Measured, code: str):
    profile = dataclasses.replace(DEFAULT, select=(code,))
    return run_checks(measured, profile).outcomes[0]


@pytest.mark.parametrize("check", OF_FIGURES, ids=lambda check: check.code)
def test_a_check_whose_figure_is_missing_is_not_judged(check, healthy):
    measured = _judged(check, healthy)
    for column in check.needs:
        some = _without(measured, column, {"text/1"})
        outcome = _outcome(some, check.code)
        assert outcome.num_open == 1, column
        assert outcome.reason == f"text/1: {column} cannot be computed"
        every = _without(measured, column, {row["router"] for row in measured.layers})
        assert _outcome(every, check.code).state == "inconclusive"
        if "tokens" in check.inputs:  # rule or recording say why there is none
            metric = measured.run["column_versions"][column].split("/")[0]
            reasons = {"text/1": {"reasons": {metric: "counts only"}}}
            explained = dataclasses.replace(some, run={**measured.run, "parts": reasons})
            assert _outcome(explained, check.code).num_open == 0


def test_what_is_not_a_number_is_a_missing_figure():
    nothing = {"router": "text/0", "variant": "as_stored", "population": "all", "row_rank": np.nan}
    assert measured_rows([nothing], []).layers[0]["row_rank"] is None
