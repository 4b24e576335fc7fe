"""Plug-ins are found where they stand, several to a module of their kin."""

import ast
import importlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from moegeom.core.errors import InternalError, UsageError
from moegeom.core.registry import Rooms, modules_of
from tests.architecture.sources import ROOT, SOURCES, parsed

FAMILIES = sorted((ROOT / "moegeom/router/families").glob("*.toml"))


def all_rooms() -> list[Rooms]:
    """Every ``NAME = Rooms(...)`` at the top of a module."""
    rooms = []
    for file, source in SOURCES.items():
        for node in parsed(source).body:
            value = getattr(node, "value", None)
            if isinstance(value, ast.Call) and re.match("Rooms", ast.unparse(value.func)):
                name = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
                target = ast.unparse(node).partition("=")[0].partition(":")[0].strip()
                rooms.append(getattr(importlib.import_module(name), target))
    return rooms


def test_every_record_of_a_room_is_found_by_its_name():
    rooms = all_rooms()
    assert sum(len(room.names()) for room in rooms) > 280
    assert [n for room in rooms for n in room.names() if room[n].name != n] == []


def test_every_module_of_a_folder_of_plugins_holds_one():
    records = {}
    for room in all_rooms():
        records.setdefault(room._package, []).append(room._record)
    empty = [
        f"{package}.{place}"
        for package, kinds in records.items()
        for place in modules_of(package)
        if not any(
            isinstance(value, tuple(kinds))
            for value in vars(importlib.import_module(f"{package}.{place}")).values()
        )
    ]
    assert empty == []


@dataclass(frozen=True)
class Planted:
    """A record that a test puts into a package."""

    name: str


def test_two_records_of_one_name_in_different_rooms_are_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    rooms = tmp_path / "planted_rooms"
    rooms.mkdir()
    (rooms / "__init__.py").touch()
    source = "from tests.architecture.test_plugins import Planted\n\nONE = Planted('one')\n"
    (rooms / "first.py").write_text(source, "utf-8")
    (rooms / "_private.py").write_text(source, "utf-8")
    assert Rooms("plant", "planted_rooms", Planted).names() == ["one"]
    with pytest.raises(UsageError, match="Unknown plant 'on'. Did you mean one"):
        Rooms("plant", "planted_rooms", Planted)["on"]
    (rooms / "second.py").write_text(source, "utf-8")
    with pytest.raises(InternalError, match="second defines a plant named 'one'"):
        Rooms("plant", "planted_rooms", Planted).names()


def test_every_family_file_is_a_table():
    assert len(FAMILIES) > 100
    assert [file.stem for file in FAMILIES if not tomllib.loads(file.read_text("utf-8"))] == []


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_contributing_says_how_to_add_to_every_folder_of_plugins():
    unsaid = []
    for room in all_rooms():
        folder = room._package.replace(".", "/")
        rows = [line for line in CONTRIBUTING.splitlines() if f"`{folder}/<" in line]
        if len(rows) != 1 or f"`{room._record.__name__}`" not in rows[0]:
            unsaid.append(folder)
    assert unsaid == []
    assert (
        "| command | `cli/moegeom_cli/commands/<command>.py`, of `moegeom list` in" in CONTRIBUTING
    )


def test_every_folder_of_tests_is_in_contributing():
    folders = {f"tests/{f.name}" for f in (ROOT / "tests").iterdir() if any(f.glob("*.py"))}
    assert folders - set(re.findall(r"^\| `(tests/\w+)` \|", CONTRIBUTING, re.MULTILINE)) == set()
