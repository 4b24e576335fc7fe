"""A screen fits one page and counts what it leaves out; --detail and pages leave out nothing."""

import dataclasses
import re

import pytest

from moegeom.core.finding import MOST_FAIR_SHARES, Finding
from moegeom.document.excerpts import in_part
from moegeom.document.model import Document, Excerpt, Note, Table, Title, View
from moegeom.document.place import span
from moegeom.document.render import render
from moegeom.document.renderers.table import PAGE
from moegeom.document.results import layer_excerpt
from moegeom.document.sparkline import MARK, bar
from moegeom.document.summary import Summary
from moegeom.document.verdict_blocks import findings_excerpt

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
