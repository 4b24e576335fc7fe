"""Plug-ins are one file each: every file of a plug-in folder defines exactly its record."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

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


PLUGINS = [(registry, name) for registry in registries() for name in registry.names()]


@pytest.mark.parametrize(
    ("registry", "name"), PLUGINS, ids=[f"{registry.kind}-{name}" for registry, name in PLUGINS]
)
def test_a_plugin_file_defines_its_one_record(registry, name):
    record = registry[name]
    module = importlib.import_module(f"{registry._package}.{name}")
    imported = {id(other) for other in registry.all() if other is not record}
    records = [v for v in vars(module).values() if isinstance(v, type(record))]
    assert [v for v in records if v is not record and id(v) not in imported] == []
    assert getattr(record, "name", name) == name
    assert inspect.getdoc(module)


@pytest.mark.parametrize("file", FAMILIES, ids=lambda file: file.stem)
def test_a_family_file_is_a_table(file):
    assert tomllib.loads(file.read_text("utf-8"))


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


@pytest.mark.parametrize("registry", registries(), ids=lambda registry: registry._package)
def test_contributing_says_how_to_add_to_every_folder_of_plugins(registry):
    folder = registry._package.replace(".", "/").replace("moegeom_cli", "cli/moegeom_cli")
    rows = [line for line in CONTRIBUTING.splitlines() if f"`{folder}/<" in line]
    assert len(rows) == 1, folder
    promised = re.findall(r"`([A-Z]+)`", rows[0].split("|")[3])
    assert registry._attribute in promised or "its one record" in rows[0]


def test_every_folder_of_tests_is_in_contributing():
    folders = {f"tests/{f.name}" for f in (ROOT / "tests").iterdir() if any(f.glob("*.py"))}
    assert folders - set(re.findall(r"^\| `(tests/\w+)` \|", CONTRIBUTING, re.MULTILINE)) == set()
