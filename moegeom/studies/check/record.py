"""The record of a check: the verdict, and the run that it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.core.finding import Severity, Verdict
from moegeom.core.option import argument, option
from moegeom.engine.request import CHECKPOINT, FAIL_ON, TOKENS, OutTerms, RunTerms, Tokens
from moegeom.results.reader import Results


@dataclass(frozen=True)
class GateRequest(OutTerms, RunTerms):
    """What was asked for. ``target`` is a checkpoint, or results, in a folder or in memory.

    None leaves a choice to the profile. ``profile`` is a file, or the name of a built-in one; None
    looks for ``moegeom.toml`` or ``[tool.moegeom]`` in the working directory, unless that lies with
    the target; ``out`` None keeps no results. With ``experts`` a sample of each expert is read, and
    judged, with ``attention`` gates and sinks of attention are; results that are kept do not hold
    what these say.
    """

    target: str | Results = argument(
        f"Results of a scan, or a checkpoint: {CHECKPOINT}.", default=""
    )
    _: dataclasses.KW_ONLY
    tokens: Tokens | None = option(TOKENS)
    baseline: Path | None = option("File to compare with.")
    update_baseline: bool = option("Write the baseline instead of comparing with it.", False)
    experts: bool = option(
        "Read 4 kB of each tensor of each expert: did experts grow apart?", False
    )
    attention: bool = option("Read gates and sinks of attention: are they whole?", False)
    profile: Path | None = option(
        "default, release, training, or a TOML file [default: moegeom.toml, or [tool.moegeom], "
        "outside CKPT]."
    )
    select: tuple[str, ...] | None = option("Codes or their beginnings: MGI,MGN112.", is_list=False)
    fail_on: Severity | None = option(FAIL_ON)
    out: Path | None = option("Keep the results in this directory.")

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
