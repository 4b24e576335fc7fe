"""A pytest fixture that fails a test when a checkpoint fails the gate.

In a ``conftest.py``: ``pytest_plugins = ["moegeom.testing.gate_fixture"]``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moegeom.core.finding import Verdict
from moegeom.document import View
from moegeom.document.render import render
from moegeom.studies.check.document import document
from moegeom.studies.check.study import GateRequest, gate


@pytest.fixture
def moegeom_gate() -> Callable[..., Verdict]:
    """``moegeom_gate(checkpoint, tokens=..., baseline=...)``: the verdict, or a failed test.

    Takes what :class:`moegeom.studies.check.study.GateRequest` takes. An inconclusive verdict fails
    the test too: a gate that could not judge must not look like one that passed.
    """

    def check(target: str | Path, **options: Any) -> Verdict:
        for name in ("baseline", "profile", "out"):
            if options.get(name) is not None:
                options[name] = Path(options[name])
        report = gate(GateRequest(target=str(target), **options))
        if report.verdict.exit_code:
            pytest.fail(render(document(report, View()), "table"), pytrace=False)
        return report.verdict

    return check
