"""What-ifs at one router: each is fitted, then tried on all tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from threadpoolctl import threadpool_limits

from moegeom.core.errors import RouterRuleError
from moegeom.core.metric import Metric
from moegeom.core.row_keys import ALL
from moegeom.core.tokens import TILE
from moegeom.engine.plan import SAMPLE_TOKENS, sample_batches
from moegeom.engine.prepared import prepare
from moegeom.engine.task import MadeWhatIf, Task
from moegeom.engine.what_if import make_what_if, moved_under, read_sample, why_missing
from moegeom.kernels.reduction import reduction_of
from moegeom.measure.finish import MeasuredRouter, Rows, finish_router
from moegeom.measure.passes import (
    Pass,
    RouterRun,
    extend_rows,
    fold_pass,
    task_of,
    typical_norm,
)
from moegeom.variants.arithmetic import arithmetic
from moegeom.variants.what_if import parse_what_ifs


def with_what_ifs(run: RouterRun, measured: MeasuredRouter) -> MeasuredRouter:
    """The rows of a router with those of every what-if, each a variant of its own.

    A what-if that means nothing for its rule has no rows: ``facts["what_ifs"]`` says why.
    """
    own = prepare(run.router)
    tiles = sample_batches(
        run.source.facts.num_tokens, run.options.seed, SAMPLE_TOKENS, run.options.what_if_batch
    )
    task = task_of(run, own, (), typical_norm(run, own))
    with threadpool_limits(1, user_api="blas"):
        sample = read_sample(task, tiles, run.options.what_if_batch)
    rows: Rows = {}
    facts: dict[str, Any] = {}
    extend_rows(rows, measured.rows)
    with threadpool_limits(1, user_api="blas"):
        made: list[MadeWhatIf] = []
        for asked in parse_what_ifs(run.options.what_ifs):
            try:
                made.append(make_what_if(asked, task, sample))
            except RouterRuleError as refusal:
                facts[asked.name] = {"refused": refusal.message}
        moved = [
            moved_under(made, task, arithmetic(n), tiles)
            for n in run.options.arithmetics
            if run.is_whole
        ]
    for number, one in enumerate(made):
        found, reasons = _tried(one, run, task)
        extend_rows(rows, found)
        figures = dict(one.figures)
        for under in moved:
            figures |= under[number]
        facts[one.name] = _facts(one, figures, reasons)
    return MeasuredRouter(rows, {**measured.facts, "what_ifs": facts})


def _tried(made: MadeWhatIf, run: RouterRun, task: Task) -> tuple[Rows, dict[str, str]]:
    """Rows of the metrics of one choice, and of those that compare it with the router as stored."""
    metrics = [m for m in run.metrics if _is_of_choice(m)]
    needed = {reduction_of(need) for metric in metrics for need in metric.needs}
    missing = {name: why for name in needed if (why := why_missing(made, name))}
    wanted = sorted((needed - missing.keys()) | {"token_counts"})
    tried = dataclasses.replace(task, reductions=tuple(wanted), what_if=made)
    tiles = range(-(-run.source.facts.num_tokens // TILE))
    planned = Pass(made.name, tried, tiles, run.options.skips_non_finite)
    progress = fold_pass(run, planned)
    if not run.is_whole:
        return {}, {}
    names = task.populations.names
    with threadpool_limits(1, user_api="blas"):
        finished = finish_router(
            made.router, progress.states, names, metrics, missing, made.name, ALL
        )
    return finished.rows, finished.reasons


def _is_of_choice(metric: Metric) -> bool:
    return metric.scope in ("router", "flip") and not metric.is_for_figures


def _facts(
    made: MadeWhatIf, figures: Mapping[str, float], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """What a reader of the results is told of a what-if at one router."""
    gate = made.gate
    return {
        "top_k": made.router.rule.num_chosen,
        "figures": dict(figures),
        "notes": list(gate.notes),
        "is_causal": gate.is_causal,
        "is_token_local": gate.is_token_local,
        "has_fixed_size": gate.has_fixed_size,
        "num_sampled": made.num_sampled,
        "reasons": dict(reasons),
    }
