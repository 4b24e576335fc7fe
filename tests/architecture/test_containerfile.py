"""Containerfile: no engine runs here, so what it copies and installs is held against the project."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

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
    assert STAGES["clone"][0] == "docker.io/library/python:${PYTHON}-slim"
    assert {STAGES[image][0] for image in IMAGES} == {"clone"}


def test_every_path_that_is_copied_exists_and_the_build_finds_what_it_names():
    copied = [rest.split()[:-1] for word, rest in STAGES["clone"][1] if word == "COPY"]
    paths = {path for line in copied for path in line}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    build = (ROOT / "pyproject.toml").read_text("utf-8")
    for kind, needed in (("readme", "README.md"), ("license-files", "LICENSE")):
        assert re.search(rf'^{kind} = \[?"{needed}"', build, re.MULTILINE)
        assert needed in paths
    packages = re.search(r'^packages = \["(\w+)", "(\w+)/', build, re.MULTILINE)
    assert packages
    assert set(packages.groups()) <= paths
    named = {word for image in IMAGES for line in installs(image) for word in line.split()}
    assert {word for word in named if word.endswith(".txt")} <= paths


@pytest.mark.parametrize(("image", "page"), [("full", "README.md"), ("check", "docs/gate.md")])
def test_an_image_installs_as_the_page_says(image, page):
    lines = [
        line.partition("#")[0].strip() for line in (ROOT / page).read_text("utf-8").splitlines()
    ]
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
