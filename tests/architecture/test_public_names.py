"""The names that ``import moegeom`` promises."""

import inspect
import pkgutil

import pytest

import moegeom


def test_the_version_is_that_of_the_changelog(pytestconfig):
    changelog = (pytestconfig.rootpath / "CHANGELOG.md").read_text("utf-8")
    assert "## [Unreleased]" in changelog or f"## [{moegeom.__version__}]" in changelog


def test_a_public_name_exists_and_is_documented():
    for name in moegeom._PUBLIC:
        value = getattr(moegeom, name)
        assert inspect.getdoc(value), name
        assert value.__name__ == moegeom._PUBLIC[name].partition(":")[2]
        assert name in dir(moegeom)


def test_no_public_name_hides_a_subpackage():
    """``moegeom.engine`` would be the function or the package, by what was imported before."""
    assert set(moegeom._PUBLIC) & {m.name for m in pkgutil.iter_modules(moegeom.__path__)} == set()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = moegeom.no_such_name
