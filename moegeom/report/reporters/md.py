"""Markdown, for a job summary or an issue."""

from __future__ import annotations

from moegeom.report._reporter import Reporter, View
from moegeom.report.header import (
    gate_rule_line,
    routers_line,
    rule_line,
    tokens_line,
    trust_line,
)
from moegeom.report.layer_table import layer_table
from moegeom.report.markdown import table_row
from moegeom.report.summary import summarise
from moegeom.results.reader import Results


def render(results: Results, view: View) -> str:
    """Header, findings and the table of layers as GitHub-flavoured Markdown."""
    summary = summarise(results)
    name = summary.run["checkpoint"]["name"]
    lines = [f"## moegeom: {name}", "", rule_line(summary), ""]
    lines += [f"- **routers** {routers_line(summary)}", f"- **tokens** {tokens_line(summary)}"]
    if summary.run["tokens"] is None:
        lines.append(f"- **rule** {gate_rule_line(summary.run)}")
    else:
        lines.append(f"- **trust** {trust_line(summary)}")
    errors, warnings = summary.count("error"), summary.count("warning")
    lines += ["", f"**Verdict** {errors} errors, {warnings} warnings.", ""]
    for finding in summary.findings:
        lines.append(
            f"- **{finding.severity.upper()} {finding.code}** "
            f"{summary.places(finding.routers)}: {finding.title} {finding.detail}"
        )
        if finding.next_command:
            lines.append(f"  - next: `{finding.next_command}`")
    table = layer_table(summary, view.all_layers)
    heads = [" ".join(part for part in heading if part) for heading in table.headings]
    lines += ["", table_row(heads), table_row(["---"] * len(heads))]
    lines += [table_row([cell.strip(" #") for cell in line]) for line in table.lines]
    return "\n".join(lines) + "\n"


REPORTER = Reporter("md", render)
