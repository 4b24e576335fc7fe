"""Listings, errors and notes at 80 columns; what must be copied or searched stays on one line."""

import pytest

from moegeom.testing.synthetic import SyntheticModel, write_checkpoint
from moegeom_cli.streams import error_line, folded
from tests.e2e.conftest import widest

LONG = "gate " * 40
PATTERN = r"model\.layers\.([0-9]+)\.mlp\.gate\.weight"
OPTIONS = ("--router-pattern", PATTERN, "--top-k", "4", "--score", "softmax")


def test_a_listing_fits_the_screen(moegeom, place):
    for command in ("families", "metrics", "checks", "arithmetics", "doctor", "routers model"):
        for columns in (80, 120):
            ran = moegeom(place, *command.split(), COLUMNS=str(columns), code=0)
            assert (ran.err, widest(ran.out) <= columns) == ("", True), command


def test_a_listing_says_the_same_at_every_width(moegeom, place):
    asked = (place, "families", "transformers")
    narrow, wide = ({*moegeom(*asked, COLUMNS=str(c)).out.split()} for c in (80, 120))
    rows = moegeom(*asked, "--format", "json").document
    assert len(rows) > 50
    assert {word for row in rows for cell in row.values() for word in cell.split()} <= narrow
    assert narrow == wide


@pytest.fixture
def strange(tmp_path):
    """A checkpoint of a model type that nobody knows, and of names that are long."""
    write_checkpoint(tmp_path / "strange", SyntheticModel(hidden=64, experts=16, top_k=4, layers=2))
    config = tmp_path / "strange/config.json"
    config.write_text(config.read_text("utf-8").replace('"model_type": "', '"model_type": "un'))
    return tmp_path


def test_an_error_is_folded_on_a_screen_and_whole_in_a_log(moegeom, strange):
    folded_up = moegeom(strange, "routers", "strange", COLUMNS="80")
    whole = moegeom(strange, "routers", "strange")
    assert folded_up.code == whole.code == 3
    assert [line[:8] for line in whole.err.splitlines()] == ["error: s", "  hint: "]
    lines = folded_up.err.splitlines()
    assert [line for line in lines if len(line) > 80 and "--router-pattern" not in line] == []
    assert " ".join(folded_up.err.split()) == " ".join(whole.err.split())
    (hint,) = (line for line in lines if line.startswith("  hint: "))
    assert "--router-pattern" in hint
    assert "--top-k" in hint


def test_a_hint_is_folded_unless_it_holds_options():
    said = error_line(LONG, LONG, LONG, 80).splitlines()
    assert max(map(len, said)) <= 80
    begun = [line for line in said if not line.startswith("       ")]
    assert [line.split(": ")[0].strip() for line in begun] == ["error", "note", "hint"]
    assert error_line("m", f"--score {LONG}", "", 80) == f"error: m\n  hint: --score {LONG}"


def test_a_word_that_is_longer_than_the_screen_stays_whole():
    name = "model.layers." * 12
    assert folded(f"skipped {name}: why", 80, " " * 7).splitlines()[1] == f"       {name}:"
    assert folded(LONG, None, "") == LONG


#: Commands on a model, and how they are typed.
ON_MODEL = (
    "routers model",
    "scan model --out some",
    "check model",
    "diff model model",
    "imbalance model --tokens rec",
    "perturb model --tokens rec --at 0,5",
    "capacity --from model --width 64",
    "track model --out followed",
)


def test_a_layer_that_was_asked_for_in_vain_is_named_by_every_command(moegeom, place):
    said = "ayer 7 was asked for and has no router"
    for typed in ON_MODEL:
        assert said in moegeom(place, *typed.split(), "--layers", "0,7").words, typed
    notes = moegeom(place, "routers", "model", "--layers", "0,7", "--format", "json").document
    assert notes["notes"] == [f"l{said}"]


def test_every_output_says_that_the_rule_is_assumed_and_from_what(moegeom, place):
    said, as_json = "assumed from options", ("--format", "json")
    check = (place, "check", "model", *OPTIONS)
    routers = (place, "routers", "model", *OPTIONS)
    report = (place, "report", "weights")
    for screen in (
        moegeom(*routers),
        moegeom(*check),
        moegeom(place, "scan", "model", *OPTIONS, "--out", "weights"),
        moegeom(*report),
        moegeom(*report, "--format", "md"),
    ):
        assert said in screen.words
    for command in (report, check):
        document = moegeom(*command, *as_json).document
        assert (document["rule_status"], document["rule_trust"]) == ("assumed", said)
    document = moegeom(*routers, *as_json).document
    assert (document["rule_status"], document["rule_origin"]) == ("assumed", "options")
