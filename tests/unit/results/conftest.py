"""A small checkpoint and recording on disk, and its undisturbed results."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.synthetic import SyntheticModel, synthetic_inputs, write_checkpoint
from moegeom import pipeline
from moegeom.core.tokens import TILE, TokenColumns
from moegeom.pipeline import ScanRequest, scan
from moegeom.tokens.recording.writer import RecordingWriter

MODEL = SyntheticModel(hidden=16, experts=8, top_k=2, layers=2, duplicate=(1,))
TOKENS = 2 * TILE + 50
ROUTERS = ("text/0", "text/1")


def record(path: Path, sizes: tuple[int, ...], has_domains: bool = True) -> Path:
    """The same tokens, cut into shards of these sizes."""
    token = np.arange(TOKENS)
    labels = TokenColumns(
        document=token // 60,
        position=(token % 60).astype(np.int32),
        token_id=np.full(TOKENS, -1, np.int32),
        domain=((token // 60 % 2 - 1) if has_domains else token * 0 - 1).astype(np.int16),
    )
    values = {
        name: synthetic_inputs(MODEL, layer, TOKENS, num_sinks=2)
        for layer, name in enumerate(ROUTERS)
    }
    with RecordingWriter(path, "router_input", ROUTERS, domains=("code",) * has_domains) as writer:
        first = 0
        for size in sizes:
            part = slice(first, first + size)
            columns = TokenColumns(**{n: a[part] for n, a in vars(labels).items()})
            writer.append(columns, {name: v[part] for name, v in values.items()})
            first += size
    assert first == TOKENS
    return path


class Disk:
    """Where everything lies, and what an undisturbed scan of it gives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_checkpoint(folder / "model", MODEL)
        self.tokens = record(folder / "rec", (TOKENS,))
        self.record = record
        self.undisturbed = scan(self.request(folder / "undisturbed"))

    def request(self, out: Path, **changes) -> ScanRequest:
        request = ScanRequest(
            checkpoint=str(self.model),
            out=out,
            tokens=str(self.tokens),
            unverified=True,
            stale_inputs=True,
            num_workers=1,
        )
        return dataclasses.replace(request, **changes)

    @staticmethod
    def tables(out: Path) -> dict[str, list[dict]]:
        tables = {p.stem: pq.read_table(p).to_pylist() for p in sorted(out.glob("*.parquet"))}
        for finding in tables["findings"]:  # names the recording, which tests may cut otherwise
            finding.pop("next_command")
        return tables

    def assert_undisturbed(self, out: Path) -> None:
        np.testing.assert_equal(self.tables(out), self.tables(self.undisturbed))


class Killed(BaseException):
    """Stands for the end of the process at this place."""


def killed(request: ScanRequest) -> Path:
    """Where a run was to write that ended after its first router."""
    measure = pipeline.measure

    def stop(routers, *rest):
        if routers[0].name == "text/1":
            raise Killed
        return measure(routers, *rest)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(pipeline, "measure", stop)
        scan(request)
    return request.out


@pytest.fixture(scope="session")
def disk(tmp_path_factory):
    return Disk(tmp_path_factory.mktemp("disk"))
