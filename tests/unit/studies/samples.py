"""The sample checkpoints, and how the tests of studies look at records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moegeom.document.model import Document, View
from moegeom.document.render import render

SAMPLES = Path(__file__).resolve().parents[3] / "sample_ckpts"
BALANCED, COLLAPSED = SAMPLES / "olmoe-balanced", SAMPLES / "olmoe-collapsed"
GROUPED = SAMPLES / "deepseek-tiny"


def sides(sample: Path, step: int = 1500) -> tuple[Path, Path]:
    """A checkpoint and its recording."""
    return sample / f"step_{step}", sample / f"rec/step_{step}"


def worded(
    document: Callable[[Any, View], Document], record: Any, form: str = "table", **view: Any
) -> str:
    """A record as a format shows it."""
    return render(document(record, View(**view)), form, View(**view))


def unwrapped(text: str) -> str:
    """A screen in one line."""
    return " ".join(text.split())


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))
