"""Imports point down: the contracts of pyproject.toml, run by import-linter."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    command = "from importlinter.cli import lint_imports_command as run; run()"
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = ['.', 'cli']; {command}", "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
    )


def test_every_contract_is_kept():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def house(tmp_path):
    """An empty house with the same floors and the real contracts."""
    contracts = (ROOT / "pyproject.toml").read_text("utf-8").partition("[tool.importlinter]")
    (tmp_path / "pyproject.toml").write_text("".join(contracts[1:]), "utf-8")
    floors = """
        checkpoint checks core document engine engine/devices geometry kernels kernels/cpu
        kernels/cuda measure metrics recorder research results router routing_cells studies testing
        tokens trainable variants
    """.split()
    for folder in [tmp_path / "cli/moegeom_cli", tmp_path / "moegeom"]:
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    for floor in floors:
        (tmp_path / "moegeom" / floor).mkdir(parents=True)
        (tmp_path / "moegeom" / floor / "__init__.py").touch()
    for room in ("api", "explore", "pipeline"):
        (tmp_path / f"moegeom/{room}.py").touch()
    return tmp_path


def test_an_empty_house_keeps_its_contracts(house):
    (house / "moegeom/kernels/cuda/scan.py").write_text("import cupy\n", "utf-8")
    (house / "moegeom/engine/devices/cuda.py").write_text("import cupy\n", "utf-8")
    (house / "moegeom/pipeline.py").write_text("import moegeom.engine, moegeom.document\n", "utf-8")
    result = lint_imports(house)
    assert result.returncode == 0, result.stdout + result.stderr


#: Imports that point up, sideways or out, by the file that has them.
PLANTED = {
    "core/router.py": ("moegeom_cli", "moegeom.geometry"),
    "geometry/gram.py": ("moegeom.kernels", "pyarrow", "logging"),
    "router/load.py": ("moegeom.tokens",),
    "document/html.py": ("moegeom.metrics", "moegeom.geometry"),
    "checks/run.py": ("moegeom.document",),
    "engine/loop.py": ("cupy", "moegeom.metrics"),
    "kernels/cpu/fused.py": ("cupy",),
    "studies/diff.py": ("moegeom.routing_cells", "moegeom.research"),
    "pipeline.py": ("moegeom.studies",),
}


def test_every_planted_import_breaks_a_contract(house):
    for file, names in PLANTED.items():
        text = "".join(f"import {name}\n" for name in names)
        (house / "moegeom" / file).write_text(text, "utf-8")
    result = lint_imports(house)
    assert result.returncode == 1
    chains = [
        f"moegeom.{file.removesuffix('.py').replace('/', '.')} -> {name}"
        for file, names in PLANTED.items()
        for name in names
    ]
    assert [chain for chain in chains if chain not in result.stdout] == [], result.stdout


def test_a_module_without_a_floor_breaks_a_contract(house):
    (house / "moegeom/helpers.py").write_text("import numpy\n", "utf-8")
    assert lint_imports(house).returncode == 1
