"""What-ifs as a document: the front, a line for each, what they reached, what they cannot say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moegeom.core.text import figure_text, number_of, percent
from moegeom.document.chart import Axis, Bars, Chart, Guide, Panel, Points, Polyline
from moegeom.document.excerpts import in_part
from moegeom.document.header import header, skipped
from moegeom.document.model import Block, Document, Excerpt, Fact, Gallery, Note, Table, View
from moegeom.document.rule_trust import rule_facts
from moegeom.studies.whatif.record import Tried, WhatIfReport

_HEADS = (
    ("", "experts", "FLOPs of", "load", "", "", "another", "weight", "knows only"),
    ("what-if", "a token", "experts", "MaxVio", "CV", "entropy", "set", "moved", "the past"),
)

#: Columns that a narrow screen does without, the highest first.
_DROPS = (0, 0, 3, 0, 2, 1, 0, 0, 0)

#: Figures of a fit that the table has of all tokens.
_IN_TABLE = ("experts_mean", "flop_factor", "no_expert_share")

#: Columns of the name of a what-if in front of what it reached.
_LABEL = 12


def document(report: WhatIfReport, view: View) -> Document:
    """What ``moegeom whatif`` says; a page has a line for each router too."""
    summary = report.summary
    notes = [*_limits(report), *skipped(summary)]
    reached = [*_reached(report)]
    return Document(
        "whatif",
        summary.run["checkpoint"]["name"],
        [
            [Fact("RESULT", _result(report))],
            [*_refused(report)],
            [*header(summary, "routers", "tokens", "trust")],
            [Excerpt([table], [table]) for table in _table(report)],
            [Gallery(lambda: [*what_if_figures(report)])],
            [in_part(reached, "what-if", view.detail, least=1)],
            [_by_layer(report, view)],
            [in_part([*map(Note, notes)], "note", view.detail, least=1, is_aside=True)],
        ],
        lambda: _record(report),
    )


# ------------------------------------------------------------------------------------------ verdict
def _result(report: WhatIfReport) -> str:
    """What is least uneven, what moves least, and how much of what was asked was tried."""
    tried, total = report.tried, len(report.what_ifs)
    routers = len(report.stored.rows)
    counted = f"{len(tried)} of {number_of(total, 'what-if')} tried"
    partly = len(tried) - len(report.whole)
    if partly:
        counted += f" ({partly} of them not on all of {number_of(routers, 'layer')})"
    now = report.stored.mean("max_vio_global")
    whole = [one for one in report.whole if one.mean("max_vio_global") is not None]
    if not whole or now is None:
        return f"{counted}."
    best = min(whole, key=lambda one: one.mean("max_vio_global") or 0.0)
    least = best.mean("max_vio_global")
    assert least is not None
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
def _table(report: WhatIfReport) -> Iterator[Table]:
    """Means over layers; the front of MaxVio against weight moved is marked.

    Nothing where no layer has a token.
    """
    if not report.stored.rows:
        return
    rows = [report.stored, *report.tried]
    cells = [(_name(report, one), *_cells(report, one)) for one in rows]
    layers = number_of(len(report.stored.rows), "layer")
    rest = f"Mean of {layers}. * no other is better in both MaxVio and weight moved."
    yield Table(_HEADS, cells, drops=_DROPS, rest=rest)


def _name(report: WhatIfReport, one: Tried) -> str:
    """A star where it is on the front, and of how many layers, if not of all."""
    if one in report.front:
        return f"{one.name} *"
    layers = len(report.stored.rows)
    return one.name if len(one.rows) == layers else f"{one.name} ({len(one.rows)} of {layers})"


def _cells(report: WhatIfReport, one: Tried, router: str = "") -> tuple[str, ...]:
    """The cells of a choice, over all its routers or at one of them."""
    if router:
        one = replace(one, rows={router: one.rows[router]})
    experts = one.experts_mean
    now = sum(map(report.stored.experts, one.rows)) / len(one.rows)
    stored = one.name == report.stored.name
    return (
        f"{experts:.3g}",
        f"{experts / now:.3g}x" if now else "-",
        _figure(one.mean("max_vio_global")),
        _figure(one.mean("load_cv_ddof0")),
        _figure(one.mean("load_entropy_normalised")),
        "-" if stored else _share(one.mean("flipped_share")),
        "-" if stored else _share(one.mean("weight_moved_mean")),
        "yes" if one.is_causal else "no",
    )


def _by_layer(report: WhatIfReport, view: View) -> Block:
    """A line for each layer and what-if: on pages, and with ``--detail``."""
    rows = [
        (report.summary.place(router), one.name, *_cells(report, one, router))
        for router in report.stored.rows
        for one in (report.stored, *report.tried)
        if router in one.rows
    ]
    heads = (("", *_HEADS[0]), ("layer", *_HEADS[1]))
    table = Table(heads, rows, left=(0, 1), drops=(0, *_DROPS))
    many = len(report.stored.rows) > 1
    return Excerpt([table] if view.detail and many else [], [table])


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
    for name in names:
        if name in _IN_TABLE:
            continue
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
    run = report.summary.run
    return {
        "stored": dict(report.stored.rows),
        "what_ifs": [
            {
                "name": one.name,
                "experts_mean": one.experts_mean if one.rows else None,
                "is_causal": one.is_causal,
                "is_on_front": one in report.front,
                "layers": dict(one.rows),
                "figures": dict(one.figures),
                "refused": dict(one.refused),
                "missing": dict(one.reasons),
                "notes": list(one.notes),
            }
            for one in report.what_ifs
        ],
        **rule_facts(run),
        "run": run,
    }


# ------------------------------------------------------------------------------------------ figures
#: What-ifs that have a bar each; of more a sweep has the front alone.
_MOST_BARS = 48


def what_if_figures(report: WhatIfReport) -> Iterator[Chart]:
    """Nothing where no what-if has both figures."""
    pairs = [
        (one, moved, vio)
        for one in report.whole
        if (moved := one.mean("weight_moved_mean")) is not None
        and (vio := one.mean("max_vio_global")) is not None
    ]
    before = report.stored.mean("max_vio_global")
    if not pairs or before is None:
        return
    front = [one for one in report.front if one is not report.stored]
    ends = [(0.0, before)] if report.stored in report.front else []
    ends += [(m, v) for one, m, v in pairs if one in front]
    ends.sort()
    if len(pairs) <= _MOST_BARS:
        yield _bars(pairs, before)
    local = [int(not one.is_causal) for one, *_ in pairs]
    marks = [
        Points(
            [0.0, *(m for _, m, _ in pairs)],
            [before, *(v for *_, v in pairs)],
            [2, *local],
            ["follows from the text so far", "later tokens matter", "as stored"],
        ),
        Polyline("no other is better in both", "limit", [m for m, _ in ends], [v for _, v in ends]),
    ]
    best = min(pairs, key=lambda point: point[2])
    yield Chart(
        "front",
        "How even, and at what price",
        "MaxVio, the largest load over the mean less 1, against the share of routing weight that "
        "lies on other experts than now, both mean over layers; one point for each what-if.",
        "What a model would say that was trained with another router, or what it loses.",
        f"Least MaxVio: {best[0].name}, {figure_text(best[2])} (now {figure_text(before)}), with "
        f"{figure_text(100.0 * best[1])} % of the weight moved.",
        [Panel("", Axis("share of the routing weight moved"), Axis("MaxVio"), marks)],
        _columns(pairs),
    )


def _bars(points: Sequence[tuple[Tried, float, float]], before: float) -> Chart:
    names = [one.name for one, *_ in points]
    most = max(points, key=lambda point: point[1])
    best = min(points, key=lambda point: point[2])
    y = Axis("", names=names)
    return Chart(
        "choices",
        "How uneven, and how much weight moves",
        "For each what-if MaxVio, the largest load over the mean less 1 (the line: now), and the "
        "share of routing weight that lies on other experts than now; both mean over layers.",
        "What a model would say that was trained with another router, or what it loses.",
        f"MaxVio is {figure_text(before)} now, least with {best[0].name}: {figure_text(best[2])}. "
        f"Most weight moves with {most[0].name}: {percent(most[1])}.",
        [
            Panel(
                "MaxVio",
                Axis("MaxVio"),
                y,
                [Bars("MaxVio", "tokens", [v for *_, v in points]), Guide("now", "limit", before)],
            ),
            Panel(
                "weight moved",
                Axis("share of the routing weight"),
                y,
                [Bars("weight moved", "other", [m for _, m, _ in points])],
            ),
        ],
        _columns(points),
    )


def _columns(
    points: Sequence[tuple[Tried, float, float]],
) -> list[tuple[str, Sequence[str | float | bool]]]:
    return [
        ("what_if", [one.name for one, *_ in points]),
        ("experts_mean", [one.experts_mean for one, *_ in points]),
        ("weight_moved_mean", [m for _, m, _ in points]),
        ("max_vio_global", [v for *_, v in points]),
        ("is_causal", [one.is_causal for one, *_ in points]),
    ]
