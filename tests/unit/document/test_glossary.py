"""A page says what its words mean: once in the glossary, shown wherever a word is said."""

import re
import runpy
from html import unescape
from pathlib import Path

from moegeom.document.model import Document, Fact, Note, Table, View
from moegeom.document.render import render
from moegeom.document.renderers.html import WORDS, pattern, word_of

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
    assert "<script" not in text
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
