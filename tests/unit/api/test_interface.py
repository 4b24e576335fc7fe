"""What the functions accept, how they refuse, and what their answers look like."""

import dataclasses
import doctest
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import moegeom as mg
from moegeom import api
from moegeom.core.errors import InternalError
from moegeom.engine.parameters import in_python, option_of, parameters_of, request_of
from moegeom.engine.request import ScanRequest, Terms
from moegeom.router.requested_family import RequestedFamily
from moegeom.studies.study import studies
from moegeom_cli.command import COMMANDS, built
from tests.by_day import by_day
from tests.doc_scripts import script
from tests.unit.studies.samples import BALANCED, SAMPLES, sides

ROOT = SAMPLES.parent
CKPT, REC = sides(BALANCED)

#: Functions that are a command, and the record of what they are asked.
ASKED = [
    name
    for name, found in vars(api).items()
    if inspect.isfunction(found) and found.__module__ == api.__name__ and not name.startswith("_")
] + [*studies()]


#: By day those of functions that pages of documents call on the same samples wait for the night.
ON_PAGES = {"boundary_report", "cells", "continuity", "explain", "outputs", "perturb", "regions"}
ON_PAGES |= {"scan", "imbalance", "signoff", "whatif"}


@pytest.mark.parametrize("name", by_day(ASKED, [name for name in ASKED if name not in ON_PAGES]))
def test_every_example_runs(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    (found,) = finder.find(getattr(mg, name), name, api)
    runner.run(found)
    assert runner.failures == 0
    assert found.examples or name in ("merge", "report", "track"), "these need a folder"


def test_a_function_has_the_name_of_its_command():
    listings = {"arithmetics", "checks", "doctor", "families", "metrics"}
    others = {"capture": "Recorder", "routers": "open"}
    commands = {name: others.get(name, name) for name in COMMANDS.names() if name not in listings}
    assert set(commands.values()) <= {*ASKED, "Recorder"}


def test_an_option_is_spelled_as_its_parameter_says():
    """The options of a command are those of the parameters that they fill."""
    own = {"format", "quiet", "detail", "is_ascii", "no_cache", "plan_only", "verbose"}
    assert [
        (name, param.name)
        for name in COMMANDS.names()
        for param in built(name).params
        if param.param_type_name == "option" and param.name not in own
        if option_of(param.name) not in param.opts
    ] == []


def test_options_in_messages_are_parameters_in_python():
    assert in_python("--exclude-first 3 leaves none; --map KEY=ROUTER.") == (
        "exclude_first 3 leaves none; router_map KEY=ROUTER."
    )
    assert in_python("Go on with --non-finite skip.") == "Go on with non_finite='skip'."
    typed = "moegeom capture CKPT --text FILE --out REC, then add --tokens REC."
    assert in_python(typed) == typed.replace("add --tokens", "add tokens")
    assert in_python("`moegeom check CKPT --init` writes one; --layer 3") == (
        "`moegeom check CKPT --init` writes one; layers 3"
    )
    assert in_python("a-file--with-dashes.npz") == "a-file--with-dashes.npz"


def refusal(call, *given, **options) -> mg.MoeGeomError:
    with pytest.raises(mg.MoeGeomError) as caught:
        call(*given, **options)
    return caught.value


def test_an_unknown_parameter_is_an_error_that_suggests_the_nearest():
    for name in ("scan", "check", "imbalance", "open", "recording", "cells", "capacity"):
        typed, nearest = ("stages", "stage") if name == "recording" else ("layer", "layers")
        message = refusal(getattr(mg, name), str(CKPT), **{typed: 0}).message
        assert f"Did you mean {nearest}?" in message
        assert message.startswith("Unknown parameter")


def test_an_error_names_the_parameter_or_what_is_not_there(tmp_path):
    for open_one in (mg.open, mg.recording):
        assert "no such file" in refusal(open_one, tmp_path / "none").message
    assert "stage" in refusal(mg.imbalance, CKPT, np.zeros((4, 64))).hint
    assert refusal(mg.scan, CKPT, layers="7").message.startswith("layers 7 names no layer")
    assert "add tokens REC" in refusal(mg.boundary_report, CKPT).hint
    assert "exclude_first" in refusal(mg.scan, CKPT, exclude_first=1).message
    assert refusal(mg.scan, CKPT, seed="one").message == "seed 'one': expected int."
    assert refusal(mg.scan, CKPT, REC, per_token=True).hint == "Name a folder: out."
    assert "--" not in str(refusal(mg.check, CKPT, select="MGX"))
    held = mg.recording(np.zeros((4, 64)))
    assert refusal(held.open, CKPT).hint.startswith("Add stage, one of")
    assert "--" not in str(refusal(held.open))


@pytest.mark.wrong_arguments
def test_an_error_says_which_of_two_it_is_about():
    assert refusal(mg.diff, CKPT, 3).message.startswith("b is a int; expected a path")
    error = refusal(mg.diff, mg.open(CKPT, layers=0), mg.open(CKPT, layers=1))
    assert error.message.startswith("layers is '0' of one and '1' of another")
    assert "in memory" in refusal(mg.signoff, CKPT, mg.scan(CKPT)).message
    held = mg.recording(np.zeros((4, 64)), stage="router_input")
    assert "named twice" in refusal(mg.signoff, CKPT, CKPT, [held, held]).message
    assert refusal(mg.scan, CKPT, REC, run_b=held).message.startswith(
        "run_b holds tokens in memory"
    )
    error = refusal(mg.track, CKPT, {"step_1": held})
    assert error.message == "step_1500: tokens holds none of it, only of step_1."
    other = mg.recording(np.zeros((4, 64)), stage="pre_norm")
    error = refusal(mg.diff, CKPT, CKPT, (held, other))
    assert error.message.startswith("stage is 'router_input' of one and 'pre_norm' of another")


def test_inputs_of_another_shape_are_refused():
    router = mg.open(CKPT).routers[0]
    assert "inputs has shape (3, 4)" in refusal(mg.route, router, np.zeros((3, 4))).message
    assert "reshape(-1, 64)" in refusal(mg.route, router, np.zeros((1, 3, 64))).hint
    assert "no token" in refusal(mg.route, router, np.zeros((0, 64))).message
    rows = np.ones((2000, 64))
    rows[1500] = np.nan
    error = refusal(mg.route, router, rows)
    assert error.message == (
        "inputs: 1 of 2,000 tokens are not finite or overflow at router text/0 (first: token 1500)."
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        mg.route(router, np.ones((2, 64))).chosen = None


def test_what_was_opened_is_shown_once_with_what_it_holds(monkeypatch):
    monkeypatch.chdir(ROOT)
    checkpoint = mg.open("sample_ckpts/olmoe-balanced/step_1500")
    lines = repr(checkpoint).splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["text/0", "text/1", "text/2"]
    assert "softmax, top 4 of 16; rule assumed from config." in " ".join(lines)
    assert len(lines) <= 6
    assert not hasattr(checkpoint, "_repr_html_"), "a notebook would show both"
    assert repr(mg.recording("sample_ckpts/olmoe-balanced/rec/step_1500")) == (
        "Recording('sample_ckpts/olmoe-balanced/rec/step_1500', 4,096 tokens in 64 documents, "
        "router_input of 3 routers in float32, layers 0-2, with the model's choices)"
    )
    arrays = {"text.0": np.zeros((5, 64), np.float32), "document": np.zeros(5, int)}
    assert repr(mg.recording(arrays, stage="logits")) == (
        "Recording('in memory', stage='logits', text.0 (5, 64) float32, document (5,) int64)"
    )


def test_a_notebook_gets_text_and_of_an_error_what_it_says(monkeypatch):
    """By the names that IPython looks for: a kernel's shell, and the lines in place of frames."""
    expected = repr(mg.open(CKPT))
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr("builtins.get_ipython", shell, raising=False)
    assert repr(mg.open(CKPT)) == expected
    error = refusal(mg.scan, CKPT, layers=7)
    error.add_note("checkpoint: here")
    assert error._render_traceback_() == [
        "UsageError: layers 7 names no layer with a router.\n  hint: Known: 0, 1, 2.",
        "  note: checkpoint: here",
    ]
    try:
        raise InternalError("a promise is broken.")
    except InternalError as bug:
        assert "in test_a_notebook_gets" in "".join(bug._render_traceback_())


def test_answers_are_short_in_a_console_and_pages_in_a_notebook():
    found = mg.check(CKPT)
    assert repr(found).startswith("GateReport(check: step_1500: PASSED IN PART: ")
    assert str(found).startswith("VERDICT  PASSED IN PART: ")
    assert "\n\nstep_1500  olmoe: " in str(found)
    assert found._repr_html_().startswith("<iframe sandbox")
    assert "<script" not in found._repr_html_()
    assert found.html().startswith("<!doctype html>")
    assert found.markdown().startswith("#")
    assert max(map(len, found.text(width=80).splitlines())) <= 100
    # only gates are false
    assert type(mg.Report.__dict__.get("__bool__")) is type(None)
    assert not mg.signoff(BALANCED / "step_1000", CKPT)


def test_signatures_list_every_parameter():
    listed = inspect.signature(mg.scan).parameters
    assert set(parameters_of(ScanRequest)) <= set(listed)
    assert "options" not in listed
    assert list(listed)[:3] == ["checkpoint", "tokens", "watch"]
    assert listed["exclude_first"].default == 0


def test_a_request_is_made_of_parameters():
    found = request_of(
        ScanRequest,
        checkpoint=Path("model"),
        out="out",
        layers=range(2),
        arithmetics="bf16",
        router_pattern="x",
        top_k=2,
        router_map=None,
        device=None,
    )
    assert found == ScanRequest(
        "model",
        Path("out"),
        layers="0,1",
        arithmetics=("bf16",),
        requested_family=RequestedFamily(pattern="x", top_k=2),
    )
    named = request_of(Terms, requested_family=RequestedFamily(pattern="y", top_k=2), top_k=3)
    assert named.requested_family == RequestedFamily(pattern="y", top_k=3)


def test_no_two_parameters_have_one_option_and_every_function_says_what_it_raises():
    for name in ASKED:
        function = getattr(mg, name)
        options = [option_of(parameter) for parameter in inspect.signature(function).parameters]
        assert len(set(options)) == len(options), name
        assert re.search(r"^Raises\n------$", inspect.getdoc(function), re.MULTILINE), name


def test_a_value_of_an_opened_object_gives_way_to_an_option():
    opened = mg.open(CKPT, layers=0)
    assert [r["name"] for r in mg.scan(opened).run["routers"]] == ["text/0"]
    assert [r["name"] for r in mg.scan(opened, layers=1).run["routers"]] == ["text/1"]


def test_the_page_says_what_the_docstrings_say():
    module = script("refresh_api")
    written = (ROOT / "docs/api.md").read_text("utf-8")
    assert written == module.api_page(), "run python docs/refresh_api.py"
    assert set(module.FUNCTIONS) == set(ASKED)


def test_types_of_the_functions_are_those_of_their_requests():
    written = (ROOT / "moegeom/__init__.pyi").read_text("utf-8")
    assert written == script("refresh_stubs").stub(), "run python docs/refresh_stubs.py"


def test_tokens_of_which_none_is_finite_leave_the_gate_open():
    blank = {f"text/{layer}": np.full((256, 16), np.nan, np.float32) for layer in range(3)}
    judged = mg.check(CKPT, blank, stage="logits", non_finite="skip")
    assert judged.exit_code == 4
    assert "not one of the tokens is finite" in " ".join(str(judged).split())
