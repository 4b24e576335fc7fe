"""Gated attention as a mixture, as a document: what can be told at all, and what descents show."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from moegeom.core.text import figure_text, number_of
from moegeom.document.chart import Axis, Chart, Panel, Polyline, Role
from moegeom.document.excerpts import in_part
from moegeom.document.model import (
    Block,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Look,
    Note,
    Table,
    Title,
    View,
)
from moegeom.geometry.hmoe import Position
from moegeom.research.hmoe.record import (
    DescentRun,
    Exponent,
    Mixtures,
    Model,
    ModelRates,
    PositionRank,
    StartRates,
    State,
)

#: What positions are called on the screen; G1 to G5 as papers number them.
_POSITIONS: Mapping[Position, str] = {
    "none": "none (MHA)",
    "query_or_key": "queries or keys (G3, G4)",
    "value": "values (G2, Setting I)",
    "sdpa": "attention (G1, Setting II)",
    "output": "output (G5)",
    "gate_per_head": "a gate for each head",
    "gate_per_channel": "a gate for each channel",
}

_MODELS: Mapping[Model, str] = {"mha": "MHA", "1": "Setting I", "2": "Setting II"}

_RANK_HEADS = ("non-linearity", "parameters", "rank", "flat", "free", "last | next")

_RATE_HEADS = (
    ("", "", "slope against log n of", "", ""),
    ("model, channels", "start p", "L_2", "L_2 at the start", "error of f"),
)

_LOOKS: Mapping[State, Look] = {
    "none": "dim",
    "explained": "plain",
    "away": "warning",
    "undecided": "warning",
    "beyond": "strong",
}


def document(report: Mixtures, view: View) -> Document:
    """What ``moegeom hmoe`` says."""
    ranks = _rank_table(report)
    is_shown = view.detail or not report.rates
    return Document(
        "hmoe",
        "hmoe",
        [
            [Title("hmoe", "what data can tell of the parameters of gated attention.")],
            [*_results(report), *_descents(report)],
            [_rate_table(report)] if report.rates else [],
            [Excerpt([ranks] if is_shown else [Note(_RANKS_LEFT_OUT)], [ranks])],
            [Gallery(lambda: [*hmoe_figures(report)])],
            [in_part([*_notes(report)], "note", view.detail, is_aside=True)],
        ],
        lambda: dataclasses.asdict(report),
    )


# ------------------------------------------------------------------------------------------ results


def _results(report: Mixtures) -> Iterator[Block]:
    """The verdict on rates first, where descents were run."""
    label = "RESULT"
    for text, look in (*_rate_results(report), *_rank_results(report)):
        yield Fact(label, text, look)
        label = ""


def _rate_results(report: Mixtures) -> Iterator[tuple[str, Look]]:
    if not report.rates:
        return
    judged = [rates for rates in report.rates if rates.state != "none"]
    if judged:
        beyond = sum(rates.state == "beyond" for rates in judged)
        text = f"L_2 comes nearer to 0 with n by more than its start explains in {beyond} of "
        yield f"{text}{number_of(len(judged), 'case')} (a model and its channels).", "strong"
    for state, ending in _ENDINGS.items():
        if own := [rates.starts[0].loss for rates in judged if rates.state == state]:
            slopes = " to ".join(_signed(end(one.value for one in own)) for end in (min, max))
            widest = f"{max(one.half_width for one in own):.3f}"
            cases = f"{len(own)} of {number_of(len(judged), 'case')}"
            yield f"{cases}: slope {slopes}, +- {widest}, {_SAME_START}{ending}", _LOOKS[state]
    if len(judged) < len(report.rates):
        (free,) = {rank.beyond for rank in report.ranks if rank.position == "none"}
        yield f"MHA has no rate: {free} directions of its parameters do nothing (F-22).", "plain"
    if report.deviations:
        yield _least_deviations(report), "plain"


#: What the control is.
_SAME_START = "from a start that is the same for every n"

_ENDINGS: Mapping[State, str] = {
    "beyond": ".",
    "away": ": noise drove descents away from the truth that they began at.",
    "explained": ": other slopes are the start's.",
    "undecided": ": too few repeats to tell it from 0 or from -1/2.",
}


def _least_deviations(report: Mixtures) -> str:
    size = report.deviations[0].size
    medians = ", ".join(
        f"{figure_text(one.median)} ({_MODELS[one.model]})" for one in report.deviations
    )
    return (
        f"At n = {size:,} no unbiased estimator has a smaller median standard deviation than "
        f"{medians}; the parameters are 2 at most."
    )


def _rank_results(report: Mixtures) -> Iterator[tuple[str, Look]]:
    if report.rates:
        return
    number = sum(rank.beyond == 0 for rank in report.ranks)
    places = number_of(len(report.ranks), "place")
    text = f"{number} of {places} of a non-linearity leave nothing free but what scores share."
    yield text, "strong"


def _descents(report: Mixtures) -> Iterator[Block]:
    design = report.design
    if design is None:
        return
    sizes = ", ".join(f"{size:,}" for size in design.sizes)
    repeats, epochs = number_of(design.repeats, "repeat"), number_of(design.epochs, "epoch")
    left = len(report.runs) - report.num_settled
    yield Fact(
        "descents",
        f"{len(report.runs):,}: n = {sizes}; {repeats}, at most {epochs}. {left:,} were still "
        f"falling when epochs ran out. Seed {design.seed}.",
        "plain",
    )


def _exponent(exponent: Exponent) -> str:
    if math.isnan(exponent.half_width):
        return _signed(exponent.value)
    return f"{_signed(exponent.value)} +- {exponent.half_width:.3f}"


def _signed(slope: float) -> str:
    """With its sign; that of rounding errors is none."""
    return f"{round(slope, 3) + 0.0:+.3f}"


# ------------------------------------------------------------------------------------------- tables


def _rate_table(report: Mixtures) -> Table:
    rows = [(rates, one) for rates in report.rates for one in rates.starts]
    return Table(
        _RATE_HEADS,
        [_rate_cells(*row) for row in rows],
        [_LOOKS[rates.state] if rates.state == "none" else "plain" for rates, _ in rows],
    )


def _rate_cells(rates: ModelRates, one: StartRates) -> tuple[str, ...]:
    return (
        f"{_MODELS[rates.model]}, {rates.channels}",
        f"{one.start:g}" if one.start else "control",
        *map(_exponent, (one.loss, one.start_loss, one.error)),
    )


def _rank_table(report: Mixtures) -> Table:
    return Table(
        [_RANK_HEADS],
        [
            (
                _name(rank),
                f"{rank.parameters}",
                f"{rank.rank}",
                f"{rank.gauge + rank.beyond}",
                f"{rank.beyond}",
                f"{_share(rank.least)} | {_share(rank.rest)}",
            )
            for rank in report.ranks
        ],
        ["strong" if not rank.beyond else "plain" for rank in report.ranks],
    )


#: Singular values below this share of the largest are what float64 makes of 0.
_ROUNDING = 1e-12


def _share(value: float) -> str:
    return "0" if value < _ROUNDING else f"{value:.0e}"


def _name(rank: PositionRank) -> str:
    if rank.activation == "sigmoid":
        return _POSITIONS[rank.position]
    return f"{_POSITIONS[rank.position].partition(' ')[0]}, {rank.activation}"


# -------------------------------------------------------------------------------------------- notes


_RANKS_LEFT_OUT = "Not shown: what is free by where a non-linearity stands: moegeom hmoe ranks"


def _notes(report: Mixtures) -> Iterator[Block]:
    if report.rates:
        yield Note(
            "Slopes are means over repeats with 95 % intervals; samples of all sizes share seeds. "
            "A start that shrinks as n^-p has a slope by itself, which stands beside that of the "
            "end; the control has p = 0."
        )
    yield Note(
        "flat: directions of the parameters of S2 in which f stays as it is. free: flat beyond "
        "what all scores of a head share. last | next: singular values on both sides of the rank, "
        f"over the largest; 0 is below {_ROUNDING:.0e}, rounding."
    )
    yield Note(
        "Released models multiply by a sigmoid of their input (the gates), which is not what S2 "
        "studies. One for each channel leaves only scales free; one for each head leaves its "
        "channels mixed."
    )
    if report.written:
        yield Note(f"Descents written to {report.written}.")


# ------------------------------------------------------------------------------------------ figures
#: Titles of panels.
_TITLES: dict[Model, str] = {"mha": "attention", "1": "Setting I", "2": "Setting II"}


def hmoe_figures(report: Mixtures) -> Iterator[Chart]:
    """Of descents, with the fewest channels and the first start that shrinks with n."""
    if report.design is None or len(report.design.starts) < 2:
        return
    channels, start = report.design.channels[0], report.design.starts[1]
    runs = [run for run in report.runs if run.channels == channels]
    ends = [
        f"{_TITLES[rates.model]} {rates.starts[1].loss.value:+.3f}, control "
        f"{rates.starts[0].loss.value:+.3f}"
        for rates in report.rates
        if rates.channels == channels
    ]
    yield Chart(
        "rates",
        "Loss of the parameters against n",
        f"Voronoi loss L_2 of {channels} channels where descents ended and where they began, for "
        f"starts that shrink as n^-{start:g} and for the control, one that does not shrink; "
        "geometric means over repeats.",
        "The rate of an estimator: at these n least squares cannot find the parameters, and "
        "attention without an activation has none to find.",
        f"Slopes of L_2: {'; '.join(ends)}.",
        [
            Panel(
                _TITLES[model],
                Axis("samples n", "log10"),
                Axis("L_2", "log10"),
                [*_lines([run for run in runs if run.model == model], start)],
                is_wide=False,
            )
            for model in report.design.models
        ],
        [
            ("model", [run.model for run in runs]),
            ("start", [run.start for run in runs]),
            ("repeat", [run.repeat for run in runs]),
            ("size", [run.size for run in runs]),
            ("start_loss", [run.start_loss for run in runs]),
            ("loss", [run.loss for run in runs]),
        ],
    )


def _lines(runs: Sequence[DescentRun], start: float) -> Iterator[Polyline]:
    shrinking = [run for run in runs if run.start == start]
    control = [run for run in runs if run.start == 0.0]
    yield _line(f"start n^-{start:g}: end", "tokens", shrinking, is_start=False)
    yield _line(f"start n^-{start:g}: beginning", "random", shrinking, is_start=True)
    yield _line("control: end", "other", control, is_start=False)


def _line(text: str, role: Role, runs: Sequence[DescentRun], is_start: bool) -> Polyline:
    """Means without intervals: sizes share seeds, so that slopes vary far less than levels do."""
    sizes = sorted({run.size for run in runs})
    losses = [
        np.log([run.start_loss if is_start else run.loss for run in runs if run.size == size])
        for size in sizes
    ]
    return Polyline(text, role, sizes, [math.exp(float(each.mean())) for each in losses])
