"""What the code imports is declared, pinned and points down, and what is declared is imported;
importing moegeom, like asking for help, loads nothing heavy. What
the image and the action install is that of the project; no engine runs here.
"""

import ast
import functools
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import moegeom
from moegeom_cli.command import command_names
from tests.architecture.sources import ROOT, parsed
from tests.e2e.test_install import distributions_of, small_set

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
    "import-linter": "run as lint-imports below",
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


# ---------------------------------------------------------------------------------------- contracts
def lint_imports(root):
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


# ----------------------------------------------------------------------------------- what is loaded
HEAVY = set("cupy cupyx matplotlib numba pandas scipy sklearn torch transformers".split())

HELP = """
from moegeom_cli.app import exit_code
for arguments in {screens}:
    assert exit_code(arguments) == 0
"""


def printed_by(code: str) -> list[str]:
    """Lines that ``code`` prints in a fresh interpreter, the last one what it loaded."""
    script = (
        f"import json, sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'cli')!r}]\n"
        f"before = set(sys.modules)\n{code}\n"
        "print(); print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def loaded_by(code: str) -> set[str]:
    """Top-level modules that ``code`` adds to a fresh interpreter."""
    return {name.split(".")[0] for name in json.loads(printed_by(code)[-1])}


def test_import_moegeom_loads_only_itself_and_the_standard_library():
    assert loaded_by("import moegeom") - set(sys.stdlib_module_names) == {"moegeom"}


def test_help_loads_nothing_heavy():
    screens = [["--help"], *([*name.split(), "--help"] for name in command_names())]
    assert loaded_by(HELP.format(screens=screens)) & (HEAVY | {"pyarrow"}) == set()


def test_a_command_imports_no_other_command():
    code = HELP.format(screens=[["doctor", "--help"]])
    code += "print([n for n in sys.modules if n.startswith('moegeom_cli.commands.')])"
    assert printed_by(code)[-3] == "['moegeom_cli.commands.doctor']"


def test_the_measurement_sees_what_is_loaded():
    assert "decimal" in loaded_by("import decimal")


CHECKPOINT = str(ROOT / "sample_ckpts/deepseek-tiny/step_1500")


def test_a_check_of_weights_compiles_nothing_and_loads_nothing_heavy():
    typed = f"assert exit_code(['check', {CHECKPOINT!r}]) == 0"
    assert loaded_by(f"from moegeom_cli.app import exit_code; {typed}") & HEAVY == set()


def test_a_check_of_weights_from_python_loads_nothing_heavy():
    assert loaded_by(f"import moegeom; assert moegeom.check({CHECKPOINT!r})") & HEAVY == set()


def test_no_module_of_the_devices_loads_anything_heavy():
    """The engine of devices costs no time to import; CuPy is there only once a device is opened."""
    folders = [ROOT / "moegeom" / folder for folder in ("kernels/cuda", "engine/devices")]
    files = [file for folder in folders for file in folder.glob("[a-z]*.py")]
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    assert {"moegeom.engine.devices.cuda", "moegeom.kernels.cuda.device"} <= {*modules}
    assert loaded_by(f"import {', '.join(modules)}") & HEAVY == set()


def test_the_version_is_that_of_the_changelog(pytestconfig):
    changelog = (pytestconfig.rootpath / "CHANGELOG.md").read_text("utf-8")
    assert "## [Unreleased]" in changelog or f"## [{moegeom.__version__}]" in changelog


def test_a_public_name_exists_and_is_documented():
    for name in moegeom._PUBLIC:
        value = getattr(moegeom, name)
        assert inspect.getdoc(value), name
        assert value.__name__ == moegeom._PUBLIC[name].partition(":")[2]
        assert name in dir(moegeom)


def test_no_public_name_hides_a_subpackage():
    """``moegeom.engine`` would be the function or the package, by what was imported before."""
    assert set(moegeom._PUBLIC) & {m.name for m in pkgutil.iter_modules(moegeom.__path__)} == set()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = moegeom.no_such_name


# ---------------------------------------------------------------------------------------- the image
def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Name of a stage -> what it begins with, and its instructions."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    instructions: list[tuple[str, str]] = []
    for line in (ROOT / "Containerfile").read_text("utf-8").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, name = rest.split(" AS ")
            instructions = []
            found[name] = base, instructions
        elif line and word not in ("#", "ARG"):
            instructions.append((word, rest))
    return found


STAGES = stages()
IMAGES = ("full", "check")


def installs(image: str) -> list[str]:
    """What it types to install, without the option that only keeps an image small."""
    runs = [rest for word, rest in STAGES[image][1] if word == "RUN" and "pip install" in rest]
    return [run.replace(" --no-cache-dir", "") for run in runs]


def test_the_image_without_a_target_is_that_of_the_check():
    assert list(STAGES) == ["clone", "full", "check"]
    assert STAGES["clone"][0] == "${BASE}"
    assert {STAGES[image][0] for image in IMAGES} == {"clone"}


def test_every_path_that_is_copied_exists_and_the_build_finds_what_it_names():
    copied = [rest.split()[:-1] for word, rest in STAGES["clone"][1] if word == "COPY"]
    paths = {path for line in copied for path in line}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    build = (ROOT / "pyproject.toml").read_text("utf-8")
    assert 'license-files = ["LICENSE"]' in build
    assert {"hatch_build.py", "README.md", "LICENSE"} <= paths
    packages = re.search(r'^packages = \["(\w+)", "(\w+)/', build, re.MULTILINE)
    assert packages
    assert set(packages.groups()) <= paths
    named = {word for image in IMAGES for line in installs(image) for word in line.split()}
    assert {word for word in named if word.endswith(".txt")} <= paths


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_as_the_page_says(image):
    page = (ROOT / "docs/gate.md").read_text("utf-8")
    lines = [line.partition("#")[0].strip() for line in page.splitlines()]
    assert installs(image)
    assert [line for line in installs(image) if line not in lines] == []


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_moegeom_and_not_as_root(image):
    words = [word for word, _ in STAGES[image][1]]
    said = dict(STAGES[image][1])
    assert said["ENTRYPOINT"] == '["moegeom"]'
    assert ("RUN", f"useradd --create-home {said['USER']}") in STAGES["clone"][1]
    pip = [i for i, (word, rest) in enumerate(STAGES[image][1]) if "pip install" in rest]
    assert words.index("USER") > max(pip)


def test_the_image_with_all_compiles_its_kernels_where_its_user_finds_them():
    instructions = STAGES["full"][1]
    said = dict(instructions)
    home = Path("/home") / said["USER"]
    name, _, folder = said["ENV"].partition("=")
    assert name == "NUMBA_CACHE_DIR"
    assert home in Path(folder).parents
    module = said["RUN"].removeprefix("python -P -m ")
    assert importlib.util.find_spec(module)
    words = [word for word, _ in instructions]
    last_run = max(i for i, word in enumerate(words) if word == "RUN")
    assert words.index("ENV") < words.index("USER") < last_run


# ----------------------------------------------------------------------- by their hashes
@pytest.mark.parametrize("name", ["check", "all"])
def test_what_is_installed_has_the_version_that_ci_installs_and_a_hash(name):
    text = (ROOT / f"hashes-{name}.txt").read_text("utf-8").replace("\\\n", "")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    versions = dict(line[0].split("==") for line in lines)
    pinned = pins()
    assert versions == {one: pinned[one] for one in versions}
    hashes = [[word for word in line if word.startswith("--")] for line in lines]
    assert all(hashes)
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for own in hashes for one in own)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    core = [*map(Requirement, declared["project"]["dependencies"])]
    build = [*map(Requirement, declared["build-system"]["requires"])]
    needed = distributions_of([*(core if name == "all" else small_set()), *build])
    elsewhere = {line[0].split("==")[0] for line in lines if "sys_platform" in line}
    assert set(versions) - elsewhere == set(needed)


def test_the_action_and_the_image_install_by_hash_and_moegeom_with_what_is_there():
    hashed = r'--require-hashes --only-binary :all: -r \S*hashes-\S+\.txt"?'
    own = r"--no-deps --no-build-isolation (\.|\S*ACTION\S*)"
    action, file = ((ROOT / name).read_text("utf-8") for name in ("action.yml", "Containerfile"))
    lines = re.findall(r'"\$\{install\[@\]\}" (.*)', action)
    lines += re.findall(r"pip install --no-cache-dir (.*)", file)
    assert len(lines) == (action + file).count("pip install") + 1 == 6
    assert [line for line in lines if not re.fullmatch(f"{hashed}|{own}", line)] == []


def test_the_images_of_a_release_begin_with_a_base_of_which_the_digest_is_said(tmp_path):
    workflow = yaml.safe_load((ROOT / ".github/workflows/image.yml").read_text("utf-8"))
    first, second = (step["run"] for step in workflow["jobs"]["image"]["steps"] if "run" in step)
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$@" >> calls\necho "$ANSWER"\n')
    (tmp_path / "docker").chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_ENV": "env", "BASE": "B"}
    for digest, code in ((f"sha256:{'a' * 64}", 0), ("latest", 1), ("", 1)):
        ran = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", first],
            cwd=tmp_path,
            env=given | {"ANSWER": f"python@{digest}"},
        )
        assert ran.returncode == code
    assert (tmp_path / "env").read_text() == f"BASE=docker.io/library/python@sha256:{'a' * 64}\n"
    assert ("ENV", "SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION}") in STAGES["clone"][1]
    for kind, version in (("tag", " --build-arg VERSION=1.2.3"), ("branch", "")):
        given |= {"GITHUB_REF_TYPE": kind, "GITHUB_REF_NAME": "v1.2.3"}
        (tmp_path / "calls").write_text("")
        subprocess.run(
            ["bash", "-eo", "pipefail", "-c", second], cwd=tmp_path, env=given, check=True
        )
        builds = [call for call in (tmp_path / "calls").read_text().splitlines() if "build" in call]
        words = rf"--target (\w+) --build-arg BASE=B{version} --label"
        assert [re.findall(words, call) for call in builds] == [[i] for i in reversed(IMAGES)]
