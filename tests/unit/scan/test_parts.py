"""A scan in parts, on as many machines as one likes, is the scan, byte for byte; a part that
somebody else wrote opens, fetches and writes nothing but what a part may name.
"""

import dataclasses
import functools
import json
import os
import shutil
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import SyntheticModel, write_checkpoint, write_tokens
from moegeom.core.errors import OutputError, RecordingError, ResultsError, UsageError
from moegeom.core.tokens import TILE, SourceFacts
from moegeom.engine.cluster import parts_by_ray
from moegeom.engine.parts import PART_FILE, MissingParts, Share, parse_part
from moegeom.engine.request import ScanRequest
from moegeom.engine.session import Session
from moegeom.engine.sources import refuse_too_many
from moegeom.kernels.reduction import MOST_TOKENS, SettledCounts
from moegeom.pipeline import scan
from moegeom.results.reader import open_results
from moegeom.studies.boundary.record import BoundaryRequest
from moegeom.studies.boundary.study import measure_boundary
from moegeom.tokens.open import open_tokens
from moegeom_cli.streams import Silence
from tests.by_day import by_day
from tests.unit.scan.made import merge

MODEL = SyntheticModel(hidden=32, experts=8, top_k=2, layers=2)

#: The last tile is short.
TOKENS = 2 * TILE + 300


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    write_checkpoint(folder / "model", MODEL)
    write_tokens(folder / "rec", MODEL, TOKENS)
    return folder


def request_for(world: Path, out: Path, **options: Any) -> ScanRequest:
    tokens = options.pop("tokens", str(world / "rec"))
    return ScanRequest(str(world / "model"), tokens=tokens, out=out, **options)


def tables(results: object) -> dict[str, bytes]:
    assert isinstance(results, Path), results
    return {path.name: path.read_bytes() for path in sorted(results.glob("*.parquet"))}


def parts_of(world: Path, folder: Path, order: Sequence[int], **options: Any) -> list[Path]:
    """All parts, made in this order."""
    return [
        scan(request_for(world, folder / f"part{number}", part=f"{number}/{len(order)}", **options))
        for number in order
    ]


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tables of one scan."""
    return tables(scan(request_for(world, tmp_path_factory.mktemp("whole") / "out")))


@pytest.fixture(scope="module")
def three(world: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return parts_of(world, tmp_path_factory.mktemp("three"), (1, 2, 3))


@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 5), st.randoms())
def test_every_tile_is_in_one_share_and_no_group_is_cut(count, num_tiles, together, random):
    parts = [Share(number, count) for number in range(1, count + 1)]
    whole = [tile for part in parts for tile in part.tiles(range(num_tiles), num_tiles, together)]
    assert whole == [*range(num_tiles)]
    some = sorted(random.sample(range(num_tiles), random.randint(0, num_tiles)))
    shares = [part.tiles(some, num_tiles, together) for part in parts]
    assert [tile for share in shares for tile in share] == some
    owner = {tile: place for place, share in enumerate(shares) for tile in share}
    groups = {tile // together: owner[tile] for tile in some}
    assert all(owner[tile] == groups[tile // together] for tile in some)


SIDES = {
    "as stored": {},
    "variants": {
        "arithmetics": ("bf16",),
        "what_ifs": ("topk:k=3", "expert-choice"),
        "what_if_batch": 2 * TILE,
        "checkpoint_b": "second",
        "layers": "1",
    },
    "run b": {"run_b": "other.npz", "stage_b": "ids", "layers": "1"},
}


@pytest.fixture(scope="module")
def sides(world: Path) -> Path:
    write_checkpoint(world / "second", dataclasses.replace(MODEL, seed=1))
    random = np.random.default_rng(0)
    columns = open_tokens(world / "rec").read_columns(0, TOKENS)
    experts = np.tile(np.arange(MODEL.experts), (TOKENS, 1))
    chosen = {f"text.{n}": random.permuted(experts, axis=1)[:, :2] for n in range(MODEL.layers)}
    np.savez(world / "other.npz", **chosen, document=columns.document, position=columns.position)
    return world


#: The first has more parts than tiles.
@pytest.mark.parametrize(
    ("side", "order"), [("as stored", (1, 2, 3, 4)), ("variants", (3, 1, 2)), ("run b", (2, 1))]
)
def test_parts_add_up_to_the_tables_of_one_scan(side, order, sides, tmp_path):
    options: dict[str, Any] = dict(SIDES[side])
    for name in {"run_b", "checkpoint_b"} & options.keys():
        options[name] = str(sides / options[name])
    one = scan(request_for(sides, tmp_path / "whole", **options))
    merged = merge(parts_of(sides, tmp_path, order, **options), tmp_path / "merged")
    assert tables(merged) == tables(one)
    plans = [json.loads((p / "run.json").read_text())["plan"] for p in (one, merged)]
    assert plans[0] == plans[1]


def test_a_boundary_report_is_shared_out_as_a_scan_is(world, tmp_path):
    request = BoundaryRequest(
        str(world / "model"),
        tokens=str(world / "rec"),
        out=tmp_path / "whole",
        arithmetics=("bf16",),
        layers="1",
    )
    parts = [
        measure_boundary(dataclasses.replace(request, out=tmp_path / f"{n}", part=f"{n}/2"))
        for n in (1, 2)
    ]
    assert tables(merge(parts, tmp_path / "merged")) == tables(measure_boundary(request))


def test_a_trace_of_places_is_shared_out_with_its_map(world, tmp_path):
    order = np.random.default_rng(0).random((TOKENS, MODEL.layers, MODEL.experts))
    ids = np.argsort(order, axis=2)[:, :, : MODEL.top_k].astype(np.uint8)
    for number, rows in enumerate(np.split(ids, [1500])):
        np.save(tmp_path / f"{number}.npy", rows)
    turned = list(range(MODEL.experts))[::-1]
    (tmp_path / "map.json").write_text(json.dumps(turned))
    options = {"tokens": f"{tmp_path}/*.npy", "expert_map": str(tmp_path / "map.json")}
    parts = parts_of(world, tmp_path, (1, 2), **options)
    merged = merge(parts, tmp_path / "merged")
    assert tables(merged) == tables(scan(request_for(world, tmp_path / "whole", **options)))
    experts = np.array(turned)[ids].transpose(1, 0, 2).reshape(MODEL.layers, -1)
    expected = [np.bincount(of_layer, minlength=MODEL.experts) for of_layer in experts]
    of_experts = {"variant": "as_stored", "population": "all"}
    columns = open_results(merged).columns("experts", ["num_slots"], **of_experts)
    np.testing.assert_array_equal(columns["num_slots"], np.concatenate(expected))
    (tmp_path / "map.json").write_text(json.dumps(turned[::-1]))
    with pytest.raises(ResultsError, match="expert_map here are not those"):
        merge(parts, tmp_path / "again")


def test_missing_parts_are_inconclusive_and_those_of_others_refused(three, tmp_path, whole, world):
    merged = merge([three[0], three[2]], tmp_path / "merged")
    assert merged == MissingParts((2,), 3, (str(three[0]), str(three[2])))
    assert not [*tmp_path.iterdir()]
    assert tables(merge([*three, three[1]], tmp_path / "whole")) == whole
    foreign = scan(request_for(world, tmp_path / "foreign", part="2/3", seed=1))
    with pytest.raises(ResultsError, match="of another scan than .*: seed differ"):
        merge([three[0], foreign, three[2]], tmp_path / "merged")
    with pytest.raises(ResultsError, match="no part of a scan"):
        merge([*three, world / "model"], tmp_path / "merged")
    write_checkpoint(tmp_path / "model", MODEL)
    other = write_tokens(tmp_path / "rec", MODEL, TOKENS + 1)
    with pytest.raises(ResultsError, match="tokens here are not those"):
        merge(three, tmp_path / "merged", tokens=str(other))


@pytest.mark.parametrize("spoil", ["state", "digest", "lost", "facts"])
def test_a_part_that_is_not_as_it_was_written_is_refused(spoil, three, tmp_path):
    spoilt = Path(shutil.copytree(three[1], tmp_path / "spoilt"))
    part = json.loads((spoilt / PART_FILE).read_text())
    state = spoilt / part["states"][0]["file"]
    if spoil == "state":
        raw = bytearray(state.read_bytes())
        raw[len(raw) // 2] ^= 1
        state.write_bytes(raw)
    elif spoil == "digest":
        part["states"][0]["digest"] = "0"
    elif spoil == "lost":
        state.unlink()
    else:
        part["states"][0]["file"] = "../part1/000000.npz"
    (spoilt / PART_FILE).write_text(json.dumps(part))
    with pytest.raises(ResultsError):
        merge([three[0], spoilt, three[2]], tmp_path / "merged")


def test_what_is_no_part_or_cannot_be_cut_or_told_to_another_machine_is_refused(world, tmp_path):
    with pytest.raises(UsageError, match="--per-token cannot be cut"):
        scan(request_for(world, tmp_path / "part", part="1/2", per_token=True))
    with pytest.raises(UsageError, match="it needs --tokens"):
        scan(request_for(world, tmp_path / "part", part="1/2", tokens=None))
    for engine in ("dask", "rays", ""):
        with pytest.raises(UsageError, match="expected ray"):
            scan(request_for(world, tmp_path / "out", engine=engine))
    assert not [*tmp_path.iterdir()]
    for text in ("0/3", "4/3", "1", "1/0", "-1/3", "1/3/5", "a/b", "1/9999999"):
        with pytest.raises(UsageError, match="expected i/n"):
            parse_part(text)


def test_a_part_replaces_none_that_came_meanwhile(world, tmp_path):
    class Meanwhile(Silence):
        def begin(self, what: str) -> None:
            (tmp_path / "part/of_another").mkdir(parents=True, exist_ok=True)

    with pytest.raises(OutputError, match="File exists"):
        scan(
            request_for(world, tmp_path / "part", part="1/2"), Meanwhile(quiet=True, unit="tokens")
        )
    assert {*tmp_path.rglob("*")} == {tmp_path / "part", tmp_path / "part/of_another"}


def test_more_tokens_than_sums_hold_are_refused_before_and_after():
    facts = SourceFacts("rec", "ids", 16 * MOST_TOKENS + 1, ("text/0",), (), True, True)
    with pytest.raises(RecordingError, match="hold 2,147,483,648 at most"):
        refuse_too_many(facts)
    counts = np.zeros((1, 16, 1), np.int64)
    counts[0, :2] = 2**62
    with pytest.raises(ResultsError, match="64 bits"):
        SettledCounts.of({"counts": counts}).select(None, None)
    counts[0, 1] -= 2**30
    assert SettledCounts.of({"counts": counts}).select(None, None) == 2**63 - 2**30


@pytest.mark.parametrize("num_workers", by_day([1, 2, 4, 8], [2]))
def test_killed_workers_are_replaced_and_the_tables_stay(
    num_workers, world, whole, tmp_path, monkeypatch
):
    """And nothing of the working directory runs there."""
    import ray

    monkeypatch.setattr(ray, "init", functools.partial(ray.init, num_cpus=num_workers))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moegeom.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'w').close()")
    killed = tmp_path / "killed"
    killed.mkdir()

    def fragile(request: ScanRequest) -> dict[str, bytes]:
        from moegeom.pipeline import _part_files

        number = (request.part or "").partition("/")[0]
        if number in ("1", "2") and not (killed / number).exists():
            (killed / number).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return _part_files(request)

    request = request_for(world, tmp_path / "merged", engine="ray")
    source = Session.open(request).source
    with parts_by_ray(request, source, fragile, None) as parts:
        assert len(parts.parts) == min(2 * num_workers, 3)
        merged = scan(request_for(world, tmp_path / "merged"), merged=parts)
    assert sorted(path.name for path in killed.iterdir()) == ["1", "2"]
    assert tables(merged) == whole
    assert not (tmp_path / "RAN").exists()


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
    "requested_family": [{}, None],
    "unheard_of": [1],
}


def test_a_request_that_no_writer_writes_is_refused_unopened(
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


def test_a_checkpoint_behind_a_url_is_fetched_only_where_it_is_named(part, tmp_path, listening):
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
