"""Pictures of trainings: widths of smoothing, losses and loads over the steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.trained.methods import BASE, METHODS
from benchmarks.trained.records import ResultFile
from moegeom.document.chart import Areas, Axis, Chart, Guide, Panel, Polyline

#: Methods whose width is drawn, whose loss, and whose loads.
SMOOTH = ("smooth", "smooth-detached", "smooth-annealed")
LOSSES = ("dense-active", BASE, "smooth", "relu", "cosine", "osr", "smear")
USAGES = (BASE, "centred", "osr")

_STEPS = Axis("step")

Columns = list[tuple[str, Sequence[str | int | float | None]]]


def charts(held: ResultFile) -> dict[str, Chart]:
    """Every picture by its name."""
    found = (_eps(held), _loss(held), _usage(held))
    return {chart.name: chart for chart in found}


def _curves(held: ResultFile, method: str, name: str) -> tuple[list[int], np.ndarray]:
    """Steps, and the values at each [steps, ...], means over seeds; empty where there are none."""
    runs = [run["curves"] for run in held.runs if run["method"] == method and "curves" in run]
    if not runs or name not in runs[0][0]:
        return [], np.empty((0, 0))
    values = [[point[name] for point in curve] for curve in runs]
    return [point["step"] for point in runs[0]], np.mean(np.array(values, np.float64), axis=0)


def _eps(held: ResultFile) -> Chart:
    panels, columns = [], []
    labels = {"eps": "width of smoothing, logits", "experts_per_token": "experts per token"}
    budget = Guide("budget", "limit", held.facts["settings"]["top_k"] + 0.5)
    for name, label in labels.items():
        lines = []
        for method in SMOOTH:
            steps, values = _curves(held, method, name)
            for layer in range(values.shape[1] if steps else 0):
                text = f"{method}, layer {layer}"
                y = values[:, layer].tolist()
                lines.append(Polyline(text, f"g{len(lines)}", steps, y))
                columns += [(f"{name} {text}", y)]
        marks = [*lines, budget] if name == "experts_per_token" else lines
        panels.append(Panel(label, _STEPS, Axis(label), marks))
    return Chart(
        "trained-eps",
        "Smoothing over the training",
        "The width of smoothing and the experts per token of each layer, means over seeds.",
        "whether a width that is reached sooner would train a better model.",
        "Width of smoothing and experts per token over the steps, by method and layer.",
        panels,
        columns,
    )


def _loss(held: ResultFile) -> Chart:
    lines, gaps, columns = [], [], []
    base = _curves(held, BASE, "bits")[1]
    for method in LOSSES:
        steps, values = _curves(held, method, "bits")
        if not steps:
            continue
        role = f"g{len(lines)}"
        lines.append(Polyline(METHODS[method].text, role, steps, values.tolist()))
        if method != BASE and len(base):
            gaps.append(Polyline(METHODS[method].text, role, steps, (values - base).tolist()))
        columns += [(method, values.tolist())]
    level = Axis("bits per byte")
    panels = [
        Panel("Loss in training", _STEPS, level, lines),
        Panel("Less that of top-k", _STEPS, level, gaps),
    ]
    return Chart(
        "trained-loss",
        "Loss over the training",
        "Cross-entropy on the batches, means over the steps between two points and over seeds.",
        "held-out text, or how far seeds are apart; both stand in the table.",
        "Loss in training over the steps by method, and less that of top-k.",
        panels,
        columns,
    )


def _usage(held: ResultFile) -> Chart:
    panels, columns = [], []
    for method in USAGES:
        runs = [r["curves"] for r in held.runs if r["method"] == method and r["seed"] == 0]
        if not runs or "usage" not in runs[0][0]:
            continue
        steps = [point["step"] for point in runs[0]]
        shares = np.array([point["usage"] for point in runs[0]]).T.tolist()
        names = [f"expert {number}" for number in range(len(shares))]
        text = METHODS[method].text
        panels.append(Panel(text, _STEPS, Axis("share of slots"), [Areas(steps, shares, names)]))
        columns += [(f"{method} {n}", s) for n, s in zip(names, shares, strict=True)]
    return Chart(
        "trained-usage",
        "Loads over the training, first layer, seed 0",
        "The share of the slots that each expert took between two points, stacked.",
        "other layers and seeds.",
        "Share of slots of each expert over the steps, by method.",
        panels,
        columns,
    )
