"""A wheel and an editable install work in a new environment, without the network.

The environment sees the libraries of the one that runs the tests, but not moegeom itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import moegeom

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"moegeom": ROOT / "moegeom", "moegeom_cli": ROOT / "cli/moegeom_cli"}


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output; the whole output in the failure."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "COV"))}
    result = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    quiet = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(sys.executable, *quiet, *arguments, cwd=cwd)


def new_environment(folder: Path) -> Path:
    """Python of an environment that reads the libraries of this one through a path file."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin/python"
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    ).strip()
    lines = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # A path file is read once: an editable moegeom of this environment stays out of sight.
    (Path(site) / "libraries.pth").write_text("\n".join(sorted(lines)) + "\n", "utf-8")
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, ROOT, cwd=folder)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def wheel_python(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("from_wheel")
    python = new_environment(folder / "env")
    pip("--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return python


@pytest.fixture(scope="module")
def editable_python(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("editable")
    python = new_environment(folder / "env")
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    pip("--python", python, "install", *options, "-e", ROOT, cwd=folder)
    return python


def shipped_files() -> set[str]:
    """Files of both packages as a wheel names them, caches left out."""
    return {
        f"{package}/{file.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names == shipped_files()


def test_the_wheel_holds_the_families(wheel):
    families = {f.name for f in (ROOT / "moegeom/router/families").glob("*.toml")}
    names = {Path(n).name for n in zipfile.ZipFile(wheel).namelist() if "/families/" in n}
    assert families
    assert families <= names


def test_the_wheel_says_what_it_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode().splitlines()
    needs = {line.partition(": ")[2] for line in metadata if line.startswith("Requires-Dist")}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    # Hatchling writes names with dashes.
    core = {line.replace("_", "-") for line in declared["dependencies"]}
    assert {need.replace("_", "-") for need in needs if "extra ==" not in need} == core
    assert f"Version: {moegeom.__version__}" in metadata
    assert any(n.endswith("/licenses/LICENSE") for n in archive.namelist())


@pytest.mark.parametrize("kind", ["wheel_python", "editable_python"])
def test_an_install_runs(kind, request, tmp_path):
    python = request.getfixturevalue(kind)
    origin = "import moegeom, moegeom_cli; print(moegeom.__file__); print(moegeom_cli.__file__)"
    home = ROOT if kind == "editable_python" else python.parents[1]
    for line in run(python, "-c", origin, cwd=tmp_path).splitlines():
        assert Path(line).is_relative_to(home)

    version = "from importlib.metadata import version; print(version('moegeom'))"
    assert run(python, "-c", version, cwd=tmp_path).strip() == moegeom.__version__

    families = (
        "import importlib.resources as r; print(*(r.files('moegeom')/'router/families').iterdir())"
    )
    assert ".toml" in run(python, "-c", families, cwd=tmp_path)

    assert "scan" in run(python.parent / "moegeom", "--help", cwd=tmp_path)
    assert "scan" in run(python, "-m", "moegeom_cli", "--help", cwd=tmp_path)
