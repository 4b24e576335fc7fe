"""Markdown of GitHub: the verdict, and a table of all variants."""

from __future__ import annotations

from moegeom.core.variant_names import SIDES
from moegeom.report._reporter import Reporter, View
from moegeom.report.exposures._exposure import Exposure
from moegeom.report.exposures._shares import certain, percent
from moegeom.report.exposures._sides import near_line, next_line, side_lines
from moegeom.report.exposures._wording import (
    distances,
    limits,
    noise_lines,
    remarks,
    traders,
    verdict,
    worst_layers,
)
from moegeom.report.header import routers_line, rule_line, tokens_line, trust_line
from moegeom.report.markdown import table_row
from moegeom.report.untrusted import printable

_HEADS = (
    *("arithmetic", "choices switched", "random router", "worst layer", "tokens with any switch"),
    *("weight moved", "kept for certain", "predicted", "pairs that trade"),
)


def render(exposure: Exposure, view: View) -> str:
    """Header, verdict and table as GitHub-flavoured Markdown."""
    exposure = printable(exposure)
    summary = exposure.summary
    lines = [f"## moegeom boundary-report: {summary.run['checkpoint']['name']}", ""]
    lines += [rule_line(summary), "", f"- **routers** {routers_line(summary)}"]
    lines += [f"- **tokens** {tokens_line(summary)}", f"- **trust** {trust_line(summary)}", ""]
    lines[-1:] = [*(f"- **{label}** {text}" for label, text in side_lines(exposure)), ""]
    lines += [f"**Verdict** {verdict(exposure)}", "", " ".join(distances(exposure)), ""]
    lines += [f"next: `{typed}`", ""] if (typed := next_line(exposure)) else []
    lines += [table_row(_HEADS), table_row(["---"] * len(_HEADS))]
    for variant in exposure.variants:
        lines.append(
            table_row(
                (
                    f"`{variant.name}`",
                    percent(variant.mean("switched_share")),
                    percent(variant.null_share),
                    worst_layers(exposure, variant),
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
                    traders(exposure, variant) or "-",
                )
            )
        )
    near = [
        f"{variant.name}: {near_line(variant)}."
        for variant in exposure.variants
        if variant.name in SIDES and near_line(variant)
    ]
    said = (*near, *noise_lines(exposure), *remarks(exposure), *limits())
    lines += ["", *(f"- {text}" for text in said)]
    return "\n".join(lines) + "\n"


REPORTER = Reporter("md", render)
