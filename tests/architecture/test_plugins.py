"""Plug-ins are one file each: every file of a plug-in folder defines exactly its record."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from pathlib import Path

from moegeom.core.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = sorted((ROOT / "moegeom/router/families").glob("*.toml"))


def registries() -> list[Registry]:
    """Every ``NAME = Registry(...)`` at the top of a module."""
    found = []
    for file in [*sorted((ROOT / "moegeom").rglob("*.py")), *sorted((ROOT / "cli").rglob("*.py"))]:
        for node in ast.parse(file.read_text("utf-8")).body:
            value = getattr(node, "value", None)
            if isinstance(value, ast.Call) and ast.unparse(value.func).startswith("Registry"):
                parts = file.relative_to(ROOT).with_suffix("").parts
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
    plugins = [(registry, name) for registry in registries() for name in registry.names()]
    assert len(plugins) > 150
    assert [fault for plugin in plugins for fault in faults(*plugin)] == []


def test_every_family_file_is_a_table():
    assert len(FAMILIES) > 100
    assert [file.stem for file in FAMILIES if not tomllib.loads(file.read_text("utf-8"))] == []


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_contributing_says_how_to_add_to_every_folder_of_plugins():
    unsaid = []
    for registry in registries():
        folder = registry._package.replace(".", "/").replace("moegeom_cli", "cli/moegeom_cli")
        rows = [line for line in CONTRIBUTING.splitlines() if f"`{folder}/<" in line]
        promised = [re.findall(r"`([A-Z]+)`", row.split("|")[3]) for row in rows]
        if len(rows) != 1 or not (
            registry._attribute in promised[0] or "its one record" in rows[0]
        ):
            unsaid.append(folder)
    assert unsaid == []


def test_every_folder_of_tests_is_in_contributing():
    folders = {f"tests/{f.name}" for f in (ROOT / "tests").iterdir() if any(f.glob("*.py"))}
    assert folders - set(re.findall(r"^\| `(tests/\w+)` \|", CONTRIBUTING, re.MULTILINE)) == set()
