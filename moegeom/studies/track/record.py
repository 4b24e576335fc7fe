"""What ``moegeom track`` is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.finding import Severity
from moegeom.core.option import argument, option
from moegeom.engine.request import FAIL_ON, RunTerms, Tokens


@dataclass(frozen=True)
class TrackRequest(RunTerms):
    """What was asked for. ``tokens`` is a path with {step} or {name}, or tokens by the name of the
    checkpoint; None looks at weights alone.

    ``out`` None is runs/<name of the series>.track. ``expert`` asks for the load of one expert at
    every step; ``fail_on`` is the least severity of a finding that fails, None an error.
    """

    patterns: tuple[str, ...] = argument(
        "Pattern in quotes, such as 'step_*', or several paths, of checkpoints (folders and files, "
        "no URLs) or results of scans.",
        metavar="CKPTS",
    )
    _: dataclasses.KW_ONLY
    tokens: str | Mapping[str, Tokens] | None = option(
        "Recording of each step: 'rec/step_{step}' or 'rec/{name}'."
    )
    out: Path | None = option("Where results stay [default: runs/<folder of them>.track].")
    expert: int | None = option("Also show the load of this expert.", min=0)
    fail_on: Severity | None = option(FAIL_ON)
    engine: str | None = option("ray, or ray:ADDRESS: workers of a cluster fold each step.")
