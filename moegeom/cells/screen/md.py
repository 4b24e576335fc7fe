"""Markdown of GitHub: a list of facts for every router and every answer."""

from __future__ import annotations

from moegeom.cells.record import Enumerations
from moegeom.cells.screen._wording import answer_sentences, sentences, summary_of
from moegeom.document._reporter import Reporter, View
from moegeom.document.header import routers_line, rule_line, tokens_line
from moegeom.document.markdown import escaped
from moegeom.document.untrusted import printable


def render(found: Enumerations, view: View) -> str:
    """A heading, the header, and a section for each router."""
    found = printable(found)
    summary = summary_of(found)
    lines = [f"## moegeom cells: {escaped(found.name)}", ""]
    if summary is not None:
        facts = (
            ("rule", rule_line(summary)),
            ("routers", routers_line(summary)),
            ("tokens", tokens_line(summary)),
        )
        lines += [*(f"- **{label}** {escaped(text)}" for label, text in facts), ""]
    for router in found.routers:
        lines += [f"### {escaped(router.router)}", ""]
        lines += [f"- **{label}** {escaped(text)}" for label, text in sentences(router)] + [""]
    for answer in found.answers:
        lines += [f"- {escaped(text)}" for text in answer_sentences(answer)] + [""]
    for name, why in found.left_out:
        lines += [f"- left out: {escaped(name)}: {escaped(why)}"]
    if found.files:
        lines += ["", f"Written: {escaped(', '.join(found.files))}"]
    return "\n".join(lines).rstrip("\n") + "\n"


REPORTER = Reporter("md", render)
