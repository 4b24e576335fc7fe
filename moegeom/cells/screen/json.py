"""One JSON document: every router with its slice and cells, every answer with its certificate."""

from __future__ import annotations

import dataclasses

from moegeom.cells.record import Enumerations
from moegeom.document._reporter import Reporter, View
from moegeom.document.rule_trust import rule_facts
from moegeom.document.strict_json import document_text


def render(found: Enumerations, view: View) -> str:
    """The record as JSON; infinities are the strings "inf" and "-inf", unknown is null."""
    document = {
        "name": found.name,
        "routers": [dataclasses.asdict(router) for router in found.routers],
        "answers": [dataclasses.asdict(answer) for answer in found.answers],
        "left_out": found.left_out,
        "seed": found.seed,
        "written": found.written,
        "files": found.files,
        **({} if found.run is None else rule_facts(found.run)),
        "run": found.run,
    }
    return document_text(document)


REPORTER = Reporter("json", render)
