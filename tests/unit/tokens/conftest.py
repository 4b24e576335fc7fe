"""Small recordings, made on the spot, and what is said where they are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import OUTPUT_KINDS, TokenColumns, TopLogits
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.sources.recorded import open_recording
from moegeom.tokens.stages import FLOAT_DTYPES
from tests.columns import columns_of

ROUTERS = ("text/0", "text/1")
DOMAINS = ("code", "prose")
SIZES = (40, 1, 59)

#: Of one token, by kind of output.
ROW_SHAPES = {
    "shared_output": (10,),
    "routed_output": (10,),
    "expert_output": (6, 4),
    "routing_weights": (2,),
}


class Content:
    def __init__(self, num_tokens: int, width: int = 12, top_k: int = 3) -> None:
        random = np.random.default_rng(0)
        token = np.arange(num_tokens)
        token_id = random.integers(0, 50000, num_tokens)
        self.columns = columns_of(token // 37, token_id, token % 3 - 1)
        rows = lambda *row: {
            r: random.standard_normal((num_tokens, *row), dtype=np.float32) for r in ROUTERS
        }
        self.values = rows(width)
        self.chosen = {
            r: random.integers(0, 64, (num_tokens, top_k)).astype(np.int32) for r in ROUTERS
        }
        self.outputs = {kind: rows(*ROW_SHAPES[kind]) for kind in OUTPUT_KINDS}

    def part(self, start, stop, stage="router_input", has_chosen=True, dtype="float32", kinds=()):
        """Arguments of ``append`` for one shard."""
        cut = lambda arrays: {name: array[start:stop] for name, array in arrays.items()}
        values = {r: v.astype(FLOAT_DTYPES[dtype]) for r, v in cut(self.values).items()}
        chosen = cut(self.chosen)
        if stage == "top_logits":
            logits = cut(self.values)
            values = {r: TopLogits(logits[r][:, :3], chosen[r]) for r in ROUTERS}
        return {
            "columns": TokenColumns(**cut(vars(self.columns))),
            "values": None if stage == "ids" else values,
            "chosen": chosen if has_chosen else None,
            "outputs": {kind: cut(self.outputs[kind]) for kind in kinds} or None,
        }


def record(path: Path, content: Content, sizes=SIZES, stage="router_input", **what: Any) -> Path:
    facts = {"checkpoint_name": "tiny", "fingerprint": "sha256:1", "engine": "test 1.0"}
    facts |= {"domains": DOMAINS, "dtype": what.get("dtype", "float32")}
    with RecordingWriter(path, stage, ROUTERS, **facts) as writer:
        for stop, size in zip(np.cumsum(sizes), sizes, strict=True):
            writer.append(**content.part(stop - size, stop, stage, **what))
    return path


@pytest.fixture
def recording(tmp_path) -> tuple[Path, Content]:
    content = Content(100)
    return record(tmp_path / "rec", content, kinds=OUTPUT_KINDS), content


def refusal(action: Callable[[], Any]) -> str:
    """What ``action`` is refused with; nothing where it is not."""
    try:
        action()
    except RecordingError as error:
        return str(error)
    return ""


def refusal_to_open(path: Path) -> str:
    return refusal(lambda: open_recording(path))
