"""The tables of the pages on gated attention are those of the benchmarks and their results."""

import itertools
import json
from pathlib import Path

import numpy as np

from benchmarks import gated_attention
from benchmarks import least_squares_finds_the_function_before_the_parameters as fits
from benchmarks.slopes_of_descents_are_those_of_their_starts import (
    DescentRun,
    Design,
    rates_of,
    runs_of,
    with_channels,
)

ROOT = Path(__file__).resolve().parents[3]


def descents(design: Design) -> list[DescentRun]:
    each = itertools.product(design.models, design.channels, range(design.repeats), design.sizes)
    return [run for task in each for run in runs_of((design, *task))]


def test_the_table_of_ranks_is_that_of_the_page():
    page = (ROOT / "docs/attention.md").read_text("utf-8")
    rows = table(page, "What the place of a gate makes free")
    expected = {
        one.position: [one.rank.columns, one.rank.rank, one.beyond]
        for one in gated_attention.ranks()
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
