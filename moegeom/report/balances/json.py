"""One JSON document: every router with its bias, both halves, the sentence, the facts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from moegeom.report._reporter import View
from moegeom.report.balances._balance import SENTENCES, Balance, BalanceReporter


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
        "run": balance.run,
    }
    return json.dumps(_strict(document), allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


REPORTER = BalanceReporter("json", render)
