"""Reports of a verdict say what it holds, whatever the files of others are called."""

from __future__ import annotations

import html.parser
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from moegeom.core.finding import STATES, Finding, Outcome, Verdict
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.document.untrusted import printable
from moegeom.document.verdict_text import places, verdict_sentence
from moegeom.studies.check.document import document
from moegeom.studies.check.record import Gate

NAMES = ("failed", "warned", "strict")
WIDTHS = (76, 80, 100, 120)

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


# ----------------------------------------------------------------------------------- in all reports


@pytest.mark.parametrize("name", RENDERERS.names())
def test_every_report_ends_with_one_newline_and_a_file_can_hold_it(name, of_others, hostile):
    text = rendered(name, *of_others(hostile))
    assert text.encode("utf-8").endswith(b"\n")
    assert not text.endswith("\n\n")


@pytest.mark.parametrize("name", sorted(set(RENDERERS.names()) - {"json"}))
def test_no_report_passes_control_characters_on(name, of_others, hostile):
    text = rendered(name, *of_others(hostile))
    assert [c for c in text if not c.isprintable() and c != "\n"] == []


@pytest.mark.parametrize("name", RENDERERS.names())
def test_every_report_names_what_nobody_looked_at(name, warned, run):
    text = rendered(name, warned, run)
    assert ("expert weights" in text) == (name != "github")


@pytest.mark.parametrize("name", RENDERERS.names())
def test_routers_that_cannot_be_read_are_reported(name, refused_run):
    finding = Finding("error", "MGI106", (), "model: scale of another kind.")
    outcome = Outcome("MGI106", "the storage is not known", "error", "failed", "", (finding,))
    assert "scale of another kind" in rendered(name, Verdict((outcome,)), refused_run)


@pytest.mark.parametrize("name", ["table", "md"])
def test_a_refusal_is_told_once_and_also_when_its_check_was_not_selected(name, refused_run):
    finding = Finding("error", "MGI106", (), "model: scale of another kind.")
    told = Verdict((Outcome("MGI106", "storage", "error", "failed", "", (finding,)),))
    for verdict, where in ((told, "MGI106 says why"), (Verdict(()), "none could be read. model:")):
        text = rendered(name, verdict, refused_run)
        assert where in text
        assert text.count("scale of another kind") == 1


def test_the_sentence_counts_every_check_once(failed):
    assert verdict_sentence(failed) == (
        "FAILED: 1 error, 1 warning, 1 note; 2 checks passed, 1 inconclusive, 1 needs tokens, "
        "1 needs a baseline, 1 does not apply, 1 ignored."
    )


def test_what_lacks_in_a_baseline_that_was_given_is_counted_as_that():
    lacking = [
        Outcome(code, "load", "warning", "needs tokens in the baseline", "made without tokens")
        for code in ("MGB401", "MGB402")
    ]
    assert "; 0 checks passed, 2 need a baseline made with tokens." in verdict_sentence(
        Verdict(tuple(lacking))
    )
    assert "1 needs a baseline made with tokens." in verdict_sentence(Verdict((lacking[0],)))


def test_the_sentence_says_when_warnings_fail(strict):
    assert verdict_sentence(strict).endswith(" Warnings fail.")


@pytest.mark.parametrize(
    ("routers", "text"),
    [
        ((), "checkpoint"),
        (("text/31",), "layer 31"),
        (("text/5", "text/3", "text/4", "text/9"), "layers 3-5,9"),
        (tuple(f"text/{n}" for n in range(3, 61)), "layers 3-60"),
        (tuple(f"text/{n}" for n in range(4, 61, 2)), "layers 4,6,8,10,12,14,16,18 and 21 more"),
    ],
)
def test_layers_of_one_stack_are_ranges(run, routers, text):
    assert places(routers, run) == text


def test_routers_of_several_stacks_keep_their_names(run):
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


# ------------------------------------------------------------------------------------------ table


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_only_commands_are_longer_than_the_screen(request, run, name, width):
    text = rendered("table", request.getfixturevalue(name), run, width=width)
    long = [line for line in text.splitlines() if len(line) > width]
    assert [line for line in long if not line.startswith("   next: moegeom")] == []
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_exit_code_stands_at_the_right_end(failed, run, width):
    (line,) = re.findall(r"^.*exit 1$", rendered("table", failed, run, width=width), re.MULTILINE)
    assert len(line) == width


def test_the_screen_is_the_one_to_aim_at(warned, run):
    screen = rendered("table", warned, run, width=100)
    assert screen == (
        "VERDICT  PASSED: 0 errors, 1 warning, 1 note; 2 checks passed, 1 needs tokens, 1 needs a baseline, 1\n"
        "         does not apply, 1 ignored.                                                           exit 0\n"
        "\n"
        "model@rev  deepseek_v3: sigmoid + selection bias, best 4 of 8 groups, top 8 of 256. Boundaries are\n"
        "         non-linear.\n"
        "routers  58 of 58 expected. Read 226 MB of 688 GB in 9.0 s. Stored bf16.\n"
        "rule     assumed from config (no recorded choices yet; a capture of 256 tokens would verify it)\n"
        "\n"
        "WARN  MGN112  layers 3-60: the selection bias does not survive a cast to bf16.\n"
        "   256 distinct values become 9 to 14: they spread 0.31 around 6.9, where bf16 steps by 0.031.\n"
        "   Harmless as stored (fp32); most tokens would be mis-routed if an engine casts it.\n"
        "   fix:  subtract 6.9 from every bias of the layer: 212 values survive. Proof that no choice\n"
        "         changes: scores are compared with scores; a common shift cancels.\n"
        "   next: moegeom check --explain MGN112\n"
        "NOTE  MGN115  layers 3,5: the biases have a common offset.\n"
        "\n"
        "ignored MGG203  layer 9: a row is much longer than its layer's: known since step 900\n"
        "\n"
        "Detectable at 90 % power: a load CV that changed by 0.031; an expert 0.29 fair shares above.\n"
        "Not checked: load, margins, dead experts (no tokens); expert weights.\n"
        "   record  moegeom capture CKPT --text FILE --out REC (981 MB and one forward pass over 16,384\n"
        "           tokens; from a loop of your own or an engine: docs/capture.md), then add --tokens REC.\n"
    )


def test_findings_come_worst_first_and_inconclusive_checks_after_them(failed, run):
    screen = rendered("table", failed, run)
    found = re.findall(r"^(ERROR|WARN|NOTE|INCONCLUSIVE|ignored) +MG", screen, re.MULTILINE)
    assert found == ["ERROR", "WARN", "NOTE", "INCONCLUSIVE", "ignored"]
    assert "INCONCLUSIVE MGN401  not known whether" in screen


def test_a_command_is_one_line_however_long(failed, run):
    (finding, *_) = failed.findings
    screen = rendered("table", failed, run, width=80)
    assert f"   next: {finding.next_command}" in screen.splitlines()


def test_with_tokens_the_rule_is_verified_and_nothing_is_asked_for(warned, run_on_tokens):
    screen = rendered("table", warned, run_on_tokens, width=120)
    assert "rule     verified: 99.9 % of the first recorded choices follow" in screen
    assert "tokens   4,096 in 64 documents" in screen
    assert "docs/recordings.md" not in screen


def test_tokens_that_failed_a_test_verify_nothing(warned, run_on_tokens):
    trust = {**run_on_tokens["trust"], "overridden": ["rec: recorded from another checkpoint."]}
    screen = rendered("table", warned, {**run_on_tokens, "trust": trust}, width=120)
    assert "rule     NOT verified: 99.9 %" in screen
    assert "1 failed test allowed: rec: recorded from another checkpoint." in screen


def test_tokens_without_recorded_choices_leave_the_rule_assumed(warned, run_on_tokens):
    trust = {**run_on_tokens["trust"], "share_reproduced": None}
    screen = rendered("table", warned, {**run_on_tokens, "trust": trust})
    assert "rule     assumed from config (no recorded choices)." in screen


def test_colour_codes_appear_only_when_asked_for(failed, run):
    assert "\x1b[" not in rendered("table", failed, run)
    assert "\x1b[" in rendered("table", failed, run, colours=True)


def test_a_gate_that_judged_nothing_is_not_green(run):
    def colour_of_the_verdict(*outcomes):
        screen = rendered("table", Verdict(outcomes), run, colours=True)
        return re.findall(r"\x1b\[([0-9;]*)mVERDICT", screen)

    passed = Outcome("MGI101", "finite", "error", "passed")
    assert colour_of_the_verdict(passed) == ["1;32"]
    assert colour_of_the_verdict() == ["33"]


# -------------------------------------------------------------------------------------------- json


def test_json_is_strict_and_holds_every_check(failed, run):
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


def test_json_gives_the_text_of_others_back_unchanged(of_others, hostile):
    document = json.loads(rendered("json", *of_others(hostile)))
    assert document["outcomes"][0]["findings"][0]["title"] == hostile


# ---------------------------------------------------------------------------------------------- md


class Page(html.parser.HTMLParser):
    """Names of all tags, and the text of the cells of each row."""

    def __init__(self):
        super().__init__()
        self.tags, self.rows = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def page(verdict, run) -> Page:
    """What a Markdown renderer makes of it."""
    read = Page()
    read.feed(MarkdownIt("commonmark").enable("table").render(rendered("md", verdict, run)))
    return read


def test_markdown_folds_a_table_of_all_checks_away(failed, run):
    read = page(failed, run)
    assert [read.tags.count(tag) for tag in ("details", "summary", "table")] == [1, 1, 1]
    states = {code.strip(): state.strip() for code, _, state in read.rows}
    assert len(states) == len(failed.outcomes) + 1
    assert states["MGI104"] == "failed (error)"
    assert states["MGI121"] == "needs a baseline: no baseline"


def test_markdown_says_the_verdict_first(failed, strict, warned, run):
    firsts = [rendered("md", v, run).splitlines()[2] for v in (failed, strict, warned)]
    words = ["FAILED", "FAILED", "PASSED"]
    assert [line.split(":")[0] for line in firsts] == [f"- **VERDICT** {w}" for w in words]
    assert [line[-8:] for line in firsts] == [f"(exit {code})" for code in (1, 1, 0)]


def test_an_inconclusive_gate_does_not_read_as_passed(failed, run):
    undecided = Verdict(failed.in_state("inconclusive"))
    assert rendered("md", undecided, run).splitlines()[2].startswith("- **VERDICT** INCONCLUSIVE: ")


@pytest.fixture(scope="module")
def tame(of_others) -> list[str]:
    return page(*of_others("tame")).tags


def assert_it_is_only_text(made, text, tame):
    read = page(*made)
    assert read.tags == tame
    code, title, state = read.rows[2]
    told = (title.split(), state.split())
    assert (code.strip(), *told) == (
        "MGI106",
        printable(text).split(),
        ["inconclusive:", *printable(text).split()],
    )


def test_names_of_others_bring_no_markup_into_a_page(of_others, hostile, tame):
    assert_it_is_only_text(of_others(hostile), hostile, tame)


@given(ANY_TEXT)
def test_any_text_leaves_the_page_as_it_is(of_others, tame, text):
    # an empty name is no markup either, but it changes what is there
    assert_it_is_only_text(of_others(f"x{text}x"), f"x{text}x", tame)


# ------------------------------------------------------------------------------------------ github


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


def test_each_finding_is_an_annotation_and_the_verdict_comes_last(failed, run):
    levels = [(level, title) for level, title, _ in commands(rendered("github", failed, run))]
    assert levels == [
        ("error", "MGI104 layer 44"),
        ("warning", "MGN112 layers 3-60"),
        ("notice", "MGN115 layers 3,5"),
        ("warning", "MGN401 inconclusive"),
        ("notice", "moegeom model@rev"),
    ]


def test_a_finding_is_an_error_exactly_when_it_fails_the_gate(warned, strict, run):
    def levels(verdict):
        return [level for level, *_ in commands(rendered("github", verdict, run))]

    assert levels(warned) == ["warning", "notice", "notice"]
    assert levels(strict) == ["error", "notice", "notice"]


def test_an_error_that_a_profile_took_down_is_a_warning(run):
    finding = Finding("error", "MGI104", ("text/44",), "the same row.")
    verdict = Verdict((Outcome("MGI104", "duplicates", "warning", "failed", "", (finding,)),))
    assert verdict.exit_code == 0
    assert [level for level, *_ in commands(rendered("github", verdict, run))] == [
        "warning",
        "notice",
    ]


def test_a_lesser_finding_of_a_failing_check_is_no_error(failed, run):
    (duplicate, warning, note) = failed.findings
    mixed = Outcome("MGI104", "duplicates", "error", "failed", "", (duplicate, warning, note))
    found = [replace(finding, code="MGI104") for finding in mixed.findings]
    verdict = Verdict((replace(mixed, findings=tuple(found)),))
    levels = [level for level, *_ in commands(rendered("github", verdict, run))]
    assert levels == ["error", "warning", "notice", "notice"]


def test_the_last_notice_holds_the_sentence_and_the_exit_code(failed, run):
    *_, (_, _, message) = commands(rendered("github", failed, run))
    assert message == f"{verdict_sentence(failed)} exit 1"


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
    levels = [level for level, *_ in commands(rendered("github", *of_others(text)))]
    assert levels == ["error", "error", "notice", "warning", "notice"]
