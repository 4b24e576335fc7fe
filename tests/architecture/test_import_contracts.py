"""Imports point down: the contracts of pyproject.toml, run by import-linter."""

from __future__ import annotations

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
        kernels/cuda measure metrics recorder results router studies studies/cells testing tokens trainable
        variants
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


@pytest.mark.parametrize(
    ("file", "imports"),
    [
        ("core/router.py", "moegeom_cli"),
        ("core/router.py", "moegeom.geometry"),
        ("geometry/gram.py", "moegeom.kernels"),
        ("geometry/gram.py", "pyarrow"),
        ("geometry/gram.py", "logging"),
        ("router/load.py", "moegeom.tokens"),
        ("document/html.py", "moegeom.metrics"),
        ("document/html.py", "moegeom.geometry"),
        ("checks/run.py", "moegeom.document"),
        ("engine/loop.py", "cupy"),
        ("kernels/cpu/fused.py", "cupy"),
        ("engine/loop.py", "moegeom.metrics"),
        ("studies/diff.py", "moegeom.studies.cells"),
        ("pipeline.py", "moegeom.studies"),
        ("helpers.py", "numpy"),
    ],
)
def test_a_planted_import_breaks_a_contract(house, file, imports):
    (house / "moegeom" / file).write_text(f"import {imports}\n", "utf-8")
    assert lint_imports(house).returncode == 1
