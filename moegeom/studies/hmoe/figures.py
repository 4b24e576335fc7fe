"""The figure of descents: L_2 against n, beside where they began and beside the control."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from moegeom.document.chart import Axis, Chart, Panel, Polyline, Role
from moegeom.studies.hmoe.record import DescentRun, Mixtures, Model

#: Titles of panels.
_TITLES: dict[Model, str] = {"mha": "attention", "1": "Setting I", "2": "Setting II"}


def hmoe_figures(found: Mixtures) -> Iterator[Chart]:
    """Of descents, with the fewest channels and the first start that shrinks with n."""
    if found.design is None or len(found.design.starts) < 2:
        return
    channels, start = found.design.channels[0], found.design.starts[1]
    kept = [run for run in found.runs if run.channels == channels]
    ends = [
        f"{_TITLES[rates.model]} {rates.starts[1].loss.value:+.3f}, control "
        f"{rates.starts[0].loss.value:+.3f}"
        for rates in found.rates
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
                [*_lines([run for run in kept if run.model == model], start)],
                is_wide=False,
            )
            for model in found.design.models
        ],
        [
            ("model", [run.model for run in kept]),
            ("start", [run.start for run in kept]),
            ("repeat", [run.repeat for run in kept]),
            ("size", [run.size for run in kept]),
            ("start_loss", [run.start_loss for run in kept]),
            ("loss", [run.loss for run in kept]),
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
