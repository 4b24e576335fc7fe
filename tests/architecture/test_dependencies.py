"""What the code imports is declared, and what is declared is pinned."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

#: Import names that differ from the name of the distribution.
DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "cupy": "cupy-cuda13x",
    "cupyx": "cupy-cuda13x",
    "mpl_toolkits": "matplotlib",
}

#: For other machines, or not run by the tests: nothing that CI installs.
UNPINNED = {"cupy-cuda12x", "ray"}

OWN = {"moegeom", "moegeom_cli"}


def canonical(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


CORE = {canonical(line) for line in PROJECT["dependencies"]}
OPTIONAL = {canonical(x) for lines in PROJECT["optional-dependencies"].values() for x in lines}
OPTIONAL -= OWN


def imported(folder: Path) -> dict[str, set[str]]:
    """Third-party distribution -> files that import it."""
    found: dict[str, set[str]] = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - OWN:
                distribution = canonical(DISTRIBUTIONS.get(top, top))
                found.setdefault(distribution, set()).add(str(file.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("folder", ["moegeom", "cli"])
def test_every_import_is_declared(folder):
    undeclared = {k: v for k, v in imported(ROOT / folder).items() if k not in CORE | OPTIONAL}
    assert undeclared == {}


def pins() -> dict[str, str]:
    """Distribution -> version, one ``name==version`` per line of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][\w.]*)", line)
            assert match, line
            found[canonical(match[1])] = match[2]
    return found


def test_every_requirement_that_ci_installs_is_pinned():
    assert (CORE | OPTIONAL) - pins().keys() - UNPINNED == set()


def test_a_pin_is_within_what_is_declared():
    pinned = pins()
    extras = PROJECT["optional-dependencies"].values()
    for line in [*PROJECT["dependencies"], *(x for lines in extras for x in lines)]:
        if canonical(line) in pinned:
            assert pinned[canonical(line)] in Requirement(line).specifier, line
