"""Reports of a verdict say what it holds, whatever the files of others are called."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import xmlschema
from hypothesis import example, given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped
from markdown_it import MarkdownIt

from moegeom.core.finding import STATES, Finding, Outcome, Verdict
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.document.untrusted import printable
from moegeom.document.verdict_text import places, verdict_sentence
from moegeom.studies.check.document import document
from moegeom.studies.check.record import Gate
from tests.unit.document.conftest import HOSTILE
from tests.unit.document.pages import Page

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
        "FAILED: 1 error, 1 warning, 1 note; 2 checks passed, 1 inconclusive, 1 needs tokens, "
        "1 needs a baseline, 1 does not apply, 1 ignored."
    )
    assert verdict_sentence(strict).endswith(" Warnings fail.")
    lacking = [
        Outcome(code, "load", "warning", "needs tokens in the baseline", "made without tokens")
        for code in ("MGB401", "MGB402")
    ]
    two = verdict_sentence(Verdict(tuple(lacking)))
    assert "; 0 checks passed, 2 need a baseline made with tokens." in two
    assert "1 needs a baseline made with tokens." in verdict_sentence(Verdict((lacking[0],)))


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
    expected = {"passed": 2, "failed": 3, "needs tokens in the baseline": 0, "needs experts": 0}
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
    assert [read.tags.count(tag) for tag in ("details", "summary", "table")] == [1, 1, 1]
    states = {code.strip(): state.strip() for code, _, state in read.rows}
    assert len(states) == len(failed.outcomes) + 1
    assert states["MGI104"] == "failed (error)"
    assert states["MGI121"] == "needs a baseline: no baseline"
    undecided = Verdict(failed.in_state("inconclusive"))
    words = {"FAILED": (failed, strict), "PASSED": (warned,), "INCONCLUSIVE": (undecided,)}
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
    code, title, state = (cell.split() for cell in read.rows[2])
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
        assert kinds.count(Skipped) == sum(len(verdict.in_state(state)) for state in skipped)
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
    assert cases["MGI104"].name == "MGI104 two experts share a router row"
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
        "MGG203": (Skipped, None, "ignored: known since step 900"),
    }
    text = cases["MGI104"].result[0].text
    assert "Bit-identical" in text
    assert "next: moegeom routers" in text
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
