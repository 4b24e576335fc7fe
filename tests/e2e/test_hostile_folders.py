"""Nothing that lies in a checkout runs: neither by the action, nor by a command typed there.

What commands do in a folder with hostile files once they have started: every test of this folder,
through ``run_nothing_of`` of warm_commands.py.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import yaml

from tests.e2e.conftest import ROOT, changed, environment, plant_code

STEPS = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["runs"]["steps"]

#: Ways to start a check of ``broken`` in the checkout, with the action's own first.
WAYS = {
    "action": ["bash", "-eu", "-c", STEPS[1]["run"]],
    "python -m": [sys.executable, "-m", "moegeom_cli", "check", "broken"],
}


@pytest.mark.parametrize("way", WAYS)
def test_code_in_the_checkout_does_not_answer_for_the_gate(way, tmp_path):
    changed(tmp_path, "broken", lambda held: {k: np.full_like(v, np.nan) for k, v in held.items()})
    plant_code(tmp_path)
    plant_code(tmp_path / "broken")
    inputs = dict.fromkeys(STEPS[1]["env"], "") | {
        "PYTHON": sys.executable,
        "CHECKPOINT": "broken",
        "JUNIT": "junit.xml",
        "GITHUB_STEP_SUMMARY": "summary.md",
    }
    ran = subprocess.run(
        WAYS[way], cwd=tmp_path, env=environment() | inputs, capture_output=True, text=True
    )
    assert "MGI101" in ran.stdout, ran.stderr
    assert ran.returncode == 1
    assert not (tmp_path / "RAN").exists()


def test_what_a_command_decides_is_its_exit_code_whoever_listens(tmp_path):
    changed(tmp_path, "broken", lambda held: {k: np.full_like(v, np.nan) for k, v in held.items()})
    (tmp_path / "good").symlink_to(ROOT / "sample_ckpts/olmoe-balanced/step_1500")
    command = f"{sys.executable} -m moegeom_cli check"
    streams = (">&-", "2>&-", ">&- 2>&- <&-", "| true", "2>&1 >&- | true")
    cases = [("broken", stream, 1) for stream in streams]
    offenders = []
    for target, stream, code in [*cases, ("good", streams[2], 0), ("nowhere", streams[4], 3)]:
        script = f"{command} {target} {stream}; exit ${{PIPESTATUS[0]}}"
        ran = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True
        )
        if ran.returncode != code:
            offenders.append((target, stream, ran.returncode))
    assert offenders == []


@pytest.mark.parametrize("place", ["model/kernels", "kernels", "rec"])
def test_kernels_that_a_working_tree_holds_are_refused(place, world, tmp_path):
    for name in ("model", "rec"):
        (tmp_path / name).symlink_to(world / name, target_is_directory=True)
    (tmp_path / ".git").mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "moegeom_cli", "check", "model", "--tokens", "rec"],
        cwd=tmp_path,
        env=environment() | {"NUMBA_CACHE_DIR": str(tmp_path / place)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert "which is judged" in ran.stderr
    assert "Set NUMBA_CACHE_DIR to a folder outside of it." in ran.stderr
    assert not (tmp_path / "kernels").exists()
