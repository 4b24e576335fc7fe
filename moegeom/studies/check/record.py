"""The record of a check: the verdict, and the run that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.core.finding import Severity, Verdict
from moegeom.engine.request import Terms, Tokens
from moegeom.results.reader import Results


@dataclass(frozen=True)
class GateRequest(Terms):
    """What was asked for. ``target`` is a checkpoint, or results, in a folder or in memory.

    None leaves a choice to the profile. ``profile`` is a file, or the name of a built-in one; None
    looks for ``moegeom.toml`` or ``[tool.moegeom]`` in the working directory, unless that lies with
    the target; ``out`` None keeps no results. With ``experts`` a sample of each expert is read, and
    judged, with ``attention`` gates and sinks of attention are; results that are kept do not hold
    what these say.
    """

    target: str | Results
    tokens: Tokens | None = None
    profile: Path | None = None
    baseline: Path | None = None
    update_baseline: bool = False
    select: tuple[str, ...] | None = None
    fail_on: Severity | None = None
    out: Path | None = None
    experts: bool = False
    attention: bool = False

    @property
    def name(self) -> str:
        """The path or URL of the target; of results in memory, that they are."""
        return self.target.name if isinstance(self.target, Results) else self.target


@dataclass(frozen=True)
class Gate:
    """The verdict, the facts of the run it is about, and the baseline that was written.

    ``release`` is the verdict that the built-in profile of that name would give, where the gate is
    passed under the default one.
    """

    verdict: Verdict
    run: Mapping[str, Any]
    written: Path | None = None
    release: Verdict | None = None

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code
