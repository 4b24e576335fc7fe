"""A wheel and an editable install work in a new environment, without the network, and so does the
small set of packages that a check of weights needs.

The environment sees the libraries of the one that runs the tests, or those of the small set, but
not moegeom itself.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.numpy import load_file, save_file

from moegeom.checks.profile import BUILT_IN
from moegeom.document.render import RENDERERS
from tests.by_day import by_day
from tests.fuzz.kinds import KINDS, read_everything

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


def empty_environment(folder: Path) -> tuple[Path, Path]:
    """Python of an environment without a library, and where it looks for them."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin/python"
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    ).strip()
    return python, Path(site)


def new_environment(folder: Path) -> Path:
    """Python of an environment that reads the libraries of this one through a path file."""
    python, site = empty_environment(folder)
    lines = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # A path file is read once: an editable moegeom of this environment stays out of sight.
    (site / "libraries.pth").write_text("\n".join(sorted(lines)) + "\n", "utf-8")
    return python


def small_set() -> list[Requirement]:
    lines = (ROOT / "requirements-check.txt").read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def distributions_of(requirements: list[Requirement]) -> dict[str, importlib.metadata.Distribution]:
    """What pip would install for these, of what is installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left = list(requirements)
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found[name] = importlib.metadata.distribution(name)
        left += map(Requirement, found[name].requires or ())
    return found


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


def declared_core() -> list[str]:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return declared["project"]["dependencies"]


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


def test_the_wheel_says_what_it_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode().splitlines()
    needs = {line.partition(": ")[2] for line in metadata if line.startswith("Requires-Dist")}
    # Hatchling writes names with dashes.
    core = {line.replace("_", "-") for line in declared_core()}
    assert {need.replace("_", "-") for need in needs if "extra ==" not in need} == core
    assert any(n.endswith("/licenses/LICENSE") for n in archive.namelist())


def test_an_index_takes_the_wheel_and_shows_its_page(wheel):
    """What PyPI refuses, and what a rating asks of metadata but an address of the authors."""
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, cwd=wheel.parent)
    rating = [sys.executable, "-m", "pyroma", "--skip-tests", "AuthorEmail", "--quiet", ROOT]
    assert run(*rating, cwd=wheel.parent).split()[-1] == "10"


def test_links_of_the_page_on_an_index_are_whole_and_lead_to_files(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    text = archive.read(name).decode()
    home = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["metadata"][
        "hooks"
    ]["custom"]["repository"]
    links = re.findall(r"\]\(([^)#]+)", text)
    paths = [re.sub(rf"^{re.escape(home)}/(?:blob|raw)/main/", "", link) for link in links]
    assert len(paths) > 8
    assert [path for path in paths if "://" not in path and not (ROOT / path).exists()] == []
    assert [link for link in links if "://" not in link] == []
    for file in ("CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml"):
        urls = re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / file).read_text("utf-8"))
        assert set(urls) == {home}, file


#: Where both packages are, which version is installed, and the files of the families.
SAID = """
import importlib.metadata, importlib.resources, json, moegeom, moegeom_cli
families = (importlib.resources.files("moegeom") / "router/families").iterdir()
places = [moegeom.__file__, moegeom_cli.__file__]
print(json.dumps([places, importlib.metadata.version("moegeom"), [str(f) for f in families]]))
"""


@pytest.mark.parametrize("kind", ["wheel_python", "editable_python"])
def test_an_install_runs(kind, request, tmp_path):
    python = request.getfixturevalue(kind)
    home = ROOT if kind == "editable_python" else python.parents[1]
    places, version, families = json.loads(run(python, "-c", SAID, cwd=tmp_path))
    assert all(Path(place).is_relative_to(home) for place in places)
    assert version.startswith("0.1")
    assert any(family.endswith(".toml") for family in families)
    assert "scan" in run(python.parent / "moegeom", "--help", cwd=tmp_path)
    assert "scan" in run(python, "-m", "moegeom_cli", "--help", cwd=tmp_path)


# ------------------------------------------------------------------------------------ the small set
@pytest.fixture(scope="module")
def small_python(wheel, tmp_path_factory) -> Path:
    """Python of an environment with the small set, what it needs, and moegeom."""
    python, site = empty_environment(tmp_path_factory.mktemp("small") / "env")
    zipfile.ZipFile(wheel).extractall(site)
    for distribution in distributions_of(small_set()).values():
        files = [Path(file) for file in distribution.files or ()]
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return python


#: Runs commands one after the other in one process, and says what it loaded that is installed.
#: How long reading took is no fact of a checkpoint.
COMMANDS = """
import json, sys, time
time.perf_counter = lambda: 0.0
from moegeom_cli.app import exit_code
codes = [exit_code(arguments) for arguments in json.load(open(sys.argv[1]))]
print(json.dumps([codes, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def ran(python: Path, commands: list[list[str]], folder: Path) -> tuple[list[int], set[str], str]:
    """Exit codes, what was loaded, and the screens and errors."""
    (folder / "commands.json").write_text(json.dumps(commands))
    line = 'exec "$0" -c "$1" commands.json 2>&1'
    said = run("/bin/sh", "-c", line, python, COMMANDS, cwd=folder)
    screens, _, last = said.rstrip().rpartition("\n")
    codes, loaded = json.loads(last)
    return codes, set(loaded), screens


def edited_rows(checkpoint: Path, folder: Path, order: list[int]) -> Path:
    """The checkpoint with the rows of every router in another order, or some of them twice."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        rows = np.arange(len(tensors[name]))
        rows[: len(order)] = order
        tensors[name] = np.ascontiguousarray(tensors[name][rows])
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def judged(small_python, wheel_python, tmp_path_factory) -> dict[str, tuple]:
    """The same checks in the small and in the whole environment: what they said, and their files.

    Every sample and every format of checkpoints, beside a baseline and under every profile, in
    every format of reports.
    """
    shared = tmp_path_factory.mktemp("checkpoints")
    samples = sorted((ROOT / "sample_ckpts").glob("*/step_*"))
    targets = list(map(str, by_day(samples, [p for p in samples if p.name == "step_1500"])))
    for number, kind in enumerate(KINDS.values()):
        if kind.use is read_everything and not kind.is_refused:
            (shared / str(number)).mkdir()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                kind.build(shared / str(number))
            targets.append(str(shared / str(number)))
    commands: list[list[str]] = []

    def check(target: str, *options: str) -> None:
        name = len(commands)
        reports = (f"--report={r.name}={name}.{r.name}" for r in RENDERERS.all())
        commands.append(["check", target, *reports, *options])

    for target in targets:
        check(target)
    for profile in BUILT_IN:
        check(targets[0], "--profile", profile)
    balanced = ROOT / "sample_ckpts/olmoe-balanced"
    check(str(balanced / "step_600"), "--update-baseline", "--baseline=baseline.json")
    since = [balanced / "step_600", balanced / "step_1500", balanced / "step_100"]
    since += [
        edited_rows(balanced / "step_1500", shared / f"rows {order}", order)
        for order in ([1, 2, 0], [0, 0, 1, 1])
    ]
    for target in since:
        check(str(target), "--baseline=baseline.json", "--attention")
    found = {}
    for name, python in {"small": small_python, "whole": wheel_python}.items():
        folder = tmp_path_factory.mktemp(name)
        codes, loaded, screens = ran(python, commands, folder)
        files = {path.name: path.read_text("utf-8") for path in folder.iterdir()}
        for file in [file for file in files if file.endswith(".json") and file[0].isdigit()]:
            report = json.loads(files[file])
            installed = report["run"].pop("libraries")  # the one thing that is meant to differ
            assert ("scipy" in installed) is (name == "whole")
            files[file] = json.dumps(report)
        found[name] = codes, loaded, screens, files
    return found


def test_a_check_of_weights_says_the_same_in_the_small_set_byte_for_byte(judged):
    assert set(judged["small"][0]) <= {0, 1, 4}
    assert len(judged["small"][3]) > len(judged["small"][0]) * len(RENDERERS.all())
    assert judged["small"][0] == judged["whole"][0]
    assert judged["small"][2] == judged["whole"][2]
    assert judged["small"][3] == judged["whole"][3]


def test_the_small_set_is_what_a_check_of_weights_loads_of_the_core(judged):
    core = {canonicalize_name(Requirement(line).name): line for line in declared_core()}
    loaded = {canonicalize_name(name) for name in judged["whole"][1]}
    small = {canonicalize_name(one.name): str(one) for one in small_set()}
    assert small == {name: line for name, line in core.items() if name in loaded}


def test_what_needs_more_than_the_small_set_says_how_to_have_it(small_python, tmp_path):
    sample = ROOT / "sample_ckpts/deepseek-tiny"
    checkpoint, recording = str(sample / "step_1500"), str(sample / "rec/step_1500")
    commands = [
        ["check", checkpoint, "--tokens", recording],
        ["check", checkpoint, "--experts"],
        ["scan", checkpoint],
        ["report", str(tmp_path)],
        ["boundary-report", checkpoint, "--tokens", recording],
    ]
    codes, _, said = ran(small_python, commands, tmp_path)
    assert codes == [2] * len(commands)
    lines = said.splitlines()
    assert [line.split()[1] for line in lines[::2]] == [command[0] for command in commands]
    assert all(line.endswith("which is not installed.") for line in lines[::2])
    assert set(lines[1::2]) == {"  hint: pip install moegeom"}


def test_doctor_names_what_the_small_set_leaves_out(small_python, tmp_path):
    said = run(small_python, "-m", "moegeom_cli", "doctor", cwd=tmp_path)
    absent = {line.split()[0] for line in said.splitlines() if line.split()[1:2] == ["absent"]}
    assert {"numba", "scipy", "pyarrow", "torch"} <= absent
    assert "To have the whole core: pip install moegeom\n" in said
