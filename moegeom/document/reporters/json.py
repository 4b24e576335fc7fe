"""One JSON document: run facts, findings, and every table but the rows per token."""

from __future__ import annotations

from moegeom.document._reporter import Reporter, View
from moegeom.document.rule_trust import rule_facts
from moegeom.document.strict_json import document_text
from moegeom.results.reader import Results


def render(results: Results, view: View) -> str:
    """The results as JSON; infinities are the strings "inf" and "-inf", unknown is null."""
    document = {"run": results.run, "results": results.path.name, **rule_facts(results.run)}
    document |= {table: results.rows(table) for table in results.tables()}
    return document_text(document)


REPORTER = Reporter("json", render)
