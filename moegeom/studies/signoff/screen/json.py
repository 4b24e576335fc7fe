"""One JSON document: both sides, every line with its numbers, the exit code."""

from __future__ import annotations

import dataclasses

from moegeom.document._reporter import Reporter, View
from moegeom.document.strict_json import document_text
from moegeom.studies.signoff.screen._signoff import SignOff
from moegeom.studies.signoff.screen._wording import verdict_sentence


def render(found: SignOff, view: View) -> str:
    """The sign-off as JSON; infinities are the strings "inf" and "-inf", unknown is null."""
    del view
    document = {
        "verdict": verdict_sentence(found),
        "exit_code": found.exit_code,
        **{name: dataclasses.asdict(side) for name, side in zip("ab", found.sides, strict=True)},
        "lines": [dataclasses.asdict(line) for line in found.lines],
        "notes": found.notes,
        "not_looked_at": found.not_looked_at,
    }
    return document_text(document)


REPORTER = Reporter("json", render)
