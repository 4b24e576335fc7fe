"""A page says what its words mean: once in the glossary, shown wherever a word is said."""

from __future__ import annotations

import re
import runpy
from html import unescape
from pathlib import Path

import pytest

from moegeom.document.glossary import WORDS, pattern, word_of
from moegeom.document.model import Document, Fact, Note, Table, View
from moegeom.document.render import render

ROOT = Path(__file__).resolve().parents[3]


def page(*blocks) -> str:
    return render(Document("scan", "m", [blocks], dict), "html", View())


def test_a_word_leads_to_its_sentence_and_is_listed_at_the_end():
    text = page(Note("Two margins, a margin and the MaxVio of runs/load; no fliptop, no overload."))
    shown = re.findall(r'<a class="word" href="#([\w-]+)" title="([^"]*)">([^<]*)</a>', text)
    assert [(said, unescape(means)) for _, means, said in shown] == [
        ("margins", WORDS["margin"]),
        ("MaxVio", WORDS["MaxVio"]),
    ]
    assert re.findall(r'<dt id="([\w-]+)">', text) == ["word-margin", "word-maxvio"]
    assert [target for target, _, _ in shown] == ["word-margin", "word-maxvio"]


def test_a_page_without_such_words_has_no_list_of_them():
    assert "Words" not in page(Note("Nothing of the kind."))


def test_a_heading_leads_to_its_word_and_a_cell_does_not():
    text = page(Table([["margin"]], [["margin"]]))
    assert text.count('title="') == 1


def test_what_a_word_stands_in_is_escaped_as_ever():
    text = page(Fact("VERDICT", '<script>margin</script> & "load"', "good"))
    assert "<script" not in text
    assert "&lt;script&gt;<a " in text


@pytest.mark.parametrize("said", ["flip", "Flips", "flipped", "flipping", "CV", "near-ties", "rms"])
def test_a_word_is_found_as_sentences_say_it(said):
    found = pattern().search(f"({said}), and more")
    assert found is not None
    assert found[0] == said
    assert word_of(said) in WORDS


def test_the_longest_word_is_taken():
    found = pattern().search("the load entropy")
    assert found is not None
    assert word_of(found[0]) == "load entropy"


def test_a_sentence_of_the_glossary_is_one_and_short():
    assert [w for w, text in WORDS.items() if not text.endswith(".") or len(text) > 140] == []
    assert [*WORDS] == sorted(WORDS, key=str.lower)


def test_the_page_of_the_glossary_is_as_written():
    made = runpy.run_path(str(ROOT / "docs/refresh_glossary.py"))["glossary_page"]()
    assert (ROOT / "docs/glossary.md").read_text("utf-8") == made
