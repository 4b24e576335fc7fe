"""Who is judged does not say how: where a profile counts, and what the screen says of it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from moegeom.checks import CHECKS
from moegeom.checks.profile import DEFAULT, Ignore, LayerLimits, deviations
from moegeom.core.errors import OutputError
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.studies.check.document import document
from moegeom.studies.check.study import GateRequest, gate, lies_with, profile_path
from moegeom.testing.synthetic import SyntheticModel, write_checkpoint

SOFT = 'select = ["MGG"]\n'


@pytest.fixture
def place(tmp_path):
    """``ckpt``, with a profile in it, beside an empty folder ``mine``."""
    shape = SyntheticModel(hidden=16, experts=8, top_k=2, layers=2)
    write_checkpoint(tmp_path / "ckpt", shape)
    (tmp_path / "ckpt" / "moegeom.toml").write_text(SOFT)
    (tmp_path / "ckpt" / "inside").mkdir()
    (tmp_path / "mine").mkdir()
    return tmp_path


#: Where somebody stands, what is typed there, and whether that place is the checkpoint's.
STANDS = [
    ("ckpt", ".", True),
    ("ckpt", "", True),
    ("ckpt", "../ckpt", True),
    ("ckpt", "model.safetensors", True),
    ("ckpt/inside", "..", True),
    ("mine", "../ckpt", False),
    ("mine", "hf://owner/ckpt", False),
    (".", "ckpt", False),
    (".", "ckpt/model.safetensors", False),
    ("link", ".", True),
    ("link", "../ckpt", True),
    ("ckpt", "../link", True),
    ("snapshot", "model.safetensors", True),
]


@pytest.mark.parametrize(("stand", "target", "is_theirs"), STANDS)
def test_a_folder_that_came_with_the_checkpoint_is_not_the_users(
    place, monkeypatch, stand, target, is_theirs
):
    (place / "link").symlink_to("ckpt")
    (place / "snapshot").mkdir()  # as the hub's cache has it: files are links into another folder
    (place / "snapshot" / "model.safetensors").symlink_to("../ckpt/model.safetensors")
    monkeypatch.chdir(place / stand)
    (place / stand / "moegeom.toml").write_text(SOFT)
    assert lies_with(place / stand, target) == is_theirs
    found = profile_path(GateRequest(target))
    assert (found is None) == is_theirs
    named = place / "ckpt" / "moegeom.toml"
    assert profile_path(GateRequest(target, profile=named)) == named


@pytest.mark.parametrize("name", ["moegeom.toml", "pyproject.toml"])
def test_a_profile_of_the_checkpoint_changes_no_verdict(place, monkeypatch, name):
    (place / "ckpt" / "moegeom.toml").unlink()
    monkeypatch.chdir(place / "ckpt")
    expected = gate(GateRequest(".")).verdict
    for text in (SOFT, "x = " + "9" * 5000, "[tool", ".".join("a" * 9999)):
        (place / "ckpt" / name).write_text(text)
        found = gate(GateRequest(".")).verdict
        assert dataclasses.replace(found, profile=()) == expected
        assert ("is not used" in "".join(found.profile)) == (name == "moegeom.toml")


def test_every_report_names_the_profile_and_what_it_changes(place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "moegeom.toml").write_text(SOFT + '[severity]\nMGG205 = "note"\n')
    report = gate(GateRequest("ckpt"))
    profile = report.verdict.profile
    assert profile[0] == str(place / "moegeom.toml")
    assert profile[1].startswith("not judged: MGA")
    view = View(4000)
    for name in RENDERERS.names():
        text = render(document(report, view), name, view)
        assert str(place / "moegeom.toml") in text.replace("\\", ""), name
        assert "not judged" in text, name
    assert json.loads(render(document(report, view), "json"))["profile"] == list(profile)


SOFTENED = {
    "base": ("training", "built-in profile training (less severe: MGB202, MGB203"),
    "select": (("MGI",), "not judged: MGA"),
    "family_wise_error": (1e-9, "probability of a false alarm 1e-09, not 0.005"),
    "severity": ({"MGI101": "note"}, "MGI101 is a note, not a error"),
    "ignore": ((Ignore("MGI", "known"),), "MGI is accepted: known"),
    "limits": ({"MGB203": (LayerLimits({"fair_shares": 9.0}),)}, "MGB203 fair_shares 9, not 3"),
}

#: What can make a gate only stricter, or is no part of the judgement.
HARMLESS = {"require", "fail_on", "baseline", "thresholds"}


def test_every_way_to_soften_a_verdict_is_told():
    assert deviations(DEFAULT, CHECKS.all()) == ()
    fields = {field.name for field in dataclasses.fields(DEFAULT)}
    assert SOFTENED.keys() | HARMLESS == fields
    for name, (value, sentence) in SOFTENED.items():
        profile = dataclasses.replace(DEFAULT, **{name: value})
        (said,) = deviations(profile, CHECKS.all())
        assert sentence.replace("a error", "an error") in said
    at = (LayerLimits({"fair_shares": 9.0}, frozenset({0, 1})),)
    (said,) = deviations(dataclasses.replace(DEFAULT, limits={"MGB203": at}), CHECKS.all())
    assert said == "MGB203 fair_shares 9 in layers 0-1, not 3"


def test_a_project_that_is_not_ours_is_not_parsed_and_nothing_is_told_of_a_profile(
    place, monkeypatch
):
    monkeypatch.chdir(place / "mine")
    (place / "mine" / "pyproject.toml").write_text(".".join("a" * 40_000) + " = 1")
    assert profile_path(GateRequest("../ckpt")) is None
    assert gate(GateRequest("../ckpt")).verdict.profile == ()


def test_a_baseline_that_cannot_be_written_is_refused_before_anything_is_read(place):
    with pytest.raises(OutputError, match="cannot be written"):
        gate(GateRequest("/nowhere", update_baseline=True, baseline=place / "absent" / "b.json"))
