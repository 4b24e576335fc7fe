"""Each check finds what it looks for, is silent on a healthy twin, and says when it cannot judge."""

from __future__ import annotations

from typing import Any

import pytest

from moegeom.check import CHECKS, measured_rows, run_checks
from moegeom.core.finding import Finding

EXPERTS = 8


def _layer(**changes: Any) -> dict[str, Any]:
    healthy = {
        "router": "text/3",
        "variant": "as_stored",
        "population": "all",
        "num_tokens": 1000,
        "num_twin_rows": 0,
        "num_zero_rows": 0,
        "num_non_finite_rows": 0,
        "row_norm_median": 1.0,
        "max_vio_global": 0.2,
        "max_vio_global_se": 0.01,
        "busiest_expert": 2,
        "starved_share": 0.0,
        "num_dead": 0,
        "bf16_switch_share_isotropic": 0.010,
        "bf16_switch_share_isotropic_se": 0.0005,
    }
    return healthy | changes


def _experts(**changes: dict[int, Any]) -> list[dict[str, Any]]:
    rows = []
    for expert in range(EXPERTS):
        row = {
            "router": "text/3",
            "variant": "as_stored",
            "population": "all",
            "expert": expert,
            "row_norm": 1.0,
            "is_row_finite": True,
            "twin_of": -1,
            "num_slots": 250,
            "load": 1.0,
        }
        rows.append(
            row | {name: values[expert] for name, values in changes.items() if expert in values}
        )
    return rows


def _judge(layer: dict[str, Any], experts: list[dict[str, Any]]) -> list[Finding]:
    null = _layer(variant="null")
    findings, _ = run_checks(measured_rows([layer, null], experts, "ckpt", "rec"))
    return findings


DEFECTS = {
    "MGI101": (_layer(num_non_finite_rows=1), _experts(is_row_finite={4: False})),
    "MGI104": (_layer(num_twin_rows=1), _experts(twin_of={5: 1})),
    "MGI103": (_layer(num_zero_rows=1), _experts(row_norm={2: 0.0})),
    "MGB203": (
        _layer(max_vio_global=3.0, max_vio_global_se=0.1),
        _experts(num_slots={2: 1000}, load={2: 4.0}),
    ),
    "MGB201": (
        _layer(starved_share=0.25, num_dead=1),
        _experts(num_slots={6: 0, 7: 5}, load={6: 0.0, 7: 0.02}),
    ),
    "MGN301": (_layer(bf16_switch_share_isotropic=0.03), _experts()),
}


def test_every_check_is_in_the_table_of_defects() -> None:
    assert sorted(check.code for check in CHECKS.all()) == sorted(DEFECTS)


def test_codes_are_unique() -> None:
    codes = [check.code for check in CHECKS.all()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("code", sorted(DEFECTS))
def test_a_planted_defect_is_found_and_nothing_else(code: str) -> None:
    findings = _judge(*DEFECTS[code])
    assert [finding.code for finding in findings] == [code]
    assert findings[0].routers == ("text/3",)
    assert findings[0].title.endswith(".")
    assert findings[0].next_command.startswith("moegeom ")


def test_a_healthy_layer_has_no_finding() -> None:
    assert _judge(_layer(), _experts()) == []


def test_a_load_within_two_standard_errors_of_the_limit_is_no_finding() -> None:
    row = _layer(max_vio_global=2.1, max_vio_global_se=0.06)
    assert _judge(row, _experts(num_slots={2: 775}, load={2: 3.1})) == []


def test_few_tokens_cannot_kill_an_expert() -> None:
    few = _layer(num_tokens=20, starved_share=0.25, num_dead=2)
    experts = _experts(num_slots=dict.fromkeys(range(6), 7) | {6: 0, 7: 0}, load={6: 0.0, 7: 0.0})
    assert _judge(few, experts) == []


def test_exposure_equal_to_the_null_is_no_finding() -> None:
    assert _judge(_layer(bf16_switch_share_isotropic=0.0105), _experts()) == []


def test_a_check_without_its_columns_is_skipped_and_named() -> None:
    bare = {
        key: value
        for key, value in _layer().items()
        if not key.startswith(("max_vio", "bf16", "starved", "num_tokens"))
    }
    findings, skipped = run_checks(measured_rows([bare], _experts(), "ckpt", "rec"))
    assert findings == []
    assert skipped == ["MGB201", "MGB203", "MGN301"]


def test_many_alike_findings_are_told_as_one_with_the_evidence_of_the_worst() -> None:
    loads = {"text/1": 2.5, "text/2": 3.0, "text/3": 2.2, "text/4": 2.8}
    layers = [_layer(router=name, max_vio_global=vio) for name, vio in loads.items()]
    experts = [row | {"router": name} for name in loads for row in _experts(num_slots={2: 900})]
    findings, _ = run_checks(measured_rows(layers, experts, "ckpt", "rec"))
    assert [finding.code for finding in findings] == ["MGB203"]
    assert findings[0].routers == ("text/2", "text/4", "text/1", "text/3")
    assert "worst in text/2" in findings[0].title


def test_errors_come_before_warnings() -> None:
    layer = _layer(num_twin_rows=1, starved_share=0.25, num_dead=1)
    experts = _experts(twin_of={5: 1}, num_slots={6: 0, 7: 5}, load={6: 0.0, 7: 0.02})
    assert [finding.severity for finding in _judge(layer, experts)] == ["error", "warning"]
