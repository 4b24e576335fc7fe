"""From the states of a scan to rows of the results, with standard errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from moegeom.core.metric import Metric, RouterFacts
from moegeom.core.router import Router
from moegeom.core.row_keys import ALL
from moegeom.core.shapes import Int64
from moegeom.engine.plan import on_all_cores
from moegeom.geometry.gram import effective_rows
from moegeom.geometry.statistics import jackknife_error
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.reduction import REDUCTIONS, State, reduction_of, selector
from moegeom.kernels.reductions.choices import TOKENS
from moegeom.results.reader import plain_column, plain_value

#: Rows of the results: table -> list of rows, each a mapping column -> value.
Rows = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Finished:
    """Rows of one router and variant, and why some metrics are missing."""

    rows: Rows
    reasons: dict[str, str]


@dataclass(frozen=True)
class MeasuredRouter:
    """Rows of the results, and facts about how they came about."""

    rows: Rows
    facts: dict[str, Any]


def finish_router(
    router: Router,
    states: Mapping[str, State],
    populations: Sequence[str],
    metrics: Sequence[Metric],
    missing: Mapping[str, str],
    variant: str = "as_stored",
) -> Finished:
    """Rows of every metric for all tokens and for each population with tokens.

    ``missing`` says why a reduction is absent. A column with ``has_se`` gets ``<name>_se``, the
    delete-one jackknife over the blocks that hold tokens; missing with fewer than two blocks. A
    metric may give its own (``Metric.errors``).
    """
    shared = weight_quantities(router, metrics)
    tokens = np.zeros((1, NUM_BLOCKS), np.int64)
    if "token_counts" in states:
        tokens = states["token_counts"]["counts"][..., TOKENS]
    states = {name: REDUCTIONS[name].settle(state) for name, state in states.items()}
    reasons = {}
    for metric in metrics:
        absent = [n for n in map(reduction_of, metric.needs) if n not in states]
        if metric.scope != "weights" and absent:
            reasons[metric.name] = missing[absent[0]]
    rows: Rows = {}
    rows_by_place: _Known = {}
    for index, population in _present(tokens, populations):
        of_block = tokens.sum(axis=0) if index is None else tokens[index]
        for metric in metrics:
            if metric.name in reasons or (metric.scope == "weights" and index is not None):
                continue
            key = {"router": router.name, "variant": variant, "population": population}
            if metric.scope == "weights":
                values = metric.finish(shared, RouterFacts(router, 0, variant == "random"))
            else:
                values = _values(metric, router, states, index, of_block, variant)
            _add_rows(rows, rows_by_place, key, values)
    return Finished(rows, reasons)


def _present(
    tokens: Int64[np.ndarray, "populations blocks"], populations: Sequence[str]
) -> list[tuple[int | None, str]]:
    labels: list[tuple[int | None, str]] = [(None, ALL)]
    counts = tokens.sum(axis=1).tolist()
    for index, (name, number) in enumerate(zip(populations, counts, strict=False)):
        # a stream with a single unlabelled population would only repeat the whole
        if number and name != "domain=(none)":
            labels.append((index, name))
    return labels


def _values(
    metric: Metric,
    router: Router,
    states: Mapping[str, Any],
    population: int | None,
    of_block: Int64[np.ndarray, "blocks"],
    variant: str,
) -> dict[str, dict[str, Any]]:
    select = {need: (selector(need), states[reduction_of(need)]) for need in metric.needs}
    blocks, total = np.flatnonzero(of_block).tolist(), int(of_block.sum())
    num_blocks, is_whole = len(blocks), population is None
    if len(blocks) == 1:
        blocks = []  # without it nothing is left

    def selected(without: int | None) -> dict[str, Any]:
        return {need: one(state, population, without) for need, (one, state) in select.items()}

    def facts(tokens: int) -> RouterFacts:
        return RouterFacts(router, tokens, variant == "random", num_blocks, is_whole)

    selection = selected(None)
    whole = {
        table: dict(columns) for table, columns in metric.finish(selection, facts(total)).items()
    }
    left_out = [*map(selected, blocks)] if metric.errors else []
    errors = metric.errors(selection, left_out) if metric.errors and blocks else {}
    by_jackknife = [
        (table, column.name)
        for table, columns in metric.columns.items()
        for column in columns
        if column.has_se
        and column.name in whole.get(table, {}).keys() - errors.get(table, {}).keys()
    ]
    if all(whole[table][name] is None for table, name in by_jackknife):
        blocks = []  # what has no value has no error
    each, parts = {}, []
    if metric.without_each and blocks:
        # a metric that looks at one selection after the other need not hold all of them
        each = metric.without_each(left_out or [*map(selected, blocks)], facts(total))
    if blocks and any(name not in each.get(table, {}) for table, name in by_jackknife):
        parts = [
            metric.finish(selected(block), facts(total - int(of_block[block]))) for block in blocks
        ]
    for table, name in by_jackknife:
        values = each.get(table, {}).get(name)
        if values is None:
            values = [part.get(table, {}).get(name) for part in parts]
        whole[table][f"{name}_se"] = _jackknife(values, whole[table][name])
    for table, columns in errors.items():
        whole[table] |= {f"{name}_se": error for name, error in columns.items()}
    return whole


def _jackknife(leave_one_out: Sequence[Any] | np.ndarray, whole: Any) -> Any:
    """Standard error, of the shape of ``whole``; nan where it cannot be had."""
    unknown = np.full(np.shape(whole), np.nan) if np.ndim(whole) else None
    if whole is None or len(leave_one_out) < 2 or any(v is None for v in leave_one_out):
        return unknown
    error = jackknife_error(np.asarray(leave_one_out, dtype=np.float64))
    return error if np.ndim(whole) else float(error)


#: Columns that tell the rows of a table and population apart, where several metrics fill it.
_KEYS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "layers": lambda row: None,
    "experts": itemgetter("expert"),
    "pairs": itemgetter("expert_out", "expert_in"),
}

#: Table -> its rows by population and what tells them apart.
_Known = dict[str, dict[tuple[str, Any], dict[str, Any]]]


def _add_rows(
    rows: Rows, rows_by_place: _Known, key: dict[str, str], values: Mapping[str, Mapping[str, Any]]
) -> None:
    """Adds rows, or columns to rows that are there; to a table that one metric fills, rows."""
    for table, columns in values.items():
        if table == "layers":
            listed = [{name: plain_value(value) for name, value in columns.items()}]
        else:
            names, plain = list(columns), [plain_column(column) for column in columns.values()]
            listed = [dict(zip(names, cells, strict=True)) for cells in zip(*plain, strict=True)]
        table_rows = rows.setdefault(table, [])
        if table not in _KEYS:
            table_rows += ({**key, **row} for row in listed)
            continue
        apart, there = _KEYS[table], rows_by_place.setdefault(table, {})
        for row in listed:
            place = key["population"], apart(row)
            if place in there:
                there[place].update(row)
            else:
                there[place] = {**key, **row}
                table_rows.append(there[place])


#: By the name that a metric of scope ``weights`` gives in ``needs``.
WEIGHT_QUANTITIES: Mapping[str, Callable[[Router], Any]] = {
    "effective_rows": lambda router: effective_rows(router.weight, router.gain)
}


def weight_quantities(router: Router, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Every quantity that a metric of scope ``weights`` needs."""
    needed = {need for metric in metrics if metric.scope == "weights" for need in metric.needs}
    return {name: WEIGHT_QUANTITIES[name](router) for name in sorted(needed)}


#: Why a log of counts gives some metrics no value.
_COUNTS_ALONE = "needs the choices of each token; this log counts experts only"


def measure_weights(router: Router, metrics: Sequence[Metric], reason: str) -> MeasuredRouter:
    """Rows of the metrics that need no tokens; the others are missing for ``reason``."""
    missing = {
        reduction_of(need): reason for m in metrics if m.scope != "weights" for need in m.needs
    }
    finished = finish_router(router, {}, (), metrics, missing)
    return MeasuredRouter(finished.rows, {"num_tokens": 0, "reasons": finished.reasons})


def measure_weights_of(
    routers: Sequence[tuple[Router, Sequence[Metric]]],
) -> Iterator[MeasuredRouter]:
    """What :func:`measure_weights` gives for each router without tokens, on all cores, in order."""
    return on_all_cores(lambda one: measure_weights(one[0], one[1], "no tokens"), routers)


def measure_counts(
    router: Router, counts: Int64[np.ndarray, "steps experts"], metrics: Sequence[Metric]
) -> MeasuredRouter:
    """Rows of the load metrics and of weights; the others are missing with the reason.

    Step n belongs to block n modulo 16, so that standard errors are those of steps; a log of one
    step has none.
    """
    blocks = np.zeros((1, NUM_BLOCKS, router.num_experts), np.int64)
    np.add.at(blocks[0], np.arange(len(counts)) % NUM_BLOCKS, counts)
    tokens = np.zeros((1, NUM_BLOCKS, 2), np.int64)
    tokens[..., TOKENS] = blocks.sum(axis=2) // router.rule.top_k
    states = {"expert_counts": {"counts": blocks}, "token_counts": {"counts": tokens}}
    missing = dict.fromkeys(set(REDUCTIONS.names()) - set(states), _COUNTS_ALONE)
    finished = finish_router(router, states, ("domain=(none)",), metrics, missing)
    facts = {
        "num_tokens": int(tokens.sum()),
        "num_excluded": 0,
        "num_non_finite": 0,
        "first_non_finite": [],
        "reasons": finished.reasons,
        "disagreements": [],
    }
    return MeasuredRouter(finished.rows, facts)
