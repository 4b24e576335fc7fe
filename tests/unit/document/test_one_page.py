"""A screen fits one page and counts what it leaves out; --detail and pages leave out nothing. A
header says no more than was recorded, and a page says what its words mean, once in the glossary.
"""

import dataclasses
import re
import runpy
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from moegeom.core.finding import MOST_FAIR_SHARES, Finding
from moegeom.document.excerpts import in_part
from moegeom.document.header import (
    gate_rule_line,
    routers_line,
    rule_line,
    skipped,
    tokens_line,
    trust_line,
)
from moegeom.document.model import Document, Excerpt, Fact, Note, Table, Title, View
from moegeom.document.place import layers_without_router, span
from moegeom.document.render import render
from moegeom.document.renderers.html import WORDS, pattern, word_of
from moegeom.document.renderers.table import PAGE
from moegeom.document.results import layer_excerpt
from moegeom.document.rule_words import assumed, rule_brief, rule_facts, rule_status, rule_trust
from moegeom.document.sparkline import MARK, bar
from moegeom.document.summary import Summary
from moegeom.document.verdict_blocks import findings_excerpt
from moegeom.results.run_file import LEAST_SHARE, is_verified_here


def summary_of_run(run: dict) -> Summary:
    return Summary(run, [], [], [], [])


def on_stage(
    run: dict, stage: str, exact: tuple[float | None, ...] = (), size_bytes: int = 10
) -> Summary:
    tokens = {**run["tokens"], "stage": stage, "size_bytes": size_bytes}
    affine = [{**router, "is_affine": True} for router in run["routers"][: len(exact)]]
    layers = [
        {"router": router["name"], "distance_exact_share": share}
        for router, share in zip(affine, exact, strict=True)
    ]
    return replace(summary_of_run({**run, "tokens": tokens, "routers": affine}), layers=layers)


EXACT = "Boundaries are linear: distances are exact."
BOUNDS = "distances are exact for at least 99.99 % of tokens, lower bounds for others."
NO_LOGITS = "Boundaries are linear, but there are no logits, hence no distances."


def test_distances_are_called_exact_only_where_all_of_them_are(run_on_tokens):
    for stage, exact, sentence in [
        ("router_input", (1.0, 1.0), EXACT),
        ("router_input", (None, None), EXACT),
        ("top_logits", (1.0, 1.0), EXACT),
        ("top_logits", (1.0, 0.999996), BOUNDS),
        ("ids", (None,), NO_LOGITS),
        ("counts", (None,), NO_LOGITS),
    ]:
        assert rule_line(on_stage(run_on_tokens, stage, exact)).endswith(sentence)


def test_folded_tokens_are_not_called_recorded_and_devices_are_named(run_on_tokens):
    stored = on_stage(run_on_tokens, "router_input")
    assert "recorded from this checkpoint" in tokens_line(stored)
    folded = tokens_line(on_stage(run_on_tokens, "router_input", size_bytes=0))
    assert "taken from the running model, nothing stored. 9.1 s" in folded
    assert "recorded" not in folded and "0 B" not in folded
    devices = {"kind": "cuda", "names": ["NVIDIA H200", "NVIDIA A"]}
    on_device = replace(stored, run=stored.run | {"device": devices})
    assert " on NVIDIA H200, NVIDIA A" in tokens_line(on_device)
    for facts in ({}, {"device": {"kind": "cpu", "names": []}}):
        assert " on " not in tokens_line(replace(stored, run=stored.run | facts))


def test_outlier_tokens_are_said_to_be_in_the_layers_that_have_tokens(run_on_tokens):
    rows = [{"router": f"text/{n}", "num_tokens": 512 if n == 3 else None} for n in range(48)]
    summary = replace(on_stage(run_on_tokens, "router_input"), layers=rows, num_outliers=1)
    assert "1 outlier token in 1 layer (" in tokens_line(summary)


def test_failed_tests_and_skipped_tensors_are_counted_in_english(run_on_tokens):
    for number, tests, tensors in [
        (1, "1 failed test allowed: b", "Skipped 1 tensor, a: why"),
        (2, "2 failed tests allowed: b", "Skipped 2 tensors, first a: why"),
    ]:
        trust = {**run_on_tokens["trust"], "overridden": ["b"] * number}
        left_out = [{"tensor": "a", "reason": "why"}] * number
        checkpoint = {**run_on_tokens["checkpoint"], "skipped": left_out}
        facts = summary_of_run({**run_on_tokens, "trust": trust, "checkpoint": checkpoint})
        assert tests in trust_line(facts)
        assert skipped(facts) == [tensors]


def test_layers_that_were_asked_for_in_vain_are_named(run):
    for layers, sentence in {
        None: "",
        "1": "",
        "1,3": "",
        "1,7": "layer 7 was asked for and has no router",
        "0-9": "layers 0,2,4-9 were asked for and have no router",
    }.items():
        assert layers_without_router(layers, ["text/1", "vision/3/second"]) == sentence
    line = routers_line(summary_of_run({**run, "layers_requested": "3-61"}))
    assert line.endswith(" Layer 61 was asked for and has no router.")
    assert "asked" not in routers_line(summary_of_run(run))


SENTENCE = "softmax, top 2 of 12"


def router(top_k: int, **facts) -> dict:
    plain = {"score": "softmax", "has_selection_bias": False, "num_groups": 1, "num_experts": 12}
    return {"top_k": top_k, **plain, **facts}


#: What another step of a router is called.
STEPS = {
    "sqrt-softplus": {"score": "sqrt_softplus"},
    "logits": {"score": "identity"},
    "softmax + selection bias": {"has_selection_bias": True},
    "softmax, groups": {"num_groups": 4},
}


def test_routers_that_choose_alike_share_a_sentence_and_others_are_counted(run):
    assert rule_brief(SENTENCE, []) == rule_brief(SENTENCE, [router(2)] * 3) == SENTENCE
    several = [router(2), router(3), router(4), router(3)]
    counted = "softmax, top 3 of 12 (2 of 4 routers), 2 of 12 (1), 4 of 12 (1)"
    assert rule_brief(SENTENCE, several) == counted
    for step, facts in STEPS.items():
        told_apart = f"softmax, top 2 of 12 (2 of 3 routers); {step}, top 2 of 12 (1)"
        assert rule_brief(SENTENCE, [router(2), router(2), router(2, **facts)]) == told_apart
    odd = {**run["routers"][1], "top_k": 4}
    changed = {**run, "routers": [*run["routers"][:-1], odd]}
    assert run["checkpoint"]["rule"] in rule_line(summary_of_run(run))
    assert "top 8 of 256 (57 of 58 routers), 4 of 256 (1)" in rule_line(summary_of_run(changed))


def run_of(share: float | None, overridden=()) -> dict:
    """The facts of a run on tokens whose first recorded choices were reproduced at this share."""
    return {
        "checkpoint": {"name": "model"},
        "tokens": {"stage": "router_input"},
        "trust": {"share_reproduced": share, "overridden": list(overridden), "rms_median": None},
    }


#: Runs, and whether their choices verify the rule.
VERIFIED = [
    (run_of(1.0), True),
    (run_of(LEAST_SHARE), True),
    (run_of(LEAST_SHARE - 1e-9), False),
    (run_of(0.5), False),
    (run_of(1.0, ["rec: recorded from another checkpoint."]), False),
    (run_of(None), False),
    ({"checkpoint": {"name": "model"}, "tokens": None, "trust": None}, False),
]


def test_a_rule_is_verified_by_the_choices_of_the_run_or_assumed():
    for run, is_verified in VERIFIED:
        trust = "verified by recorded choices" if is_verified else assumed()
        assert rule_trust(run) == trust
        assert is_verified_here(run) == is_verified
        assert rule_status(run) == ("verified" if is_verified else "assumed")
        if run["trust"] and run["trust"]["share_reproduced"] is not None:
            assert ("NOT verified" in gate_rule_line(run)) != is_verified
        elif run["trust"]:
            assert trust in gate_rule_line(run)
            assert trust in trust_line(summary_of_run(run))


def test_an_assumed_rule_says_what_it_was_taken_from(refused_run):
    described = {"checkpoint": {"family": "described"}, "tokens": None, "trust": None}
    assert rule_trust(described) == "assumed from options"
    of_a_file = {**described, "checkpoint": {"family": "mine", "rule_origin": "the family file"}}
    assert rule_trust(of_a_file) == "assumed from the family file"
    # routers that could not be read have none
    assert rule_facts(refused_run) == {"rule_status": None, "rule_trust": None}


def test_what_stands_at_the_right_has_two_columns_of_its_own_or_a_line():
    """A word of 10 columns behind a label of 9 and the text, 40 columns wide."""
    for text, num_lines in {"a" * 19: 1, "a" * 20: 2, "a" * 29: 2}.items():
        fact = Fact("label", text, right="exit 44444", indent=9)
        screen = render(Document("x", "x", [[fact]], dict), "table", View(40))
        lines = screen.rstrip("\n").split("\n")
        assert len(lines[-1]) == 40
        assert len(lines) == num_lines, text


RUN = {"routers": [{"name": f"text/{layer}"} for layer in range(48)]}


def page_of(*sections, **view) -> list[str]:
    document = Document("check", "model", sections, dict)
    return render(document, "table", View(80, **view)).splitlines()


def finding(n: int) -> Finding:
    evidence = f"evidence {n}. " * 9
    return Finding("warning", f"MGB{n}", (f"text/{n}",), f"finding {n}.", evidence, f"next {n}")


def findings(number: int) -> list[Finding]:
    return [finding(n) for n in range(number)]


@pytest.mark.parametrize("number", [1, 5, 7, 13, 48])
def test_findings_fit_a_page_and_what_is_left_out_is_counted(number):
    screen = page_of(findings_excerpt(findings(number), RUN, False), [Note("the end")])
    assert len(screen) <= PAGE
    text, titles = " ".join(screen), sum(line.startswith("WARN ") for line in screen)
    whole = {*re.findall(r"evidence (\d+)\.", text)}
    hidden = int((re.findall(r"(\d+) more finding", text) or [0])[0])
    brief = int((re.findall(r"evidence of (\d+)", text) or [0])[0])
    assert (titles + hidden, len(whole) + brief) == (number, titles)
    assert screen[-1] == "the end"


def test_with_detail_and_in_markdown_every_finding_is_whole():
    screen = page_of(findings_excerpt(findings(48), RUN, True))
    assert sum("evidence" in line for line in screen) >= 48
    document = Document("check", "model", [findings_excerpt(findings(48), RUN, False)], dict)
    text = render(document, "md")
    assert all(f"evidence {n}." in text and f"next {n}`" in text for n in range(48))
    assert "--detail" not in text


def test_the_longest_part_is_cut_first_but_what_stands_aside_before_it():
    short = in_part([Note(f"short {n}") for n in range(6)], "note", detail=False)
    long = in_part([Note(f"long {n}") for n in range(60)], "line", detail=False)
    screen = page_of([short], [long])
    assert sum(line.startswith("short") for line in screen) == 6
    assert sum(line.startswith("long") for line in screen) == 12
    assert screen[-1] == "Not shown: 48 more lines: --detail"
    # a command that a terminal folds counts as its lines
    assert len(page_of([in_part([Note("x" * 160)] * 30, "note", detail=False)])) == 13
    aside = in_part([Note(f"aside {n}") for n in range(6)], "note", detail=False, is_aside=True)
    long = in_part([Note(f"long {n}") for n in range(36)], "line", detail=False)
    screen = page_of([aside], [long])
    assert screen[:3] == ["aside 0", "aside 1", "Not shown: 4 more notes: --detail"]
    assert sum(line.startswith("long") for line in screen) == 36


def summary(loads: list[float], found: list[Finding] = ()) -> Summary:
    rows = [
        {"router": f"text/{n}", "max_vio_global": load - 1.0, "load_cv_ddof0": 0.1, "num_dead": 0}
        for n, load in enumerate(loads)
    ]
    return Summary(RUN, rows, [], found, [])


def table_of(excerpt: Excerpt) -> Table:
    (table,) = (block for block in excerpt.screen if isinstance(block, Table))
    return table


def lines_of(excerpt: Excerpt) -> list[list[str]]:
    return [[*row] for row in table_of(excerpt).rows]


def test_layers_that_follow_each_other_and_print_alike_are_one_line():
    lines = lines_of(layer_excerpt(summary([1.5] * 7 + [2.5] + [1.5] * 40), detail=False))
    assert [line[0] for line in lines] == ["0-6 (7)", "7", "8-47 (40)", "median", "p5-p95"]
    every = lines_of(layer_excerpt(summary([1.5] * 48), detail=True))
    assert [line[0] for line in every[:48]] == [str(n) for n in range(48)]


def test_a_long_table_shows_the_worst_layers_and_those_of_findings_and_counts_the_others():
    loads = [1.0 + 0.1 * ((7 * n) % 48) for n in range(48)]
    excerpt = layer_excerpt(summary(loads), detail=False)
    shown = [int(line[0]) for line in lines_of(excerpt)[:-2]]
    worst = sorted(range(48), key=lambda n: -loads[n])[: len(shown)]
    assert shown == sorted(worst)
    assert table_of(excerpt).rest == f"and {48 - len(shown)} more layers: --detail"
    every = tuple(f"text/{n}" for n in range(40))
    many = dataclasses.replace(finding(0), severity="error", routers=every)
    late = dataclasses.replace(finding(0), routers=("text/47",))
    loads = [2.0 + 0.1 * n for n in range(46)] + [1.1, 1.2]
    lines = lines_of(layer_excerpt(summary(loads, [many, late]), detail=False))
    assert {"0", "47"} <= {line[0] for line in lines}


def test_a_median_says_of_how_many_layers_it_is():
    loads = summary([1.5] * 48)
    assert lines_of(layer_excerpt(loads, detail=False))[-2][-1] == "48 layers"
    unmeasured = [dict.fromkeys(row) | {"router": row["router"]} for row in loads.layers[1:]]
    few = replace(loads, layers=[loads.layers[0], *unmeasured])
    assert lines_of(layer_excerpt(few, detail=False))[-2][-1] == "1 of 48 layers"


def test_a_page_has_a_line_for_every_layer_and_no_bars():
    excerpt = layer_excerpt(summary([1.5] * 48), detail=False)
    (table,) = excerpt.page
    assert len(table.rows) == 50
    assert len(set(table.anchors)) == 48
    assert not any(MARK in cell for row in table.rows for cell in row)


def test_a_bar_ends_at_the_limit_and_marks_the_fair_share():
    drawn = {
        1.0: "▇▇▇│      ",
        1.2: "▇▇▇│▇     ",
        3.0: "▇▇▇│▇▇▇▇▇▇",
        3.5: "▇▇▇│▇▇▇▇▇>",
        40.0: "▇▇▇│▇▇▇▇▇>",
        0.01: "▇  │      ",
        0.0: "   │      ",
    }
    assert {value: bar(value, 3.0) for value in drawn} == drawn
    balanced, collapsed = (
        lines_of(layer_excerpt(summary([load] * 3), detail=False))[0][1] for load in (1.2, 3.5)
    )
    assert balanced.count("▇") < collapsed.count("▇")
    assert f"{MOST_FAIR_SHARES:g}x" in layer_excerpt(summary([1.2]), detail=False).screen[1].text
    # without block characters
    screen = page_of([layer_excerpt(summary([1.2]), False)], is_ascii=True)
    (line,) = (line for line in screen if "#" in line)
    assert "###|#" in line
    assert line.isascii()


def test_a_span_is_of_layers_of_one_stack():
    assert span(["text/3", "text/4", "text/5"], "3") == "3-5"
    assert span(["text/3", "text/4"], "text/3") == "text/3-4"
    assert span(["text/3", "vision/4"], "text/3") == "text/3 to vision/4"
    assert span(["text/3/a", "text/3/b"], "text/3/a") == "text/3/a to text/3/b"


def screen_of(block, width: int) -> str:
    return render(Document("x", "x", [[block]], dict), "table", View(width))


def test_a_heading_runs_on_over_every_empty_one_and_widens_no_column_that_has_room():
    heads = [("", "all of these three", "", "", "one"), ("", "a", "b", "c", "d")]
    row = ("row", "10000", "20000", "30000", "4")
    assert screen_of(Table(heads, [row]), 80).splitlines() == [
        "     all of these three   one",
        "         a      b      c    d",
        "row  10000  20000  30000    4",
    ]


def test_the_words_of_a_title_stand_on_the_screen_once():
    for number in (0, 1, 3, 40):
        words = [f"word{i}" for i in range(number)]
        title = Title(" ".join(words), "and what it is")
        for width in (40, 80):
            assert screen_of(title, width).split() == [*words, *title.text.split()]
    assert screen_of(Title(""), 100) == "\n"


ROOT = Path(__file__).resolve().parents[3]


def page(*blocks) -> str:
    return render(Document("scan", "m", [blocks], dict), "html", View())


def test_a_word_leads_to_its_sentence_and_is_listed_at_the_end():
    text = page(Note("Two margins, a margin and the MaxVio of runs/load; no fliptop, no overload."))
    links = re.findall(r'<a class="word" href="#([\w-]+)" title="([^"]*)">([^<]*)</a>', text)
    assert [(word, unescape(means)) for _, means, word in links] == [
        ("margins", WORDS["margin"]),
        ("MaxVio", WORDS["MaxVio"]),
    ]
    assert re.findall(r'<dt id="([\w-]+)">', text) == ["word-margin", "word-maxvio"]
    assert [target for target, _, _ in links] == ["word-margin", "word-maxvio"]


def test_a_heading_leads_to_its_word_and_a_cell_or_another_word_does_not():
    assert page(Table([["margin"]], [["margin"]])).count('title="') == 1
    assert "Words" not in page(Note("Nothing of the kind."))


def test_what_a_word_stands_in_is_escaped_as_ever():
    text = page(Fact("VERDICT", '<script>margin</script> & "load"', "good"))
    assert text.count("<script") == 1
    assert "&lt;script&gt;<a " in text


def test_a_word_is_found_as_sentences_say_it_and_the_longest_is_taken():
    for word in ("flip", "Flips", "flipped", "flipping", "CV", "near-ties", "rms", "load entropy"):
        match = pattern().search(f"(the {word}), and more")
        assert match is not None and match[0] == word
        assert word_of(word) in WORDS
    assert word_of("load entropy") == "load entropy"


def test_a_sentence_of_the_glossary_is_one_and_short():
    assert [w for w, text in WORDS.items() if not text.endswith(".") or len(text) > 140] == []
    assert [*WORDS] == sorted(WORDS, key=str.lower)


def test_the_page_of_the_glossary_is_as_written():
    made = runpy.run_path(str(ROOT / "docs/refresh_glossary.py"))["glossary_page"]()
    assert (ROOT / "docs/glossary.md").read_text("utf-8") == made
