"""Results as a document: trust, verdict, findings worst first, layers, what was not checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.finding import Finding
from moegeom.core.text import number_of
from moegeom.document.drawing import figures_of
from moegeom.document.header import (
    gate_rule_line,
    routers_line,
    rule_line,
    skipped,
    tokens_line,
    trust_line,
)
from moegeom.document.layer_table import layer_table
from moegeom.document.model import (
    Block,
    Command,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Look,
    Note,
    Problem,
    Title,
    View,
)
from moegeom.document.recording_hint import recording_hint
from moegeom.document.rule_trust import rule_facts
from moegeom.document.summary import Summary, summarise
from moegeom.results.reader import Results
from moegeom.results.schema import OF_FIGURES

#: Findings that a screen shows; the rest are counted there.
_MOST_FINDINGS = 6


def results_document(results: Results, view: View) -> Document:
    """What ``moegeom scan`` and ``moegeom report`` say."""
    summary = summarise(results)
    table = Excerpt(
        [layer_table(summary, view.all_layers)],
        [layer_table(summary, all_layers=True, has_bars=False)],
    )
    ending = [*map(Note, (*_limits(summary), *_not_looked_at(summary)))]
    return Document(
        "scan",
        summary.run["checkpoint"]["name"],
        [
            _header(summary),
            _verdict(summary, results.name),
            _findings(summary),
            [Gallery(lambda: figures_of(results))],
            [table],
            ending,
        ],
        lambda: _record(results),
    )


def _header(summary: Summary) -> Sequence[Block]:
    title = Title(summary.run["checkpoint"]["name"], rule_line(summary))
    routers = Fact("routers", routers_line(summary))
    tokens = Fact("tokens", tokens_line(summary))
    if summary.run["tokens"] is None:
        return title, routers, Fact("rule", gate_rule_line(summary.run)), tokens
    return title, routers, tokens, Fact("trust", trust_line(summary))


def _verdict(summary: Summary, where: str) -> Sequence[Block]:
    errors, warnings = summary.count("error"), summary.count("warning")
    counted = [
        f"{number} {word}{'' if number == 1 else 's'}"
        for number, word in ((errors, "error"), (warnings, "warning"))
    ]
    look: Look = "error" if errors else "warning" if warnings else "good"
    verdict = Fact("VERDICT", f"{', '.join(counted)}; {summary.told}", look)
    return verdict, Fact("results", where)


def _findings(summary: Summary) -> Sequence[Block]:
    """The first of them as short as a screen has room for, all of them on a page."""
    if not summary.findings:
        return ()
    screen = [
        block for finding in summary.findings[:_MOST_FINDINGS] for block in _brief(summary, finding)
    ]
    rest = summary.findings[_MOST_FINDINGS:]
    if rest:
        codes = ", ".join(sorted({finding.code for finding in rest}))
        screen.append(Note(f"and {len(rest)} more ({codes}): --format json, or findings.parquet"))
    whole = [Problem(finding, summary.places(finding.routers)) for finding in summary.findings]
    return (Excerpt(screen, whole),)


def _brief(summary: Summary, finding: Finding) -> Iterator[Block]:
    """Without the fix, which ``moegeom check`` tells."""
    bare = dataclasses.replace(finding, next_command="", fix="")
    yield Problem(bare, summary.places(finding.routers))
    if finding.next_command:
        yield Command("next: ", finding.next_command)


def _limits(summary: Summary) -> list[str]:
    run = summary.run
    if run["tokens"] is None:
        return [
            "Unknown without tokens: load, dead experts on data, margins and boundary distances.",
            "Weights alone cannot tell: they depend on where the tokens of this model lie.",
            f"To record tokens: {recording_hint(run['routers'])}",
        ]
    if run["tokens"]["is_synthetic"]:
        return ["Geometry under a synthetic distribution of inputs: real tokens lie elsewhere."]
    documents = run["tokens"]["num_documents"]
    if documents is None:
        held = f"these {number_of(run['tokens']['num_tokens'], 'token')}"
    else:
        held = "this document" if documents == 1 else f"these {number_of(documents, 'document')}"
    return [f"This does not say that quality is lost: flipping is exposure; load holds for {held}."]


def _not_looked_at(summary: Summary) -> list[str]:
    nothing = ["expert weights", "other engines", "quantised activations"]
    lines = [f"Not checked: {', '.join(nothing)}.", *skipped(summary)]
    if summary.run["tokens"] is not None:
        lines += [
            f"Note, {summary.places(note.routers)}: {note.title}"
            if note.routers
            else f"Note: {note.title}"
            for note in summary.notes
        ]
    return lines


def _record(results: Results) -> Mapping[str, Any]:
    """Facts of the run, and every table but the rows per token and what figures are drawn from."""
    name = None if results.path is None else results.path.name
    facts = {"run": results.run, "results": name, **rule_facts(results.run)}
    tables = [table for table in results.tables() if table not in OF_FIGURES]
    return facts | {table: results.rows(table) for table in tables}
