"""What a boundary report says of variants that were measured."""

from __future__ import annotations

import re
from typing import Any

import pytest

from moegeom.core.errors import InternalError
from moegeom.document.model import View
from moegeom.document.render import render
from moegeom.document.summary import Summary
from moegeom.pipeline import refuse_disproved
from moegeom.results.reader import Results
from moegeom.studies.boundary.document import document
from moegeom.studies.boundary.record import BoundaryReport, VariantFlips
from tests.unit.document.records import sample_run


def row(number: int, share: float, **facts: Any) -> dict[str, Any]:
    known = {"router": f"text/{number}", "num_tokens": 1000, "weight_moved_mean": 0.5 * share}
    known |= {"flipped_share": share, "proved_share": 0.9, "num_disproved": 0}
    known |= {"flipped_share_least": share, "flipped_share_most": share}
    return known | {"predicted_flipped_share": 0.77} | facts


def variant(name: str, share: float, **facts: Any) -> VariantFlips:
    rows = [row(number, share, **facts) for number in range(3)]
    engine = {"engine": "none", "version": ""}
    pairs = [{"router": "text/1", "first": 3, "second": 5, "share": 0.5}]
    return VariantFlips(name, engine, rows, [], pairs, {})


def shown(found: BoundaryReport, form: str, **view: Any) -> str:
    return render(document(found, View(**view)), form, View(**view))


def exposure(*variants: VariantFlips) -> BoundaryReport:
    layers = [{"router": f"text/{number}"} for number in range(3)]
    run = sample_run()
    return BoundaryReport(Summary(run, layers, [], [], []), variants, Results(None, run, {}))


@pytest.mark.parametrize("form", ["table", "md", "json", "html"])
def test_tokens_that_flipped_against_a_proof_end_a_scan_and_not_a_report(form):
    with pytest.raises(InternalError, match="3 tokens flipped that were proved to stay"):
        refuse_disproved([{"router": "text/0", "variant": "bf16", "num_disproved": 3}])
    refuse_disproved([{"router": "text/0", "variant": "bf16", "num_disproved": 0}, {}])
    text = shown(exposure(variant("bf16", 0.1, num_disproved=3)), form, width=200)
    text = re.sub(r"</?a[^>]*>", "", text)  # words that lead to what they mean
    assert "bf16: 9 tokens flipped that were proved to stay: a mistake of moegeom" in text


def test_a_screen_has_details_of_the_worst_variant_and_a_page_of_all():
    found = exposure(variant("bf16", 0.1), variant("int4", 0.2), variant("tf32", 0.0))
    screen, every, page = (
        re.findall(r"swaps\W+(\w+)", text)
        for text in (
            shown(found, "table"),
            shown(found, "table", detail=True),
            shown(found, "md"),
        )
    )
    assert screen == ["int4"]
    assert every == page == ["bf16", "int4"]


def test_a_page_says_what_noise_predicts_and_a_screen_has_no_room_for_it():
    found = exposure(variant("bf16", 0.1))
    assert "77.0 %" in shown(found, "md")
    assert "77.0 %" not in shown(found, "table", width=200)


def test_a_narrow_screen_says_in_a_sentence_what_a_wide_one_has_in_a_row():
    found = exposure(variant("bf16", 0.1))
    narrow, wide = (shown(found, "table", width=width) for width in (60, 100))
    assert "worst layer" in wide
    assert "worst layer" not in narrow
    assert re.search(r"^    bf16 +10.0 % of the choices flip", narrow, re.MULTILINE)
    assert max(map(len, narrow.splitlines())) <= 60
