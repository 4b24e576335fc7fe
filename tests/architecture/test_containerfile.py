"""What the image and the action install. No engine runs here, so what Containerfile copies and installs
is held against the project.
"""

import importlib.util
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.e2e.test_install import distributions_of, small_set

ROOT = Path(__file__).resolve().parents[2]


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
PINNED = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
)


@pytest.mark.parametrize("name", ["check", "all"])
def test_what_is_installed_has_the_version_that_ci_installs_and_a_hash(name):
    text = (ROOT / f"hashes-{name}.txt").read_text("utf-8").replace("\\\n", "")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    versions = dict(line[0].split("==") for line in lines)
    pinned = {canonicalize_name(one): version for one, version in PINNED.items()}
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
