"""What every file of the packages owes its reader."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted([*(ROOT / "moegeom").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])

#: A file that outgrows this knows too many variants: split it by variant.
MAX_LINES = 400

LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b")
EM_DASH = chr(0x2014)

every_module = pytest.mark.parametrize(
    "file", MODULES, ids=[str(file.relative_to(ROOT)) for file in MODULES]
)


@every_module
def test_a_module_says_what_it_is(file):
    source = file.read_text("utf-8")
    if source.strip():  # an empty __init__.py has nothing to say
        assert ast.get_docstring(ast.parse(source))


@every_module
def test_a_module_stays_short(file):
    assert len(file.read_text("utf-8").splitlines()) <= MAX_LINES


@every_module
def test_a_module_holds_no_leftovers(file):
    source = file.read_text("utf-8")
    assert LEFTOVERS.findall(source) == []
    assert EM_DASH not in source


@pytest.mark.parametrize("package", ["moegeom", "cli/moegeom_cli"])
def test_every_folder_with_modules_is_a_package(package):
    """A folder without __init__.py is invisible to import-linter and to the shape hook."""
    folders = {file.parent for file in (ROOT / package).rglob("*.py")}
    missing = [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()]
    assert sorted(missing) == []


def test_file_names_name_a_thing():
    vague = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
    assert [str(f.relative_to(ROOT)) for f in MODULES if f.stem.strip("_") in vague] == []
