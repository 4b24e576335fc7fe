"""What-ifs as a document: the front, a line for each, what they reached, what they cannot say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from moegeom.core.text import figure_text, number_of, percent
from moegeom.document.chart import Axis, Bars, Chart, Guide, Panel, Points, Polyline
from moegeom.document.excerpts import in_part
from moegeom.document.header import header, skipped
from moegeom.document.model import Block, Document, Excerpt, Fact, Gallery, Table, View
from moegeom.document.rule_words import rule_facts
from moegeom.document.study import Column, page, table_of
from moegeom.studies.whatif.record import Tried, WhatIfReport

#: Figures of a fit that the table has of all tokens.
_IN_TABLE = ("experts_mean", "flop_factor", "no_expert_share")

#: Columns of the name of a what-if in front of what it reached.
_LABEL = 12


def document(report: WhatIfReport, view: View) -> Document:
    """What ``moegeom whatif`` says; a page has a line for each router too."""
    summary = report.summary
    return page(
        "whatif",
        summary.run["checkpoint"]["name"],
        view,
        [Fact("RESULT", _result(report))],
        [*_refused(report)],
        [*header(summary, "routers", "tokens", "trust")],
        [_table(report)] if report.stored.rows else [],  # some layer has a token
        [Gallery(lambda: [*what_if_figures(report)])],
        [in_part([*_reached(report)], "what-if", view.detail, least=1)],
        [_by_layer(report, view)],
        notes=(*_limits(report), *skipped(summary)),
        least=1,
        record=lambda: _record(report),
    )


# ------------------------------------------------------------------------------------------ verdict
def _result(report: WhatIfReport) -> str:
    """What is least uneven, what moves least, and how much of what was asked was tried."""
    tried, total = report.tried, len(report.what_ifs)
    counted = f"{len(tried)} of {number_of(total, 'what-if')} tried"
    if partly := len(tried) - len(report.whole):
        layers = number_of(len(report.stored.rows), "layer")
        counted += f" ({partly} of them not on all of {layers})"
    now = report.stored.mean("max_vio_global")
    vio = [(one, v) for one in report.whole if (v := one.mean("max_vio_global")) is not None]
    if not vio or now is None:
        return f"{counted}."
    best, least = min(vio, key=lambda pair: pair[1])
    if least >= now:
        return f"{counted}. None has a lower MaxVio than now ({figure_text(now)})."
    moved = best.mean("weight_moved_mean")
    needs = "" if best.is_causal else ", and later tokens decide"
    experts, before = best.experts_mean, report.stored.experts_mean
    if abs(experts - before) > 0.005 * before:
        needs = f", with {experts:.3g} experts a token instead of {before:.3g}{needs}"
    price = "" if moved is None else f"; {percent(moved)} of the routing weight moves"
    return (
        f"{counted}. Least MaxVio: {best.name}, {figure_text(least)} (now {figure_text(now)})"
        f"{price}{needs}."
    )


def _refused(report: WhatIfReport) -> Iterator[Block]:
    """The what-ifs that were not computed, grouped by reason."""
    for one in report.what_ifs:
        by_reason: dict[str, list[str]] = {}
        for router, why in one.refused.items():
            # both stand in front: layers with one reason share a line
            reason = why.removeprefix(f"{one.name}: ").removeprefix(f"router {router}: ")
            by_reason.setdefault(reason.rstrip("."), []).append(router)
        for why, routers in by_reason.items():
            where = report.summary.places(routers)
            yield Fact("NOT", f"{one.name}, {where}: {why}.", "warning")


# ------------------------------------------------------------------------------------------- tables
def _table(report: WhatIfReport) -> Table:
    """Means over layers; the front of MaxVio against weight moved is marked."""
    layers = number_of(len(report.stored.rows), "layer")
    rest = f"Mean of {layers}. * no other is better in both MaxVio and weight moved."
    columns = [("", "what-if", 0, partial(_name, report)), *_columns(report)]
    return table_of(columns, [report.stored, *report.tried], rest=rest)


def _name(report: WhatIfReport, one: Tried) -> str:
    """A star where it is on the front, and of how many layers, if not of all."""
    if one in report.front:
        return f"{one.name} *"
    layers = len(report.stored.rows)
    return one.name if len(one.rows) == layers else f"{one.name} ({len(one.rows)} of {layers})"


def _columns(report: WhatIfReport) -> Sequence[Column]:
    """Figures of a choice, over all routers that it has rows of."""
    stored = report.stored

    def factor(one: Tried) -> str:
        now = sum(map(stored.experts, one.rows)) / len(one.rows)
        return f"{one.experts_mean / now:.3g}x" if now else "-"

    def moved(column: str, one: Tried) -> str:
        return "-" if one.name == stored.name else _share(one.mean(column))

    return (
        ("experts", "a token", 0, lambda one: f"{one.experts_mean:.3g}"),
        ("FLOPs of", "experts", 3, factor),
        ("load", "MaxVio", 0, lambda one: _figure(one.mean("max_vio_global"))),
        ("", "CV", 2, lambda one: _figure(one.mean("load_cv_ddof0"))),
        ("", "entropy", 1, lambda one: _figure(one.mean("load_entropy_normalised"))),
        ("another", "set", 0, partial(moved, "flipped_share")),
        ("weight", "moved", 0, partial(moved, "weight_moved_mean")),
        ("knows only", "the past", 0, lambda one: "yes" if one.is_causal else "no"),
    )


def _by_layer(report: WhatIfReport, view: View) -> Block:
    """A line for each layer and what-if: on pages, and with ``--detail``."""
    layers = [*report.stored.rows]
    rows = [
        replace(one, rows={router: one.rows[router]})
        for router in layers
        for one in (report.stored, *report.tried)
        if router in one.rows
    ]
    layer: Column = ("", "layer", 0, lambda one: report.summary.place(*one.rows))
    name: Column = ("", "what-if", 0, lambda one: one.name)
    table = table_of([layer, name, *_columns(report)], rows, left=(0, 1))
    return Excerpt([table] if view.detail and len(layers) > 1 else [], [table])


# ------------------------------------------------------------------------------------------ reached
def _reached(report: WhatIfReport) -> Iterator[Block]:
    """Figures of each fit and sample, over layers, with their caveats."""
    for one in report.tried:
        spans = "; ".join(_spans(one))
        text = ". ".join(part for part in (spans, *(n.rstrip(".") for n in one.notes)) if part)
        if text:
            yield Fact(one.name, f"{text}.", "plain", indent=max(_LABEL, len(one.name) + 2))


def _spans(one: Tried) -> Iterator[str]:
    names = dict.fromkeys(name for figures in one.figures.values() for name in figures)
    for name in filter(lambda name: name not in _IN_TABLE, names):
        numbers = [figures[name] for figures in one.figures.values() if name in figures]
        low, high = min(numbers), max(numbers)
        text_of = percent if name.endswith("_share") or name.startswith("weight_") else figure_text
        span = text_of(low) if low == high else f"{text_of(low)} to {text_of(high)}"
        yield f"{name.removesuffix('_share').replace('_', ' ')} {span}"
    if none := one.mean("no_expert_share"):
        yield f"no expert for {_share(none)} of the tokens"


# ------------------------------------------------------------------------------------------- limits
def _limits(report: WhatIfReport) -> Iterator[str]:
    """How to read the figures, and what they do not say."""
    yield (
        "Another choice in a trained model says nothing about its quality: experts and later "
        "layers were trained with the router as stored, and inputs of later layers would differ."
    )
    if any(not one.is_causal for one in report.tried):
        yield (
            "Where later tokens decide, a model that writes token by token cannot choose so; "
            "shares 'alone' are tokens with another set in a batch of one."
        )
    yield (
        "'FLOPs of experts': mean experts a token over k. 'Weight moved': half the sum of the "
        "differences between routing shares, 0 to 1; weights may move though the set stays."
    )
    missing: dict[str, set[str]] = {}
    for metric, why in (pair for one in report.tried for pair in one.reasons.items()):
        missing.setdefault(why, set()).add(metric)
    for why, metrics in missing.items():
        yield f"Missing of some what-ifs: {', '.join(sorted(metrics))}: {why}."


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value, ".1f")


def _record(report: WhatIfReport) -> Mapping[str, Any]:
    return {
        "stored": report.stored.rows,
        "what_ifs": [
            {
                "name": one.name,
                "experts_mean": one.experts_mean if one.rows else None,
                "is_causal": one.is_causal,
                "is_on_front": one in report.front,
                "layers": one.rows,
                "figures": one.figures,
                "refused": one.refused,
                "missing": one.reasons,
                "notes": one.notes,
            }
            for one in report.what_ifs
        ],
        **rule_facts(report.summary.run),
        "run": report.summary.run,
    }


# ------------------------------------------------------------------------------------------ figures
#: What-ifs that have a bar each; of more a sweep has the front alone.
_MOST_BARS = 48


def what_if_figures(report: WhatIfReport) -> Iterator[Chart]:
    """Nothing where no what-if has both figures."""
    points, now = report.points, report.stored.mean("max_vio_global")
    if not points or now is None:
        return
    choices, moved, vio = map(list, zip(*points, strict=True))
    in_percent = [100.0 * share for share in moved]
    names, is_causal = [one.name for one in choices], [one.is_causal for one in choices]
    best, of_best, least = min(points, key=lambda point: point[2])
    numbers = [
        ("what_if", names),
        ("experts_mean", [one.experts_mean for one in choices]),
        ("weight_moved_mean", moved),
        ("max_vio_global", vio),
        ("is_causal", is_causal),
    ]
    unknown = "What a model would say that was trained with another router, or what it loses."
    if len(points) <= _MOST_BARS:
        most, share, _ = max(points, key=lambda point: point[1])
        y = Axis("", names=names)
        bars = [Bars("MaxVio", "tokens", vio), Guide("now", "limit", now)]
        weights = [Bars("weight moved", "other", in_percent)]
        yield Chart(
            "choices",
            "How uneven, and how much weight moves",
            "For each what-if MaxVio, the largest load over the mean less 1 (the line: now), and "
            "the share of routing weight that lies on other experts than now; both mean over "
            "layers.",
            unknown,
            f"MaxVio is {figure_text(now)} now, least with {best.name}: {figure_text(least)}. "
            f"Most weight moves with {most.name}: {percent(share)}.",
            [
                Panel("MaxVio", Axis("MaxVio"), y, bars),
                Panel("weight moved", Axis("of the routing weight, %"), y, weights),
            ],
            numbers,
        )
    front = report.front
    ends = sorted(
        (100.0 * m, v) for one, m, v in [(report.stored, 0.0, now), *points] if one in front
    )
    marks = [
        Points(
            [0.0, *in_percent],
            [now, *vio],
            [2, *(int(not causal) for causal in is_causal)],
            ["follows from the text so far", "later tokens matter", "as stored"],
        ),
        Polyline("no other is better in both", "limit", [m for m, _ in ends], [v for _, v in ends]),
    ]
    yield Chart(
        "front",
        "How even, and at what price",
        "MaxVio, the largest load over the mean less 1, against the share of routing weight that "
        "lies on other experts than now, both mean over layers; one point for each what-if.",
        unknown,
        f"Least MaxVio: {best.name}, {figure_text(least)} (now {figure_text(now)}), with "
        f"{figure_text(100.0 * of_best)} % of the weight moved.",
        [Panel("", Axis("routing weight moved, %"), Axis("MaxVio"), marks)],
        numbers,
    )
