"""What the code imports is declared, what is declared is imported, and all of it is pinned."""

import ast
import functools
import re
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.architecture.sources import ROOT, parsed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

#: Import names that differ from the name of the distribution.
DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "cupy": "cupy-cuda13x",
    "cupyx": "cupy-cuda13x",
    "markdown_it": "markdown-it-py",
    "mpl_toolkits": "matplotlib",
}

#: For other machines, or not run by the tests: nothing that CI installs.
UNPINNED = {"cupy-cuda12x"}

#: Declared and imported nowhere, each with what needs it.
NOT_IMPORTED = {
    "accelerate": "the Trainer of transformers, which tests/unit/capture trains with",
    "cupy-cuda12x": "cupy for machines with CUDA 12; code imports cupy",
    "basedpyright": "run by `make lint`",
    "build": "run by the release workflow and tests/e2e/test_install.py",
    "hatch-vcs": "counts the version from the last tag where the package is built",
    "hatchling": "builds the package, without isolation in the tests",
    "import-linter": "run as lint-imports by tests/architecture/test_import_contracts.py",
    "mkdocs": "run by `make docs`",
    "nvidia-cuda-nvrtc": "a shared library that the tests load to compile CUDA sources",
    "pyroma": "run by tests/e2e/test_install.py",
    "pytest-xdist": "pytest's -n, in `make test`",
    "ruff": "run by `make lint`",
    "twine": "run by tests/e2e/test_install.py",
}

OWN = {"moegeom", "moegeom_cli"}


def canonical(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


CORE = {canonical(line) for line in PROJECT["dependencies"]}
OPTIONAL = {canonical(x) for lines in PROJECT["optional-dependencies"].values() for x in lines}
OPTIONAL -= OWN


@functools.cache
def imported(package: str) -> dict[str, set[str]]:
    """Third-party distribution -> files that import it."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(parsed(file.read_text("utf-8"))):
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
    undeclared = {k: v for k, v in imported(folder).items() if k not in CORE | OPTIONAL}
    assert undeclared == {}


def declared(*extras: str) -> set[str]:
    lines = [x for extra in extras for x in PROJECT["optional-dependencies"][extra]]
    return {canonical(line) for line in lines} - OWN


DEVELOPERS = {"test", "dev", "docs"}
USERS = PROJECT["optional-dependencies"].keys() - DEVELOPERS


def test_every_dependency_of_users_is_imported_by_the_packages():
    used = imported("moegeom").keys() | imported("cli").keys()
    assert sorted((CORE | declared(*USERS)) - used - NOT_IMPORTED.keys()) == []


def test_every_dependency_of_developers_is_imported_by_tests_or_benchmarks():
    folders = ("moegeom", "cli", "tests", "benchmarks", "docs")
    used = {name for folder in folders for name in imported(folder)}
    assert sorted(declared(*DEVELOPERS) - used - NOT_IMPORTED.keys()) == []


def test_what_is_excused_from_being_imported_is_declared_and_not_imported():
    used = {name for folder in ("moegeom", "cli", "tests") for name in imported(folder)}
    assert NOT_IMPORTED.keys() - (CORE | OPTIONAL) == set()
    assert NOT_IMPORTED.keys() & used == set()


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
