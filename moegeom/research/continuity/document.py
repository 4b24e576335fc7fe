"""The output over a boundary as a document: does it jump, and what does smoothing make of it?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from moegeom.core.text import figure_text, number_of, percent
from moegeom.document.chart import Axis, Chart, Guide, Panel, Polyline
from moegeom.document.excerpts import worst_excerpt
from moegeom.document.header import size
from moegeom.document.model import Block, Document, Fact, Gallery, Table, View
from moegeom.document.place import place
from moegeom.document.study import left_out_facts, study_page, study_record, study_summary
from moegeom.research.continuity.record import Along, Continuity, RouterContinuity

#: Slopes at small radii from which it is said that the output jumps, or is in proportion to r.
_JUMPS, _PROPORTIONAL = 0.1, 0.9

_HEADS = (
    ("", "", "experts", "jump,", "slope of G", "", "G at the least r", "", ""),
    ("layer", "token", "out, in", "of output", "hard", "smooth", "hard", "smooth", "eps"),
)

#: Share of the strip behind which an expert's weight fades.
_FADING = 0.9

#: Radii of the table of one router: the ends and decades between.
_SHOWN = 5


def document(report: Continuity, view: View) -> Document:
    """What ``moegeom research continuity`` says."""
    return study_page(
        report,
        "research continuity",
        view,
        [worst_excerpt(report.routers, _height, view, partial(_routers, report))],
        [_radii(report)],
        [Gallery(lambda: [*continuity_figures(report)])],
        verdict=_result(report),
        facts=[Fact("line", _lines(report)), *_gate(report)],
        notes=_limits(report),
        record=lambda: _record(report),
    )


def _height(one: RouterContinuity) -> float:
    """How high the output jumps, in shares of its length."""
    return one.crossing.relative


def highest(report: Continuity) -> RouterContinuity:
    """The router whose jump is the highest, measured by the output."""
    return max(report.routers, key=_height)


# ------------------------------------------------------------------------------------------- result


def _result(report: Continuity) -> Iterator[Block]:
    one = highest(report)
    crossing, place = one.crossing, study_summary(report).places([one.router])
    out, into = crossing.pair
    yield Fact(
        "RESULT",
        f"{place}, token {crossing.token:,}: where expert {into} takes over from expert {out} the "
        f"output {_said(crossing.hard)} (slope {_slope(crossing.hard)}; height "
        f"{figure_text(crossing.jump)}, {percent(crossing.relative)} of its length).",
        "strong",
    )
    if crossing.smooth is not None:
        yield Fact("", f"Smoothed, it {_smooth_said(crossing.smooth)}.", "plain")
    yield from left_out_facts(report)


def _said(along: Along) -> str:
    """The behaviour of the hard gate down to the least radius."""
    if along.slope_near < _JUMPS:
        return "jumps"
    if along.slope_near > _PROPORTIONAL:
        return "moves in proportion to the input"
    return "neither jumps nor moves in proportion to the input as far down as was looked"


def _smooth_said(along: Along) -> str:
    steepest = f"no more than {figure_text(along.steepest)} per unit of the input"
    if along.slope_near > _PROPORTIONAL:
        return (
            f"moves in proportion to the input there (slope {_slope(along)}), {steepest} anywhere "
            "on the line"
        )
    if along.slope_near < _JUMPS:
        return f"jumps too (slope {_slope(along)})"
    return f"does neither as far down as was looked (slope {_slope(along)}; {steepest})"


def _slope(along: Along) -> str:
    return "-" if math.isnan(along.slope_near) else f"{along.slope_near:.2f}"


def _lines(report: Continuity) -> str:
    """The number of tokens the lines were chosen from, and the bytes that were read."""
    points, total = (
        sum(getattr(one, name) for one in report.routers) for name in ("num_known", "num_tokens")
    )
    read, of = (
        sum(getattr(one, name) for one in report.routers)
        for name in ("experts_read", "expert_bytes")
    )
    which = (
        "of the token asked for"
        if report.sample.seed is None
        else "of the token of the sample with the highest jump whose line meets no other boundary"
    )
    few = [one.num_jumps for one in report.routers if one.num_jumps < one.num_known]
    if few and report.sample.seed is not None:
        which += f", of {min(few)} whose exchanged experts weigh most"
    left = "" if points == total else f"; {total - points:,} of {total:,} boundary points unknown"
    return (
        f"Through the nearest boundary point, {report.radius:g} rms lengths to both sides: {which}"
        f"{left}. {number_of(read, 'expert')} read ({size(of)})."
    )


def _gate(report: Continuity) -> Iterator[Block]:
    """How the smoothed gate was made, and how small a disturbance it is good for."""
    smoothed = [one for one in report.routers if one.crossing.smooth is not None]
    if smoothed:
        one = max(smoothed, key=lambda each: each.eps)
        up_to = "eps up to" if len(smoothed) > 1 else "eps"
        yield Fact(
            "smooth",
            f"Experts less than eps below the last chosen one run too ({report.smooth}; {up_to} "
            f"{figure_text(one.eps)} {one.unit}, {figure_text(one.extra)} more experts a token). "
            f"They fade in the last tenth of that strip: weights move by up to "
            f"{one.steepest_activation:.3g}/eps per unit of score, and disturbances below some "
            f"{figure_text(one.eps / one.steepest_activation)} alone are calmed.",
        )
    for reason in dict.fromkeys(one.reason for one in report.routers if one.reason):
        places = study_summary(report).places(
            [o.router for o in report.routers if o.reason == reason]
        )
        yield Fact("" if smoothed else "smooth", f"{places}: no smoothed gate: {reason}.")


# ------------------------------------------------------------------------------------------- tables


def _routers(report: Continuity, routers: Any) -> Table:
    rest = len(report.routers) - len(routers)
    more = f"and {rest} more that jump less: --detail" if rest else ""
    rows = [(study_summary(report).place(one.router), *_cells(one)) for one in routers]
    return Table(_HEADS, rows, drops=(0, 0, 0, 0, 0, 0, 1, 1, 2), rest=more)


def _cells(one: RouterContinuity) -> tuple[str, ...]:
    crossing, smooth = one.crossing, one.crossing.smooth
    return (
        str(crossing.token),
        f"{crossing.pair[0]}, {crossing.pair[1]}",
        percent(crossing.relative),
        _slope(crossing.hard),
        "-" if smooth is None else _slope(smooth),
        figure_text(float(crossing.hard.spread[0])),
        "-" if smooth is None else figure_text(float(smooth.spread[0])),
        "-" if smooth is None else figure_text(one.eps),
    )


def _radii(report: Continuity) -> Table:
    """G at some radii, of the router whose jump is the highest."""
    one = highest(report)
    crossing, smooth = one.crossing, one.crossing.smooth
    last = len(crossing.radius) - 1
    places = [round(last * n / (_SHOWN - 1)) for n in range(_SHOWN)]
    unit = crossing.rms * math.sqrt(one.hidden_size)
    rows = [
        (
            f"{crossing.radius[at] / unit:.0e}",
            figure_text(float(crossing.hard.spread[at])),
            "-" if smooth is None else figure_text(float(smooth.spread[at])),
            "-" if smooth is None else figure_text(float(smooth.spread[at] / crossing.radius[at])),
        )
        for at in places
    ]
    place = study_summary(report).places([one.router])
    heads = (
        (f"{place}: within r", "spread G of the output", "", "smooth"),
        ("rms lengths", "hard", "smooth", "G / r"),
    )
    return Table(heads, rows)


# -------------------------------------------------------------------------------------------- notes


def _limits(report: Continuity) -> Iterator[str]:
    yield (
        "G(r) is the largest distance of two outputs within r of the boundary point on the line, "
        "its slope d ln G / d ln r over the smallest decade of 40 radii: 0 at a jump, 1 where the "
        "output has a derivative. Of the routed experts of one block, with one set of weights."
    )
    crossing = highest(report).crossing
    if crossing.fades_at < _FADING:
        yield (
            f"At the ends of that line the expert left out is {percent(crossing.fades_at)} of eps "
            "below the last chosen one: its weight fades farther out, where the smoothed output is "
            "steeper. A longer line, or a narrower strip, shows it: --radius, --smooth."
        )
    yield (
        "What is seen on one line is said of that line, down to the least radius. A jump cannot be "
        "told from a very steep slope by looking; the height is that of the two sides at the "
        "boundary itself."
    )
    if any(one.has_groups for one in report.routers):
        yield (
            "Groups are masked before rank k is looked at: where the nearest boundary is one of "
            "groups, smoothing does not help. Those are among the unknown boundary points."
        )
    if report.written:
        yield f"Lines and spreads written to {report.written}."


def _record(report: Continuity) -> Mapping[str, Any]:
    record = study_record(report)
    return {**record, "routers": _plain(record["routers"])}


def _plain(value: Any) -> Any:
    """Arrays as lists; what is no number is None."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------ figures
#: Colours of the gates.
_ROLES = {"hard": "tokens", "smooth": "g1"}


def continuity_figures(report: Continuity) -> Iterator[Chart]:
    """One for each router, the highest jump first."""
    names = [one.router for one in report.routers]
    for one in sorted(report.routers, key=lambda each: -each.crossing.relative):
        yield _crossing(one, place(one.router, names))


def _crossing(one: RouterContinuity, name: str) -> Chart:
    crossing = one.crossing
    gates = [along for along in (crossing.hard, crossing.smooth) if along is not None]
    unit = crossing.rms * math.sqrt(one.hidden_size)
    offset = [float(value / unit) for value in crossing.offset]
    radius = [float(value / unit) for value in crossing.radius]
    out, into = crossing.pair

    def lines(of: str, at: Sequence[float]) -> list[Polyline]:
        return [Polyline(along.gate, _ROLES[along.gate], at, _values(along, of)) for along in gates]

    panels = [
        Panel(
            "The output along the line",
            Axis("from the boundary, in rms lengths"),
            Axis(f"output {crossing.coordinate}"),
            lines("line", offset),
        ),
        Panel(
            "How far it spreads",
            Axis("within r, in rms lengths of the input", "log10"),
            Axis("spread G", "log10"),
            [*lines("spread", radius), Guide("height of the jump", "limit", crossing.jump)],
        ),
        Panel(
            "How that grows",
            Axis("within r, in rms lengths of the input", "log10"),
            Axis("slope d ln G / d ln r"),
            [*lines("slope", radius), Guide("a derivative", "dim", 1.0)],
        ),
    ]
    smoothed = (
        ""
        if crossing.smooth is None
        else f"; smoothed, {figure_text(float(crossing.smooth.spread[0]))} with slope "
        f"{crossing.smooth.slope_near:.2f}"
    )
    return Chart(
        f"crossing-{one.router.replace('/', '-')}",
        f"Layer {name}: the output where expert {into} takes over from expert {out}",
        f"A line through the nearest boundary point of token {crossing.token}, at right angles to "
        "the boundary. First the coordinate of the output that jumps most, by the model's own gate "
        "and by the smoothed one, whose experts are the same; then the largest distance of two "
        "outputs within r of the boundary, all coordinates together; last its slope: 0 where the "
        "output jumps, 1 where it has a derivative.",
        "Other lines, shared experts, and what later layers make of it.",
        f"Within {radius[0]:.0e} rms lengths the output spreads by "
        f"{figure_text(float(crossing.hard.spread[0]))} with slope {crossing.hard.slope_near:.2f}, "
        f"{percent(crossing.relative)} of its length{smoothed}.",
        panels,
        [
            ("radius", radius),
            *(
                (f"{along.gate}_{column}", _values(along, column))
                for along in gates
                for column in ("spread", "slope", "spread_coordinate", "slope_coordinate")
            ),
        ],
    )


def _values(along: Along, name: str) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in getattr(along, name).tolist()]
