"""A number that decides the routing and is out of its range is a finding, wherever it stands."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from moegeom.checks import measured_results, run_checks
from moegeom.core.errors import OUT_OF_RANGE, InternalError, RouterError
from moegeom.pipeline import ScanRequest, scan
from moegeom.results.reader import open_results
from moegeom.router import family as records
from moegeom.router.facts import settings_of
from moegeom.router.family import Setting, families, load_family
from moegeom.router.settings import Settings
from tests.unit.check.conftest import (
    BIAS,
    GAIN,
    GATE,
    Case,
    keep,
    outcome_of,
    with_token_table,
    write_model,
)
from tests.unit.check.defects import setting, tensor, together

STACKS = [(name, stack) for name in families() for stack in load_family(name).stacks]

#: Flags and lists of layers.
NO_NUMBERS = {
    *("renormalise", "has_logit_bias", "has_selection_bias"),
    *("dense", "listed", "kinds"),
}


def test_every_field_for_a_number_of_a_family_has_a_range():
    found = {
        item.name
        for record in vars(records).values()
        if dataclasses.is_dataclass(record) and isinstance(record, type)
        for item in dataclasses.fields(record)
        if Setting in get_args(item.type) and "range" not in item.metadata
    }
    assert found == NO_NUMBERS
    with pytest.raises(InternalError, match="has no range"):
        Settings({"key": 1}).number(Setting(("key",)))


def _table(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def test_no_number_of_any_family_is_taken_out_of_its_range():
    """A string, a flag, what is no number, and what is beyond both ends."""
    different = {}
    for _, stack in STACKS:
        for one in settings_of(stack):
            different[one.range, one.keys, one.over, one.zero, bool(one.values)] = one
    for one in different.values():
        limits: Any = one.range
        read = Settings.integer if limits.is_whole else Settings.number
        least, most = limits.least, limits.most
        beyond = [] if one.over or one.values else [most * 10, -most, least - 1e-9 - most / 1e3]
        numbers = [float("nan"), float("inf"), -float("inf"), 10**400, -(10**400)]
        for value in ["1", True, "nan", {}, [1], *beyond, *numbers]:
            if one.values and str(value).lower() in one.values:
                continue
            with pytest.raises(RouterError) as caught:
                read(Settings(_table(one.keys[0], value)), one)
            assert caught.value.code == OUT_OF_RANGE or one.values
            assert one.values or limits.text in caught.value.message


def test_what_a_family_takes_by_itself_is_usual():
    for name, stack in STACKS:
        for one in settings_of(stack, of_config=False):
            assert one.range is not None
            for value in (one.value, one.default):
                if isinstance(value, int | float) and not isinstance(value, bool):
                    number = one.over / value if one.over else value
                    assert one.range.holds(number) and one.range.is_usual(number), (name, one)


#: What is spoilt: a config, or a tensor; how much a finding weighs by default; its words.
SPOILT = {
    "eps beyond": (setting(rms_norm_eps=1e10), "error", "'rms_norm_eps' is 10000000000.0 "),
    "eps below": (setting(rms_norm_eps=-1), "error", "expected a number from 0 to 1"),
    "eps unusual": (setting(rms_norm_eps=0.5), "warning", "is 0.5, usual is 1e-12 to 0.001"),
    "no factor": (setting(routed_scaling_factor=0.0), "error", "'routed_scaling_factor' is 0.0 "),
    "clamp": (setting(swiglu_limit=1e5), "warning", "'swiglu_limit' is 100000, usual is 0.1 to 1000"),
    "gains": (tensor(GAIN, lambda g: g * 1e30), "error", "(gain of the norm in front): its large"),
    "gains unusual": (tensor(GAIN, lambda g: g * 1e5), "warning", "usual is 0.0001 to 10000"),
    "bias": (tensor(BIAS, lambda b: b + 1e9), "error", "(selection bias): its largest entry is 1e"),
    "rows": (tensor(GATE, lambda w: w.astype(float) * 1e300), "error", "(router rows): its largest"),
    "rows in half": (
        together(setting(dtype="float16"), tensor(GATE, lambda w: w * 1e7)),
        "error", "the largest of float16 is 65504",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_number_out_of_its_range_is_a_finding_with_and_without_a_baseline(name, judged, tmp_path):
    spoil, severity, words = SPOILT[name]
    case = Case(family="deepseek_v3", made=with_token_table if name == "clamp" else keep)
    judged(case, baseline=tmp_path / "b.json", update_baseline=True)
    for profile in ("default", "release"):
        for baseline in (None, tmp_path / "b.json"):
            verdict = judged(case, spoil, profile=Path(profile), baseline=baseline).verdict
            (finding,) = [f for f in verdict.findings if f.code == OUT_OF_RANGE]
            assert words in finding.title
            assert finding.severity == (severity if profile == "default" else "error")
            if finding.severity == "error":
                assert verdict.exit_code == 1


def test_scan_and_results_say_what_check_says_of_rows_beyond_float32(judged, tmp_path):
    spoil = SPOILT["rows"][0]
    (finding,) = outcome_of(judged(spoil=spoil), OUT_OF_RANGE).findings
    assert finding.detail == "Beyond float32: engines load it as infinity."
    out = scan(ScanRequest(str(write_model(tmp_path, Case(), spoil)), out=tmp_path / "out"))
    results = open_results(out)
    told = [row for row in results.rows("findings") if row["code"] == OUT_OF_RANGE]
    assert [row["title"] for row in told] == [finding.title]
    outcome = outcome_of_results(results)
    assert [f.title for f in outcome.findings] == [finding.title]


def test_tokens_cannot_be_measured_by_rows_beyond_float32_and_that_is_the_finding(outcomes):
    outcome = outcomes(Case(SPOILT["rows"][0], tokens=300, layers=2))[OUT_OF_RANGE]
    assert "the row of expert 0 is beyond float32" in outcome.findings[0].title


def outcome_of_results(results):
    verdict = run_checks(measured_results(results))
    return next(one for one in verdict.outcomes if one.code == OUT_OF_RANGE)


def test_numbers_that_are_not_finite_hide_none_that_are_out_of_range(judged):
    spoil = tensor(GAIN, lambda g: np.where(np.arange(len(g)) == 3, np.nan, g * 1e30))
    assert outcome_of(judged(spoil=spoil), OUT_OF_RANGE).state == "failed"
