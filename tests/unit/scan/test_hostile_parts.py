"""A part that somebody else wrote opens, fetches and writes nothing but what a part may name."""

import json
import shutil
import socket
from pathlib import Path

import pytest

from moegeom.core.errors import ResultsError, UsageError
from moegeom.engine.parts import PART_FILE
from moegeom.engine.request import ScanRequest
from moegeom.pipeline import scan
from moegeom.testing.synthetic import SyntheticModel, write_checkpoint, write_tokens
from tests.unit.scan.made import merge


@pytest.fixture(scope="module")
def part(tmp_path_factory) -> Path:
    """The only part of a scan."""
    folder, model = (
        tmp_path_factory.mktemp("world"),
        SyntheticModel(hidden=64, experts=8, top_k=2, layers=1),
    )
    write_checkpoint(folder / "model", model)
    write_tokens(folder / "rec", model, 1024)
    request = ScanRequest(
        str(folder / "model"), tokens=str(folder / "rec"), out=folder / "part", part="1/1"
    )
    return scan(request)


@pytest.fixture
def listening():
    """A socket to which nobody may connect, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BlockingIOError):
            server.accept()


def forged(part: Path, folder: Path, /, **fields: object) -> Path:
    copy = Path(shutil.copytree(part, folder))
    said = json.loads((copy / PART_FILE).read_text("utf-8"))
    said["request"] |= fields
    (copy / PART_FILE).write_text(json.dumps(said), "utf-8")
    return copy


#: Fields that no writer of parts writes; ADDRESS is one that somebody listens at.
FOREIGN = {
    "engine": ["ray", "ray:ADDRESS", "ray:ray://ADDRESS"],
    "checkpoint": [None, 3, ["a"], {"a": 1}, ""],
    "checkpoint_b": ["https://ADDRESS/model", "hf://owner/name"],
    "tokens": ["https://ADDRESS/rec", ["https://ADDRESS/rec", "rec"], 7, {"a": "b"}, ["rec"]],
    "run_b": ["s3://ADDRESS/rec", [1]],
    "expert_map": ["http://ADDRESS/map.json"],
    "family": ["https://ADDRESS/family.toml"],
    "out": ["elsewhere", "/etc"],
    "part": ["1/1"],
    "overwrite": [True],
    "restart": [True],
    "device": ["cuda"],
    "num_workers": [10**9],
    "batch_tokens": [1],
    "remote": [{"cache": "/"}],
    "noise": [0.5, {"text/0": 0.5}],
    "arithmetics": [[{}], [["bf16"]], {"a": "b"}, [None]],
    "what_ifs": [[1.5], "top_k=1"],
    "map_b": [{"a": ["b"]}, ["a"], "a"],
    "router_map": [{"a": {}}, {"a": "https://ADDRESS/x"}],
    "seed": ["0", 1.5, True, None, [0], 0],
    "exclude_first": [True, "1"],
    "per_token": [1, True, "yes"],
    "stale_inputs": [1],
    "stage": [5, ["logits"]],
    "record": [{}],
    "given": [{}],
    "asked": [{}, None],
    "unheard_of": [1],
}


def test_a_request_that_no_writer_writes_is_refused_before_anything_is_opened(
    part, tmp_path, listening, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    accepted = []
    for name, values in FOREIGN.items():
        for value in values:
            text = json.dumps(value).replace("ADDRESS", listening)
            copy = forged(part, tmp_path / "forged", **{name: json.loads(text)})
            try:
                merge([copy], tmp_path / "merged")
            except (ResultsError, UsageError):
                pass
            else:
                accepted.append((name, text))
            shutil.rmtree(copy)
    assert accepted == []
    assert [*tmp_path.iterdir()] == []


def test_a_checkpoint_behind_a_url_is_fetched_only_where_whoever_merges_names_it(
    part, tmp_path, listening
):
    copy = forged(part, tmp_path / "forged", checkpoint=f"http://{listening}/model")
    with pytest.raises(UsageError, match="fetches nothing that a part names"):
        merge([copy], tmp_path / "merged")
    with pytest.raises(UsageError, match="path of the checkpoint is empty"):
        merge([copy], tmp_path / "merged", checkpoint="")  # a variable that is not set
    here = json.loads((part / PART_FILE).read_text("utf-8"))["request"]["checkpoint"]
    assert merge([copy], tmp_path / "merged", checkpoint=here) == tmp_path / "merged"


def test_a_scan_of_another_url_is_not_cut_into_parts(part, tmp_path):
    world = part.parent
    request = ScanRequest(
        str(world / "model"), tokens=str(world / "rec"), part="1/1", checkpoint_b="hf://owner/name"
    )
    with pytest.raises(UsageError, match="--checkpoint-b cannot be cut"):
        scan(request)
