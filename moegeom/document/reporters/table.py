"""The first screen: trust, verdict, findings worst first, capped table, what was not looked at."""

from __future__ import annotations

from rich.text import Text

from moegeom.core.finding import Finding
from moegeom.core.text import number_of
from moegeom.document._reporter import Reporter, View
from moegeom.document.header import (
    gate_rule_line,
    routers_line,
    rule_line,
    skipped,
    tokens_line,
    trust_line,
)
from moegeom.document.layer_table import LayerTable, layer_table
from moegeom.document.recording_hint import recording_hint
from moegeom.document.screen import (
    STYLES,
    command,
    finding_head,
    labelled,
    titled,
    to_text,
    wrapped,
)
from moegeom.document.summary import Summary, summarise
from moegeom.document.untrusted import printable
from moegeom.results.reader import Results

#: Findings shown in full; the rest are counted.
_MOST_FINDINGS = 6


def render(results: Results, view: View) -> str:
    """The screen as text of at most ``view.width`` columns, with colour codes if wanted."""
    summary = printable(summarise(results))
    lines: list[Text] = []
    _header(lines, summary, view.width)
    lines.append(Text())
    _verdict(lines, summary, printable(str(results.path)), view.width)
    lines.append(Text())
    for finding in summary.findings[:_MOST_FINDINGS]:
        _finding(lines, summary, finding, view.width)
    if len(summary.findings) > _MOST_FINDINGS:
        rest = summary.findings[_MOST_FINDINGS:]
        codes = ", ".join(sorted({finding.code for finding in rest}))
        more = f"and {len(rest)} more ({codes}): --format json, or findings.parquet"
        lines.append(Text(more, style="dim"))
    if summary.findings:
        lines.append(Text())
    _table(lines, layer_table(summary, view.all_layers), view.width)
    lines.append(Text())
    _ending(lines, summary, view.width)
    return to_text(lines, view)


def _header(lines: list[Text], summary: Summary, width: int) -> None:
    lines += titled(summary.run["checkpoint"]["name"], rule_line(summary), width)
    lines += labelled("routers", routers_line(summary), width)
    if summary.run["tokens"] is None:
        lines += labelled("rule", gate_rule_line(summary.run), width)
        lines += labelled("tokens", tokens_line(summary), width)
    else:
        lines += labelled("tokens", tokens_line(summary), width)
        lines += labelled("trust", trust_line(summary), width)


def _verdict(lines: list[Text], summary: Summary, where: str, width: int) -> None:
    errors, warnings = summary.count("error"), summary.count("warning")
    counted = [
        f"{number} {word}{'' if number == 1 else 's'}"
        for number, word in ((errors, "error"), (warnings, "warning"))
    ]
    text = f"{', '.join(counted)}; {summary.told}"
    style = STYLES["error" if errors else "warning" if warnings else "good"]
    lines += labelled("VERDICT", text, width, style)
    lines += labelled("results", where, width)


def _finding(lines: list[Text], summary: Summary, finding: Finding, width: int) -> None:
    lines += finding_head(finding, summary.places(finding.routers), width)
    if finding.next_command:
        lines.append(command("next: ", finding.next_command))


def _table(lines: list[Text], table: LayerTable, width: int) -> None:
    columns = list(zip(*table.headings, strict=True))
    rows = [*columns, *table.lines]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.headings))]
    gap = 3 if sum(widths) + 3 * (len(widths) - 1) <= width else 2
    kept = list(range(len(widths)))
    while sum(widths[i] for i in kept) + gap * (len(kept) - 1) > width:
        droppable = max(kept, key=lambda i: table.drops[i])
        if table.drops[droppable] == 0:
            break
        kept.remove(droppable)
    styles = ["bold", "bold", *(STYLES[kind] for kind in table.kinds)]
    for row, style in zip(rows, styles, strict=True):
        cells = [
            f"{row[i]:>{widths[i]}}" if 0 < i < len(widths) - 1 else f"{row[i]:<{widths[i]}}"
            for i in kept
        ]
        text = (" " * gap).join(cells).rstrip()
        if text:
            lines.append(Text(text, style=style))


def _ending(lines: list[Text], summary: Summary, width: int) -> None:
    for text in (*_limits(summary), *_not_looked_at(summary)):
        lines += [Text(part, style="dim") for part in wrapped(text, width)]


def _limits(summary: Summary) -> list[str]:
    run = summary.run
    if run["tokens"] is None:
        return [
            "Unknown without tokens: load, dead experts on data, margins and boundary distances.",
            "Weights alone cannot tell: they depend on where the tokens of this model lie.",
            f"To record tokens: {recording_hint(run['routers'])}",
        ]
    if run["tokens"]["is_synthetic"]:
        return ["Geometry under a made-up distribution of inputs: real tokens lie elsewhere."]
    documents = run["tokens"]["num_documents"]
    if documents is None:
        held = f"these {run['tokens']['num_tokens']:,} tokens"
    else:
        held = "this document" if documents == 1 else f"these {number_of(documents, 'document')}"
    return [
        f"This does not say that quality is lost: switching is exposure; load holds for {held}."
    ]


def _not_looked_at(summary: Summary) -> list[str]:
    nothing = ["expert weights", "other engines", "quantised activations"]
    lines = [f"Not looked at: {', '.join(nothing)}.", *skipped(summary)]
    if summary.run["tokens"] is not None:
        lines += [
            f"Note, {summary.places(note.routers)}: {note.title}"
            if note.routers
            else f"Note: {note.title}"
            for note in summary.notes
        ]
    return lines


REPORTER = Reporter("table", render)
