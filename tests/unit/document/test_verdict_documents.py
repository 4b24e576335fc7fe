"""Reports of a verdict say what it holds, and no name of others reaches a terminal, a page or a
workflow as more than text, in any report.

Every function that makes a document is shown by every renderer: a new study or format is looked at
without a line here. Records are made from their types, every string of them hostile, but for the
words of closed lists.
"""

import collections.abc
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import xmlschema
from hypothesis import example, given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped
from markdown_it import MarkdownIt
from safetensors.numpy import load_file, save_file

import moegeom
from benchmarks.synthetic import write_checkpoint
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.finding import STATES, Finding, Outcome, Verdict
from moegeom.core.router import RouterSet
from moegeom.document.model import Document, View
from moegeom.document.render import RENDERERS, render
from moegeom.document.untrusted import printable
from moegeom.document.verdict_text import places, verdict_sentence, verdict_word
from moegeom.metrics import METRICS
from moegeom.pipeline import ScanRequest, scan
from moegeom.results.reader import Results, open_results
from moegeom.router.load import load_routers
from moegeom.studies.check.document import document
from moegeom.studies.check.record import Gate
from moegeom.studies.faults.score import Fault
from tests.by_day import by_day
from tests.unit.check.conftest import GATE, Case
from tests.unit.document.conftest import HOSTILE, written_by_others
from tests.unit.document.pages import Page
from tests.unit.document.records import SAMPLE, sample_run

#: Anything, and often what one of the formats gives a meaning to.
_MEANINGFUL = (
    "<b> </details> &lt; | ` ``` **x** _x_ [a](b) ![a](b) \\ # - ~~x~~ :: : , % %0A ]]> \" '"
)
ANY_TEXT = st.lists(
    st.sampled_from([*_MEANINGFUL.split(), " ", "\n", "\r", "\x1b[0m", "\ud800"])
    | st.characters(exclude_categories=()),
    max_size=20,
).map("".join)


def rendered(name, verdict, run, **view) -> str:
    shown = View(**view)
    return render(document(Gate(verdict, run), shown), name, shown)


UNREADABLE = Finding("error", "MGI106", (), "model: scale of another kind.")


def test_every_report_is_whole_and_names_what_nobody_looked_at(
    of_others, hostile, warned, run, refused_run
):
    unread = Verdict((Outcome("MGI106", "storage", "error", "failed", "", (UNREADABLE,)),))
    for name in RENDERERS.names():
        text = rendered(name, *of_others(hostile))
        assert text.encode("utf-8").endswith(b"\n"), name
        assert not text.endswith("\n\n"), name
        assert ("expert weights" in rendered(name, warned, run)) == (name != "github"), name
        assert "scale of another kind" in rendered(name, unread, refused_run), name


def test_a_refusal_is_told_once_and_also_when_its_check_was_not_selected(refused_run):
    selected = Verdict((Outcome("MGI106", "storage", "error", "failed", "", (UNREADABLE,)),))
    for name in ("table", "md"):
        for verdict, where in (
            (selected, "MGI106 says why"),
            (Verdict(()), "none could be read. model:"),
        ):
            text = rendered(name, verdict, refused_run)
            assert where in text
            assert text.count("scale of another kind") == 1


def test_the_sentence_counts_every_check_once_and_says_when_warnings_fail(failed, strict):
    assert verdict_sentence(failed) == (
        "FAILED: 2 checks fine; 3 not (1 error, 1 warning, 1 note); 3 not judged (1 inconclusive, "
        "1 needs tokens, 1 needs a baseline); 1 accepted, 1 does not apply."
    )
    assert verdict_sentence(strict).endswith(" Warnings fail.")
    lacking = [
        Outcome(code, "load", "warning", "needs tokens in the baseline", "made without tokens")
        for code in ("MGB401", "MGB402")
    ]
    two = verdict_sentence(Verdict(tuple(lacking)))
    assert ": 0 checks fine; 0 not; 2 not judged (2 need a baseline made with tokens)." in two
    assert "(1 needs a baseline made with tokens)." in verdict_sentence(Verdict((lacking[0],)))


def of(severity: str, state: str) -> Outcome:
    found = (Finding(severity, "MGX1", (), "x"),) if state == "failed" else ()
    return Outcome("MGX1", "x", severity, state, findings=found)


#: An outcome beside one that passed makes each first word; those that make it false follow it.
_UNJUDGED = [of("warning", state) for state in ("needs tokens", "needs experts", "needs more")]
_NOTE, _WARNING, _ERROR = (of(severity, "failed") for severity in ("note", "warning", "error"))
_OPEN = of("warning", "inconclusive")
FIRST_WORDS = {
    "PASSED": ([of("error", "does not apply")], [*_UNJUDGED, _NOTE, _WARNING, _ERROR, _OPEN]),
    "PASSED IN PART": (_UNJUDGED, [_NOTE, _WARNING, _ERROR, _OPEN]),
    "NOTES": ([_NOTE], [_WARNING, _ERROR, _OPEN]),
    "WARNINGS": ([_WARNING, _NOTE], [_ERROR, _OPEN]),
    "INCONCLUSIVE": ([_OPEN, _WARNING], [_ERROR]),
    "FAILED": ([_ERROR, _OPEN], []),
}


@pytest.mark.parametrize("word", FIRST_WORDS)
def test_each_first_word_of_a_verdict_is_made_false_by_one_outcome_more(word):
    outcomes, others = FIRST_WORDS[word]
    fine = of("error", "passed")
    assert verdict_word(Verdict((fine, *outcomes))) == word
    for more in others:
        assert verdict_word(Verdict((fine, *outcomes, more))) != word


def test_layers_of_one_stack_are_ranges_and_routers_of_several_keep_their_names(run):
    for layers, text in {
        (): "checkpoint",
        (31,): "layer 31",
        (5, 3, 4, 9): "layers 3-5,9",
        (*range(3, 61),): "layers 3-60",
        (*range(4, 61, 2),): "layers 4,6,8,10,12,14,16,18 and 21 more",
    }.items():
        assert places([f"text/{layer}" for layer in layers], run) == text
    several = {**run, "routers": [*run["routers"], {"name": "mtp/61"}]}
    assert places(("text/3", "mtp/61"), several) == "text/3, mtp/61"
    assert places(("text/3",), several) == "text/3"
    many = tuple(router["name"] for router in several["routers"])
    assert places(many, several) == "all 59 routers"
    assert places(many[1:], several).endswith("text/11 and 50 more")


def test_printable_text_is_left_alone_and_other_text_is_written_out():
    assert printable({"a": ["naïve ✓", 1, None]}) == {"a": ["naïve ✓", 1, None]}
    assert printable(("\x1b[0m", "a\nb\xa0c", "\ud800", "\u202e")) == (
        "\\x1b[0m",
        "a b c",
        "\\ud800",
        "\\u202e",
    )


def test_only_commands_are_longer_than_the_screen_and_the_exit_code_stands_at_its_end(
    failed, warned, strict, run
):
    for verdict, width in itertools.product((failed, warned, strict), (76, 80, 100, 120)):
        lines = rendered("table", verdict, run, width=width).splitlines()
        long = [line for line in lines if len(line) > width]
        assert [line for line in long if not line.startswith("   next: moegeom")] == []
        assert [line for line in lines if line != line.rstrip()] == []
        (end,) = (line for line in lines if line.endswith(f"exit {verdict.exit_code}"))
        assert len(end) == width


def test_findings_come_worst_first_and_inconclusive_checks_after_them(failed, run):
    screen = rendered("table", failed, run, width=80)
    levels = re.findall(r"^(ERROR|WARN|NOTE|INCONCLUSIVE|ignored) +MG", screen, re.MULTILINE)
    assert levels == ["ERROR", "WARN", "NOTE", "INCONCLUSIVE", "ignored"]
    assert "INCONCLUSIVE MGN401  not known whether" in screen
    (finding, *_) = failed.findings  # its command is one line, however long
    assert f"   next: {finding.next_command}" in screen.splitlines()
    assert "\n   fix:  subtract 6.9 from every bias of the layer" in screen
    assert "\n   record  moegeom capture CKPT --text FILE --out REC (981 MB and one" in screen


def test_tokens_verify_the_rule_by_their_choices_alone(warned, run_on_tokens):
    def screen(**facts):
        trust = run_on_tokens["trust"] | facts
        return rendered("table", warned, {**run_on_tokens, "trust": trust}, width=120)

    assert "rule     verified: 99.9 % of the first recorded choices follow" in screen()
    assert "tokens   4,096 in 64 documents" in screen()
    assert "docs/recordings.md" not in screen()
    failed_a_test = screen(overridden=["rec: recorded from another checkpoint."])
    assert "rule     NOT verified: 99.9 %" in failed_a_test
    assert "1 failed test allowed: rec: recorded from another checkpoint." in failed_a_test
    no_choices = screen(share_reproduced=None)
    assert "rule     assumed from config (no recorded choices)." in no_choices


def test_colours_appear_only_when_asked_for_and_a_gate_that_judged_nothing_is_not_green(
    failed, run
):
    assert "\x1b[" not in rendered("table", failed, run)

    def colour_of_the_verdict(*outcomes):
        screen = rendered("table", Verdict(outcomes), run, colours=True)
        return re.findall(r"\x1b\[([0-9;]*)mVERDICT", screen)

    passed = Outcome("MGI101", "finite", "error", "passed")
    assert colour_of_the_verdict(passed) == ["1;32"]
    assert colour_of_the_verdict() == ["33"]


def test_json_is_strict_holds_every_check_and_gives_the_text_of_others_back(
    failed, run, of_others, hostile
):
    facts = {**run, "seconds": float("nan"), "largest": float("inf")}
    text = rendered("json", failed, facts)
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"not strict: {name}"))
    assert document["exit_code"] == 1
    absent = ("needs tokens in the baseline", "needs experts", "needs more", "needs routers")
    expected = {"passed": 2, "failed": 3, **dict.fromkeys(absent, 0)}
    assert document["checks"] == dict.fromkeys(STATES, 1) | expected
    assert document["findings"] == {"error": 1, "warning": 1, "note": 1}
    failing = [entry["code"] for entry in document["outcomes"] if entry["is_failing"]]
    assert failing == ["MGI104"]
    assert (document["run"]["seconds"], document["run"]["largest"]) == (None, "inf")
    assert document["outcomes"][4]["findings"][0]["routers"] == ["text/44"]
    of_names = json.loads(rendered("json", *of_others(hostile)))
    assert of_names["outcomes"][0]["findings"][0]["title"] == hostile


def page(verdict, run) -> Page:
    """What a Markdown renderer makes of it."""
    text = rendered("md", verdict, run)
    return Page(MarkdownIt("commonmark").enable("table").render(text))


def test_markdown_says_the_verdict_first_and_folds_a_table_of_all_checks_away(
    failed, strict, warned, run
):
    read = page(failed, run)
    assert [read.tags.count(tag) for tag in ("details", "summary", "table")] == [1, 1, 2]
    states = {row[0].strip(): row[2].strip() for row in read.rows if len(row) == 3}
    assert len(states) == len(failed.outcomes) + 1
    assert states["MGI104"] == "failed (error)"
    assert states["MGI121"] == "needs a baseline: no baseline"
    undecided = Verdict(failed.in_state("inconclusive"))
    words = {"FAILED": (failed, strict), "WARNINGS": (warned,), "INCONCLUSIVE": (undecided,)}
    for word, verdicts in words.items():
        for verdict in verdicts:
            line = rendered("md", verdict, run).splitlines()[2]
            assert line.startswith(f"- **VERDICT** {word}: ")
            assert line.endswith(f"(exit {verdict.exit_code})")


@pytest.fixture(scope="module")
def tame(of_others) -> list[str]:
    return page(*of_others("tame")).tags


@given(ANY_TEXT)
@example(HOSTILE)
def test_any_text_leaves_the_page_as_it_is(of_others, tame, text):
    # an empty name is no markup either, but it changes what is there
    text = f"x{text}x"
    read = page(*of_others(text))
    assert read.tags == tame
    code, title, state = (cell.split() for cell in [r for r in read.rows if len(r) == 3][2])
    words = printable(text).split()
    assert (code, title, state) == (["MGI106"], words, ["inconclusive:", *words])


def commands(text: str) -> list[tuple[str, str, str]]:
    """Level, title and message as the runner reads them."""
    read = []
    for line in re.split(r"\r\n|\r|\n", text.removesuffix("\n")):
        match = re.fullmatch(r"::(\w+) title=(.*?)::(.*)", line)
        assert match, line
        level, title, message = match.groups()
        assert "," not in title
        assert ":" not in title
        read.append((level, decoded(title), decoded(message)))
    return read


def decoded(text: str) -> str:
    codes = {"%3A": ":", "%2C": ",", "%0D": "\r", "%0A": "\n", "%25": "%"}
    return re.sub("%(3A|2C|0D|0A|25)", lambda match: codes[match[0]], text)


def levels_of(verdict, run) -> list[str]:
    return [level for level, *_ in commands(rendered("github", verdict, run))]


def test_each_finding_is_an_annotation_and_the_verdict_comes_last(failed, run):
    annotations = commands(rendered("github", failed, run))
    assert [(level, title) for level, title, _ in annotations] == [
        ("error", "MGI104 layer 44"),
        ("warning", "MGN112 layers 3-60"),
        ("notice", "MGN115 layers 3,5"),
        ("warning", "MGN401 inconclusive"),
        ("notice", "moegeom model@rev"),
    ]
    assert annotations[-1][2] == f"{verdict_sentence(failed)} exit 1"


def test_a_finding_is_an_error_exactly_when_it_fails_the_gate(failed, warned, strict, run):
    assert levels_of(warned, run) == ["warning", "notice", "notice"]
    assert levels_of(strict, run) == ["error", "notice", "notice"]
    # a profile took the error down to a warning
    lesser = replace(failed.outcomes[4], severity="warning")
    assert Verdict((lesser,)).exit_code == 0
    assert levels_of(Verdict((lesser,)), run) == ["warning", "notice"]
    # lesser findings of a check that fails
    mixed = tuple(replace(finding, code="MGI104") for finding in failed.findings)
    verdict = Verdict((replace(failed.outcomes[4], findings=mixed),))
    assert levels_of(verdict, run) == ["error", "warning", "notice", "notice"]


def test_percent_and_line_ends_are_what_the_runner_decodes(of_others, hostile):
    found = commands(rendered("github", *of_others(hostile)))
    text = printable(hostile)
    assert len(found) == 5
    assert found[0][2] == "\n".join(
        (text.strip(), text.strip(), f"fix: {text}".strip(), f"next: {text}".strip())
    )
    assert found[-1][1] == f"moegeom {text}"


@given(ANY_TEXT)
def test_any_text_makes_as_many_commands_as_there_are_things_to_say(of_others, text):
    assert levels_of(*of_others(text)) == ["error", "error", "notice", "warning", "notice"]


SCHEMA = xmlschema.XMLSchema(Path(__file__).parents[2] / "data/junit.xsd")


def junit(verdict, run) -> str:
    text = rendered("junit", verdict, run)
    SCHEMA.validate(text)
    return text


def cases_of(verdict, run):
    """What junitparser makes of it: test cases by code."""
    xml = JUnitXml.fromstring(junit(verdict, run).encode("utf-8"))
    return {case.name.split()[0]: case for suite in xml for case in suite}


def test_a_third_party_counts_what_the_verdict_counts_and_the_suites_state(
    failed, warned, strict, run
):
    def stated(part):
        return part.tests, part.failures, part.errors, part.skipped

    def counted(part):
        part.update_statistics()
        return stated(part)

    skipped = ("needs tokens", "needs a baseline", "does not apply", "ignored")
    for verdict in (failed, warned, strict):
        cases = cases_of(verdict, run)
        kinds = [type(result) for case in cases.values() for result in case.result]
        assert len(cases) == len(verdict.outcomes)
        assert kinds.count(Failure) == sum(map(verdict.fails, verdict.outcomes))
        assert kinds.count(Error) == len(verdict.in_state("inconclusive"))
        warned_of = [o for o in verdict.in_state("failed") if not verdict.fails(o)]
        unjudged = sum(len(verdict.in_state(state)) for state in skipped)
        assert kinds.count(Skipped) == len(warned_of) + unjudged
        xml = JUnitXml.fromstring(junit(verdict, run).encode("utf-8"))
        assert [stated(part) for part in (xml, *xml)] == [counted(part) for part in (xml, *xml)]


def test_each_area_of_codes_is_a_suite_and_others_are_still_reported(failed, run, refused_run):
    new = Outcome("MGX1", "of a later version", "error", "passed")
    cases = cases_of(Verdict((*failed.outcomes, new)), run)
    assert {code[:3]: case.classname for code, case in cases.items()} == {
        "MGI": "moegeom.integrity",
        "MGN": "moegeom.numerics",
        "MGG": "moegeom.geometry",
        "MGB": "moegeom.balance",
        "MGP": "moegeom.profile",
        "MGX": "moegeom.other",
    }
    assert cases["MGI104"].name == "MGI104 whether two experts share a router row"
    assert len(cases_of(failed, refused_run)) == len(failed.outcomes)  # read or not


def test_each_state_of_a_check_is_told_in_its_own_way(failed, run):
    cases = cases_of(failed, run)
    results = {
        code: (type(case.result[0]), case.result[0].type, case.result[0].message)
        for code, case in cases.items()
        if case.result
    }
    assert results == {
        "MGI104": (Failure, "error", "layer 44: experts 12 and 97 are the same row."),
        "MGN401": (Error, "inconclusive", "inconclusive: other version"),
        "MGB203": (Skipped, None, "needs tokens: none"),
        "MGI121": (Skipped, None, "needs a baseline: no baseline"),
        "MGP901": (Skipped, None, "does not apply: the profile has none"),
        "MGN112": (
            *(Skipped, None),
            "warning: layers 3-60: the selection bias does not survive a cast to bf16.",
        ),
        "MGN115": (Skipped, None, "note: layers 3,5: the biases have a common offset."),
        "MGG203": (Skipped, None, "ignored: known since step 900"),
    }
    text = cases["MGI104"].result[0].text
    assert "Bit-identical" in text
    assert "next: moegeom list routers" in text
    assert "layer 9: rows far from the median length." in cases["MGG203"].system_out


def test_several_findings_make_one_failure_and_text_that_xml_forbids_breaks_nothing(
    run, of_others, hostile
):
    (failure,) = cases_of(of_others("x")[0], run)["MGI105"].result
    assert failure.message == "layer 1: x (and 1 more)"
    assert failure.text.count("layer 1: x") == 2
    text = junit(*of_others(hostile))
    assert "<script" not in text
    assert "\\x1b[31m" in text
    (failure,) = cases_of(*of_others(hostile))["MGI105"].result
    assert "]]>" in failure.text
    assert "<script>alert(1)</script>" in failure.text


@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_any_text_makes_a_valid_document_that_a_file_can_hold(of_others, text):
    junit(*of_others(text)).encode("utf-8")


HOUSE = Path(moegeom.__file__).parent

#: Escape sequences, new lines, text that runs backwards, HTML, Markdown, commands of workflows.
NAME = (
    f"text/0/x\x1b]0;PWNED\x07\x1b[31m\r\n::error file=a::pwned ##[error]pwned %0A::error::pwned "
    f"\u202e\u2066\x9b31m <img src=x onerror=alert(1)> **pwned** {HOSTILE}"
)

#: Words that facts of a run may hold, by their key; everything else in it is hostile.
VOCABULARY = {
    *("stage", "fingerprint", "score", "stored_dtype", "bias_dtype", "group_fill", "trust"),
    *("severity", "variant", "population", "ties", "device"),
}


#: Packages with modules that tell records as documents.
TELLERS = (
    *("moegeom.studies", "moegeom.research", "moegeom.routing_cells"),
    *("moegeom.recorder", "moegeom.document"),
)


def documents() -> dict[str, Callable[..., Document]]:
    """Every function that returns a document, but for frames that others fill in, by where it is."""
    found = {}
    for package in map(importlib.import_module, TELLERS):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            file = HOUSE.parent.joinpath(*info.name.split(".")).with_suffix(".py")
            if info.ispkg or "-> Document:" not in file.read_text("utf-8"):
                continue
            module = importlib.import_module(info.name)
            for name, function in inspect.getmembers(module, inspect.isfunction):
                makes = inspect.get_annotations(function).get("return") == "Document"
                is_frame = "sections" in inspect.signature(function).parameters
                if makes and not is_frame and function.__module__ == info.name:
                    found[f"{info.name}.{name}"] = function
    return found


DOCUMENTS = documents()
JUDGES = ["moegeom.studies.check.document.document", "moegeom.studies.track.document.document"]

#: Widths, and whether all details are shown.
VIEWS = by_day(
    itertools.product([80, 140], [False, True]), {"page": (140, False), "details": (80, True)}
)


def kinds_of(form: str) -> list[str]:
    """Documents that a renderer shows."""
    return JUDGES if RENDERERS[form].of_verdicts else [*DOCUMENTS]


#: Values of plain types; a verdict has one check in each state.
PLAIN = {bool: True, int: 2, float: 0.25, Any: NAME, object: NAME, Path: Path(NAME)}
PLAIN |= {Verdict: written_by_others(NAME)[0], np.ndarray: np.full(2, 0.25)}

#: Fields that hold a word of a closed list although their type does not say so.
WORDS = {"road": "sweep", "device": "cpu", "CauseVerdict.cause": "inconclusive"}
WORDS |= {"RouterImbalance.cause": "rows", "Evening.meaning": "partly"}


def row() -> dict[str, Any]:
    """A row of results with every column of every metric; names are hostile, numbers numbers."""
    tables = [table for metric in METRICS.all() for table in metric.columns.values()]
    numbers = {c.name: 0.25 for table in tables for c in table if c.kind in ("float", "int")}
    names = {"router": NAME, "name": NAME, "reason": NAME, "text": NAME, "population": "all"}
    pairs = {"first": 1, "second": 2, "share": 0.25}
    return numbers | names | pairs | {"engine": NAME, "version": NAME, "variant": "as_stored"}


def hostile(value: Any, key: str = "") -> Any:
    """The same facts with every string that is no word of a closed list replaced."""
    if isinstance(value, str):
        return value if key in VOCABULARY else NAME
    if isinstance(value, collections.abc.Mapping):
        return {name: hostile(entry, name) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [hostile(entry, key) for entry in value]
    return value


def made(kind: Any, field: str = "") -> Any:
    """A value of a type: the first of a closed list, two of everything that there can be many of."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is str:
        return WORDS.get(field, NAME)
    if isinstance(kind, type) and kind in PLAIN:
        return PLAIN[kind]
    if kind is Results:  # its tables are shown by the report of a scan
        return Results(None, run(), {})
    if kind is RouterSet:  # arrays that fit together
        routers = load_routers(open_checkpoint(SAMPLE / "step_1500"))
        return dataclasses.replace(routers, checkpoint=NAME, family=NAME, family_text=NAME)
    if origin is typing.Literal:
        return args[0]
    if origin in (typing.Union, types.UnionType):
        return made(next(one for one in args if one is not type(None)), field)
    if origin is tuple:
        each = (args[0], args[0]) if args[1:] == (Ellipsis,) else args
        return tuple(made(one, field) for one in each)
    if origin in (list, collections.abc.Sequence, collections.abc.Iterable):
        return [made(args[0], field) if args else NAME] * 2
    if origin in (dict, collections.abc.Mapping):
        if field in ("run", "other") and (not args or args[1] is Any):
            return run() if field == "run" else run()["run_b"]
        if args and args[1] is Any:
            return row()
        keys = typing.get_args(args[0]) or [made(args[0])]  # of a closed list, or any
        return {key: made(args[1], field) for key in keys}
    if origin is np.ndarray:
        return PLAIN[origin]
    if hasattr(kind, "array_type"):  # of jaxtyping
        return np.full([2] * len(kind.dims), 0.25).astype(kind.dtypes[0])
    if dataclasses.is_dataclass(origin or kind) or hasattr(kind, "__struct_fields__"):
        return record(origin or kind)
    return made(args[0], field) if args else NAME


def record(kind: Any) -> Any:
    """A record of a type, every field of it made but for records of its own type, without end."""
    # an explanation names faults for its types alone
    hints = typing.get_type_hints(kind, localns={"Fault": Fault})
    names = getattr(kind, "__struct_fields__", ())
    names = names or [f.name for f in dataclasses.fields(kind) if f.init]
    names = [name for name in names if kind not in typing.get_args(hints[name])]
    words = {name: WORDS.get(f"{kind.__name__}.{name}") for name in names}
    return kind(**{name: word or made(hints[name], name) for name, word in words.items()})


def run() -> dict[str, Any]:
    """Facts of a run that compared with another run and another checkpoint, and added noise."""
    other = {"name": "", "engine": "", "stage": "ids", "num_tokens": 2, "num_matched": 2}
    against = {"name": "", "rule": "", "has_same_rule": False, "num_compared": 2}
    lists = {"equal": [""], "regained": [""], "unknown_gain": [""]}
    runs = {"run_b": other | {"notes": [""], "fits": []}, "checkpoint_b": against | lists}
    facts = {"noise": {"scale": 0.1}, "next_command": "moegeom explain"}
    return hostile(sample_run() | runs | facts)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    """Results of a checkpoint whose folder and tensors are named so that they do harm."""
    folder = tmp_path_factory.mktemp("hostile")
    name = re.sub(r"[/\x00\ud800]", "", NAME)[:80]
    model = write_checkpoint(folder / name, Case().model)
    tensors = load_file(model / "model.safetensors")
    for number in range(2):
        gate = f"{NAME.replace(chr(0xD800), '')}layers.{number}.mlp.gate.weight"
        tensors[gate] = np.zeros((4, 4), np.float32)
    tensors[GATE.format(1)][2] = 0.0  # something to find
    save_file(tensors, model / "model.safetensors")
    return open_results(scan(ScanRequest(str(model), out=folder / "out")))


@pytest.fixture(scope="module")
def shown(results) -> Callable[..., str]:
    """The text of a document of hostile records."""

    @functools.cache
    def arguments(kind: str) -> list[Any]:
        function = DOCUMENTS[kind]
        hints = typing.get_type_hints(function)
        names = [name for name in inspect.signature(function).parameters if name != "view"]
        return [results if hints[name] is Results else made(hints[name], name) for name in names]

    @functools.cache
    def text(kind: str, form: str, width: int = 80, detail: bool = True, **more: bool) -> str:
        view = View(width, detail=detail, **more)
        return render(DOCUMENTS[kind](*arguments(kind), view), form, view)

    return text


def test_every_function_that_makes_a_document_is_looked_at():
    """As many as the source has; frames take sections of others."""
    written = [
        f"{'.'.join(('moegeom', *file.relative_to(HOUSE).with_suffix('').parts))}.{name}"
        for file in HOUSE.rglob("*.py")
        if "moegeom.document.model import" in (text := file.read_text("utf-8"))
        for name in re.findall(
            r"^def (\w+)\((?![^)]*\*sections)[^)]*\) -> Document:", text, re.MULTILINE
        )
    ]
    assert sorted(DOCUMENTS) == sorted(written)
    assert {kind.rsplit(".", 1)[1] for kind in DOCUMENTS} >= {"document", "results_document"}
    assert {*JUDGES} < {*DOCUMENTS}


def is_clean(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize("form", RENDERERS.names())
def test_no_control_character_reaches_the_output_and_names_do(shown, form):
    offenders = [
        (kind, view)
        for kind in kinds_of(form)
        for view in VIEWS
        if not is_clean(text := shown(kind, form, *view)) or "pwned" not in text.lower()
    ]
    assert offenders == []


def test_with_colours_nothing_but_colours_is_sent(shown):
    def plain(kind: str) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", shown(kind, "table", 100, False, colours=True))

    assert [kind for kind in DOCUMENTS if not is_clean(plain(kind))] == []


def test_a_name_longer_than_the_screen_is_shown(shown):
    assert [kind for kind in DOCUMENTS if not shown(kind, "table", 40, False)] == []


@pytest.mark.parametrize("form", sorted({*RENDERERS.names()} - {"github"}))
def test_no_name_begins_a_command_of_a_workflow(shown, form):
    commands = r"^\s*::" if form == "json" else r"^\s*::|##\["
    texts = {kind: shown(kind, form) for kind in kinds_of(form)}
    assert [kind for kind in texts if re.search(commands, texts[kind], re.MULTILINE)] == []


def test_no_name_ends_a_command_of_ours(shown):
    ours = r"::(error|warning|notice) title=[^:]*::"
    for kind in kinds_of("github"):
        text = shown(kind, "github")
        # a line break that the runner would decode is ours, never one of a name
        assert "%0A::" not in text.replace("%250A", ""), kind
        assert [line for line in text.splitlines() if not re.match(ours, line)] == [], kind


def test_markdown_holds_no_markup_of_names(shown):
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for kind in kinds_of("md"):
        tokens = parser.parse(shown(kind, "md"))
        inner = [child for token in tokens for child in (token.children or ())]
        markup = [t.content for t in (*tokens, *inner) if t.type in ("html_block", "html_inline")]
        allowed = r"(</?(details|summary)>|[^<>])*"
        assert [content for content in markup if not re.fullmatch(allowed, content)] == [], kind
        assert not {t.type for t in inner} & {"link_open", "image", "s_open", "em_open"}, kind
        bold, depth = [], 0
        for token in inner:
            depth += {"strong_open": 1, "strong_close": -1}.get(token.type, 0)
            bold += [token.content] if depth and token.type == "text" else []
        assert "pwned" not in bold, kind


#: Tags and attributes of pages; what would run or load is none of them.
TAGS = {
    *"html head meta title style body h1 h2 section details summary p b br span code dl dt dd".split(),
    *"figure figcaption div a svg text path rect circle g image nav script".split(),
    *"table thead tbody tr th td".split(),
}
ATTRIBUTES = {
    *"lang charset http-equiv content name class id title href download viewbox role".split(),
    *"aria-label x y cx cy r width height d fill fill-opacity stroke-width stroke-linecap".split(),
    *"stroke-opacity transform text-anchor font-weight preserveaspectratio".split(),
    *"data-by data-layer data-links".split(),
}


def test_a_page_holds_no_tag_of_names(shown):
    pages = {kind: Page(shown(kind, "html")) for kind in kinds_of("html")}
    foreign = {
        kind: ({*page.tags} - TAGS, {*page.attributes} - ATTRIBUTES) for kind, page in pages.items()
    }
    assert {kind: names for kind, names in foreign.items() if names != (set(), set())} == {}


def test_json_holds_the_names_as_they_are_and_junit_is_xml(shown):
    for kind in kinds_of("json"):
        assert "pwned" in json.dumps(json.loads(shown(kind, "json")), ensure_ascii=False), kind
    for kind in kinds_of("junit"):
        ET.fromstring(shown(kind, "junit"))


def test_neither_documents_nor_renderers_raise():
    files = {Path(sys.modules[one.__module__].__file__) for one in DOCUMENTS.values()}
    files |= set((HOUSE / "document/renderers").glob("*.py"))
    assert len(files) > 10
    assert [p.name for p in files if re.search(r"^\s+raise ", p.read_text("utf-8"), re.M)] == []
