"""Results as a document: trust, verdict, findings worst first, layers, what was not checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moegeom.core.text import these
from moegeom.document.drawing import figures_of
from moegeom.document.excerpts import in_part
from moegeom.document.header import (
    header,
    skipped,
)
from moegeom.document.layer_table import layer_excerpt
from moegeom.document.model import (
    Block,
    Document,
    Fact,
    Gallery,
    Look,
    Note,
    View,
)
from moegeom.document.recording_hint import recording_hint
from moegeom.document.rule_trust import rule_facts
from moegeom.document.summary import Summary, summarise
from moegeom.document.verdict_blocks import findings_excerpt
from moegeom.results.reader import Results
from moegeom.results.run_file import num_non_finite
from moegeom.results.schema import OF_FIGURES


def results_document(results: Results, view: View) -> Document:
    """What ``moegeom scan`` and ``moegeom report`` say."""
    summary = summarise(results)
    notes = [*map(Note, _notes(summary, False))]
    whole = [*map(Note, _notes(summary, True))]
    ending = [*map(Note, (*_limits(summary), *_not_looked_at(summary)))]
    return Document(
        "scan",
        summary.run["checkpoint"]["name"],
        [
            _verdict(summary),
            _header(summary, results.name),
            findings_excerpt(summary.findings, summary.run, view.detail),
            [Gallery(lambda: figures_of(results))],
            [layer_excerpt(summary, view.detail)],
            [
                *ending,
                in_part(
                    whole if view.detail else notes, "note", view.detail, page=whole, is_aside=True
                ),
            ],
        ],
        lambda: _record(results),
    )


def _header(summary: Summary, where: str) -> Sequence[Block]:
    no_tokens = summary.run["tokens"] is None
    labels = ("routers", "rule", "tokens") if no_tokens else ("routers", "tokens", "trust")
    return [*header(summary, *labels), Fact("results", where)]


def _verdict(summary: Summary) -> Sequence[Block]:
    errors, warnings = summary.count("error"), summary.count("warning")
    counted = [
        f"{number} {word}{'' if number == 1 else 's'}"
        for number, word in ((errors, "error"), (warnings, "warning"))
    ]
    look: Look = "error" if errors else "warning" if warnings else "good"
    return [Fact("VERDICT", f"{', '.join(counted)}; {summary.told}", look)]


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
    lost, given = num_non_finite(run), run["tokens"]["num_tokens"]
    if given and lost == given:
        return ["Not one token is finite: nothing is known of load, margins and distances."]
    if documents is None:
        held = these(given - lost, "token")
    else:
        held = these(documents, "document")
    return [f"This does not say that quality is lost: flipping is exposure; load holds for {held}."]


def _not_looked_at(summary: Summary) -> list[str]:
    nothing = ["expert weights", "other engines", "quantised activations"]
    return [f"Not checked: {', '.join(nothing)}.", *skipped(summary)]


def _notes(summary: Summary, are_whole: bool) -> list[str]:
    """Why figures are missing, where there are tokens to have them of; whole with their names."""
    if summary.run["tokens"] is None:
        return []
    found = []
    for note in summary.notes:
        where = f", {summary.places(note.routers)}" if note.routers else ""
        names = f" They are {note.detail}" if are_whole and note.detail else ""
        found.append(f"Note{where}: {note.title}{names}")
    return found


def _record(results: Results) -> Mapping[str, Any]:
    """Facts of the run, and every table but the rows per token and what figures are drawn from."""
    name = None if results.path is None else results.path.name
    facts = {"run": results.run, "results": name, **rule_facts(results.run)}
    tables = [table for table in results.tables() if table not in OF_FIGURES]
    return facts | {table: results.rows(table) for table in tables}
