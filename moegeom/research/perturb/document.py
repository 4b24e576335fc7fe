"""Drifting router inputs as a document: how far, and to which expert."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from moegeom.core.text import number_of, percent
from moegeom.document.excerpts import worst_excerpt
from moegeom.document.model import Block, Document, Excerpt, Fact, Table, View
from moegeom.document.study import left_out_facts, study_page, study_summary
from moegeom.research.perturb.record import Perturbed, RouterPaths

#: Pairs of experts that a screen shows of all routers together.
_PAIRS = 6

#: Errors of the difference beyond which a pair is said to differ from the nearest boundary.
_BELIEVED = 3.0

_PAIR_HEADS = (
    ("", "", "", "first exits", "by the nearest"),
    ("layer", "out", "in", "by this pair", "boundary"),
)


def document(report: Perturbed, view: View) -> Document:
    """What ``moegeom research perturb`` says."""
    sections = []
    file = [f"Curves and exits written to {report.written}."] * bool(report.written)
    if report.routers:
        curves = partial(_curves, report)
        worst = worst_excerpt(report.routers, lambda one: -one.half.simulated, view, curves)
        sections = [[worst], [*_pairs(report, view)]]
    moved = Fact("moved", f"{report.noise[:1].upper()}{report.noise[1:]}.")
    return study_page(
        report,
        "research perturb",
        view,
        *sections,
        verdict=_result(report),
        facts=[moved] if report.routers else [],
        notes=(*_limits(report), *file),
    )


def _median(report: Perturbed, value: Callable[[RouterPaths], float | None]) -> float | None:
    """Median over the routers that have a value; None without any."""
    numbers = [one for one in map(value, report.routers) if one is not None]
    return statistics.median(numbers) if numbers else None


def _result(report: Perturbed) -> Iterator[Block]:
    label = "RESULT"
    for sentence in (_when(report), _which(report)):
        if sentence:
            yield Fact(label, sentence, "strong" if label else "plain")
            label = ""
    yield from left_out_facts(report, label)


def _when(report: Perturbed) -> str:
    """How far the median token may drift."""
    half = _median(report, lambda one: one.half.simulated)
    if half is None:
        return ""
    if math.isinf(half):
        return (
            "Half of the tokens change experts with probability below 1/2 at all times looked at."
        )
    early, late = (
        _median(report, lambda one, end=end: getattr(one.half, end))
        for end in ("earliest", "latest")
    )
    size = _median(report, _size_at_half)
    when = f"by time {half:.2g} ("
    if size is not None:
        when = f"once noise reaches {percent(size)} of their rms (time {half:.2g}; "
    proof = "simulated" if early is None else f"proved {_time(early)} to {_time(late)}"
    text = f"Half of the tokens change experts with probability 1/2 or more {when}{proof})"
    if len(report.routers) > 1:
        soonest = min(report.routers, key=lambda one: one.half.simulated)
        place = study_summary(report).places([soonest.router])
        text += f"; soonest in {place}, by {_time(soonest.half.simulated)}"
    return f"{text}."


def _which(report: Perturbed) -> str:
    """How often another expert takes over than the nearest boundary says."""
    share = _median(report, lambda one: one.elsewhere)
    if share is None:
        return ""
    return (
        f"In {percent(share)} of first changes another expert comes in than the one behind the "
        "nearest boundary."
    )


# ------------------------------------------------------------------------------------------- tables


def _curves(report: Perturbed, routers: Sequence[RouterPaths]) -> Table:
    first = report.routers[0]
    times = [f"{at.time:.3g}" for at in first.curve]
    blank = [""] * (len(times) - 1)
    over = ("", "experts have changed by time", *blank, "half", "", "another")
    heads = (over, ("layer", *times, "by", "drift", "comes in"))
    rest = len(report.routers) - len(routers)
    more = f"and {rest} more that change later: --detail" if rest else ""
    rows = [(study_summary(report).place(one.router), *_cells(one)) for one in routers]
    return Table(heads, rows, drops=(0, 2, 1, 0, 0, 0, 0, 0, 0), rest=more)


def _cells(one: RouterPaths) -> tuple[str, ...]:
    size = _size_at_half(one)
    return (
        *(_chance((at.simulated_lower + at.simulated_upper) / 2.0) for at in one.curve),
        _time(one.half.simulated),
        "-" if size is None else percent(size),
        "-" if one.elsewhere is None else percent(one.elsewhere),
    )


def _size_at_half(one: RouterPaths) -> float | None:
    """How far an input has drifted at the half time, a coordinate, in shares of its rms."""
    if one.size is None or math.isinf(one.half.simulated):
        return None
    return one.size * math.sqrt(one.half.simulated)


def _chance(chance: float) -> str:
    """A chance in two figures, or that it is less than any simulation or table would tell."""
    return "< 1e-9 %" if 0.0 < chance < 1e-11 else percent(chance)


def _time(time: float | None) -> str:
    if time is None:
        return "-"
    return "later" if math.isinf(time) else f"{time:.2g}"


def _pairs(report: Perturbed, view: View) -> Iterator[Block]:
    """The pairs of experts whose share of exits differs most from that of nearest boundaries."""
    ranked = sorted(
        (
            (one, pair)
            for one in report.routers
            for pair in one.exits
            if abs(pair.share - pair.share_nearest) > _BELIEVED * pair.apart
        ),
        key=lambda both: -abs(both[1].share - both[1].share_nearest),
    )
    if not ranked:
        return
    rows = [
        (
            study_summary(report).place(one.router),
            str(pair.expert_out),
            str(pair.expert_in),
            f"{percent(pair.share)} +- {percent(pair.share_se)}",
            percent(pair.share_nearest),
        )
        for one, pair in ranked
    ]
    most = len(rows) if view.detail else _PAIRS
    rest = len(rows) - most
    more = f"and {number_of(rest, 'more pair')}: --detail" if rest > 0 else ""
    table = Table(_PAIR_HEADS, rows[:most], rest=more)
    shorter = [[Table(_PAIR_HEADS, rows[:2], rest=f"and {len(rows) - 2} more: --detail")]]
    yield Excerpt([table], [Table(_PAIR_HEADS, rows)], shorter=shorter if len(rows) > 2 else ())


# -------------------------------------------------------------------------------------------- notes


def _limits(report: Perturbed) -> Iterator[str]:
    """How to read the figures, and what they do not say."""
    if not report.routers:
        return
    yield (
        "Chances are those of the median token, simulated without bias in time; 'half': 1/2. "
        "'drift': standard deviation a coordinate by then, in shares of the token's rms. Inputs "
        "drift at random, each coordinate on its own; a model may move them otherwise."
    )
    yield from _errors(report)
    if report.has_drift:
        yield "Not computed with --drift: which expert takes over."
    corners = _median(report, lambda one: one.at_corners)
    if corners is not None:
        yield (
            f"'another comes in': walks to the boundary, however long. {percent(corners)} of "
            "exits are at a corner (a second boundary within a hundredth of the first distance)."
        )
    if left := max(one.num_left for one in report.routers):
        yield f"--budget ended it: up to {number_of(left, 'token')} of a router are left out."
    if unfinished := max(one.unfinished for one in report.routers):
        yield f"Up to {percent(unfinished)} of the walks did not arrive and are left out."
    if places := [one.router for one in report.routers if not one.is_linear]:
        yield (
            f"Boundaries of {study_summary(report).places(places)} are curved or grouped: chances "
            "and walks go by tangents in short steps, whose error is counted; proved chances are "
            "not known."
        )


def _errors(report: Perturbed) -> Iterator[str]:
    """The largest standard errors of what a table shows, of chances at each noise."""
    parts = []
    at_times = zip(*(one.curve for one in report.routers), strict=True)
    if report.routers:
        of_times = (max(at.simulated_se for at in column) for column in at_times)
        parts.append(f"chances {', '.join(_chance(error) for error in of_times)}")
    for name, values in {
        "'another comes in'": [one.elsewhere_se for one in report.routers]
    }.items():
        errors = [value for value in values if value is not None and not math.isnan(value)]
        if any(errors):
            parts.append(f"{name} {percent(max(errors))}")
    halves = [one.half.simulated_se for one in report.routers if one.half.simulated_se]
    if halves:
        parts.append(f"'half' {max(halves):.2g}")
    if parts:
        of = "tokens" if len(report.routers[0].tokens) > 1 else "paths and draws"
        yield f"Standard errors over {of}, at most: {', '.join(parts)}."
