"""The sample checkpoints, and how the tests of studies look at records."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moegeom.document.model import Document, View
from moegeom.document.render import render
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.sources.recorded import open_recording
from tests.records import new_folder, shared

SAMPLES = Path(__file__).resolve().parents[3] / "sample_ckpts"
BALANCED, COLLAPSED = SAMPLES / "olmoe-balanced", SAMPLES / "olmoe-collapsed"
GROUPED = SAMPLES / "deepseek-tiny"


def sides(sample: Path, step: int = 1500) -> tuple[Path, Path]:
    return sample / f"step_{step}", sample / f"rec/step_{step}"


def worded(
    document: Callable[[Any, View], Document], record: Any, form: str = "table", **view: Any
) -> str:
    return render(document(record, View(**view)), form, View(**view))


def assert_cut(
    document: Callable[[Any, View], Document], record: Any, start: str, rest: str
) -> list[int]:
    """A screen shows some of 14 routers, which are returned; details and pages show all."""
    screens = [worded(document, record, width=100, detail=detail) for detail in (False, True)]
    some, every = (re.findall(f"^{start}(\\d+) ", text, re.MULTILINE) for text in screens)
    assert every == [str(n) for n in range(14)]
    assert f"and {14 - len(some)} {rest}: --detail" in screens[0]
    for page in ("md", "html"):
        text = worded(document, record, page)
        assert all(f"text/{n}" in text for n in range(14))
        assert "--detail" not in text
    return [*map(int, some)]


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


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
