"""What is judged holds nothing that libraries run or obey."""

import re
from pathlib import Path

import pytest

from moegeom.core import loaded_code
from moegeom.core.errors import UsageError
from moegeom.core.loaded_code import kernels_of_numba, refuse_code_within
from moegeom.studies.track.exports import SERIES_EXPORTS

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
def test_a_folder_of_kernels_in_the_working_tree_of_what_is_judged_is_refused(
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
    wandb = SERIES_EXPORTS["wandb"].settings
    for folder in (Path.cwd(), tree):
        monkeypatch.chdir(folder)
        for name in (".numba_config.yaml", wandb):
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text("cache_dir: planted\n")
            if folder != tree:
                refuse_code_within(tree / "models/one", settings=wandb)
                continue
            with pytest.raises(UsageError, match=f"^{re.escape(name)}: would be loaded from"):
                refuse_code_within(tree / "models/one", settings=wandb)
            Path(name).unlink()


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
