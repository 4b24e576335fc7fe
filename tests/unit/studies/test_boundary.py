"""What a boundary report says of variants that were measured, and noise between two recordings."""

import dataclasses
import functools
import json
import re
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import moegeom as mg
from moegeom.core.errors import InternalError, NonFiniteError, RecordingError
from moegeom.core.router import Norm
from moegeom.core.tokens import TokenColumns
from moegeom.document.summary import Summary
from moegeom.pipeline import refuse_disproved
from moegeom.results.reader import Results
from moegeom.studies.boundary.document import document, near_ties
from moegeom.studies.boundary.record import BoundaryReport, VariantFlips
from moegeom.studies.boundary.study import recorded_noise
from moegeom.tokens.open import open_tokens
from tests.array_source import ArraySource
from tests.unit.document.records import sample_run
from tests.unit.studies.orthonormal import HIDDEN, router_of
from tests.unit.studies.samples import BALANCED, sides, widest, worded

CKPT, REC = sides(BALANCED)

shown = functools.partial(worded, document)


def row(number: int, share: float, **facts: Any) -> dict[str, Any]:
    every = {"router": f"text/{number}", "num_tokens": 1000, "weight_moved_mean": 0.5 * share}
    every |= {"flipped_share": share, "proved_share": 0.9, "num_disproved": 0}
    every |= {"flipped_share_least": share, "flipped_share_most": share}
    return every | {"predicted_flipped_share": 0.77} | facts


def variant(name: str, share: float, layers: int = 3, **facts: Any) -> VariantFlips:
    rows = [row(number, share, **facts) for number in range(layers)]
    engine = {"engine": "none", "version": ""}
    pairs = [{"router": "text/1", "first": 3, "second": 5, "share": 0.5}]
    return VariantFlips(name, engine, rows, pairs)


def exposure(*variants: VariantFlips) -> BoundaryReport:
    layers, run = [{"router": f"text/{number}"} for number in range(3)], sample_run()
    return BoundaryReport(Summary(run, layers, [], [], []), variants, Results(None, run, {}))


@pytest.mark.parametrize("form", ["table", "md", "json", "html"])
def test_tokens_that_flipped_against_a_proof_end_a_scan_and_not_a_report(form):
    with pytest.raises(InternalError, match="3 tokens flipped that were proved to stay"):
        refuse_disproved([{"router": "text/0", "variant": "bf16", "num_disproved": 3}])
    refuse_disproved([{"router": "text/0", "variant": "bf16", "num_disproved": 0}, {}])
    text = shown(exposure(variant("bf16", 0.1, num_disproved=3)), form, width=200)
    text = re.sub(r"</?a[^>]*>", "", text)  # words that lead to what they mean
    assert "bf16: 9 tokens flipped that were proved to stay: a mistake of moegeom" in text


def test_a_screen_says_less_than_a_page_has_room_for():
    report = exposure(variant("bf16", 0.1), variant("int4", 0.2), variant("tf32", 0.0))
    texts = shown(report), shown(report, detail=True), shown(report, "md")
    screen, every, page = (re.findall(r"swaps\W+(\w+)", text) for text in texts)
    assert screen == ["int4"]
    assert every == page == ["bf16", "int4"]
    report = exposure(variant("bf16", 0.1))
    assert "77.0 %" in shown(report, "md")  # what noise predicts
    assert "77.0 %" not in shown(report, width=200)
    narrow, wide = (shown(report, width=width) for width in (60, 100))
    assert ("worst layer" in wide, "worst layer" in narrow) == (True, False)
    assert re.search(r"^    bf16 +10.0 % of the choices flip", narrow, re.MULTILINE)
    assert widest(narrow) <= 60


def test_few_flips_tell_nothing_of_where_they_lie():
    for flips, words in (
        (1, "2 flips are too few to tell whether near-ties explain them"),
        (9, "18 flips are too few"),
        (10, "only 0 % of the flips are among the 10 % of tokens with the least margin"),
    ):
        one = variant("run-b", flips / 1000, layers=2, flipped_near_share=0.0)
        assert near_ties(one).startswith(words)


TOKENS, WIDTH = 4000, 32


class Arrays(ArraySource):
    """A recording in memory of which token 7 is known."""

    def __init__(self, values: dict[str, np.ndarray], stage="router_input", seventh=5):
        super().__init__({n: v.astype(np.float32) for n, v in values.items()}, document_tokens=50)
        self._facts = dataclasses.replace(self.facts, stage=stage)
        self._seventh = seventh

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        columns = super().read_columns(start, stop)
        columns.token_id[np.arange(start, stop) == 7] = self._seventh
        return columns


def test_planted_noise_comes_back_at_every_router():
    planted = {"text/0": 0.03, "text/1": 0.06}
    random = np.random.default_rng(0)
    exact = 3.0 * random.standard_normal((TOKENS, WIDTH))
    runs = (
        Arrays(
            {n: exact + size * random.standard_normal(exact.shape) for n, size in planted.items()}
        )
        for _ in range(2)
    )
    measured = recorded_noise(*runs)
    assert measured.keys() == planted.keys()
    for router, noise in measured.items():
        assert not noise.is_relative
        np.testing.assert_allclose(noise.scale, planted[router], rtol=0.01)
        np.testing.assert_allclose(noise.relative, planted[router] / 3.0, rtol=0.02)
        assert noise.systematic_share < 0.01


def test_noise_recorded_before_the_norm_is_that_of_what_the_router_reads():
    gain = np.linspace(0.5, 4.0, HIDDEN)
    router = router_of(norm=Norm("rms", 1e-6, "norm"), gain=gain)
    random = np.random.default_rng(3)
    exact = 7.0 * random.standard_normal((TOKENS, HIDDEN))
    runs = [exact + 0.2 * random.standard_normal(exact.shape) for _ in range(2)]
    before = [Arrays({"text/0": run}, "pre_norm") for run in runs]
    after = [
        Arrays({"text/0": run / np.sqrt((run**2).mean(axis=1, keepdims=True)) * gain})
        for run in runs
    ]
    (one,), (expected,) = (recorded_noise(*pair, (router,)).values() for pair in (before, after))
    np.testing.assert_allclose(one.scale, expected.scale, rtol=1e-4)
    assert abs(one.scale - 0.2) > 0.05


def test_tokens_that_are_not_finite_in_one_of_two_runs_are_left_out_and_counted():
    router = router_of()
    random = np.random.default_rng(5)
    exact = random.standard_normal((TOKENS, HIDDEN))
    runs = [exact + 0.2 * random.standard_normal(exact.shape) for _ in range(2)]
    finite = np.ones(TOKENS, bool)
    finite[[3, 4, 90]] = False
    expected = recorded_noise(*(Arrays({"text/0": run[finite]}) for run in runs))["text/0"]
    runs[0][3], runs[1][4, 1], runs[1][90] = np.nan, np.inf, 3e38  # whose logits overflow
    pair = [Arrays({"text/0": run}) for run in runs]
    measured = recorded_noise(*pair, (router,), skips_non_finite=True)["text/0"]
    assert measured.num_non_finite == 3
    np.testing.assert_allclose(measured.scale, expected.scale, rtol=1e-6)
    assert expected.num_non_finite == 0
    with pytest.raises(NonFiniteError, match="1 of .* at router text/0 .*first: token 3"):
        recorded_noise(*pair, (router,))
    nothing = [Arrays({"text/0": np.full_like(exact, np.nan)}), pair[1]]
    with pytest.raises(NonFiniteError, match="first: token 0"):
        recorded_noise(*nothing, (router,), skips_non_finite=True)


def ones(tokens: int = 100, width: int = 8, router: str = "text/0", **changes) -> Arrays:
    return Arrays({router: np.ones((tokens, width))}, **changes)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"stage": "logits"}, "holds logits"),
        ({"seventh": 6}, "token 7 has another token id"),
        ({"stage": "pre_norm"}, "expected the same stage"),
        ({"tokens": 90}, "100 tokens, .* 90"),
        ({"width": 9}, "8 values a token"),
        ({"router": "text/3"}, "no router in common"),
    ],
)
def test_other_tokens_stages_and_widths_are_refused(other, message):
    with pytest.raises(RecordingError, match=message):
        recorded_noise(ones(), ones(**other))


def test_an_arithmetic_whose_rounding_the_recording_holds_is_not_judged(tmp_path):
    """By the numbers and not by their dtype; one that also rounds logits is."""
    source = open_tokens(REC)
    rounded = {
        name: source.read_values(name, 0, 512).astype(bfloat16).astype(np.float32)
        for name in source.facts.routers
    }
    held = mg.boundary_report(CKPT, mg.recording(rounded, stage="router_input"), arithmetics="bf16")
    assert held.text().startswith("VERDICT  NOT JUDGED under bf16: ")
    assert json.loads(held.json())["recorded"].keys() == {"bf16"}
    both = mg.boundary_report(
        CKPT, mg.recording(rounded, stage="router_input"), arithmetics=("bf16", "bf16-logits")
    )
    assert [one["variant"] for one in json.loads(both.json())["variants"]] == ["bf16-logits"]
    assert re.search(r"^  bf16 +- +- +- +- +- +-$", both.text(), re.MULTILINE)
    whole = mg.boundary_report(CKPT, REC, arithmetics="bf16", layers=0)
    record = json.loads(whole.json())
    assert (record["recorded"], record["variants"][0]["flipped_share"] > 0.0) == ({}, True)
