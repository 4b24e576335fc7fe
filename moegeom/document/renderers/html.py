"""A document as one page of HTML: complete, with its figures, and nothing to load.

Figures lead to rows of tables by plain links, texts on hovering are titles, and the numbers behind
a figure are a link that holds them: so everything can be read without a script. The one that is
there picks, sorts, filters and copies; the policy of the page knows it by its hash, and forbids
others and every request.
"""

from __future__ import annotations

import csv
import io
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from itertools import count, zip_longest

from moegeom.core.documents import shipped_text
from moegeom.core.text import number_of
from moegeom.document.chart import Chart, Panel
from moegeom.document.model import (
    Block,
    Command,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Headline,
    Note,
    Problem,
    Table,
    Title,
    View,
)
from moegeom.document.render import Renderer, heads_of
from moegeom.document.svg import STYLE, panel_svg
from moegeom.document.untrusted import printable

# ----------------------------------------------------------------------------------------- glossary
#: Word to sentence. What a column of a table holds: ``moegeom list metrics``.
WORDS: Mapping[str, str] = {
    "95 % interval": "Where the figure would lie for other documents like these, in 95 of 100 "
    "cases.",
    "boundary distance": "Length of the smallest change of a router's input that changes its "
    "expert set.",
    "co-activation": "Two experts chosen for the same token.",
    "CV": "Standard deviation over mean, of the loads where nothing else is said: 0 where all are "
    "equal.",
    "dead": "An expert that no token chooses.",
    "effective rank": "How many directions the rows of a router span, counted by their weight.",
    "expert set": "The experts that a router chooses for a token, in any order.",
    "fair share": "The tokens that each expert would get if all got the same.",
    "fingerprint": "A hash of the routers' weights, by which a recording is known to belong to a "
    "checkpoint.",
    "flip": "Another expert set for the same token: under another arithmetic, in another run, or "
    "by another checkpoint.",
    "Gini": "Gini coefficient of the loads: 0 where all are equal, near 1 where one expert gets "
    "everything.",
    "Gram score": "1 less the rms cosine between the rows of a router: 1 where all are "
    "orthogonal, 0 where all point one way.",
    "heuristic": "A limit from experience: how often it is passed by chance is not known.",
    "load": "How many tokens choose an expert; over the mean, 1 is an even share.",
    "load entropy": "Entropy of the loads over that of even loads: 1 where all are equal.",
    "margin": "The selection score of the last expert chosen less that of the first one left out.",
    "MaxVio": "The largest load over the mean load, less 1: 0 where all are equal.",
    "mean resultant length": "Length of the mean of the router inputs, each of length 1: 1 where "
    "all point one way.",
    "near-tie": "A token so near to a boundary that rounding or noise can flip it.",
    "participation ratio": "How many directions the router inputs spread over, counted by their "
    "variance.",
    "provably unchanged": "No rounding that the arithmetic allows can flip these tokens, for the "
    "inputs that were recorded.",
    "random router": "A router of the same shape and row lengths, with random directions, on the "
    "same tokens: what chance alone gives.",
    "rms": "Root of the mean square.",
    "router input": "What a router multiplies with its rows: hidden states behind the norm.",
    "routing entropy": "Entropy of a token's scores over log(experts): 0 where one expert has all, "
    "1 where all are equal.",
    "routing weight": "What the output of a chosen expert is multiplied with.",
    "selection bias": "Added to the scores for the choice of experts only, not to their weights.",
    "selection score": "What experts are ranked by: the largest k are chosen.",
    "underused": "An expert with far fewer tokens than its fair share.",
}

#: Endings that a word may have in a sentence.
_ENDINGS = {"flip": "(?:s|ped|ping)?"}


@cache
def pattern() -> re.Pattern[str]:
    """Matches any word of the glossary in a sentence, the longest where several fit."""
    longest = sorted(WORDS, key=lambda word: -len(word))
    forms = (f"{re.escape(word)}{_ENDINGS.get(word, 's?')}" for word in longest)
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(forms)})(?![\w/-])", re.IGNORECASE)


@cache
def word_of(text: str) -> str:
    """The word of the glossary that :func:`pattern` found."""
    return max((word for word in WORDS if text.lower().startswith(word.lower())), key=len)


@cache
def _files() -> tuple[str, str, str]:
    """What a page looks like, what it does, and its policy: nothing may be loaded and no script
    but that one may run, whatever a name smuggles in.
    """
    style, script = (shipped_text("moegeom.document.renderers", "page", s) for s in (".css", ".js"))
    digest = b64encode(sha256(script.encode()).digest()).decode()
    rules = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return style, script, f"{rules}; script-src 'sha256-{digest}'"


#: Looks of what was judged: a bar of their colour stands beside it.
_JUDGED = ("good", "warning", "error")


def render(document: Document, view: View) -> str:
    """The page; every text in it is escaped."""
    del view
    style, script, policy = _files()
    heading = escape(f"moegeom {document.kind}: {document.name}")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{heading}</title><style>{style}{STYLE}</style></head><body><h1>{heading}</h1>"
    )
    bodies = ("".join(_blocks([_untitled(b, document.name) for b in s])) for s in document.sections)
    first, *others = [f"<section>{text}</section>" for text in bodies if text] or [""]
    numbers = count(1)
    rest = _TABLE.sub(lambda match: f'{match[0]} id="table-{next(numbers)}"', "\n".join(others))
    end = f"<script>{script}</script></body></html>"
    return "\n".join((head, first, _contents(rest), rest, _words(first + rest), end, ""))


#: What of a page has a place in its contents, as it is written below: figures and tables.
_TABLE = re.compile('<div class="scroll"')
_ENTRY = re.compile(r'id="([\w-]+)"(?:><h2>(.*?)</h2>| data-by="(.*?)")')


def _contents(body: str) -> str:
    """Links to the figures and tables of a page with several."""
    parts = [(title or f"table by {by}", name) for name, title, by in _ENTRY.findall(body)]
    entries = dict(reversed(parts))  # of tables alike, the first
    links = (f'<a href="#{name}">{title}</a>' for title, name in reversed(entries.items()))
    return f"<nav>{' '.join(links)}</nav>" if len(entries) > 1 else ""


def _untitled(block: Block, name: str) -> Block:
    """A title without the name that is the heading of the page."""
    return Title("", block.text) if isinstance(block, Title) and block.name == name else block


def _text(text: str) -> str:
    """A sentence; each word of the glossary, the first time, leads to what it means."""
    seen: set[str] = set()

    def linked(match: re.Match[str]) -> str:
        word = word_of(match[0])
        if word in seen:
            return match[0]
        seen.add(word)
        means = escape(WORDS[word])
        return f'<a class="word" href="#{_anchor(word)}" title="{means}">{match[0]}</a>'

    return pattern().sub(linked, escape(text))


def _anchor(word: str) -> str:
    return f"word-{re.sub('[^a-z0-9]+', '-', word.lower())}"


def _words(body: str) -> str:
    """Definitions of the glossary words on the page, for print and for touch screens."""
    words = [word for word in WORDS if f'href="#{_anchor(word)}"' in body]
    if not words:
        return ""
    rows = (f'<dt id="{_anchor(w)}">{escape(w)}</dt><dd>{escape(WORDS[w])}</dd>' for w in words)
    return f'<section><h2>Words</h2><dl class="words">{"".join(rows)}</dl></section>'


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    facts: list[Fact] = []
    for block in blocks:
        if isinstance(block, Fact):
            facts.append(block)
            continue
        yield from _facts(facts)
        facts = []
        yield from _block(block)
    yield from _facts(facts)


def _facts(facts: Sequence[Fact]) -> Iterator[str]:
    if not facts:
        return
    look = facts[0].look
    yield f'<dl class="card {look}">' if look in _JUDGED else "<dl>"
    for fact in facts:
        right = f'<span class="right">{escape(fact.right)}</span>' if fact.right else ""
        yield f'<dt class="{fact.look}">{escape(fact.label)}</dt>'
        yield f"<dd>{_text(fact.text)}{right}</dd>"
    yield "</dl>"


def _block(block: Block) -> Iterator[str]:
    match block:
        case Title(name, text):
            yield f"<h2>{escape(name)}</h2>" if name else ""
            yield f"<p>{_text(text)}</p>" if text else ""
        case Problem(finding, places):
            look = {"note": "dim"}.get(finding.severity, finding.severity)
            head = f"{finding.severity.upper()} {finding.code}"
            yield f'<p><b class="{look}">{escape(head)}</b> {_text(f"{places}: {finding.title}")}'
            yield f"<br>{_text(finding.detail)}" if finding.detail else ""
            yield f"<br>fix: {escape(finding.fix)}" if finding.fix else ""
            typed = finding.next_command
            yield f"<br>next: {_command(typed)}</p>" if typed else "</p>"
        case Table():
            yield from _table(block)
        case Note(text, look):
            yield f'<p class="{look}">{_text(text)}</p>'
        case Command(label, text):
            yield f'<p><span class="dim">{escape(label)}</span> {_command(text)}</p>'
        case Excerpt(page=page, summary=summary):
            yield f"<details><summary>{escape(summary)}</summary>" if summary else ""
            yield from _blocks(page)
            yield "</details>" if summary else ""
        case Headline(numbers):
            cells = (
                f'<div class="{look}"><b>{escape(number)}</b> <span>{_text(text)}</span></div>'
                for number, text, look in numbers
            )
            yield f'<div class="numbers">{"".join(cells)}</div>' if numbers else ""
        case Gallery(figures):
            for figure in figures():
                yield from _figure(printable(figure))


def _command(text: str) -> str:
    """Something to type: folded between its words, so that no option is torn at its dashes."""
    words = "".join(f"<span>{escape(word)}</span> " for word in text.split(" "))
    return f'<code class="typed">{words.rstrip(" ")}</code>'


def _figure(figure: Chart) -> Iterator[str]:
    """Heading, caption, panels, and the numbers behind them."""
    yield f'<figure id="{escape(figure.name)}"><h2>{escape(figure.title)}</h2><div class="panels">'
    yield from (_panel(panel, figure.alt) for panel in figure.panels)
    if figure.more:
        yield f"<details><summary>{number_of(len(figure.more), 'more layer')}</summary>"
        yield '<div class="panels">'
        yield from (_panel(panel, figure.alt) for panel in figure.more)
        yield "</div></details>"
    numbers = b64encode(comma_separated(figure).encode()).decode()
    link = f'href="data:text/csv;base64,{numbers}" download="{escape(figure.name)}.csv"'
    yield f"</div><figcaption>{_text(figure.shows)} "
    yield f"<b>It does not show:</b> {_text(figure.shows_not)} <a {link}>Numbers as CSV</a>"
    sentence = figure.alt[:1].upper() + figure.alt[1:]
    yield f'<p class="dim">{_text(sentence)}</p></figcaption></figure>'


def _panel(panel: Panel, alt: str) -> str:
    kind = ' class="wide"' if panel.fills_page else ""
    layer = _of_layer(panel.title.removeprefix("layer ").partition(",")[0])
    return f"<div{kind}{layer}>{panel_svg(panel, alt)}</div>"


#: A layer as a screen calls it: ``3``, or with its stack and slot.
_LAYER = re.compile(r"(?:[\w.-]+/)?\d+(?:/[\w.-]+)?")


def _of_layer(name: str) -> str:
    """What tells the script of which layer a row or a panel is; nothing where it is of none."""
    return f' data-layer="{name}"' if _LAYER.fullmatch(name) else ""


def comma_separated(figure: Chart) -> str:
    """The numbers behind a figure, each as the table holds it; nothing for what is not known.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([name for name, _ in figure.columns])
    columns = [[_cell(value) for value in values] for _, values in figure.columns]
    rows.writerows(zip(*columns, strict=True))
    return text.getvalue()


#: What a spreadsheet takes for a formula, numbers aside.
_FORMULA = re.compile(r"[=+@-](?![\d. e+-]*$)")


def _cell(value: str | float | None) -> str | float:
    if isinstance(value, str):
        return f"'{value}" if _FORMULA.match(value) else value
    return "" if value is None else value


def _table(table: Table) -> Iterator[str]:
    heads = heads_of(table)

    def row(tag: str, cells: Sequence[str], look: str = "", anchor: str = "") -> str:
        markup = _text if tag == "th" else escape
        content = "".join(
            f"<{tag}{' class=left' if place in table.left else ''}>{markup(cell.strip())}</{tag}>"
            for place, cell in enumerate(cells)
        )
        name = f' id="{escape(anchor)}"' if anchor else ""
        layer = _of_layer(cells[0].strip()) if tag == "td" and heads[0] == "layer" else ""
        return f'<tr class="{look}"{name}{layer}>{content}</tr>'

    yield f'<div class="scroll" data-by="{escape(heads[0] or "row")}">'
    yield f"<table><thead>{row('th', heads)}</thead><tbody>"
    anchored = zip_longest(table.rows, table.row_looks, table.anchors, fillvalue="")
    yield from (row("td", cells, look, anchor) for cells, look, anchor in anchored)
    yield "</tbody></table></div>"
    if table.rest:
        yield f'<p class="dim">{escape(table.rest)}</p>'


RENDERER = Renderer("html", render)
