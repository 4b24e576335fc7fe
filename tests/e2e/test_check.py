"""`moegeom check` as it is typed: exit codes, streams, reports, profile, baseline."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import yaml

from tests.e2e.conftest import GATES, HEALTHY, changed, widest
from tests.museum.checkpoint import permuted
from tests.museum.healthy import olmoe
from tests.short_samples import short_samples

ROOT = Path(__file__).resolve().parents[2]
TOKENS = "sample_ckpts/olmoe-balanced/rec/step_1500"
COLLAPSED = "sample_ckpts/olmoe-collapsed/step_1500"


def test_a_healthy_checkpoint_passes_and_says_what_was_not_looked_at(moegeom, place):
    ran = moegeom(place, "check", HEALTHY, code=0)
    assert ran.err == ""
    assert " checks fine; 0 not; " in ran.out
    assert "Not checked: load, margins, dead experts (no tokens)" in ran.words
    assert widest(ran.out) <= 100


def test_warnings_fail_only_when_asked(moegeom, place):
    every_token = str(ROOT / COLLAPSED.replace("step", "rec/step"))
    arguments = ("check", COLLAPSED, "--tokens", every_token, "--layers", "0")
    moegeom(place, *arguments, code=0)
    moegeom(place, *arguments, "--fail-on", "warning", code=1)
    assert sorted(p.name for p in place.iterdir() if p.suffix == ".moegeom") == []


def test_init_writes_a_profile_that_changes_nothing(moegeom, place):
    judge = (place, "check", HEALTHY, "--format", "json")
    before = moegeom(*judge).document["outcomes"]
    moegeom(place, "check", "--init", code=0)
    assert moegeom(*judge).document["outcomes"] == before
    moegeom(place, "check", "--init", code=2)


#: What is typed, the exit code, and words of the refusal.
REFUSED = [
    (("--report", "junit"), 2, "needs a checkpoint"),
    ((HEALTHY, "--report", "junti=x"), 2, "Did you mean junit?"),
    ((HEALTHY, "--report", "junit", "--format", "json"), 2, "--report junit=FILE"),
    ((HEALTHY, "--report", "junit=none/x.xml"), 2, "cannot be written"),
    ((HEALTHY, "--select", "MGX"), 2, "no check has the code"),
    ((HEALTHY, "--profile", "none.toml"), 2, "--init"),
    ((HEALTHY, "--profile", "wrong.toml"), 2, "Did you mean select?"),
    (("--explain", "MGN113X"), 2, "Did you mean MGN113?"),
    (("results", "--tokens", "rec"), 2, "holds results"),
    (("nowhere",), 3, "nowhere"),
    ((HEALTHY, "--baseline", "nowhere.json"), 3, "nowhere.json"),
    ((HEALTHY, "--baseline", "b.json"), 3, "b.json"),
]


def test_what_cannot_be_meant_or_read_is_told(moegeom, refused, place):
    (place / "wrong.toml").write_text('slct = ["MGI"]\n')
    (place / "b.json").write_text("{}")
    for arguments, code, words in REFUSED:
        refused(place, ("check", *arguments), words, code=code)
    bare = moegeom(place, "check")
    assert bare.code == 2
    assert "check needs a checkpoint or results" in bare.err


def test_a_refused_router_is_a_finding_with_its_code(moegeom, place):
    name = changed(place, "half", lambda held: held | {GATES[1]: held[GATES[1]][:8]})
    moegeom(place, "list", "routers", name, code=3)
    drawn = moegeom(place, "check", name, "--plot", "checks.svg", code=1)
    assert "MGI105" in drawn.out
    # what was found outweighs a figure that there is not
    assert "There is no figure" in drawn.err
    assert not (place / "checks.svg").exists()


def test_the_figure_of_checks_is_drawn_of_a_checkpoint_that_passes_and_of_one_that_does_not(
    moegeom, place
):
    def zero(tensors):
        tensors[GATES[1]][3] = 0.0
        return tensors

    for name, code in ((HEALTHY, 0), (changed(place, "zero", zero), 1)):
        moegeom(place, "check", name, "--plot", "checks.svg", "--figure", "checks", code=code)
        assert "checks" in (place / "checks.svg").read_text("utf-8")
    moegeom(place, "check", HEALTHY, "--plot", "a.svg", "--figure", "no", code=2)


def test_results_are_judged_without_the_checkpoint(moegeom, place):
    findings = []
    for typed in (("results",), ("model", "--tokens", "rec", "--layers", "1")):
        ran = moegeom(place, "check", *typed, code=1)
        assert " checks fine; 1 not (1 error); " in ran.out
        assert "ERROR MGI104  layer 1: experts 1 and 5 are the same row" in ran.out
        findings.append([line for line in ran.out.splitlines() if "MGI104" in line])
    assert findings[0] == findings[1]


def test_several_reports_come_from_one_verdict(moegeom, place):
    files = {"junit": "j.xml", "md": "s.md", "github": "g.txt", "json": "v.json", "table": "t.txt"}
    files |= {"html": "v.html"}
    asked = [part for name, file in files.items() for part in ("--report", f"{name}={file}")]
    ran = moegeom(place, "check", "model", "--quiet", *asked, code=1)
    assert ran.err == ""
    assert "VERDICT  FAILED" in ran.out
    assert ET.parse(place / "j.xml").getroot().get("failures") == "1"
    assert json.loads((place / "v.json").read_text())["exit_code"] == 1
    assert "::error title=MGI104" in (place / "g.txt").read_text()
    assert "MGI104" in (place / "s.md").read_text()
    assert "ERROR MGI104" in (place / "t.txt").read_text()
    assert '<b class="error">ERROR MGI104</b>' in (place / "v.html").read_text()


def test_a_checkpoint_passes_its_own_baseline(moegeom, place):
    measured = (place, "check", HEALTHY, "--tokens", TOKENS, "--layers", "1")
    ran = moegeom(*measured, "--update-baseline", code=0)
    assert "baseline written: moegeom-baseline.json" in ran.err
    ran = moegeom(*measured, "--baseline", "moegeom-baseline.json", code=0)
    assert " checks fine; 0 not; " in ran.out
    assert "Smallest change this run can catch" in ran.out


def test_rows_that_change_places_alone_fail_and_with_their_experts_pass(moegeom, place):
    moegeom(place, "check", HEALTHY, "--update-baseline", "--baseline", "b.json")
    for name, parts in (("alone", ("weight",)), ("together", ("weight", "experts"))):
        permuted(olmoe(), [1, 0, 3, 2, *range(4, 16)], parts).write(place / name)
    ran = moegeom(place, "check", "alone", "--baseline", "b.json", code=1)
    assert "MGI121" in ran.out
    assert "experts are where they were" in ran.words
    assert "bytes of headers and expert weights" in ran.err
    moegeom(place, "check", "together", "--baseline", "b.json", "--fail-on", "warning", code=0)


def test_a_baseline_that_the_profile_names_is_used(moegeom, place):
    (place / "moegeom.toml").write_text('baseline = "b.json"\n')
    moegeom(place, "check", HEALTHY, "--update-baseline", code=0)
    assert (place / "b.json").exists()
    assert "MGG401" in moegeom(place, "check", "sample_ckpts/olmoe-balanced/step_300").out


def test_explain_prints_the_page_of_a_check(moegeom, place):
    page = moegeom(place, "check", "--explain", "mgn112", code=0).out
    for words in ("Looked for:", "A finding means:", "What to do:", "step_over_spread"):
        assert words in page


def test_the_action_passes_what_check_takes(moegeom, place):
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    script = action["runs"]["steps"][1]["run"]
    options = moegeom(place, "check", "--help").out
    for option in ("--report", "--tokens", "--baseline", "--profile", "--fail-on"):
        assert option in script
        assert option in options
    assert "${{" not in script  # inputs are data, never text of the script
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert hook["entry"] == "moegeom check"


def test_the_action_installs_the_small_set_for_weights_alone(place):
    step = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["runs"]["steps"][0]
    (place / "python").write_text('#!/bin/sh\necho "$@" >> asked\n')
    (place / "python").chmod(0o755)
    start = "-P -m pip install --quiet"
    hashed = f"{start} --require-hashes --only-binary :all: -r A/hashes"
    for checkpoint, tokens, packages in (
        *(("model", "", "check"), ("model", "rec", "all"), ("results", "", "all")),
    ):
        calls = [f"{hashed}-{packages}.txt", f"{start} --no-deps --no-build-isolation A"]
        given = {"PYTHON": "./python", "ACTION": "A", "CHECKPOINT": checkpoint, "TOKENS": tokens}
        assert given.keys() == step["env"].keys()
        subprocess.run(
            ["bash", "-eu", "-c", step["run"]], cwd=place, env=os.environ | given, check=True
        )
        assert (place / "asked").read_text().splitlines() == calls
        (place / "asked").unlink()


GATE_PAGE = (ROOT / "docs/gate.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """The code blocks of the page about the gate that are in this language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", GATE_PAGE, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_the_documented_workflow_gives_the_action_what_it_takes():
    (workflow,) = (w for text in blocks("yaml") if "jobs" in (w := yaml.safe_load(text)))
    assert set(workflow[True]) == {"pull_request", "workflow_dispatch"}  # YAML reads "on" so
    steps = workflow["jobs"]["routers"]["steps"]
    (ours,) = (step for step in steps if step["uses"].startswith("OWNER/moegeom"))
    inputs = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["inputs"]
    assert set(ours["with"]) <= set(inputs)
    (upload,) = (step for step in steps if "upload-artifact" in step["uses"])
    assert upload["with"]["path"] == inputs["junit"]["default"]


def test_the_documented_release_passes_and_stops_as_the_page_says(moegeom, tmp_path):
    def link(name: str, sample: str):
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
    moegeom(tmp_path, *judge, code=3)  # no baseline yet
    written = moegeom(tmp_path, *update, code=4)
    assert re.findall(r"^INCONCLUSIVE (\w+)", written.out, re.MULTILINE) == ["MGP901"]
    moegeom(tmp_path, *judge, code=0)
    assert (tmp_path / "moegeom-junit.xml").exists()
    without = [word for word in judge if word not in ("--tokens", "recordings/release")]
    moegeom(tmp_path, *without, code=4)
    link("checkpoints/latest", "olmoe-balanced/step_1000")
    moegeom(tmp_path, *judge, code=3)  # the recording of another checkpoint
    link("recordings/release", "olmoe-balanced/rec/step_1000")
    assert "MGG401" in moegeom(tmp_path, *judge, code=1).out


def test_the_fixture_fails_a_test_with_the_screen(moegeom, tmp_path):
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


# --------------------------------------------------------------------------- words wider than tests
EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"


def each(layers=range(3), experts=range(16)):
    return [(n, e, part) for n in layers for e in experts for part in ("gate", "up", "down")]


def without_half(tensors):
    for n, e, part in each(experts=range(8, 16)):
        del tensors[EXPERT.format(n, e, part)]
    return tensors


def in_pairs(tensors):
    for n, e, part in each(experts=range(1, 16, 2)):
        tensors[EXPERT.format(n, e, part)] = tensors[EXPERT.format(n, e - 1, part)]
    return tensors


def layer_without_experts(tensors):
    for n, e, part in each(layers=[1]):
        del tensors[EXPERT.format(n, e, part)]
    return tensors


@pytest.mark.parametrize(
    ("change", "options"),
    [(without_half, ()), (in_pairs, ("--experts",)), (layer_without_experts, ())],
)
def test_experts_that_are_missing_or_twice_fail(moegeom, place, change, options):
    assert moegeom(place, "check", changed(place, "bad", change), *options).code == 1


def test_routers_are_not_called_the_same_where_experts_are_others(moegeom, place):
    other = changed(place, "other", in_pairs)
    said = moegeom(place, "diff", HEALTHY, other).out
    assert "are identical" not in said
    assert "expert" in said


def traces_of_zeros(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for number in range(30):
        ids = draw.permuted(np.tile(np.arange(16), (60, 3, 1)), axis=2)[:, :, :4]
        ids[:20] = 0
        np.save(folder / f"{number}.npy", ids.astype(np.uint8))


def test_a_trace_whose_prompts_are_zeros_is_not_sound(moegeom, tmp_path):
    traces_of_zeros(tmp_path)
    assert moegeom(tmp_path, "routes", ".", "--validate").code == 1


def test_a_trace_whose_prompts_are_zeros_is_a_finding_and_fails_a_release(moegeom, place):
    (place / "dump").mkdir()
    traces_of_zeros(place / "dump")
    judge = (place, "check", HEALTHY, "--tokens", "dump", "--select", "MGI129")
    assert "first rows are missing." in moegeom(*judge, code=0).words
    moegeom(*judge, "--profile", "release", code=1)
