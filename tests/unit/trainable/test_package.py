"""The names of the package, and what is said where torch is not installed."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import moegeom.trainable
from moegeom.core.errors import UsageError
from moegeom.geometry.capacity.costs import router_macs

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", sorted(moegeom.trainable._PUBLIC))
def test_a_name_exists_and_is_documented(name):
    assert inspect.getdoc(getattr(moegeom.trainable, name))
    assert name in dir(moegeom.trainable)


def test_no_name_is_that_of_a_module():
    modules = set(moegeom.trainable._PUBLIC.values())
    assert set(moegeom.trainable._PUBLIC) & modules == set()
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = moegeom.trainable.Nothing


def test_without_torch_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"moegeom\.trainable needs torch") as caught:
        importlib.reload(moegeom.trainable)
    assert "[torch]" in caught.value.hint
    monkeypatch.undo()
    importlib.reload(moegeom.trainable)


def test_the_package_alone_loads_no_torch():
    code = "import sys; import moegeom.trainable; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == "False\n", ran.stderr


def test_the_page_has_the_costs_of_the_formulas():
    page = (ROOT / "docs/trainable.md").read_text("utf-8")
    costs = {
        line.split("`")[1]: line.split("|")[4].split()[0]
        for line in page.splitlines()
        if line.startswith("| `")
    }
    macs, cosine = router_macs(8, 4096, 128), router_macs(8, 4096, 256).cosine
    assert (
        costs["TopKRouter"] == costs["SmoothTopKRouter"] == costs["ReLURouter"] == str(macs.linear)
    )
    assert costs["CosineRouter"] == str(cosine)
    assert costs["GRURouter"] == str(macs.gru)
    assert costs["OSRRouter"] == str(2 * macs.projector + 64)
    assert costs["SoftMoE(experts, hidden)"] == str(3 * 8 * 4096)
