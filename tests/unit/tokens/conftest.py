"""Small recordings, made on the spot."""

from pathlib import Path

import numpy as np
import pytest

from moegeom.core.tokens import TokenColumns, TopLogits
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.stages import FLOAT_DTYPES

ROUTERS = ("text/0", "text/1")
DOMAINS = ("code", "prose")


class Content:
    """What is written: columns, values, top logits and choices of ``num_tokens`` tokens."""

    def __init__(self, num_tokens: int, width: int = 12, top_k: int = 3, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        token = np.arange(num_tokens)
        self.num_tokens = num_tokens
        self.columns = TokenColumns(
            document=(token // 37).astype(np.int64),
            position=(token % 37).astype(np.int32),
            token_id=random.integers(0, 50000, num_tokens).astype(np.int32),
            domain=(token % 3 - 1).astype(np.int16),
        )
        self.values = {
            r: random.standard_normal((num_tokens, width), dtype=np.float32) for r in ROUTERS
        }
        self.chosen = {
            r: random.integers(0, 64, (num_tokens, top_k)).astype(np.int32) for r in ROUTERS
        }

    def part(self, start: int, stop: int, stage: str, has_chosen: bool, dtype: str):
        """Arguments of ``append`` for one shard."""
        columns = TokenColumns(**{n: a[start:stop] for n, a in vars(self.columns).items()})
        values = {r: v[start:stop].astype(FLOAT_DTYPES[dtype]) for r, v in self.values.items()}
        chosen = {r: c[start:stop] for r, c in self.chosen.items()}
        if stage == "top_logits":
            logits = {r: v[start:stop, :3] for r, v in self.values.items()}
            values = {r: TopLogits(logits[r], chosen[r]) for r in ROUTERS}
        return columns, None if stage == "ids" else values, chosen if has_chosen else None


@pytest.fixture
def content():
    return Content


@pytest.fixture
def record():
    """Write ``content`` in shards of the given sizes and return the directory."""

    def write(
        path: Path, content: Content, sizes, stage="router_input", has_chosen=True, dtype="float32"
    ) -> Path:
        with RecordingWriter(
            path,
            stage,
            ROUTERS,
            checkpoint_name="tiny",
            fingerprint="sha256:1",
            engine="test 1.0",
            domains=DOMAINS,
            dtype=dtype,
        ) as writer:
            first = 0
            for size in sizes:
                writer.append(*content.part(first, first + size, stage, has_chosen, dtype))
                first += size
        return path

    return write


@pytest.fixture
def recording(tmp_path, content, record):
    """A recording of 100 tokens in three shards, and what is in it."""
    held = content(100)
    return record(tmp_path / "rec", held, (40, 1, 59)), held


@pytest.fixture
def refused():
    """The one RecordingError that opening (or reading) ends in."""
    from moegeom.core.errors import RecordingError

    def run(action) -> str:
        with pytest.raises(RecordingError) as caught:
            action()
        return str(caught.value)

    return run


@pytest.fixture
def refused_open(refused):
    return lambda path: refused(lambda: open_recording(path))
