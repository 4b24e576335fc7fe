"""What an extra brings is refused by name where it is absent, before any work; what to type installs
it where moegeom came from, and never asks for a stranger's.
"""

import importlib.util
import json
import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from moegeom.core import extras
from moegeom.core.errors import UsageError
from moegeom.core.extras import install_command, left_out
from moegeom.document.paper import ENDINGS
from moegeom.routing_cells.pictures.views import check_picture
from moegeom.routing_cells.request import CellsRequest
from moegeom.studies.track.exports import SERIES_EXPORTS, requested_exports
from moegeom.studies.track.record import TrackRequest

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]
NEEDY = [name for name in SERIES_EXPORTS.names() if SERIES_EXPORTS[name].package]


@pytest.fixture
def bare(monkeypatch):
    """An installation of the core alone."""
    find = importlib.util.find_spec
    absent = ("matplotlib", "tensorboard", "wandb")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )


def refused(error: UsageError) -> tuple[str, str]:
    """The package that is missed and the extra that is advised."""
    words = r"needs (\w+), which is not installed.*pip install [^\[]+\[(\w+)\]"
    match = re.search(words, str(error), re.DOTALL)
    assert match
    return match[1], match[2]


def test_an_export_without_its_package_is_refused_with_the_extra_that_brings_it(bare):
    assert NEEDY == ["tensorboard", "wandb"]
    for name in NEEDY:
        export = SERIES_EXPORTS[name]
        assert any(export.package in entry for entry in EXTRAS[export.extra])
        with pytest.raises(UsageError) as caught:
            list(requested_exports(TrackRequest(("step_*",), export=(f"{name}:here",))))
        assert refused(caught.value) == (export.package, export.extra)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_picture_is_refused_without_its_package_alone(tmp_path, request, ending):
    check_picture(CellsRequest("", plot=tmp_path / f"a{ending}"))
    request.getfixturevalue("bare")
    with pytest.raises(UsageError) as caught:
        check_picture(CellsRequest("", plot=tmp_path / f"a{ending}"))
    package, extra = refused(caught.value)
    assert any(package in entry for entry in EXTRAS[extra])


# ------------------------------------------------------------------------------------- what to type
@pytest.fixture
def came_from(monkeypatch):
    """Installs moegeom, as pip says it in direct_url.json; None: pip says nothing."""

    def install(said: str | None) -> list[str]:
        record = SimpleNamespace(read_text=lambda name: said)
        monkeypatch.setattr(extras, "distribution", lambda name: record)
        install_command.cache_clear()
        return shlex.split(install_command("hub"))

    yield install
    install_command.cache_clear()


@pytest.mark.parametrize("name", ["moegeom", "a folder with spaces", "ordner äöü"])
def test_of_a_clone_the_clone_is_named_with_its_versions(came_from, tmp_path, name):
    clone = tmp_path / name
    clone.mkdir()
    for file in ("pyproject.toml", "constraints.txt"):
        (clone / file).touch()
    said = {"url": clone.as_uri(), "dir_info": {}}
    versions = ["-c", str(clone / "constraints.txt")]
    assert came_from(json.dumps(said)) == ["pip", "install", *versions, f"{clone}[hub]"]
    editable = json.dumps(said | {"dir_info": {"editable": True}})
    assert came_from(editable) == ["pip", "install", *versions, "-e", f"{clone}[hub]"]


def test_of_an_address_the_same_commit_is_named(came_from):
    said = {
        "url": "https://example.org/a/moegeom",
        "vcs_info": {"vcs": "git", "commit_id": "0123abc"},
    }
    command = came_from(json.dumps(said))
    assert command[:2] == ["pip", "install"]
    wanted = Requirement(command[2])
    assert (wanted.name, wanted.extras) == ("moegeom", {"hub"})
    assert wanted.url == "git+https://example.org/a/moegeom@0123abc"


def test_where_nothing_is_said_pip_adds_to_what_is_installed(came_from, monkeypatch):
    for said in (None, "", "no json", "[]", '{"url": "file:///gone/for/good"}'):
        assert came_from(said) == ["pip", "install", "moegeom[hub]"]

    def unknown(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", unknown)
    install_command.cache_clear()
    assert install_command("hub") == "pip install 'moegeom[hub]'"


def test_what_is_left_out_of_the_core_is_refused_by_name_and_nothing_else():
    told = left_out(ModuleNotFoundError("", name="scipy.special"), "scan")
    assert told is not None
    assert told.message == "scan needs scipy, which is not installed."
    assert told.hint == install_command()
    assert "[" not in told.hint
    assert left_out(ModuleNotFoundError("", name="ml_dtypes"), "scan") is not None
    for name in ("torch", "moegeom.nothing", "sci", None):
        assert left_out(ModuleNotFoundError("", name=name), "scan") is None
