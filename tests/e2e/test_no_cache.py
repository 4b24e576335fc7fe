"""``--no-cache``: what is asked for comes from the server, and nothing is kept of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.by_day import by_day
from tests.unit.checkpoint.remote_server import Log, Site, serve

#: How each command that takes a URL is called; results go to folders of the test.
CALLS = {
    "routers": ("list", "routers", "URL"),
    "scan": ("scan", "URL", "--out", "scanned"),
    "scan --tokens": ("scan", "URL", "--tokens", "rec", "--out", "measured"),
    "check": ("check", "URL"),
    "check --tokens": ("check", "URL", "--tokens", "rec"),
    "diff": ("diff", "URL", "URL"),
    "diff --tokens": ("diff", "URL", "model", "--tokens", "rec"),
    "imbalance": ("imbalance", "URL", "--tokens", "rec"),
    "perturb": ("research", "perturb", "URL", "--tokens", "rec", "--at", "0,5"),
    "capacity": ("research", "capacity", "--from", "URL", "--width", "64"),
}


@pytest.fixture
def site(world) -> Iterator[Site]:
    with serve() as running:
        running.add_folder(world / "model", "/model")
        yield running


@pytest.fixture
def ask(moegeom, place, site, tmp_path):
    """Runs a command on the served model and returns the paths that the server was asked for."""

    def run(call: tuple[str, ...], *options: str) -> list[str]:
        site.log = Log()
        arguments = [f"{site.url}/model/" if word == "URL" else word for word in call]
        variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1"}
        ran = moegeom(place, *arguments, *options, **variables)
        # check finds the duplicate rows and exits 1
        assert ran.code == (call[0] == "check"), ran.err
        return site.log.requests

    return run


def kept(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


#: Each way to a checkpoint: opened, scanned, judged, as a second side, as sizes.
BY_DAY = ("routers", "scan --tokens", "check", "diff", "capacity")


@pytest.mark.parametrize("name", by_day(CALLS, BY_DAY))
def test_without_a_cache_the_server_is_asked_again_and_nothing_is_kept(name, ask, tmp_path):
    first = ask(CALLS[name], "--no-cache")
    assert first
    assert kept(tmp_path / "cache") == {}
    ask(("list", "routers", "URL"))
    before = kept(tmp_path / "cache")
    assert before
    call = tuple("again" if word in ("scanned", "measured") else word for word in CALLS[name])
    again = ask(call, "--no-cache")
    assert sorted(again) == sorted(first)
    assert kept(tmp_path / "cache") == before
