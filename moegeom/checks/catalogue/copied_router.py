"""MGI112: no two layers hold the same router, or the same rows.

Looked for: router weights of two places of the checkpoint that are equal bit for bit, other than
rows of zeros; rows whose lengths are equal to the last digit in the same order, two or more; and
routers whose row lengths are all in one proportion, as close as the coarser of the two dtypes
allows: a copy that was cast or scaled. A router that encoder and decoder share is read once, and is
no copy.

A finding means: one layer was overwritten with the router of another, or with a block of its rows,
or a layer was copied whole. Training leaves no two routers equal. Where the gains of the norm in
front differ, the router alone was copied, and its experts meet the tokens of another layer.

What to do: compare the layers with the source of the checkpoint. A model that was grown by
repeating layers has them on purpose until it is trained on: accept the code in a profile. Routers
whose rows all have one length are compared bit for bit only, so that they raise no false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured, Row, place_of
from moegeom.core.finding import Finding
from moegeom.core.text import number_of

#: Lengths of equal rows differ by the order of a sum in float64, relatively.
_EQUAL = 1e-12

#: Rows of fewer columns may have one length by chance, and so may a single one.
_LEAST_COLUMNS, _LEAST_ROWS = 32, 2

#: Rows below which lengths in one proportion may be chance, and how many times their spread must be
#: what a cast changes of them.
_LEAST_IN_PROPORTION, _TIMES = 8, 10.0


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    alike: dict[str, list[Row]] = {}
    for row in _read(measured):
        if row["num_zero_rows"] < measured.facts(row["router"])["num_experts"]:  # MGI103 says so
            alike.setdefault(row["weight_digest"], []).append(row)
    for rows in alike.values():
        if len(rows) > 1:
            yield _told(
                rows,
                f"{_and([place_of(row['router']) for row in rows])} hold the same router.",
                "Their weights are equal bit for bit.",
            )
    different = {rows[0]["router"]: rows[0] for rows in alike.values()}
    lengths = {name: _lengths(measured, name) for name in different}
    blocks = _blocks(measured, lengths)
    for (first, second), shared in blocks.items():
        shift = f", {abs(shared[0][1] - shared[0][0])} further on" * (shared[0][0] != shared[0][1])
        yield _told(
            [different[first], different[second]],
            f"{place_of(first)} and {place_of(second)} share {number_of(len(shared), 'row')}.",
            f"Experts {_ranges([one for one, _ in shared])} of the one are experts "
            f"{_ranges([other for _, other in shared])} of the other{shift}: their lengths are "
            "equal to the last digit.",
        )
    for first, second, factor in _proportions(measured, different, lengths):
        if (first, second) in blocks:
            continue
        scaled = f"{factor:.4g} times" if abs(factor - 1.0) > 1e-3 else "a cast of"
        yield _told(
            [different[first], different[second]],
            f"the router of {place_of(second)} is {scaled} that of {place_of(first)}.",
            f"The lengths of {number_of(len(lengths[first]), 'row')} are in one proportion.",
        )


def _told(rows: Sequence[Row], title: str, detail: str) -> Finding:
    routers = tuple(row["router"] for row in rows)
    return CHECK.finding(
        routers, title, f"{detail} {_gains(rows)} A fault of the file, not of the data."
    )


def _and(places: Sequence[str]) -> str:
    return f"{', '.join(places[:-1])} and {places[-1]}"


def _read(measured: Measured) -> list[Row]:
    """Routers whose weight was read: of those that are listed alone nothing is known."""
    return [row for row in measured.layers if row["weight_digest"] is not None]


def _lengths(measured: Measured, router: str) -> list[float]:
    """Lengths of the stored rows; nan for rows that are zero, not finite or not known."""
    known = (e.get("row_norm") for e in measured.experts.get(router, ()))
    return [n if n and math.isfinite(n) else math.nan for n in known]


def _blocks(
    measured: Measured, lengths: dict[str, list[float]]
) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """By pair of routers the experts whose rows are equal, in the order of the first."""
    wide = [
        name for name in lengths if measured.facts(name).get("hidden_size", 0) >= _LEAST_COLUMNS
    ]
    every = sorted(
        (length, name, expert)
        for name in wide
        for expert, length in enumerate(lengths[name])
        if length == length
    )
    found: dict[tuple[str, str], dict[int, list[tuple[int, int]]]] = {}
    order = {name: place for place, name in enumerate(lengths)}
    for one, other in pairwise(every):
        if other[0] - one[0] > _EQUAL * one[0] or one[1] == other[1]:
            continue
        (_, first, a), (_, second, b) = sorted((one, other), key=lambda e: order[e[1]])
        found.setdefault((first, second), {}).setdefault(b - a, []).append((a, b))
    # a block keeps its order: rows that are equal by chance have shifts of their own
    longest = {pair: max(shifts.values(), key=len) for pair, shifts in found.items()}
    return {pair: sorted(rows) for pair, rows in longest.items() if len(rows) >= _LEAST_ROWS}


def _proportions(
    measured: Measured, different: dict[str, Row], lengths: dict[str, list[float]]
) -> Iterator[tuple[str, str, float]]:
    """Routers whose row lengths are those of an earlier one times a factor; the first such alone.

    As close as six standard errors of what casts to the stored dtypes change of a length: a number
    with b bits is off by a uniform error of at most 2^-(b+1), one row of D numbers by about
    sqrt(3/D) times its root mean square.
    """
    alike: dict[tuple[int, int], list[str]] = {}
    for name, row in different.items():
        hidden, known = measured.facts(name).get("hidden_size", 0), lengths[name]
        is_plain = row.get("weight_bits") is not None and hidden
        if is_plain and len(known) >= _LEAST_IN_PROPORTION and not math.isnan(sum(known)):
            alike.setdefault((len(known), hidden), []).append(name)
    for (_, hidden), names in alike.items():
        logs = np.log([lengths[name] for name in names])
        bits = np.array([different[name]["weight_bits"] for name in names])
        bounds = 6.0 * 2.0 ** -(1.0 + np.minimum.accumulate(bits)) / math.sqrt(hidden)
        begins, spreads = logs[:, 1:_LEAST_IN_PROPORTION] - logs[:, :1], logs.std(axis=1)
        for at in range(1, len(names)):
            near = np.abs(begins[:at] - begins[at]).max(axis=1) <= 2.0 * bounds[at]
            for one in np.flatnonzero(near):  # of most there is none
                bound = 6.0 * 2.0 ** -(1.0 + min(bits[one], bits[at])) / math.sqrt(hidden)
                steps = logs[at] - logs[one]
                middle = float(np.median(steps))
                if np.abs(steps - middle).max() <= bound < spreads[one] / _TIMES:
                    yield names[one], names[at], math.exp(middle)
                    break


def _ranges(experts: Sequence[int]) -> str:
    """``0-15, 20``."""
    runs = [
        [expert for _, expert in run]
        for _, run in groupby(enumerate(sorted(experts)), key=lambda pair: pair[1] - pair[0])
    ]
    shown = [f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs]
    return ", ".join(shown[:8]) + (" ..." if len(shown) > 8 else "")


def _gains(rows: Sequence[Row]) -> str:
    gains = {row["gain_digest"] for row in rows}
    if None in gains:
        return "No gain in front tells whether more of the layer was copied."
    if len(gains) == 1:
        return "The gains of the norm in front are equal too: the layer may have been copied whole."
    return "The gains of the norm in front differ: the router alone was copied."


CHECK = Check(
    "MGI112",
    "two layers hold the same router",
    "error",
    _judge,
    ("weight_digest",),
    absent="no weight was read",
    too_little=lambda measured: (
        "one router is compared with no other" if len(_read(measured)) < 2 else ""
    ),
)
