"""Markdown, for a job summary or an issue."""

from __future__ import annotations

from moegeom.document._reporter import Reporter, View
from moegeom.document.header import (
    gate_rule_line,
    routers_line,
    rule_line,
    tokens_line,
    trust_line,
)
from moegeom.document.layer_table import layer_table
from moegeom.document.markdown import code_span, escaped, table_row
from moegeom.document.summary import summarise
from moegeom.document.untrusted import printable
from moegeom.results.reader import Results


def render(results: Results, view: View) -> str:
    """Header, findings and the table of layers as GitHub-flavoured Markdown."""
    summary = printable(summarise(results))
    name = summary.run["checkpoint"]["name"]
    lines = [f"## moegeom: {escaped(name)}", "", escaped(rule_line(summary)), ""]
    facts = [("routers", routers_line(summary)), ("tokens", tokens_line(summary))]
    if summary.run["tokens"] is None:
        facts.append(("rule", gate_rule_line(summary.run)))
    else:
        facts.append(("trust", trust_line(summary)))
    lines += [f"- **{label}** {escaped(text)}" for label, text in facts]
    errors, warnings = summary.count("error"), summary.count("warning")
    lines += ["", f"**Verdict** {errors} errors, {warnings} warnings; {summary.told}", ""]
    for finding in summary.findings:
        said = f"{summary.places(finding.routers)}: {finding.title} {finding.detail}"
        head = f"**{finding.severity.upper()} {escaped(finding.code)}**"
        lines.append(f"- {head} {escaped(said)}")
        if finding.next_command:
            lines.append(f"  - next: {code_span(finding.next_command)}")
    table = layer_table(summary, view.all_layers)
    heads = [" ".join(part for part in heading if part) for heading in table.headings]
    lines += ["", table_row(heads), table_row(["---"] * len(heads))]
    lines += [table_row([escaped(cell.strip(" #")) for cell in line]) for line in table.lines]
    return "\n".join(lines) + "\n"


REPORTER = Reporter("md", render)
