"""Prose states the sizes of samples that the code takes: a number is a promise."""

import re
from pathlib import Path

from moegeom.core.tokens import TILE
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.engine.trust import FIRST_TOKENS
from moegeom.kernels.reductions.samples import NUM_IDS, NUM_INPUTS
from moegeom.kernels.reductions.sketches import DOCUMENTS
from moegeom.measure.passes import _TYPICAL_TOKENS, FLIPPED, SAMPLED
from moegeom.metrics import METRICS

DOCS = Path(__file__).parents[2] / "docs"

#: "a sample of at most 4096 tokens", "about 2048 tokens", "at most 4096 documents".
STATED = re.compile(
    r"(?:at most|about) ([\d,]{4,})\.?(?: (documents))?(?! (?:bytes|boundaries|vertices))"
)

#: What a sample of a few thousand can be, by what its metric needs; pages of no metric: any.
ALL = {SMALL_SAMPLE_TOKENS, NUM_INPUTS, DOCUMENTS, NUM_IDS, SAMPLED}


def stated(text: str) -> set[int]:
    """Numbers of tokens or documents that sentences about samples state."""
    found = set()
    for sentence in re.split(r"(?<=[.;])\s", re.sub(r"\s+", " ", text)):
        if re.search(r"\bsample|\bSampled|documents\b", sentence):
            found |= {int(n.replace(",", "")) for n, _ in STATED.findall(sentence)}
    return found


def size_of(metric) -> set[int]:
    """The sizes that a metric may state."""
    if "input_sample" in metric.needs:
        return {NUM_INPUTS}
    if "token_sample" in metric.needs:
        return {NUM_IDS}
    if "document_counts" in metric.needs:
        return {DOCUMENTS}
    if {"jumps", "flip_jumps"} & set(metric.needs):
        return {SAMPLED, FLIPPED}
    return {SMALL_SAMPLE_TOKENS}


def texts_of(name: str) -> list[str]:
    """What a metric says of itself: its docstring, its columns, its page."""
    metric = METRICS[name]
    columns = [column.text for table in metric.columns.values() for column in table]
    page = (DOCS / "metrics" / f"{name}.md").read_text("utf-8")
    return [metric.page, metric.text, *columns, page]


def test_every_metric_states_the_size_of_its_own_sample() -> None:
    wrong = {
        (name, text): stated(text)
        for name in METRICS.names()
        for text in texts_of(name)
        if not stated(text) <= size_of(METRICS[name])
    }
    assert wrong == {}


def test_the_formulas_state_the_size_of_the_metric_that_uses_them() -> None:
    sections = re.split(r"^### `(\w+)`$", (DOCS / "formulas.md").read_text("utf-8"), flags=re.M)
    text_of = dict(zip(sections[1::2], sections[2::2], strict=True))
    seen = 0
    for metric in METRICS.all():
        formulas = {c.formula for table in metric.columns.values() for c in table if c.formula}
        for formula in formulas & set(text_of):
            numbers = stated(text_of[formula])
            seen += len(numbers)
            assert numbers <= size_of(metric) | {SMALL_SAMPLE_TOKENS}, (metric.name, formula)
    assert seen >= 5


def test_no_other_size_of_a_sample_stands_on_a_page() -> None:
    found = {page.name: stated(page.read_text("utf-8")) - ALL for page in DOCS.glob("*.md")}
    assert {page: numbers for page, numbers in found.items() if numbers} == {}


def test_pages_that_speak_of_first_tokens_mean_those_of_the_code() -> None:
    results = (DOCS / "results.md").read_text("utf-8")
    assert _TYPICAL_TOKENS == TILE
    assert f"the median of the first {_TYPICAL_TOKENS} tokens" in results
    recordings = (DOCS / "recordings.md").read_text("utf-8")
    assert f"the first {FIRST_TOKENS} tokens of each router" in recordings


def test_a_wrong_number_is_seen() -> None:
    assert stated("Ties, on a sample of at most 8192 tokens, and more.") == {8192}
    assert stated("On a sample of\nabout 2,049 tokens.") == {2049}
    assert stated("Longer than 8192 tokens.") == set()
