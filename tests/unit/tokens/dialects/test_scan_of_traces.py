"""A trace in a scan: load figures are those of the choices, everything else is null with reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moegeom.core.errors import UsageError
from moegeom.core.tokens import TokenSource
from moegeom.pipeline import ScanRequest, scan
from moegeom.results.reader import Results, open_results
from moegeom.tokens.open import open_tokens
from tests.unit.tokens.dialects.test_counts import write_imatrix
from tests.unit.tokens.dialects.written import Written, write_vllm

CHECKPOINT = Path("sample_ckpts/olmoe-balanced/step_1500")
NUM_TOKENS = 1024


@pytest.fixture(scope="module")
def recording() -> TokenSource:
    return open_tokens("sample_ckpts/olmoe-balanced/rec/step_1500")


def requests_of(recording: TokenSource) -> list[Written]:
    """The first documents, as an engine would have kept them."""
    columns = recording.read_columns(0, NUM_TOKENS)
    routers = recording.facts.routers
    ids = np.stack([recording.read_chosen(r, 0, NUM_TOKENS) for r in routers], axis=1)
    requests = []
    for document in np.unique(columns.document):
        rows = columns.document == document
        tokens = columns.token_id[rows].astype(np.int64)
        requests.append(Written(f"req-{document}", ids[rows][:-1], tokens, num_prompt=5))
    return requests


def scanned(tmp_path: Path, tokens: str, **asked) -> Results:
    out = tmp_path / "out"
    scan(ScanRequest(checkpoint=str(CHECKPOINT), out=out, tokens=tokens, **asked))
    return open_results(out)


def slots_of(results: Results) -> list[list[int]]:
    """By router and expert."""
    rows = [row for row in results.rows("experts") if row["population"] == "all"]
    routers = [router["name"] for router in results.run["routers"]]
    return [[row["num_slots"] for row in rows if row["router"] == name] for name in routers]


def test_load_of_counts_is_that_of_the_counts(recording, tmp_path):
    random = np.random.default_rng(1)
    routers = recording.facts.routers
    experts, top_k = 16, 4
    counts = random.multinomial(500 * top_k, random.dirichlet(np.ones(experts)), len(routers))
    write_imatrix(tmp_path / "m.gguf", counts[None])
    results = scanned(tmp_path, str(tmp_path / "m.gguf"))
    np.testing.assert_array_equal(slots_of(results), counts)
    layers = [row for row in results.rows("layers") if row["population"] == "all"]
    expected = counts.max(axis=1) * experts / counts.sum(axis=1) - 1
    np.testing.assert_allclose([row["max_vio_global"] for row in layers], expected)
    assert all(row["max_vio_global_se"] is None for row in layers)
    part = next(iter(results.run["parts"].values()))
    assert part["reasons"]["coactivation"].startswith("needs the choices of each token")
    assert all(row["num_exact_ties"] is None for row in layers)
    with pytest.raises(UsageError, match="--per-token: m.gguf holds counts only"):
        scanned(tmp_path / "rows", str(tmp_path / "m.gguf"), per_token=True)


def test_one_layer_of_a_trace_can_be_scanned_and_no_stage_beside_its_dialect(recording, tmp_path):
    write_vllm(tmp_path / "replies.jsonl", requests_of(recording))
    results = scanned(tmp_path, str(tmp_path / "replies.jsonl"), layers="1")
    assert {row["router"] for row in results.rows("experts")} == {recording.facts.routers[1]}
    with pytest.raises(UsageError, match="holds ids of experts, not stage logits"):
        scanned(tmp_path, str(tmp_path / "replies.jsonl"), stage="logits", dialect="vllm")
