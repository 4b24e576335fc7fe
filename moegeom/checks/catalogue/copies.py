"""Copies: one router in two places, and one place with several routers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np

from moegeom.checks.check import Limits, Unknown, check
from moegeom.checks.measured import Measured, Row, place_of
from moegeom.core.finding import Finding
from moegeom.core.text import listing, number_of

#: Lengths of equal rows differ by the order of a sum in float64, relatively.
_EQUAL = 1e-12

#: Rows of fewer columns may have one length by chance, and so may a single one.
_LEAST_COLUMNS, _LEAST_ROWS = 32, 2

#: Rows below which lengths in one proportion may be chance, and how many times their spread must be
#: what a cast changes of them.
_LEAST_IN_PROPORTION, _TIMES = 8, 10.0


def _read(measured: Measured) -> list[Row]:
    """Routers whose weight was read: of those that are listed alone nothing is known."""
    return [row for row in measured.layers if row["weight_digest"] is not None]


@check(
    "MGI112",
    "two layers hold the same router",
    "error",
    ("weight_digest",),
    absent="no weight was read",
    too_little=lambda measured: (
        "one router is compared with no other" if len(_read(measured)) < 2 else ""
    ),
)
def copied_router(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """No two layers hold the same router, or the same rows.

    Looked for: router weights of two places that are equal bit for bit, other than rows of zeros;
    two or more rows, in one order, whose lengths are equal to the last digit; and routers whose row
    lengths are all in one proportion, as close as the coarser of the two dtypes allows: a copy that
    was cast or scaled. A router that encoder and decoder share is read once, and is no copy.

    A finding means: one layer was overwritten with the router of another, or with a block of its
    rows, or was copied whole; training leaves no two routers equal. Where the gains of the norm in
    front differ, the router alone was copied, and its experts meet the tokens of another layer.

    What to do: compare the layers with the source of the checkpoint. A model that was grown by
    repeating layers has them on purpose until it is trained on: accept the code in a profile.
    Routers whose rows all have one length are compared bit for bit only.
    """
    alike: dict[str, list[Row]] = {}
    for row in _read(measured):
        num_broken = row["num_zero_rows"] + row["num_non_finite_rows"]  # MGI101 and MGI103 say so
        if num_broken < measured.facts(row["router"])["num_experts"]:
            alike.setdefault(row["weight_digest"], []).append(row)
    for rows in alike.values():
        if len(rows) > 1:
            yield _finding(
                rows,
                f"{listing([place_of(row['router']) for row in rows])} hold the same router.",
                "Their weights are equal bit for bit.",
            )
    different = {rows[0]["router"]: rows[0] for rows in alike.values()}
    lengths = {name: _lengths(measured, name) for name in different}
    blocks = _blocks(measured, lengths)
    for (first, second), shared in blocks.items():
        shift = f", {abs(shared[0][1] - shared[0][0])} further on" * (shared[0][0] != shared[0][1])
        yield _finding(
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
        yield _finding(
            [different[first], different[second]],
            f"the router of {place_of(second)} is {scaled} that of {place_of(first)}.",
            f"The lengths of {number_of(len(lengths[first]), 'row')} are in one proportion.",
        )


def _finding(rows: Sequence[Row], title: str, detail: str) -> Finding:
    routers = tuple(row["router"] for row in rows)
    return copied_router.finding(
        routers, title, f"{detail} {_gains(rows)} A fault of the file, not of the data."
    )


def _lengths(measured: Measured, router: str) -> list[float]:
    """Lengths of the stored rows; nan for rows that are zero, not finite or not known."""
    lengths = (e.get("row_norm") for e in measured.experts.get(router, ()))
    return [n if n and math.isfinite(n) else math.nan for n in lengths]


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
    shifts_by_pair: dict[tuple[str, str], dict[int, list[tuple[int, int]]]] = {}
    order = {name: place for place, name in enumerate(lengths)}
    for one, other in pairwise(every):
        if other[0] - one[0] > _EQUAL * one[0] or one[1] == other[1]:
            continue
        (_, first, a), (_, second, b) = sorted((one, other), key=lambda e: order[e[1]])
        shifts_by_pair.setdefault((first, second), {}).setdefault(b - a, []).append((a, b))
    # a block keeps its order: rows that are equal by chance have shifts of their own
    longest = {pair: max(shifts.values(), key=len) for pair, shifts in shifts_by_pair.items()}
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
        hidden, own = measured.facts(name).get("hidden_size", 0), lengths[name]
        is_plain = row.get("weight_bits") is not None and hidden
        if is_plain and len(own) >= _LEAST_IN_PROPORTION and not math.isnan(sum(own)):
            alike.setdefault((len(own), hidden), []).append(name)
    for (_, hidden), names in alike.items():
        logs = np.log([lengths[name] for name in names])
        bits = np.array([different[name]["weight_bits"] for name in names])
        bounds = 6.0 * 2.0 ** -(1.0 + np.minimum.accumulate(bits)) / math.sqrt(hidden)
        begins, spreads = logs[:, 1:_LEAST_IN_PROPORTION] - logs[:, :1], logs.std(axis=1)
        order = np.argsort(begins[:, 0])  # what is near is near in its first step
        first = begins[order, 0]
        starts = np.searchsorted(first, begins[:, 0] - 2.0 * bounds, "left")
        stops = np.searchsorted(first, begins[:, 0] + 2.0 * bounds, "right")
        for at in range(1, len(names)):
            earlier = np.sort(order[starts[at] : stops[at]])
            earlier = earlier[earlier < at]
            near = np.abs(begins[earlier] - begins[at]).max(axis=1) <= 2.0 * bounds[at]
            for one in earlier[near]:  # of most there is none
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
    texts = [f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs]
    return ", ".join(texts[:8]) + (" ..." if len(texts) > 8 else "")


def _gains(rows: Sequence[Row]) -> str:
    gains = {row["gain_digest"] for row in rows}
    if None in gains:
        return "No gain in front tells whether more of the layer was copied."
    if len(gains) == 1:
        return "The gains of the norm in front are equal too: the layer may have been copied whole."
    return "The gains of the norm in front differ: the router alone was copied."


@check("MGI114", "copies of a router differ", "error")
def copies_differ(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """A router that is stored several times is the same everywhere.

    Looked for: files or folders of several ranks that hold tensors of one name (``model-rank-0``,
    ``mp_rank_01``, ``tp1``), and a router under several names; routers, biases and gains byte by
    byte. A tensor that is cut over the ranks, as its shape says, is no copy.

    A finding means: the replicas drifted apart in training, as they do when a gradient is not
    summed over the ranks, or the files are of two checkpoints. Which one an engine loads is chance,
    and each rank trained another model.

    What to do: find the step from which they differ. Where routers were meant to be cut over the
    ranks, join the slices with the tool that wrote them.
    """
    yield from copies_differ.refused(measured)


@check(
    "MGI117",
    "loaders take different routers",
    "warning",
    facts="loaders",
    absent="these results do not say what lies beside the weights",
    severities={"release": "error"},
)
def loaders_disagree(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """Every loader takes the same routers of the folder.

    Looked for: files of the folder, or a table of its config, in which transformers, vLLM, SGLang
    or llama.cpp's converter, or transformers with another option, finds other routers than those
    that are judged, bit for bit; and an adapter that PEFT lays over a router. The line "weights"
    says whose answer is judged.

    A finding means: which routers a model has depends on who loads it. A shard holds a router that
    the index places in another one, a second copy of the weights lies beside the first, or the
    config names another file.

    What to do: keep one copy of the weights in the folder, and write the index anew, as
    ``save_pretrained`` does. Merge an adapter that belongs to the model.
    """
    facts = measured.run["loaders"]
    for other in facts["others"]:
        loaders = listing(other["loaders"])
        if other["routers"]:
            broken, inner = len(other["not_finite"]), other.get("inner")
            files = ", ".join(other["files"][:3]) + (", ..." if len(other["files"]) > 3 else "")
            finding = loaders_disagree.finding(
                tuple(other["routers"]),
                f"other routers are loaded by {loaders}{f', from {files}' if files else ''}"
                + (f": {number_of(broken, 'router')} not finite." if broken else "."),
                f"Judged: {facts['entry'] or 'the files of the folder'}."
                + (f" They read {inner!r} of the config before the rest." if inner else ""),
            )
            is_broken = broken and other["is_default"]
            yield dataclasses.replace(finding, severity="error") if is_broken else finding
        elif other["is_default"] and not other.get("is_missing"):
            yield Unknown("checkpoint", f"what {loaders} load: {other['reason']}")
    if other := facts["class_of_others"]:
        yield loaders_disagree.finding(
            (),
            f"the class {other['class']} of 'architectures' is of family {other['family']}, the "
            "'model_type' of another.",
            "transformers goes by the type, which is judged; vLLM and SGLang by the class.",
        )
    adapter = facts["adapter"]
    if adapter and adapter["routers"]:
        yield loaders_disagree.finding(
            tuple(adapter["routers"]),
            f"transformers with PEFT lays {adapter['file']} over them.",
            "Judged are the routers without the adapter.",
        )
    elif adapter and adapter["reason"]:
        yield Unknown("checkpoint", f"whether the adapter changes routers: {adapter['reason']}")
