"""The first screen: trust, verdict, findings worst first, capped table, what was not looked at."""

from __future__ import annotations

import io
import textwrap

from rich.console import Console
from rich.text import Text

from moegeom.core.finding import Finding
from moegeom.report._reporter import Reporter, View
from moegeom.report.header import routers_line, rule_line, size, tokens_line, trust_line
from moegeom.report.layer_table import LayerTable, layer_table
from moegeom.report.summary import Summary, summarise
from moegeom.results.reader import Results

_LABEL = 9

#: Findings shown in full; the rest are counted.
_MOST_FINDINGS = 6

_STYLES = {
    "error": "bold red",
    "warning": "yellow",
    "note": "dim",
    "plain": "",
    "summary": "dim",
    "good": "bold green",
}


def render(results: Results, view: View) -> str:
    """The screen as text of at most ``view.width`` columns, with colour codes if wanted."""
    summary = summarise(results)
    lines: list[Text] = []
    _header(lines, summary, view.width)
    lines.append(Text())
    _verdict(lines, summary, results, view.width)
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
    return _to_text(lines, view)


def _to_text(lines: list[Text], view: View) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=view.width,
        force_terminal=view.colours,
        color_system="standard" if view.colours else None,
        highlight=False,
    )
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
    return stream.getvalue()


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _labelled(lines: list[Text], label: str, text: str, width: int, style: str = "bold") -> None:
    parts = _wrapped(text, width - _LABEL, "") or [""]
    for index, part in enumerate(parts):
        head = f"{label:<{_LABEL}}" if index == 0 else " " * _LABEL
        lines.append(Text.assemble((head, style), part))


def _header(lines: list[Text], summary: Summary, width: int) -> None:
    name = summary.run["checkpoint"]["name"]
    parts = _wrapped(f"{name}  {rule_line(summary)}", width, "")
    lines.append(Text.assemble((name, "bold"), parts[0].removeprefix(name)))
    lines += [Text(" " * _LABEL + part.strip()) for part in parts[1:]]
    _labelled(lines, "routers", routers_line(summary), width)
    _labelled(lines, "tokens", tokens_line(summary), width)
    if summary.run["tokens"] is not None:
        _labelled(lines, "trust", trust_line(summary), width)


def _verdict(lines: list[Text], summary: Summary, results: Results, width: int) -> None:
    errors, warnings = summary.count("error"), summary.count("warning")
    counted = [
        f"{number} {word}{'' if number == 1 else 's'}"
        for number, word in ((errors, "error"), (warnings, "warning"))
    ]
    shape = {(r["num_experts"], r["top_k"]) for r in summary.run["routers"]}
    of = f" for {next(iter(shape))[0]}/{next(iter(shape))[1]}" if len(shape) == 1 else ""
    text = (
        f"{', '.join(counted)}. {summary.num_normal} of {len(summary.layers)} "
        f"layer{'s' if len(summary.layers) > 1 else ''} look normal{of}."
    )
    where = str(results.path)
    style = _STYLES["error" if errors else "warning" if warnings else "good"]
    room = width - _LABEL - len(text)
    if room > len(where) + 2:
        lines.append(Text.assemble((f"{'VERDICT':<{_LABEL}}", style), text, f"{where:>{room}}"))
    else:
        _labelled(lines, "VERDICT", text, width, style)
        lines.append(Text(" " * _LABEL + where))


def _finding(lines: list[Text], summary: Summary, finding: Finding, width: int) -> None:
    word = {"error": "ERROR", "warning": "WARN "}.get(finding.severity, "NOTE ")
    title = f"{summary.places(finding.routers)}: {finding.title}"
    head = f"{word} {finding.code}  "
    for index, part in enumerate(_wrapped(title, width - len(head), "")):
        style = _STYLES[finding.severity]
        lines.append(Text.assemble((head if index == 0 else " " * len(head), style), part))
    lines += [Text(part) for part in _wrapped(finding.detail, width, "   ")]
    if finding.next_command:
        # one line, however long: a command must survive copying
        lines.append(Text.assemble(("   next: ", "dim"), finding.next_command))


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
    styles = ["bold", "bold", *(_STYLES[kind] for kind in table.kinds)]
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
        lines += [Text(part, style="dim") for part in _wrapped(text, width, "")]


def _limits(summary: Summary) -> list[str]:
    run = summary.run
    if run["tokens"] is None:
        shape = run["routers"][0]
        per_token = sum(4 * r["hidden_size"] for r in run["routers"])
        recording = (
            f"next: record the inputs of these {len(run['routers'])} routers "
            "(moegeom.tokens.writer.RecordingWriter, docs/recordings.md) and add --tokens: "
            f"{size(16_384 * per_token)} for 16,384 tokens of {shape['hidden_size']} float32."
        )
        return [
            "Unknown without tokens: load, dead experts on data, margins and boundary distances.",
            "Weights alone cannot tell: they depend on where the tokens of this model lie.",
            recording,
        ]
    if run["tokens"]["is_synthetic"]:
        return ["Geometry under a made-up distribution of inputs: real tokens lie elsewhere."]
    documents = run["tokens"]["num_documents"]
    held = f"these {documents:,} documents" if documents else "these tokens"
    return [
        f"This does not say that quality is lost: switching is exposure; load holds for {held}."
    ]


def _not_looked_at(summary: Summary) -> list[str]:
    nothing = ["expert weights", "other engines", "quantised activations"]
    lines = [f"Not looked at: {', '.join(nothing)}."]
    skipped = summary.run["checkpoint"]["skipped"]
    if skipped:
        first = skipped[0]
        lines.append(f"Skipped {len(skipped)} tensors, first {first['tensor']}: {first['reason']}")
    if summary.run["tokens"] is not None:
        lines += [
            f"Note, {summary.places(note.routers)}: {note.title}"
            if note.routers
            else f"Note: {note.title}"
            for note in summary.notes
        ]
    return lines


REPORTER = Reporter("table", render)
