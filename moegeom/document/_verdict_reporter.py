"""What a reporter of a gate's verdict is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moegeom.core.registry import Registry
from moegeom.core.verdict import Verdict
from moegeom.document._reporter import View


@dataclass(frozen=True)
class VerdictReporter:
    """``render`` turns a verdict and the facts of ``run.json`` into a file's text."""

    name: str
    render: Callable[[Verdict, Mapping[str, Any], View], str]


#: Reporters of verdicts by file name.
VERDICT_REPORTERS: Registry[VerdictReporter] = Registry(
    "report", "moegeom.document.verdicts", "REPORTER", VerdictReporter
)
