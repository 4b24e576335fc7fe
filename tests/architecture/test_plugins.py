"""Plug-ins are found where they stand: one to a file, or several to a module of their kin."""

import ast
import importlib
import inspect
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from moegeom.core.errors import InternalError, UsageError
from moegeom.core.registry import Registry, Rooms
from tests.architecture.sources import ROOT, SOURCES, parsed

FAMILIES = sorted((ROOT / "moegeom/router/families").glob("*.toml"))


def registries() -> list[Registry | Rooms]:
    """Every ``NAME = Registry(...)`` or ``Rooms(...)`` at the top of a module."""
    found = []
    for file, source in SOURCES.items():
        for node in parsed(source).body:
            value = getattr(node, "value", None)
            if isinstance(value, ast.Call) and re.match("Registry|Rooms", ast.unparse(value.func)):
                parts = Path(file).with_suffix("").parts
                parts = parts[1:] if parts[0] == "cli" else parts
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
                found.append(getattr(module, target.id))
    return found


def faults(registry: Registry, name: str) -> list[str]:
    """What is wrong with the file of one plug-in."""
    record = registry[name]
    module = importlib.import_module(f"{registry._package}.{name}")
    imported = {id(other) for other in registry.all() if other is not record}
    records = [v for v in vars(module).values() if isinstance(v, type(record))]
    said = {
        "defines another record": any(v is not record and id(v) not in imported for v in records),
        "has the name of another": getattr(record, "name", name) != name,
        "says nothing of itself": not inspect.getdoc(module),
    }
    return [f"{module.__name__} {fault}" for fault, is_there in said.items() if is_there]


def test_every_plugin_file_defines_its_one_record():
    single = [registry for registry in registries() if isinstance(registry, Registry)]
    plugins = [(registry, name) for registry in single for name in registry.names()]
    assert len(plugins) > 60
    assert [fault for plugin in plugins for fault in faults(*plugin)] == []


def test_every_record_of_a_room_is_found_by_its_name():
    rooms = [registry for registry in registries() if isinstance(registry, Rooms)]
    assert sum(len(room.names()) for room in rooms) > 160
    assert [n for room in rooms for n in room.names() if room[n].name != n] == []


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
    for registry in registries():
        folder = registry._package.replace(".", "/").replace("moegeom_cli", "cli/moegeom_cli")
        rows = [line for line in CONTRIBUTING.splitlines() if f"`{folder}/<" in line]
        promised = [re.findall(r"`([A-Z_]+)`", row.split("|")[3]) for row in rows]
        promises = (
            f"`{registry._record.__name__}`" in rows[0]
            if isinstance(registry, Rooms)
            else registry._attribute in promised[0] or "its one record" in rows[0]
        )
        if len(rows) != 1 or not promises:
            unsaid.append(folder)
    assert unsaid == []


def test_every_folder_of_tests_is_in_contributing():
    folders = {f"tests/{f.name}" for f in (ROOT / "tests").iterdir() if any(f.glob("*.py"))}
    assert folders - set(re.findall(r"^\| `(tests/\w+)` \|", CONTRIBUTING, re.MULTILINE)) == set()
