"""The sample checkpoints, and how the tests of studies look at records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import moegeom as mg
from moegeom.document.model import Document, View
from moegeom.document.render import render
from moegeom.studies.balance.record import Balance
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.recording.writer import RecordingWriter
from tests.records import new_folder, shared

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


@shared
def balance_of_balanced() -> mg.Report[Balance]:
    """Two layers of the balanced sample."""
    return mg.balance(*sides(BALANCED), layers=[0, 2])


@shared
def few_tokens(name: str, step: int = 1500, num_tokens: int = 512) -> Path:
    """The first tokens of a recording of a sample, as a recording."""
    whole = open_recording(sides(SAMPLES / name, step)[1])
    facts, folder = whole.facts, new_folder() / f"{name}-{step}"
    with RecordingWriter(
        *(folder, facts.stage, facts.routers),
        fingerprint=facts.fingerprint,
        engine=facts.engine,
        domains=facts.domains,
    ) as writer:
        writer.append(
            whole.read_columns(0, num_tokens),
            {router: whole.read_values(router, 0, num_tokens) for router in facts.routers},
            {router: whole.read_chosen(router, 0, num_tokens) for router in facts.routers},
        )
    return folder
