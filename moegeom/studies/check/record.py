"""The record of a check: the verdict, and the run that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.core.verdict import Verdict


@dataclass(frozen=True)
class Gate:
    """The verdict, the facts of the run it is about, and the baseline that was written."""

    verdict: Verdict
    run: Mapping[str, Any]
    written: Path | None = None
