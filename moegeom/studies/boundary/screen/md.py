"""Markdown of GitHub: the verdict, and a table of all variants."""

from __future__ import annotations

from moegeom.core.variant_names import SIDES
from moegeom.document._reporter import Reporter, View
from moegeom.document.header import routers_line, rule_line, tokens_line, trust_line
from moegeom.document.markdown import code_span, escaped, table_row
from moegeom.document.untrusted import printable
from moegeom.studies.boundary.record import Exposure
from moegeom.studies.boundary.screen._shares import certain, percent
from moegeom.studies.boundary.screen._sides import near_line, next_line, side_lines
from moegeom.studies.boundary.screen._wording import (
    distances,
    limits,
    noise_lines,
    remarks,
    traders,
    verdict,
    worst_layers,
)

_HEADS = (
    *("arithmetic", "choices switched", "random router", "worst layer", "tokens with any switch"),
    *("weight moved", "kept for certain", "predicted", "pairs that trade"),
)


def render(exposure: Exposure, view: View) -> str:
    """Header, verdict and table as GitHub-flavoured Markdown."""
    exposure = printable(exposure)
    summary = exposure.summary
    lines = [f"## moegeom boundary-report: {escaped(summary.run['checkpoint']['name'])}", ""]
    facts = [("routers", routers_line(summary)), ("tokens", tokens_line(summary))]
    facts += [("trust", trust_line(summary)), *side_lines(exposure)]
    lines += [escaped(rule_line(summary)), ""]
    lines += [*(f"- **{label}** {escaped(text)}" for label, text in facts), ""]
    lines += [f"**Verdict** {escaped(verdict(exposure))}", ""]
    lines += [escaped(" ".join(distances(exposure))), ""]
    lines += [f"next: {code_span(typed)}", ""] if (typed := next_line(exposure)) else []
    lines += [table_row(_HEADS), table_row(["---"] * len(_HEADS))]
    for variant in exposure.variants:
        lines.append(
            table_row(
                (
                    code_span(variant.name),
                    percent(variant.mean("switched_share")),
                    percent(variant.null_share),
                    escaped(worst_layers(exposure, variant)),
                    percent(variant.any_share),
                    percent(variant.mean("weight_moved_mean")),
                    *(
                        ("-", "-")
                        if variant.name in SIDES
                        else (
                            certain(variant.mean("proved_share")),
                            percent(variant.mean("predicted_switched_share")),
                        )
                    ),
                    escaped(traders(exposure, variant)) or "-",
                )
            )
        )
    near = [
        f"{variant.name}: {near_line(variant)}."
        for variant in exposure.variants
        if variant.name in SIDES and near_line(variant)
    ]
    said = (*near, *noise_lines(exposure), *remarks(exposure), *limits())
    lines += ["", *(f"- {escaped(text)}" for text in said)]
    return "\n".join(lines) + "\n"


REPORTER = Reporter("md", render)
