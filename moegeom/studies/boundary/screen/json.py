"""One JSON document: every variant with its rows, its null and the pairs that trade."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.document._reporter import Reporter, View
from moegeom.document.rule_trust import rule_facts
from moegeom.document.strict_json import document_text
from moegeom.studies.boundary.record import Exposure
from moegeom.studies.boundary.screen._wording import distances, noise_lines, remarks, verdict


def render(exposure: Exposure, view: View) -> str:
    """The report as JSON; infinities are the strings "inf" and "-inf", unknown is null."""
    variants = [
        {
            "variant": variant.name,
            "facts": dict(variant.facts),
            "switched_share": variant.mean("switched_share"),
            "null_switched_share": variant.null_share,
            "worst_router": variant.worst["router"],
            "any_layer_share": variant.any_share,
            "null_any_layer_share": variant.null_any_share,
            "weight_moved_mean": variant.mean("weight_moved_mean"),
            "switched_near_share": variant.near_share,
            "proved_share": variant.mean("proved_share"),
            "layers": [_compared(row) for row in variant.rows],
            "null": [_compared(row) for row in variant.null],
            "trades": list(variant.trades),
        }
        for variant in exposure.variants
    ]
    run = exposure.summary.run
    document = {
        "verdict": verdict(exposure),
        "distances": distances(exposure),
        "noise": noise_lines(exposure),
        "remarks": remarks(exposure),
        "routers": [dict(row) for row in exposure.summary.layers],
        "variants": variants,
        **rule_facts(run),
        "run": dict(run),
    }
    return document_text(document)


def _compared(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a variant's row that have a value."""
    return {name: value for name, value in row.items() if value is not None}


REPORTER = Reporter("json", render)
