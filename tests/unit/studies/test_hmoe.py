"""What data can tell of gated attention, and the descents behind its page: seeds, slopes, sentences."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

import moegeom as mg
from benchmarks import least_squares_finds_the_function_before_the_parameters as fits
from benchmarks.slopes_of_descents_are_those_of_their_starts import (
    DescentRun,
    Design,
    Exponent,
    exponent,
    rates_of,
    runs_of,
    state_of,
    with_channels,
)
from moegeom.geometry.hmoe import cramer_rao_sd
from moegeom.research.hmoe.study import NOISE

ROOT = Path(__file__).resolve().parents[3]
SMALL = Design(("mha", "1"), (3,), (100, 200, 400), (0.0, 0.5), repeats=2, epochs=4)


def descents(design: Design) -> list[DescentRun]:
    each = itertools.product(design.models, design.channels, range(design.repeats), design.sizes)
    return [run for task in each for run in runs_of((design, *task))]


def series(*values: tuple[float, ...]) -> list[list[DescentRun]]:
    return [
        [
            DescentRun("1", 3, 0.0, repeat, size, value, value, value, value, 1, False)
            for size, value in zip((10, 100, 1000), row, strict=True)
        ]
        for repeat, row in enumerate(values)
    ]


def test_slopes_are_means_over_repeats_with_the_interval_of_scipy():
    rows = [(1.0, 0.5, 0.2), (2.0, 0.9, 0.7), (1.5, 1.0, 0.2)]
    found = exponent(series(*rows), lambda run: run.loss)
    slopes = [np.polyfit(np.log([10, 100, 1000]), np.log(row), 1)[0] for row in rows]
    interval = ttest_1samp(slopes, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(found.value, np.mean(slopes))
    np.testing.assert_allclose(found.half_width, (interval.high - interval.low) / 2.0)
    assert math.isnan(exponent(series(rows[0]), lambda run: run.loss).half_width)


def test_a_rate_is_claimed_of_a_control_that_came_nearer_alone():
    for slope, width, growth, state in (
        (0.0, 0.01, -1.0, "explained"),
        (-0.01, 0.1, -1.0, "explained"),
        (-0.2, 0.4, -1.0, "undecided"),
        (0.0, math.nan, -1.0, "undecided"),
        (-0.5, 0.1, -1.0, "beyond"),
        (-0.5, 0.1, 1.0, "away"),
    ):
        assert state_of("1", Exponent(slope, width), growth) == state
        assert state_of("mha", Exponent(slope, width), growth) == "none"


def test_the_table_of_ranks_is_that_of_the_page():
    page = (ROOT / "docs/attention.md").read_text("utf-8")
    rows = table(page, "What the place of a gate makes free")
    expected = {
        one.position: [one.parameters, one.rank, one.beyond]
        for one in mg.hmoe().value.ranks
        if one.activation == "sigmoid"
    }
    assert {PLACES[row[0]]: [*map(int, row[2:])] for row in rows} == expected


PAGE = (ROOT / "docs/hmoe.md").read_text("utf-8")
RESULT = json.loads((ROOT / "docs/hmoe/rates.json").read_text("utf-8"))
RATES = RESULT["result"]["rates"]
STARTS = [(rates, one) for rates in RATES for one in rates["starts"]]
DESCENTS = [DescentRun(**run) for run in RESULT["result"]["runs"]]


def table(page: str, heading: str) -> list[list[str]]:
    behind = page.partition(f"## {heading}\n")[2].splitlines()
    lines = itertools.dropwhile(lambda line: line[:1] != "|", behind)
    rows = [*itertools.takewhile(lambda line: line[:1] == "|", lines)]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


#: How the page of attention calls the places of an activation or gate.
PLACES = {
    "none": "none",
    "phi of the query or key": "query_or_key",
    "phi of the block's output": "output",
    "phi of the values": "value",
    "phi of what a head gives": "sdpa",
    "sigma(W x), one a head": "gate_per_head",
    "sigma(W x), one a channel": "gate_per_channel",
}


def test_the_table_of_slopes_is_that_of_the_result_file_and_its_descents():
    expected = []
    for _, one in STARTS:
        parts = (one["loss"], one["start_loss"], one["error"])
        numbers = [f"{round(p['value'], 3) + 0.0:+.3f} ± {p['half_width']:.3f}" for p in parts]
        expected.append([f"{one['start']:g}", *numbers])
    assert [row[1:] for row in table(PAGE, "What descents show")] == expected
    assert len(RESULT["core"]) > 3
    assert RESULT["versions"].keys() >= {"moegeom", "numpy", "scipy", "python"}
    assert RESULT["result"]["design"] == json.loads(json.dumps(vars(Design())))
    for rates, stored in zip(rates_of(Design(), DESCENTS), RATES, strict=True):
        assert rates["state"] == stored["state"]
        for one, same in zip(rates["starts"], stored["starts"], strict=True):
            for name in ("loss", "start_loss", "error"):
                values = [*vars(one[name]).values()]
                np.testing.assert_allclose(values, [*same[name].values()], atol=1e-5)


@pytest.mark.parametrize("model", [pytest.param("mha", marks=pytest.mark.nightly), "2"])
def test_a_descent_of_the_result_file_ends_there_again(model):
    task = (model, 3, 0, 10_000)
    stored = [r for r in DESCENTS if (r.model, r.channels, r.repeat, r.size) == task]
    again = runs_of((replace(Design(), starts=(0.0,)), *task))[0]
    (same,) = (run for run in stored if run.start == 0.0)
    np.testing.assert_allclose(
        [getattr(again, name) for name in ("start_loss", "loss", "start_error", "error")],
        [getattr(same, name) for name in ("start_loss", "loss", "start_error", "error")],
        rtol=1e-5,
    )


def test_no_slope_of_the_page_is_more_than_that_of_its_start():
    assert len(STARTS) == 24
    for rates, one in STARTS:
        at = (rates["model"], rates["channels"], one["start"])
        own = [
            [r for r in DESCENTS if (r.model, r.channels, r.start) == at and r.repeat == n]
            for n in range(10)
        ]
        less = exponent(own, lambda run: run.loss / run.start_loss)
        assert abs(less.value) <= less.half_width, at
    assert "in all 24 rows" in PAGE


def powers(start: float, is_gated: bool) -> list[str]:
    slopes = [
        one["loss"]["value"]
        for rates, one in STARTS
        if one["start"] == start and (rates["model"] != "mha") == is_gated
    ]
    return [f"n^{slope:.2f}" for slope in (max(slopes), min(slopes))]


#: Descents from the truth with the most tokens.
LAST = [run for run in DESCENTS if run.start == 0.0 and run.size == 100_000]


def means(value: Callable[[DescentRun], float]) -> list[float]:
    """By model and channels."""
    cases: dict[tuple[str, int], list[float]] = {}
    for run in LAST:
        cases.setdefault((run.model, run.channels), []).append(math.log(value(run)))
    return sorted(math.exp(np.mean(own)) for own in cases.values())


def test_numbers_in_the_prose_are_those_of_the_result_files():
    gated, free = (" to ".join(powers(0.3, True)), " and ".join(powers(0.3, False)))
    near = sorted(powers(0.083, True) + powers(0.083, False))
    nearer, errors = means(lambda r: r.start_error / r.error), means(lambda r: r.error)
    ends = means(lambda r: r.loss / r.start_loss)
    moved = [run.loss / run.start_loss for run in LAST]
    jump = [r.loss for r in DESCENTS if (r.model, r.channels, r.start, r.repeat) == ("2", 4, 0, 1)]
    sentences = [
        f"it falls as {near[0]} to {near[-1]}, with an activation as without",
        f"it falls as {gated} with an activation and as {free} without",
        f"at {min(moved):.2f} to {max(moved):.2f} of it",
        f"{nearer[0]:.0f} to {nearer[-1]:.0f} times nearer",
        f"an error of {errors[0]:.3f} to {errors[-1]:.3f}",
        f"ends at {ends[0]:.2f} to {ends[3]:.2f} of its start",
        f"at {ends[4]:.2f} and {ends[5]:.2f} of it",
        f"ends at {jump[1]:.2f} for n = 30,000 and at {jump[2]:.2f} for 100,000",
        "All 720 were still falling",
    ]
    assert [sentence for sentence in sentences if sentence not in PAGE] == []
    assert [run.settled for run in DESCENTS] == [False] * 720


# --------------------------------------------------------------------------------------------- fits
FITS = json.loads((ROOT / "docs/hmoe/fits.json").read_text("utf-8"))["result"]
FIT_RUNS = [fits.FitRun(**run) for run in FITS["runs"]]
FIT_DESIGN = fits.Design()


def short(value: float) -> str:
    return f"{value:.3g}" if value < 1000.0 else f"{value:,.0f}"


def row_of(rate: fits.Rate) -> list[str]:
    """As the page has it."""
    case = rate.case
    mixture = with_channels(fits.TRUTHS[case.truth](), case.channels)
    slopes = [f"{one.value:+.2f} ± {one.half_width:.2f}" for one in (rate.error, rate.loss)]
    return [
        f"{case.truth}, {'none' if case.model == 'mha' else 'I' * int(case.model)}, {case.channels}",
        f"{case.start:g}",
        f"{rate.errors[0]:.4f} to {rate.errors[-1]:.4f}",
        slopes[0],
        f"{rate.parameters[0]:.0f} to {rate.parameters[-1]:.0f} of {fits.free(mixture).size}",
        " to ".join(map(short, (rate.losses[0], rate.losses[-1]))),
        slopes[1],
        f"{rate.num_converged} of {rate.num_fits}",
    ]


def test_the_table_of_fits_is_that_of_the_result_file_and_its_runs():
    assert FITS["design"] == json.loads(json.dumps(FIT_DESIGN, default=vars))
    rates = [*fits.rates_of(FIT_DESIGN, FIT_RUNS)]
    assert json.loads(json.dumps(rates, default=vars)) == FITS["rates"]
    assert table(PAGE, "What fits show") == [row_of(rate) for rate in rates]


def test_numbers_about_fits_in_the_prose_are_those_of_the_result_file():
    rates = {rate.case: rate for rate in fits.rates_of(FIT_DESIGN, FIT_RUNS)}
    slopes = [rate.error.value for rate in rates.values()]
    own = [r for c, r in rates.items() if c.truth == "published" and c.model != "mha"]
    head = {(c.model, c.channels): r for c, r in rates.items() if c.truth == "one head"}
    free = next(iter(rates.values()))
    first, second = head["1", 1].loss, head["2", 1].loss
    sentences = [
        f"Errors fall as n^{max(slopes):.2f} to n^{min(slopes):.2f}",
        *(f"{NOISE * math.sqrt(26 / size):.3f}" for size in (1_000, 3_000, 10_000)),
        f"{sum(r.num_below_truth for r in rates.values())} of the {len(FIT_RUNS)} fits",
        f"has the slope {first.value:.2f} ± {first.half_width:.2f}",
        f"that of Setting II, {second.value:.2f} ± {second.half_width:.2f}",
        f"L_2 is {head['1', 2].losses[-1]:.0f} and {head['2', 2].losses[-1]:.0f} at n = 36,000",
        f"L_2 of {free.losses[0]:.1f} and of {free.losses[-1]:.1f}",
        f"a slope of {free.loss.value:.2f} ± {free.loss.half_width:.2f}",
        f"{sum(r.num_converged for r in rates.values())} of {len(FIT_RUNS)} converged",
    ]
    assert [sentence for sentence in sentences if sentence not in PAGE] == []
    assert all(abs(rate.loss.value) <= rate.loss.half_width for rate in own)
    assert min(min(rate.losses) for rate in own) > 10.0
    deviations = [least_deviation_of(position) for position in ("value", "sdpa")]
    assert max(deviations) <= 0.13


def least_deviation_of(position: fits.Position) -> float:
    """The largest over the parameters of one head, of 100,000 samples."""
    truth = fits.one_head()
    points = fits.square(5000, np.random.default_rng(0))
    slopes = fits.jacobian(truth, points, position)[:, fits.free_columns(truth)]
    return float(cramer_rao_sd(slopes, NOISE, 100_000).max())


@pytest.mark.parametrize("number", [3, 21, 36])
def test_a_fit_of_the_result_file_ends_there_again(number):
    stored = FIT_RUNS[number]
    case = fits.Case(stored.truth, stored.model, stored.channels, stored.start)
    again = fits.run_of(FIT_DESIGN, case, stored.repeat, stored.size)
    np.testing.assert_allclose([again.error, again.gain], [stored.error, stored.gain], rtol=1e-4)
