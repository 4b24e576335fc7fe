"""One JSON document: the verdict and all evidence, layer by layer."""

from __future__ import annotations

import dataclasses

from moegeom.document._reporter import Reporter, View
from moegeom.document.rule_trust import rule_facts
from moegeom.document.strict_json import document_text
from moegeom.studies.explain.record import Explanation


def render(explanation: Explanation, view: View) -> str:
    """The explanation as JSON; infinities are the strings "inf" and "-inf", unknown is null."""
    verdict = explanation.verdict
    document = {
        "verdict": {
            **dataclasses.asdict(verdict),
            "meaning": verdict.meaning,
            "remedy": verdict.remedy,
        },
        "agreement": explanation.agreement,
        "any_switched_share": explanation.any_share,
        "inputs_of": explanation.inputs_of,
        "num_matched": explanation.num_matched,
        "num_examined": explanation.num_examined,
        "num_padding": explanation.num_padding,
        "layers": [dataclasses.asdict(layer) for layer in explanation.layers],
        "log_probs": explanation.log_probs and dataclasses.asdict(explanation.log_probs),
        "not_looked_at": list(explanation.not_looked_at),
        "against": explanation.against,
        "other": dict(explanation.other),
        **rule_facts(explanation.run),
        "run": dict(explanation.run),
    }
    return document_text(document)


REPORTER = Reporter("json", render)
