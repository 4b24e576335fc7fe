"""A title is told once, whatever its length."""

from __future__ import annotations

import pytest

from moegeom.document.model import Document, Title, View
from moegeom.document.render import render


@pytest.mark.parametrize("number", [0, 1, 3, 40])
def test_the_words_of_a_title_stand_on_the_screen_once(number):
    words = [f"word{i}" for i in range(number)]
    title = Title(" ".join(words), "and what it is")
    shown = Document("x", "x", [[title]], dict)
    for width in (40, 80):
        assert render(shown, "table", View(width)).split() == [*words, *title.text.split()]
    assert render(Document("x", "x", [[Title("")]], dict), "table") == "\n"
