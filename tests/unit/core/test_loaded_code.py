"""What is judged holds nothing that libraries run or obey; what an extra brings is refused without it."""

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

from moegeom.core import extras, loaded_code
from moegeom.core.errors import UsageError
from moegeom.core.extras import install_command, left_out
from moegeom.core.loaded_code import kernels_of_numba, refuse_code_within
from moegeom.document.paper import ENDINGS
from moegeom.routing_cells.pictures.views import check_picture
from moegeom.routing_cells.request import CellsRequest

VARIABLES = ("NUMBA_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A working tree with a checkpoint, beside an empty folder that is no part of it."""
    for folder in ("tree/.git", "tree/models/one", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "tree"


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("place", ["models/one/kernels", ".kernels", "models/one", "."])
def test_a_folder_of_kernels_in_the_tree_that_is_judged_is_refused(
    place, variable, tree, monkeypatch
):
    monkeypatch.setenv(variable, str(tree / place))
    with pytest.raises(UsageError, match="which is judged") as refusal:
        refuse_code_within(tree / "models/one")
    assert refusal.value.hint == f"Set {variable} to a folder outside of it."
    with pytest.raises(UsageError):
        refuse_code_within(tree / "models/one/model.safetensors")
    monkeypatch.setenv(variable, str(tree.parent / "elsewhere"))
    refuse_code_within(tree / "models/one")


def test_links_do_not_hide_a_folder_of_kernels(tree, monkeypatch):
    outside = tree.parent / "elsewhere"
    (outside / "to_kernels").symlink_to(tree / ".kernels")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(outside / "to_kernels"))
    with pytest.raises(UsageError):
        refuse_code_within(tree / "models/one")
    (tree / "latest").symlink_to(outside)  # the link is of this tree, what it names is not
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tree / ".kernels"))
    with pytest.raises(UsageError):
        refuse_code_within(tree / "latest")


def test_settings_in_the_working_directory_are_refused_where_that_is_judged(tree, monkeypatch):
    for folder in (Path.cwd(), tree):
        monkeypatch.chdir(folder)
        Path(".numba_config.yaml").write_text("cache_dir: planted\n")
        if folder != tree:
            refuse_code_within(tree / "models/one")
            continue
        with pytest.raises(UsageError, match=r"^\.numba_config\.yaml: would be loaded from"):
            refuse_code_within(tree / "models/one")


def test_the_package_may_lie_in_the_working_tree_and_not_in_the_checkpoint(tree, monkeypatch):
    monkeypatch.setattr(loaded_code, "PACKAGE", tree / "moegeom")
    (tree / "moegeom").mkdir()
    refuse_code_within(tree / "models/one")
    with pytest.raises(UsageError, match="which is judged"):
        refuse_code_within(tree)


def test_folders_of_kernels_are_those_of_the_locators_of_numba(tmp_path, monkeypatch):
    from numba.core import caching, config

    from moegeom.kernels.cpu import choice

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of_the_user"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)

    def folder(locator: type) -> Path:
        answer = locator.from_function(choice._squares.py_func, choice.__file__)
        return Path(answer.get_cache_path())

    assert kernels_of_numba() == [loaded_code.PACKAGE]
    assert folder(caching.InTreeCacheLocator).is_relative_to(loaded_code.PACKAGE)
    monkeypatch.setattr(loaded_code.os, "access", lambda path, mode: False)
    package, users = kernels_of_numba()
    assert package == loaded_code.PACKAGE
    assert folder(caching.UserWideCacheLocator).is_relative_to(users)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "set"))
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "set"))
    (users,) = kernels_of_numba()
    assert folder(caching.UserProvidedCacheLocator).is_relative_to(users)


# ------------------------------------------------------------------------------------------- extras
ROOT = Path(__file__).resolve().parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]


@pytest.fixture
def bare(monkeypatch):
    """An installation of the core alone."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )


def refused(error: UsageError) -> tuple[str, str]:
    """The package that is missed and the extra that is advised."""
    words = r"needs (\w+), which is not installed.*pip install [^\[]+\[(\w+)\]"
    match = re.search(words, str(error), re.DOTALL)
    assert match
    return match[1], match[2]


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
