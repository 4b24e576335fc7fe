import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import close_session
from safetensors import safe_open
from safetensors.numpy import save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.remote.open import retry_after
from moegeom.checkpoint.remote.url import RemoteOptions, hub_url, user_cache_folder
from moegeom.checkpoint.shards import in_parallel, lazy
from moegeom.core.errors import CheckpointError
from moegeom.core.extras import install_command
from tests.unit.checkpoint.remote_server import (
    Site,
    chunked,
    dripping,
    dropped,
    serve,
    stalled,
    status,
    together,
    truncated,
)

_INDEX = "model.safetensors.index.json"
_NUM_SHARDS = 6
_EXPERT = np.zeros((64, 300), np.float32)


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, and no token of whoever runs the tests."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")


@pytest.fixture
def site() -> Iterator[Site]:
    with serve() as running:
        yield running


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def options(waits: list[float]) -> RemoteOptions:
    return RemoteOptions(
        cache_folder=None, timeout_s=5.0, backoff_s=0.01, attempts=3, sleep=waits.append
    )


def _shard(i: int) -> str:
    return f"model-{i:05d}-of-{_NUM_SHARDS:05d}.safetensors"


def _names(i: int) -> tuple[str, str]:
    return f"layers.{i}.gate.weight", f"layers.{i}.norm.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Shards of a router, a norm beside it, and experts on both sides, which nobody needs."""
    folder = tmp_path / "model"
    folder.mkdir()
    generator = np.random.default_rng(0)
    weight_map = {}
    for i in range(_NUM_SHARDS):
        gate, norm = _names(i)
        tensors = {
            f"layers.{i}.expert.0": _EXPERT,
            gate: generator.standard_normal((16, 100)).astype(ml_dtypes.bfloat16),
            norm: generator.standard_normal(100).astype(ml_dtypes.bfloat16),
            f"layers.{i}.last_expert": _EXPERT,
        }
        save_file(tensors, folder / _shard(i))
        weight_map |= dict.fromkeys(tensors, _shard(i))
    (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "olmoe"}')
    return folder


@pytest.fixture
def served(site: Site, model: Path) -> str:
    site.add_folder(model, "/m")
    return f"{site.url}/m"


_NEEDED = [name for i in range(_NUM_SHARDS) for name in _names(i)]


def _read_all(store: Any) -> dict[str, np.ndarray]:
    store.prepare(_NEEDED)
    return dict(store.read_many(_NEEDED))


def _oracle(model: Path, name: str) -> bytes:
    file = model / _shard(int(name.split(".")[1]))
    with safe_open(file, framework="np") as opened:  # pyright: ignore[reportPrivateImportUsage]
        return opened.get_tensor(name).tobytes()


def _assert_read_as_from_disk(store: Any, model: Path) -> None:
    assert store.config == {"model_type": "olmoe"}
    assert {name: values.tobytes() for name, values in _read_all(store).items()} == {
        name: _oracle(model, name) for name in _NEEDED
    }


def _refusal(url: str, options: RemoteOptions) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        _read_all(open_checkpoint(url, options))
    return caught.value


@pytest.mark.parametrize("suffix", ["", "/", f"/{_INDEX}"])
def test_a_web_folder_reads_like_safetensors_reads_it_from_disk(suffix, served, model, options):
    store = open_checkpoint(served + suffix, options)
    _assert_read_as_from_disk(store, model)
    assert store.label == "m"
    assert store.bytes_total == sum(p.stat().st_size for p in model.iterdir())


def test_the_server_sends_little_more_than_headers_and_routers(site, served, model, options):
    store: Any = open_checkpoint(served, options)
    _ = store.config
    _read_all(store)
    needed = sum(info.size_bytes for info in map(store.info, _NEEDED))
    for path in model.iterdir():
        raw = path.read_bytes()
        is_shard = path.suffix == ".safetensors"
        needed += 8 + int.from_bytes(raw[:8], "little") if is_shard else len(raw)
    assert needed <= store.bytes_read <= 1.05 * needed
    assert needed <= site.log.bytes_sent - 4 * len(b"no such file") <= 1.05 * needed
    assert site.log.bytes_sent < 0.05 * store.bytes_total
    # a probe with the length of the header, the header, and the span of router and norm
    assert [site.count(_shard(i)) for i in range(_NUM_SHARDS)] == [3] * _NUM_SHARDS


def test_tensors_come_in_the_order_of_files_and_parts_cost_their_bytes(
    site, served, model, options
):
    name, _ = _names(2)
    store = open_checkpoint(f"{served}/{_shard(2)}", options)
    assert store.read(name).tobytes() == _oracle(model, name)
    assert site.count(_INDEX) == 0
    before = site.log.bytes_sent
    assert store.read_bytes(name, 6, 10) == _oracle(model, name)[6:16]
    assert site.log.bytes_sent - before == 10
    asked = _NEEDED[::-1] + _NEEDED
    remote = open_checkpoint(served, options).read_many(asked)
    order = [name for name, _ in remote]
    assert order == [name for name, _ in open_checkpoint(model).read_many(asked)]
    assert sorted(order) == sorted(_NEEDED)


def test_a_server_gets_eight_requests_at_the_same_time_and_never_nine(site, tmp_path, options):
    num_shards = 163
    weight_map = {}
    for i in range(num_shards):
        save_file({f"l.{i}": np.full(4, i, np.float32)}, tmp_path / f"m-{i}.safetensors")
        weight_map[f"l.{i}"] = f"m-{i}.safetensors"
    (tmp_path / _INDEX).write_text(json.dumps({"weight_map": weight_map}))
    site.add_folder(tmp_path, "/m")
    site.latency_s = 0.005
    gate = together(8)
    for i in range(160):  # a multiple of eight
        site.faults[f"/m/m-{i}.safetensors"] = [gate]
    store = open_checkpoint(f"{site.url}/m", options)
    store.prepare(weight_map)
    found = dict(store.read_many(weight_map))
    assert all((found[f"l.{i}"] == i).all() for i in range(num_shards))
    assert site.log.most_in_flight == 8
    # well-known names, the index, and three for each shard: length, header, tensor
    assert len(site.log.requests) == 6 + 1 + 3 * num_shards


class _Slow:
    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    @lazy
    def value(self) -> object:
        """An object, made when two threads want one."""
        self.barrier.wait(10)
        return object()


def test_lazy_properties_of_two_objects_are_computed_at_the_same_time_and_once():
    slow = [_Slow(barrier) for barrier in 2 * [threading.Barrier(2)]]
    assert list(in_parallel(lambda one: one.value, slow, 2)) == [one.value for one in slow]


@pytest.mark.parametrize(
    "fault", [*map(status, (429, 500, 502, 503, 504)), dropped, truncated(3), truncated(0)]
)
def test_a_failure_that_passes_after_two_attempts_is_unseen(
    fault, site, served, model, options, waits
):
    store = open_checkpoint(served, options)
    site.faults[f"/m/{_shard(3)}"] = [fault, fault]
    assert _read_all(store)[_names(3)[0]].tobytes() == _oracle(model, _names(3)[0])
    assert site.count(_shard(3)) == 5
    assert 0.005 <= waits[0] <= 0.015 and 0.01 <= waits[1] <= 0.03


def test_the_pause_that_a_server_asks_for_in_seconds_or_by_date_is_made(
    site, served, options, waits
):
    site.faults[f"/m/{_INDEX}"] = [status(429, Retry_After="7")]
    open_checkpoint(served, options)
    assert waits == [7.0]
    seconds = {"3": 3.0, "0": 0.0, "": None, "-1": None, "soon": None, "9" * 12: None}
    assert {text: retry_after(text) for text in seconds} == seconds
    now = datetime.now(UTC)
    pause = retry_after(format_datetime(now + timedelta(seconds=90), usegmt=True))
    assert pause is not None and 80 < pause <= 90
    assert retry_after(format_datetime(now - timedelta(days=1), usegmt=True)) == 0.0


#: What a server does, by the path of a file in its folder, and the end of the refusal.
_TROUBLE: dict[str, tuple[Callable[[Site], Any], str]] = {
    "a pause of an hour": (
        lambda site: site.faults[f"/m/{_INDEX}"].append(status(429, Retry_After="3600")),
        f"/{_INDEX} answers 429 (Too Many Requests), and asks to wait 3600 s.",
    ),
    "a failure that stays": (
        lambda site: site.faults[f"/m/{_shard(0)}"].extend([status(503)] * 3),
        f"/{_shard(0)} answers 503 (Service Unavailable), in each of 3 attempts.",
    ),
    "missing shards": (
        lambda site: [site.files.pop(f"/m/{_shard(i)}") for i in (1, 4)],
        f"names '{_shard(1)}', which does not exist (2 of 6 files are missing).",
    ),
    "a name that no URL can spell": (
        lambda site: _with_index(site, {"a": "\ud800.safetensors"}),
        "names '\\ud800.safetensors', which does not exist (1 of 1 files is missing).",
    ),
    "a million requests": (
        lambda site: _with_index(site, {f"t{i}": f"{i}.safetensors" for i in range(20_001)}),
        "names 20001 files, more than the 20000 allowed.",
    ),
    "no ranges": (
        lambda site: setattr(site, "has_ranges", False),
        " answers with the whole file where a part was asked for.",
    ),
}


def _with_index(site: Site, weight_map: dict[str, str]) -> None:
    site.files[f"/m/{_INDEX}"] = json.dumps({"weight_map": weight_map}).encode()


@pytest.mark.parametrize("case", _TROUBLE)
def test_a_folder_that_cannot_be_read_is_one_sentence(case, site, served, options, waits):
    make, end = _TROUBLE[case]
    make(site)
    error = _refusal(served, options)
    assert error.message.endswith(end)
    assert "\n" not in error.message
    assert len(waits) == (2 if "stays" in case else 0)
    assert error.hint or "stays" not in case
    assert len(site.log.requests) < 40


def test_a_server_that_is_gone_or_says_nothing_or_byte_by_byte_is_given_up(site, served, options):
    store = open_checkpoint(served, replace(options, timeout_s=0.1))
    site.faults[f"/m/{_shard(0)}"] = [stalled] * 3
    with pytest.raises(CheckpointError, match=r"sent nothing for 0\.1 s, in each of 3 attempts\."):
        store.info(_names(0)[0])
    store = open_checkpoint(served, replace(options, timeout_s=0.2, attempts=1))
    site.faults[f"/m/{_shard(0)}"] = [dripping(0.02)]
    with pytest.raises(CheckpointError, match=r"sent \d+ of \d+ bytes, in each of 1 attempts"):
        store.info(_names(0)[0])
    with serve() as gone:
        url = f"{gone.url}/m"
    sentence = f"config.json: {url}/config.json cannot be reached, in each of 3 attempts."
    assert _refusal(url, options).message == sentence


@pytest.mark.parametrize("change", ["etag", "longer", "shorter"])
def test_a_file_that_changes_between_two_reads_is_refused(change, site, served, options):
    store = open_checkpoint(served, options)
    site.has_etags = change != "longer"
    raw = site.files[f"/m/{_shard(0)}"]
    changed = {"etag": raw[:-1] + b"\1", "longer": raw + b"\1", "shorter": raw[:3]}
    site.files[f"/m/{_shard(0)}"] = changed[change]
    with pytest.raises(CheckpointError, match=re.escape(f"{served}/{_shard(0)} changed while it")):
        store.read(_names(0)[0])


def test_a_server_without_ranges_sends_no_file_and_no_body_of_a_redirect(site, served, options):
    target = f"/m/{_shard(0)}"
    site.answers["/m.safetensors"] = (302, {"Location": target}, bytes(1 << 26))
    open_checkpoint(f"{site.url}/m.safetensors", options)
    site.has_ranges = False
    store = open_checkpoint(served, options)  # whole JSON may come
    assert store.config == {"model_type": "olmoe"}
    assert set(_NEEDED) < set(store.names())
    site.files["/large/model.safetensors"] = bytes(1 << 26)
    assert "answers with the whole file" in _refusal(f"{site.url}/large", options).message
    assert site.log.bytes_sent < 1 << 26  # what the buffers of the connections took


def test_ranges_that_were_not_asked_for_and_redirects_without_end_are_refused(site, options):
    for part in ("bytes 1-8/100", "bytes 0-7/*", ""):
        site.answers["/m.safetensors"] = (206, {"Content-Range": part}, bytes(8))
        message = _refusal(f"{site.url}/m.safetensors", options).message
        assert f"answers with the range '{part}'" in message
    gzipped = {"Content-Range": "bytes 0-7/100", "Content-Encoding": "gzip"}
    site.answers["/m.safetensors"] = (206, gzipped, bytes(8))
    assert "is sent compressed" in _refusal(f"{site.url}/m.safetensors", options).message
    for location, sentence in {
        "/m.safetensors": "/m.safetensors redirects more than 10 times",
        "file:///etc/passwd": "cannot be followed (UnsupportedProtocol)",
    }.items():
        site.answers["/m.safetensors"] = (302, {"Location": location}, b"")
        assert sentence in _refusal(f"{site.url}/m.safetensors", options).message


def test_promises_beyond_the_file_are_refused_and_odd_letters_quoted(site, tmp_path, options):
    raw = (10**15).to_bytes(8, "little") + bytes(100)
    (tmp_path / "m.safetensors").write_bytes(raw)
    site.files["/m.safetensors"] = raw
    with pytest.raises(CheckpointError) as local:
        open_checkpoint(tmp_path / "m.safetensors")
    assert _refusal(f"{site.url}/m.safetensors", options).message == local.value.message
    name = "a b?c#d%2F\u00e9.safetensors"
    site.files[f"/m/{_INDEX}"] = json.dumps({"weight_map": {"a": name}}).encode()
    site.files[f"/m/{name}"] = b""
    error = _refusal(f"{site.url}/m", options)
    assert error.message == "m: there is no tensor 'layers.0.gate.weight'."
    with pytest.raises(CheckpointError, match="truncated, has 0 bytes"):
        open_checkpoint(f"{site.url}/m", options).info("a")


def test_a_refusal_is_not_asked_again(site, options, waits):
    for code in (401, 403, 404, 410, 418, 451):
        name = f"{code}.safetensors"
        site.answers[f"/{name}"] = (code, {}, b"")
        error = _refusal(f"{site.url}/{name}", options)
        assert error.message.startswith(f"{name}: {site.url}/{name} answers {code} (")
        assert error.hint and waits == []
        assert site.count(name) == 1
    # of an empty folder it says what was looked for
    assert _refusal(f"{site.url}/nothing", options).message == (
        "nothing: holds no file of a well-known name, and cannot be listed; config.json: "
        f"{site.url}/nothing/config.json answers 404 (Not Found)."
    )


@pytest.mark.parametrize(
    "fault",
    [status(401), status(503), truncated(2), stalled, dropped, status(429, Retry_After="999")],
)
def test_credentials_are_used_and_never_printed(fault, site, served, options):
    secret = "hunter2"
    url = served.replace("http://", f"http://user:{secret}@") + f"/?sig={secret}#{secret}"
    store: Any = open_checkpoint(url, replace(options, timeout_s=0.1, hub_token=secret))
    assert all(f"?sig={secret}" in path for path in site.log.requests)
    assert all("Authorization" in headers for headers in site.log.headers)
    site.faults[f"/m/{_shard(0)}"] = [fault] * 3
    with pytest.raises(CheckpointError) as caught:
        store.info(_names(0)[0])
    seen = [str(caught.value), store.label, store.revision, repr(store.folder)]
    assert not any(secret in text for text in seen)
    assert caught.value.__cause__ is None
    assert secret not in repr(replace(options, hub_token=secret))


@pytest.mark.parametrize(
    "url",
    ["http://[", "http://h:port/m", "https://", "http:///m", "nosuchscheme://u:hunter2@h/m", "hf://x",
     "hf://datasets/a/b", "hf://a/b/c/../../..", "s3://", "::://", "http://\ud800/m",
     f"http://{'a' * 300}.{'é' * 300}/m", "http://..модель../m", f"http://127.0.0.1:1/{'m' * 3000}",
     f"hf://{'o' * 3000}/m"],
)  # fmt: skip
def test_an_odd_url_is_one_sentence(url, options):
    offline = replace(options, hub_endpoint="http://127.0.0.1:1", attempts=1)
    error = _refusal(url, offline)
    assert "\n" not in error.message and "hunter2" not in str(error)
    assert len(error.message) < 1500


def test_a_revision_changes_with_any_weight_file_and_needs_etags(site, served, model, options):
    before = open_checkpoint(served, options).revision
    assert re.fullmatch(r"etags:[0-9a-f]{16}", before)
    assert open_checkpoint(served, options).revision == before
    site.files[f"/m/{_shard(5)}"] += b"\0"
    assert open_checkpoint(served, options).revision != before
    site.has_etags = False
    assert open_checkpoint(served, options).revision == open_checkpoint(model).revision == ""


def _cached(options: RemoteOptions, folder: Path, limit: int = 10**6) -> RemoteOptions:
    return replace(options, cache_folder=folder, cache_bytes=limit)


def test_what_is_in_the_cache_is_not_fetched_but_a_new_version(
    site, served, model, options, tmp_path
):
    cached = _cached(options, tmp_path / "cache")
    first = _read_all(open_checkpoint(served, cached))
    sent = site.log.bytes_sent
    store = open_checkpoint(served, cached)
    again = _read_all(store)
    assert {k: v.tobytes() for k, v in again.items()} == {k: v.tobytes() for k, v in first.items()}
    # each file is asked for its version, with the first bytes of it
    assert site.log.bytes_sent - sent <= 8 * (_NUM_SHARDS + 2) + 9 * len(b"no such file")
    assert store.bytes_read == 8 * (_NUM_SHARDS + 2)
    name, gate = _names(0)[0], np.full((16, 100), 3, ml_dtypes.bfloat16)
    save_file({name: gate}, model / _shard(0))
    site.add_folder(model, "/m")
    np.testing.assert_array_equal(open_checkpoint(served, cached).read(name), gate)


def _no_file(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: (path.unlink(), make(path))


_DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "rubbish": lambda path: path.write_bytes(b"x" * 40),
    "another end": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "pipe": _no_file(os.mkfifo),
    "folder": _no_file(Path.mkdir),
    "device": _no_file(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_cache_is_ignored_and_written_again(damage, served, options, tmp_path, model):
    folder = tmp_path / "cache"
    cached = _cached(options, folder)
    _read_all(open_checkpoint(served, cached))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    whole = [path.read_bytes() for path in files]
    for path in files:
        _DAMAGES[damage](path)
    _assert_read_as_from_disk(open_checkpoint(served, cached), model)
    if damage in ("empty", "rubbish", "another end"):
        assert [path.read_bytes() for path in files] == whole


def test_nothing_is_kept_without_a_strong_etag(site, served, options, tmp_path, monkeypatch):
    monkeypatch.setattr(Site, "etag", lambda *_: 'W/"1"')
    for site.has_etags in (True, False):
        _read_all(open_checkpoint(served, _cached(options, tmp_path / "cache")))
        assert not (tmp_path / "cache").exists()


def test_the_oldest_leave_a_full_cache_and_an_unwritable_one_is_no_error(served, options, tmp_path):
    folder, limit = tmp_path / "cache", 12_000
    _read_all(open_checkpoint(served, _cached(options, folder, limit)))
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert limit / 2 < total <= limit
    (tmp_path / "file").write_text("a file where the folder should be")
    cached = _cached(options, tmp_path / "file")
    assert len(_read_all(open_checkpoint(served, cached))) == 2 * _NUM_SHARDS


def test_the_cache_lies_where_caches_lie():
    for environment, platform, expected in (
        ({}, "linux", "/home/me/.cache/moegeom"),
        ({}, "darwin", "/home/me/Library/Caches/moegeom"),
        ({"LOCALAPPDATA": "/local"}, "win32", "/local/moegeom"),
        ({"XDG_CACHE_HOME": "/xdg"}, "linux", "/xdg/moegeom"),
        ({"XDG_CACHE_HOME": "relative"}, "linux", "/home/me/.cache/moegeom"),
    ):
        assert user_cache_folder(environment, Path("/home/me"), platform) == Path(expected)


_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(site: Site, model: Path, options: RemoteOptions) -> Iterator[RemoteOptions]:
    """A hub as huggingface_hub sees it, whose large files lie on a server of their own."""
    with serve() as cdn:
        siblings = []
        for path in model.iterdir():
            raw, oid = path.read_bytes(), f"oid-{path.name}"
            cdn.files[f"/blobs/{oid}"] = raw
            large = {"sha256": oid, "size": len(raw), "pointerSize": 130}
            is_large = path.suffix == ".safetensors"
            siblings.append(
                {"rfilename": path.name, "size": len(raw), "blobId": oid}
                | ({"lfs": large} if is_large else {})
            )
            at = f"/own/er/resolve/{_COMMIT}/{path.name}"
            signed = f"{cdn.url}/blobs/{oid}?Signature=hunter2"
            site.answers[at] = (302, {"Location": signed}, b"")
        description = {"id": "own/er", "sha": _COMMIT, "siblings": siblings}
        answer = (200, {"Content-Type": "application/json"}, json.dumps(description).encode())
        for revision in ("main", "v1", "refs/pr/1", "a/b"):
            site.answers[f"/api/models/own/er/revision/{revision}"] = answer
        site.answers["/api/models/own/er"] = answer
        site.cdn = cdn  # pyright: ignore[reportAttributeAccessIssue]
        yield replace(options, hub_endpoint=site.url, hub_token="hf_hunter2")
        close_session()


@pytest.mark.parametrize("at", ["", "@v1", "@refs/pr/1", "@a%2Fb", "/"])
def test_a_model_of_the_hub_is_read_at_the_commit_that_its_listing_names(at, hub, site, model):
    store = open_checkpoint(f"hf://own/er{at}", hub)
    assert store.revision == _COMMIT
    _assert_read_as_from_disk(store, model)
    api = [path for path in site.log.requests if path.startswith("/api/")]
    assert len(api) == 1 and "blobs=" in api[0]
    assert all(f"/resolve/{_COMMIT}/" in p for p in site.log.requests if p not in api)


def test_the_token_goes_to_the_hub_alone_and_a_cache_needs_a_listing(hub, site, model, tmp_path):
    store = open_checkpoint(f"hf://own/er@v1/{_shard(2)}", hub)
    assert store.label == "own/er@v1"
    assert store.read(_names(2)[1]).tobytes() == _oracle(model, _names(2)[1])
    assert {h.get("authorization") or h.get("Authorization") for h in site.log.headers} == {
        "Bearer hf_hunter2"
    }
    assert not any("uthorization" in name for h in site.cdn.log.headers for name in h)
    cached = _cached(hub, tmp_path / "cache")
    _read_all(open_checkpoint("hf://own/er", cached))
    site.log.requests.clear()
    store: Any = open_checkpoint("hf://own/er", cached)
    _read_all(store)
    assert len(site.log.requests) == 1 and store.bytes_read == 0


@pytest.mark.parametrize(
    ("code", "headers", "hint"),
    [
        (401, {"X-Error-Code": "RepoNotFound"}, "hf auth login"),
        (403, {"X-Error-Code": "GatedRepo"}, "hf auth login"),
        (404, {"X-Error-Code": "RepoNotFound"}, "name of the model"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "revision"),
    ],
)
def test_a_model_that_the_hub_refuses_says_what_to_do(code, headers, hint, hub, site, waits):
    site.answers["/api/models/own/er"] = (code, headers, b'{"error": "no hunter2"}')
    error = _refusal("hf://own/er", hub)
    assert error.message.startswith(f"hf://own/er answers {code} (")
    assert hint in error.hint and waits == [] and "hunter2" not in str(error)


def test_a_gated_file_and_a_description_without_sense_are_one_sentence(hub, site):
    path = f"/own/er/resolve/{_COMMIT}/{_INDEX}"
    site.answers[path] = (403, {"X-Error-Code": "GatedRepo"}, b"")
    error = _refusal("hf://own/er", hub)
    assert error.message == f"{_INDEX}: {site.url}{path} answers 403 (Forbidden)."
    assert "hf auth login" in error.hint
    for body in (b"", b"[]", b"{}", b'{"sha": 3, "siblings": [{"rfilename": 1}]}'):
        site.answers["/api/models/own/er"] = (200, {"Content-Type": "application/json"}, body)
        assert _refusal("hf://own/er", hub).message.startswith("hf://own/er: the hub ")


def test_a_busy_hub_is_asked_again_and_may_send_an_index_whole_but_no_shard(hub, site, waits):
    site.faults["/api/models/own/er"] = [status(503), status(429, Retry_After="2")]
    site.cdn.faults[f"/blobs/oid-{_INDEX}"] = [chunked]
    site.cdn.faults[f"/blobs/oid-{_shard(0)}"] = [chunked]
    store = open_checkpoint("hf://own/er", hub)
    assert store.revision == _COMMIT
    assert len(waits) == 2 and waits[1] == 2.0
    assert set(_NEEDED) < set(store.names())
    with pytest.raises(CheckpointError, match="answers with the whole file where a part"):
        store.info(_names(0)[0])


@pytest.fixture
def memory(model: Path) -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    for path in model.iterdir():
        system.pipe(f"/bucket/m/{path.name}", path.read_bytes())
    yield system
    system.store.clear()


@pytest.mark.parametrize("suffix", ["", "/", f"/{_INDEX}"])
def test_any_file_system_of_fsspec_reads_like_a_disk(suffix, memory, model, options):
    store: Any = open_checkpoint(f"memory://bucket/m{suffix}", options)
    _assert_read_as_from_disk(store, model)
    assert store.bytes_read < 0.05 * store.bytes_total


def test_a_file_url_is_a_path_and_nothing_runs_in_threads_on_a_disk(model, options, monkeypatch):
    store: Any = open_checkpoint(f"file://{model}", options)
    assert len(_read_all(store)) == 2 * _NUM_SHARDS
    assert store.folder.num_parallel == 1
    sentence = f"{model}/x: there is no such file or folder."
    assert _refusal(f"file://{model}/x", options).message == sentence
    monkeypatch.delattr(threading.Thread, "start")
    assert len(_read_all(open_checkpoint(model))) == 2 * _NUM_SHARDS


def test_a_change_behind_fsspec_is_seen(memory, options):
    store = open_checkpoint("memory://bucket/m", options)
    path = f"/bucket/m/{_shard(0)}"
    memory.pipe(path, memory.cat(path))
    with pytest.raises(CheckpointError, match=f"memory:/{path} changed while it was read"):
        store.read(_names(0)[0])


@pytest.mark.parametrize(
    ("error", "expected", "attempts"),
    [
        (ConnectionError("hunter2"), "cannot be read (ConnectionError), in each of 3 attempts.", 3),
        (PermissionError("hunter2"), "access is denied.", 1),
        (FileNotFoundError("hunter2"), "there is no such file or folder.", 1),
        (RuntimeError("hunter2"), "cannot be read (RuntimeError).", 1),
    ],
)
def test_errors_of_file_systems_are_told_in_our_words(
    error, expected, attempts, memory, options, monkeypatch
):
    store = open_checkpoint("memory://bucket/m", options)
    calls = []

    def fail(self: Any, path: str, **_: Any) -> bytes:
        calls.append(path)
        raise error

    monkeypatch.setattr(type(memory), "cat_file", fail)
    with pytest.raises(CheckpointError) as caught:
        store.read(_names(0)[0])
    assert caught.value.message.startswith(_shard(0)) and expected in caught.value.message
    assert "hunter2" not in str(caught.value)
    assert len(calls) == attempts


def test_a_missing_package_says_what_to_install(options, monkeypatch):
    for name, url in {"httpx2": "https://h/m", "huggingface_hub": "hf://a/b"}.items():
        monkeypatch.setitem(sys.modules, name, None)
        error = _refusal(url, options)
        assert error.message == f"{url}: needs the package {name}, which is not installed."
        assert error.hint == install_command("hub")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert _refusal("s3://bucket/m", options).hint == "pip install s3fs"


@pytest.mark.parametrize(
    ("page", "url"),
    [
        ("https://huggingface.co/Qwen/Qwen3-30B-A3B", "hf://Qwen/Qwen3-30B-A3B"),
        ("https://huggingface.co/a/b/", "hf://a/b"),
        ("https://hf.co/a/b/tree/main", "hf://a/b@main"),
        ("http://www.huggingface.co/a/b/tree/v1/sub/folder?x=1", "hf://a/b@v1/sub/folder"),
        ("https://huggingface.co/a/b/blob/main/x.safetensors", "hf://a/b@main/x.safetensors"),
        *((same, same) for same in ("hf://a/b", "https://huggingface.co/datasets/a/b")),
        *((same, same) for same in ("https://host/a/b", "https://huggingface.co/a/b/resolve/m/f")),
    ],
)
def test_the_address_of_a_page_of_the_hub_is_that_of_its_model(page, url):
    assert hub_url(page) == url
