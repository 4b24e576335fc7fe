"""A number before a noun goes through ``number_of``: nobody reads "1 rows are"."""

from __future__ import annotations

import ast
import re

import pytest

from moegeom.core.text import all_of, number_of, these
from tests.architecture.sources import SOURCES, parsed

#: Where sentences are made that a person reads.
FOLDERS = ("document", "checks", "studies", "engine", "tokens", "recorder", "router")

NOUNS = (
    "rows|experts|tokens|layers|routers|checkpoints|documents|requests|disagreements|figures|pairs|"
    "cells|boundaries|facets|lines|sets|ways|vertices|draws|tensors|steps|comparisons|ranks|files|ids|shifts|pieces|pixels|slots|batches"
)
BEHIND = re.compile(rf" (?:more |different |other |recorded |outlier |such )?(?:{NOUNS})\b")

#: A part of a whole: "1 of 1 rows" says how many there are, not how many it was.
BEFORE = re.compile(r"(?:\bof|\bat most|\bthan| x| to) $")

#: All of a whole, which ``all_of`` and ``these`` say: nobody reads "all 1 experts", whosever count
#: it is.
WHOLE = re.compile(r"\b(?:all|these) $")

#: Sizes of a router are no counts of findings; constants, text and what was compared with 1 are
#: known where they stand.
KNOWN = re.compile(
    r"num_experts|top_k|^(?:experts|cells|boundaries|k|verb|part)$|^[A-Z_]+$|_text\(|number\(|percent\("
    r"|_listed\(|sorted\(|name|where|spread|join\(|number_of\(|shape\[|mean_|^2 \* tokens$|^sample$|^_count"
)


def bare_counts(source: str) -> list[str]:
    """Numbers in f-strings before a noun in the plural."""
    tree = parsed(source)
    # both branches of a condition on 1 are written out
    is_judged = {
        id(node)
        for choice in ast.walk(tree)
        if isinstance(choice, ast.IfExp | ast.If)
        and re.search(r"[=!>] ?1\b", ast.unparse(choice.test))
        for node in ast.walk(choice)
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr) or id(node) in is_judged:
            continue
        parts = [ast.Constant(""), *node.values]
        for before, number, behind in zip(parts, parts[1:], parts[2:], strict=False):
            if not isinstance(number, ast.FormattedValue) or not isinstance(behind, ast.Constant):
                continue
            lead = before.value if isinstance(before, ast.Constant) else ""
            text = ast.unparse(number.value)
            is_known = BEFORE.search(lead) or KNOWN.search(text)
            if BEHIND.match(behind.value) and (WHOLE.search(lead) or not is_known):
                found.append(f"{number.lineno}: {text}{behind.value[:30]}")
    return found


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ('f"{len(rows)} rows are"', True),
        ('f"and {rest:,} more layers"', True),
        ('f"{a} of {b} rows are"', False),
        ("f\"{number_of(len(rows), 'row is', 'rows are')} zero\"", False),
        ('f"all {num_experts} experts are chosen"', True),
        ("f\"{all_of(num_experts, 'expert is', 'experts are')} chosen\"", False),
        ('"1 row" if n == 1 else f"{n} rows"', False),
        ('f"{router.num_experts} experts"', False),
    ],
)
def test_the_search_for_bare_counts_finds_them(line, is_found):
    assert bool(bare_counts(line)) == is_found


def test_every_count_agrees_with_its_noun():
    found = [
        f"{file}:{line}"
        for file, source in SOURCES.items()
        if file.startswith(tuple(f"moegeom/{folder}/" for folder in FOLDERS))
        for line in bare_counts(source)
    ]
    assert found == []


def test_one_is_one_and_thousands_are_separated():
    assert [number_of(n, "row") for n in (0, 1, 2, 2048)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "2,048 rows",
    ]
    assert [all_of(n, "row") for n in (1, 2048)] == ["the row", "all 2,048 rows"]
    assert [these(n, "row is", "rows are") for n in (1, 2)] == ["this row is", "these 2 rows are"]
    assert [number_of(n, "batch is", "batches are") for n in (1, 2)] == [
        "1 batch is",
        "2 batches are",
    ]
