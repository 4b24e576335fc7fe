"""Writes docs/glossary.md: what the words of reports mean, as pages show it.

python docs/refresh_glossary.py
"""

from __future__ import annotations

from pathlib import Path

from moegeom.document.renderers.html import WORDS

_HEAD = """# Words

What the words of screens and pages mean; a page shows the sentence where the pointer rests on a \
dotted word, and lists the words that it says at its end. What each column of a table holds: \
`moegeom list metrics WORD`. Formulas: [formulas.md](formulas.md).

| word | means |
|---|---|
"""


def glossary_page() -> str:
    """The page as it has to be."""
    return _HEAD + "".join(f"| {word} | {text} |\n" for word, text in WORDS.items())


if __name__ == "__main__":
    Path(__file__).with_name("glossary.md").write_text(glossary_page(), encoding="utf-8")
