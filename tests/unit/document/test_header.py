"""The header says no more than what was recorded supports."""

from __future__ import annotations

import pytest

from moegeom.document.header import rule_line, tokens_line
from moegeom.document.summary import Summary


def summary(run: dict, stage: str, exact: list[float | None], size_bytes: int = 10) -> Summary:
    tokens = {**run["tokens"], "stage": stage, "size_bytes": size_bytes}
    affine = [{**router, "is_affine": True} for router in run["routers"][: len(exact)]]
    layers = [
        {"router": router["name"], "distance_exact_share": share}
        for router, share in zip(affine, exact, strict=True)
    ]
    return Summary({**run, "tokens": tokens, "routers": affine}, layers, [], [], [])


@pytest.mark.parametrize(
    ("stage", "exact", "said"),
    [
        ("router_input", [1.0, 1.0], "Boundaries are linear: distances are exact."),
        ("router_input", [None, None], "Boundaries are linear: distances are exact."),
        ("top_logits", [1.0, 1.0], "Boundaries are linear: distances are exact."),
        (
            "top_logits",
            [1.0, 0.999996],
            "distances are exact for at least 99.99 % of tokens, lower bounds for others.",
        ),
        ("ids", [None], "Boundaries are linear, but there are no logits, hence no distances."),
        ("counts", [None], "Boundaries are linear, but there are no logits, hence no distances."),
    ],
)
def test_distances_are_called_exact_only_where_all_of_them_are(
    run_on_tokens: dict, stage: str, exact: list[float | None], said: str
) -> None:
    assert rule_line(summary(run_on_tokens, stage, exact)).endswith(said)


def test_folded_tokens_are_not_called_recorded(run_on_tokens: dict) -> None:
    assert "recorded from this checkpoint" in tokens_line(
        summary(run_on_tokens, "router_input", [])
    )
    folded = tokens_line(summary(run_on_tokens, "router_input", [], size_bytes=0))
    assert "taken from the running model, nothing stored. 9.1 s" in folded
    assert "recorded" not in folded and "0 B" not in folded


def test_a_scan_on_devices_names_them_and_one_on_the_processor_names_nothing(
    run_on_tokens: dict,
) -> None:
    on_device = {**run_on_tokens, "device": {"kind": "cuda", "names": ["NVIDIA H200", "NVIDIA A"]}}
    assert " on NVIDIA H200, NVIDIA A" in tokens_line(summary(on_device, "router_input", []))
    for facts in ({}, {"device": {"kind": "cpu", "names": []}}):
        assert " on " not in tokens_line(summary(run_on_tokens | facts, "router_input", []))
