"""One JSON document: every router with its bias, both halves, the sentence, the facts."""

from __future__ import annotations

import dataclasses

from moegeom.document._reporter import Reporter, View
from moegeom.document.rule_trust import rule_facts
from moegeom.document.strict_json import document_text
from moegeom.studies.balance.record import SENTENCES, Balance


def render(balance: Balance, view: View) -> str:
    """The answer as JSON; infinities are the strings "inf" and "-inf", unknown is null."""
    routers = [
        {
            **dataclasses.asdict(router),
            "largest_change": router.largest_change,
            "pushes": router.pushes(),
            "sentence": SENTENCES[router.meaning],
        }
        for router in balance.routers
    ]
    document = {
        "routers": routers,
        "left_out": balance.left_out,
        "num_tokens": balance.num_tokens,
        "unit": balance.unit,
        "level": balance.level,
        "seed": balance.seed,
        "written": balance.written,
        **rule_facts(balance.run),
        "run": balance.run,
    }
    return document_text(document)


REPORTER = Reporter("json", render)
