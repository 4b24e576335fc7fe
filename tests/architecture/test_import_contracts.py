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
        capture check checkpoint core geometry kernels kernels/cpu kernels/cuda metrics report
        results router scan scan/engines studies testing tokens trainable variants
    """.split()
    for folder in [tmp_path / "cli/moegeom_cli", tmp_path / "moegeom"]:
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    for floor in floors:
        (tmp_path / "moegeom" / floor).mkdir(parents=True)
        (tmp_path / "moegeom" / floor / "__init__.py").touch()
    (tmp_path / "moegeom/pipeline.py").touch()
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
        ("geometry/cells.py", "moegeom.kernels"),
        ("geometry/cells.py", "pyarrow"),
        ("geometry/cells.py", "logging"),
        ("router/load.py", "moegeom.tokens"),
        ("report/html.py", "moegeom.metrics"),
        ("report/html.py", "moegeom.geometry"),
        ("check/gate.py", "moegeom.document"),
        ("scan/engine.py", "cupy"),
        ("kernels/cpu/fused.py", "cupy"),
        ("scan/engine.py", "moegeom.metrics"),
        ("pipeline.py", "moegeom.studies"),
        ("helpers.py", "numpy"),
    ],
)
def test_a_planted_import_breaks_a_contract(house, file, imports):
    (house / "moegeom" / file).write_text(f"import {imports}\n", "utf-8")
    assert lint_imports(house).returncode == 1
