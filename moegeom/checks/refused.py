"""Checks whose statement is broken when a checkpoint cannot even be read."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding


def refused(check: Check, measured: Measured) -> Iterator[Finding]:
    """The refusal that stopped reading, when it breaks the statement of this check."""
    refusal = measured.run.get("refused")
    if refusal and refusal["code"] == check.code:
        yield check.finding((), refusal["message"], refusal["hint"])
