"""One JSON document: both sides, every router with its changes, every comparison of figures."""

from __future__ import annotations

import dataclasses
from typing import Any

from moegeom.document._reporter import Reporter, View
from moegeom.document.strict_json import document_text
from moegeom.studies.diff.record import Difference
from moegeom.studies.diff.screen._wording import described, verdict_sentence


def render(difference: Difference, view: View) -> str:
    """The difference as JSON; infinities are the strings "inf" and "-inf", unknown is null."""
    document = {
        "verdict": verdict_sentence(difference),
        **{
            name: dataclasses.asdict(side)
            for name, side in zip("ab", difference.sides, strict=True)
        },
        "unlike": difference.unlike,
        "only_in_a": difference.only_first,
        "only_in_b": difference.only_second,
        "routers": [
            {
                "router": router.router,
                "is_identical": router.is_identical,
                "changes": [
                    {**dataclasses.asdict(change), "phrase": described(change)}
                    for change in router.changes
                ],
                "beside": router.beside,
            }
            for router in difference.routers
        ],
        "figures": _figures(difference),
        "notes": difference.notes,
        "not_looked_at": difference.not_looked_at,
    }
    return document_text(document)


def _figures(difference: Difference) -> dict[str, Any] | None:
    figures = difference.figures
    if figures is None:
        return None
    return {
        "level": figures.level,
        "num_tokens": figures.num_tokens,
        "num_significant": len(figures.significant),
        "left_out": figures.left_out,
        "tests": [{**dataclasses.asdict(test), "change": test.change} for test in figures.tests],
    }


REPORTER = Reporter("json", render)
