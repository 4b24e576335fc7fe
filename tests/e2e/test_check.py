"""`moegeom check` as it is typed: exit codes, streams, reports, profile, baseline."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from tests.short_samples import short_samples

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = "sample_ckpts/olmoe-balanced/step_1500"
TOKENS = "sample_ckpts/olmoe-balanced/rec/step_1500"
COLLAPSED = "sample_ckpts/olmoe-collapsed/step_1500"


def changed(folder: Path, change) -> str:
    """A copy of the healthy sample whose tensors were changed."""
    copy = folder / f"changed-{len(list(folder.iterdir()))}"
    shutil.copytree(ROOT / HEALTHY, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, copy / "model.safetensors")
    return copy.name


GATES = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(3)]
ORDER = np.array([1, 0, 3, 2, *range(4, 16)])


def permute_rows(tensors) -> None:
    for name in GATES:
        tensors[name] = tensors[name][ORDER]


def permute_everything(tensors) -> None:
    permute_rows(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        head, _, rest = name.partition(".experts.")
        number, _, leaf = rest.partition(".")
        tensors[f"new:{head}.experts.{list(ORDER).index(int(number))}.{leaf}"] = tensors.pop(name)
    for name in [name for name in tensors if name.startswith("new:")]:
        tensors[name.removeprefix("new:")] = tensors.pop(name)


def test_a_healthy_checkpoint_passes_and_says_what_was_not_looked_at(moegeom, place) -> None:
    ran = moegeom(place, "check", HEALTHY)
    assert (ran.code, ran.err) == (0, "")
    assert "0 errors, 0 warnings" in ran.out
    assert "Not checked: load, margins, dead experts (no tokens)" in " ".join(ran.out.split())
    assert all(len(line) <= 100 for line in ran.out.splitlines())


def test_an_integrity_error_fails_and_names_the_cause(moegeom, place) -> None:
    ran = moegeom(place, "check", "model")
    assert ran.code == 1
    assert "ERROR MGI104  layer 1: experts 1 and 5 are the same row" in ran.out


def test_warnings_fail_only_when_asked(moegeom, place) -> None:
    rec = ROOT / COLLAPSED.replace("step", "rec/step")
    arguments = ("check", COLLAPSED, "--tokens", str(rec), "--layers", "0")
    assert moegeom(place, *arguments).code == 0
    assert moegeom(place, *arguments, "--fail-on", "warning").code == 1
    assert sorted(p.name for p in place.iterdir() if p.suffix == ".moegeom") == []


def test_what_a_profile_requires_and_lacks_is_inconclusive(moegeom, place) -> None:
    (place / "moegeom.toml").write_text('require = ["MGB203"]\n')
    ran = moegeom(place, "check", HEALTHY)
    assert ran.code == 4
    assert "MGB203" in ran.out
    assert moegeom(place, "check", "model").code == 1  # a failure comes first


def test_a_profile_that_cannot_be_meant_is_a_usage_error(moegeom, place) -> None:
    (place / "moegeom.toml").write_text('slect = ["MGI"]\n')
    ran = moegeom(place, "check", HEALTHY)
    assert (ran.code, ran.out) == (2, "")
    assert "Did you mean select?" in ran.err


def test_init_writes_a_profile_that_changes_nothing(moegeom, place) -> None:
    before = moegeom(place, "check", HEALTHY, "--format", "json").out
    assert moegeom(place, "check", "--init").code == 0
    after = moegeom(place, "check", HEALTHY, "--format", "json").out
    found = [json.loads(text)["outcomes"] for text in (before, after)]
    assert found[0] == found[1]
    assert moegeom(place, "check", "--init").code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Usage"),
        (("--report", "junit"), "needs a checkpoint"),
        ((HEALTHY, "--report", "junti=x"), "Did you mean junit?"),
        ((HEALTHY, "--report", "junit", "--format", "json"), "--report junit=FILE"),
        ((HEALTHY, "--report", "junit=none/x.xml"), "cannot be written"),
        ((HEALTHY, "--select", "MGX"), "no check has the code"),
        ((HEALTHY, "--fail-on", "note"), "expected error or warning"),
        ((HEALTHY, "--profile", "none.toml"), "--init"),
        (("--explain", "MGN113X"), "Did you mean MGN113?"),
        (("results", "--tokens", "rec"), "holds results"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(moegeom, place, arguments, said) -> None:
    ran = moegeom(place, "check", *arguments)
    assert ran.code in (2, 0) if not arguments else ran.code == 2
    assert said in ran.err + ran.out


def test_what_cannot_be_read_is_exit_3(moegeom, place) -> None:
    assert moegeom(place, "check", "nowhere").code == 3
    assert moegeom(place, "check", HEALTHY, "--baseline", "nowhere.json").code == 3
    (place / "b.json").write_text("{}")
    assert moegeom(place, "check", HEALTHY, "--baseline", "b.json").code == 3


def test_a_refused_router_is_a_finding_with_its_code(moegeom, place) -> None:
    def halve(tensors) -> None:
        tensors[GATES[1]] = tensors[GATES[1]][:8]

    name = changed(place, halve)
    ran = moegeom(place, "check", name)
    assert ran.code == 1
    assert "MGI105" in ran.out
    assert moegeom(place, "routers", name).code == 3
    drawn = moegeom(place, "check", name, "--plot", "checks.svg")
    assert drawn.code == 1  # what was found outweighs a figure that there is not
    assert "There is no figure" in drawn.err
    assert not (place / "checks.svg").exists()


def test_the_map_of_checks_is_drawn_of_a_checkpoint_that_passes_and_of_one_that_does_not(
    moegeom, place
) -> None:
    def zero(tensors) -> None:
        tensors[GATES[1]][3] = 0.0

    for name, code in ((HEALTHY, 0), (changed(place, zero), 1)):
        ran = moegeom(place, "check", name, "--plot", "checks.svg", "--figure", "checks")
        assert ran.code == code, ran.err
        assert (place / "checks.svg").read_text("utf-8").count("MGI103") == 1
    assert moegeom(place, "check", HEALTHY, "--plot", "a.svg", "--figure", "no").code == 2


def test_results_are_judged_without_the_checkpoint(moegeom, place) -> None:
    ran = moegeom(place, "check", "results")
    assert ran.code == 1
    assert "MGI104" in ran.out
    again = moegeom(place, "check", "model", "--tokens", "rec")
    for said in (ran.out, again.out):
        assert "VERDICT  FAILED: 1 error, 0 warnings; " in said
    found = [line for line in ran.out.splitlines() if "MGI104" in line]
    assert found == [line for line in again.out.splitlines() if "MGI104" in line]


def test_several_reports_come_from_one_verdict(moegeom, place) -> None:
    files = {"junit": "j.xml", "md": "s.md", "github": "g.txt", "json": "v.json", "table": "t.txt"}
    files |= {"html": "v.html"}
    asked = [part for name, file in files.items() for part in ("--report", f"{name}={file}")]
    ran = moegeom(place, "check", "model", "--quiet", *asked)
    assert (ran.code, ran.err) == (1, "")
    assert "VERDICT  FAILED" in ran.out
    assert ET.parse(place / "j.xml").getroot().get("failures") == "1"
    assert json.loads((place / "v.json").read_text())["exit_code"] == 1
    assert "::error title=MGI104" in (place / "g.txt").read_text()
    assert "MGI104" in (place / "s.md").read_text()
    assert "ERROR MGI104" in (place / "t.txt").read_text()
    assert '<b class="error">ERROR MGI104</b>' in (place / "v.html").read_text()


def test_a_checkpoint_passes_its_own_baseline(moegeom, place) -> None:
    write = ("check", HEALTHY, "--tokens", TOKENS, "--update-baseline")
    ran = moegeom(place, *write)
    assert ran.code == 0
    assert "baseline written: moegeom-baseline.json" in ran.err
    ran = moegeom(
        place, "check", HEALTHY, "--tokens", TOKENS, "--baseline", "moegeom-baseline.json"
    )
    assert ran.code == 0
    assert "0 errors, 0 warnings" in ran.out
    assert "Detectable at 90 % power" in ran.out


def test_rows_that_change_places_alone_fail_and_with_their_experts_pass(moegeom, place) -> None:
    moegeom(place, "check", HEALTHY, "--update-baseline", "--baseline", "b.json")
    alone = changed(place, permute_rows)
    ran = moegeom(place, "check", alone, "--baseline", "b.json")
    assert ran.code == 1
    assert "MGI121" in ran.out
    assert "experts are where they were" in " ".join(ran.out.split())
    assert "bytes of headers and expert weights" in ran.err
    together = changed(place, permute_everything)
    ran = moegeom(place, "check", together, "--baseline", "b.json", "--fail-on", "warning")
    assert ran.code == 0, ran.out


def test_a_baseline_that_the_profile_names_is_used(moegeom, place) -> None:
    (place / "moegeom.toml").write_text('baseline = "b.json"\n')
    assert moegeom(place, "check", HEALTHY, "--update-baseline").code == 0
    assert (place / "b.json").exists()
    ran = moegeom(place, "check", "sample_ckpts/olmoe-balanced/step_300")
    assert "MGG401" in ran.out


def test_explain_prints_the_page_of_a_check(moegeom, place) -> None:
    ran = moegeom(place, "check", "--explain", "mgn112")
    assert ran.code == 0
    for words in ("Looked for:", "A finding means:", "What to do:", "step_over_spread"):
        assert words in ran.out


def test_the_action_passes_what_check_takes(moegeom, place) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    script = action["runs"]["steps"][1]["run"]
    options = moegeom(place, "check", "--help").out
    for option in ("--report", "--tokens", "--baseline", "--profile", "--fail-on"):
        assert option in script
        assert option in options
    assert "${{" not in script  # inputs are data, never text of the script
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert hook["entry"] == "moegeom check"


@pytest.mark.parametrize(
    ("checkpoint", "tokens", "is_small"),
    [("model", "", True), ("model", "rec", False), ("results", "", False)],
)
def test_the_action_installs_the_small_set_for_weights_alone(
    place, checkpoint, tokens, is_small
) -> None:
    step = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["runs"]["steps"][0]
    (place / "python").write_text('#!/bin/sh\necho "$@" >> asked\n')
    (place / "python").chmod(0o755)
    given = {"PYTHON": "./python", "ACTION": "A", "CHECKPOINT": checkpoint, "TOKENS": tokens}
    assert given.keys() == step["env"].keys()
    subprocess.run(
        ["bash", "-eu", "-c", step["run"]], cwd=place, env=os.environ | given, check=True
    )
    start = "-m pip install --quiet -c A/constraints.txt"
    small = [f"{start} -r A/requirements-check.txt", f"{start} --no-deps A"]
    assert (place / "asked").read_text().splitlines() == (small if is_small else [f"{start} A"])


GATE_PAGE = (ROOT / "docs/gate.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """The code blocks of the page about the gate that are in this language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", GATE_PAGE, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_the_documented_workflow_gives_the_action_what_it_takes() -> None:
    (workflow,) = (w for text in blocks("yaml") if "jobs" in (w := yaml.safe_load(text)))
    assert set(workflow[True]) == {"pull_request", "workflow_dispatch"}  # YAML reads "on" so
    steps = workflow["jobs"]["routers"]["steps"]
    (ours,) = (step for step in steps if step["uses"].startswith("OWNER/moegeom"))
    inputs = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["inputs"]
    assert set(ours["with"]) <= set(inputs)
    (upload,) = (step for step in steps if "upload-artifact" in step["uses"])
    assert upload["with"]["path"] == inputs["junit"]["default"]


def test_the_documented_release_passes_and_stops_as_the_page_says(moegeom, tmp_path) -> None:
    def link(name: str, sample: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(short_samples() / sample, target_is_directory=True)

    link("checkpoints/latest", "olmoe-balanced/step_1500")
    link("recordings/release", "olmoe-balanced/rec/step_1500")
    (profile,) = (text for text in blocks("toml") if "MGG401" in text)
    (tmp_path / "moegeom.toml").write_text(profile, "utf-8")
    commands = [
        shlex.split(line)[1:]
        for text in blocks("")
        for line in text.splitlines()
        if line.startswith("moegeom check checkpoints/latest ")
    ]
    update, judge = commands
    assert moegeom(tmp_path, *judge).code == 3  # no baseline yet
    written = moegeom(tmp_path, *update)
    assert written.code == 4
    assert re.findall(r"^INCONCLUSIVE (\w+)", written.out, re.MULTILINE) == ["MGP901"]
    assert moegeom(tmp_path, *judge).code == 0
    assert (tmp_path / "moegeom-junit.xml").exists()
    without = [word for word in judge if word not in ("--tokens", "recordings/release")]
    assert moegeom(tmp_path, *without).code == 4
    link("checkpoints/latest", "olmoe-balanced/step_1000")
    assert moegeom(tmp_path, *judge).code == 3  # the recording of another checkpoint
    link("recordings/release", "olmoe-balanced/rec/step_1000")
    moved = moegeom(tmp_path, *judge)
    assert moved.code == 1
    assert "MGG401" in moved.out


def test_the_fixture_fails_a_test_with_the_screen(moegeom, tmp_path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["moegeom.testing.gate_fixture"]\n')
    (tmp_path / "test_gate.py").write_text(
        f"""
def test_healthy(moegeom_gate):
    assert moegeom_gate("{ROOT / HEALTHY}").exit_code == 0

def test_collapsed(moegeom_gate):
    moegeom_gate("{ROOT / COLLAPSED}", layers="0", fail_on="warning", baseline="none.json")

def test_unreachable_limits(moegeom_gate):
    moegeom_gate("{ROOT / COLLAPSED}", fail_on="warning", profile=__file__.replace(".py", ".toml"))
"""
    )
    (tmp_path / "test_gate.toml").write_text("[limits.MGG203]\nratio = 1.01\nsigmas = 0.1\n")
    options = ["-q", "-p", "no:cacheprovider", "test_gate.py"]
    ran = moegeom(tmp_path, script=f"import pytest; raise SystemExit(pytest.main({options}))")
    assert "2 failed, 1 passed" in ran.out
    assert "WARN  MGG203" in ran.out
    assert "none.json" in ran.out
