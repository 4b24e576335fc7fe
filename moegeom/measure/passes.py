"""One router from tokens to rows: the scan, its null, and the metrics on both."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from moegeom.core.input_noise import InputNoise
from moegeom.core.metric import Metric
from moegeom.core.populations import ALL
from moegeom.core.router import Router
from moegeom.core.tokens import TILE, TokenSource
from moegeom.core.variant_names import AGAINST, OTHER, under_null
from moegeom.engine.devices.dispatch import engine_for
from moegeom.engine.labels import Populations
from moegeom.engine.loop import Hooks, Pace, Progress, scan_router
from moegeom.engine.per_token import PerTokenFile
from moegeom.engine.plan import (
    SAMPLE_TOKENS,
    SMALL_SAMPLE_TOKENS,
    batch_tokens,
    sample_tiles,
)
from moegeom.engine.prepared import prepare, unavailable
from moegeom.engine.snapshot import read_snapshot, write_snapshot
from moegeom.engine.task import Task
from moegeom.engine.tile import measure
from moegeom.kernels.cuda.device import Device
from moegeom.kernels.reduction import (
    REDUCTIONS,
    Kernels,
    State,
    reduction_of,
    reductions_for,
)
from moegeom.kernels.reductions.token_counts import TOKENS
from moegeom.measure.finish import Rows, finish_router
from moegeom.results.bitmaps import write_bitmap
from moegeom.tokens.stages import INPUT_STAGES
from moegeom.tokens.traces.other_side import OtherSide
from moegeom.variants.arithmetic import Arithmetic
from moegeom.variants.emulated import emulate
from moegeom.variants.random_router import random_router

#: Tokens whose median length is the usual length of a router input: one tile, so that tokens of a
#: running model can be told apart as soon as the first tile is full.
_TYPICAL_TOKENS = TILE


@dataclass(frozen=True)
class RouterRun:
    """One router to measure, and how.

    Under each of ``arithmetics`` the choice is compared with that of the router as stored, or under
    ``reference``; with that of the router as stored so are the choices of the ``other`` run, and
    those of the router ``against`` for the same inputs. Which tokens switch is written to the
    folder ``bitmaps``. The pass over all tokens runs on ``devices``, if any can do it; ``said``
    hears what a user should know about that.
    """

    router: Router
    source: TokenSource
    kernels: Kernels
    metrics: Sequence[Metric]
    num_workers: int = 1
    batch_tokens: int | None = None
    seed: int = 0
    skip_non_finite: bool = False
    exclude_first: int = 0
    snapshot: Path | None = None
    per_token: Path | None = None
    arithmetics: Sequence[Arithmetic] = ()
    reference: Arithmetic | None = None
    noise: InputNoise | None = None
    other: OtherSide | None = None
    against: Router | None = None
    bitmaps: Path | None = None
    advanced: Callable[[int], None] | None = None
    devices: tuple[Device, ...] = ()
    said: Callable[[str], None] | None = None


@dataclass(frozen=True)
class MeasuredRouter:
    """Rows of the results, and facts about how they came about."""

    rows: Rows
    facts: dict[str, Any]


def measure_weights(router: Router, metrics: Sequence[Metric], reason: str) -> MeasuredRouter:
    """Rows of the metrics that need no tokens; the others are null for ``reason``."""
    missing = {
        reduction_of(need): reason for m in metrics if m.scope != "weights" for need in m.needs
    }
    finished = finish_router(router, {}, (), metrics, missing)
    return MeasuredRouter(finished.rows, {"num_tokens": 0, "reasons": finished.reasons})


@dataclass(frozen=True)
class Pass:
    """Tokens of the tiles ``tiles`` through ``task``, folded into ``reductions``.

    A router needs several: the stored router on all tokens (``main``) and, for what is costly, on
    a sample (``sampled``); its null on a sample (``null``, ``null sampled``). Under another
    arithmetic passes have the name of their variant.
    """

    name: str
    task: Task
    reductions: tuple[str, ...]
    tiles: Sequence[int]
    skip_non_finite: bool = True


#: Why a synthetic prior gives some metrics no value.
PRIOR = "a synthetic prior says where walls are, not which tokens come (geometry only)"

#: Scopes of metrics of one choice, as the router is stored.
ONE_CHOICE = ("router", "noise", "exposure")

#: The pass that sees every token.
MAIN = "main"


def measure_router(run: RouterRun) -> MeasuredRouter:
    """Rows of all metrics for the router as stored and, where tokens allow, for its null."""
    started = time.perf_counter()
    passes = plan_passes(run)
    progress = {
        planned.name: _scan(run, planned) if planned.name == MAIN else _scan_again(run, planned)
        for planned in passes
    }
    return finish_passes(run, passes, progress, time.perf_counter() - started)


def _scan_again(run: RouterRun, planned: Pass) -> Progress:
    """A pass after the first; those of an arithmetic over all tokens count as work done."""
    counts = planned.task.compares and planned.task.prepared.router is run.router
    hooks = Hooks(advanced=run.advanced if counts else None)
    return scan_router(
        planned.task, planned.reductions, planned.tiles, _pace(run), planned.skip_non_finite, hooks
    )


def plan_passes(run: RouterRun) -> tuple[Pass, ...]:
    """Every pass that the metrics need; reads the first tile, for the usual length of an input."""
    typical = _typical_norm(run)
    wanted = _wanted(run)
    num_tokens = run.source.facts.num_tokens
    all_tiles = range(-(-num_tokens // TILE))
    some, few = (
        sample_tiles(num_tokens, run.seed, tokens)
        for tokens in (SAMPLE_TOKENS, SMALL_SAMPLE_TOKENS)
    )
    planned = [
        (MAIN, run.router, wanted, False, all_tiles),
        ("sampled", run.router, wanted, True, few),
    ]
    if run.source.facts.stage in INPUT_STAGES:
        null = random_router(run.router, run.seed)
        kept = [name for name in wanted if REDUCTIONS[name].use.of_random_router]
        planned += [("null", null, kept, False, some), ("null sampled", null, kept, True, few)]
    passes = []
    for name, router, names, is_sampled, tiles in planned:
        reductions = tuple(n for n in names if _is_sampled(run, n) == is_sampled)
        if reductions:
            task = _task(run, router, reductions, typical)
            skips = run.skip_non_finite or name != MAIN
            passes.append(Pass(name, task, reductions, tiles, skips))
    compared = (
        *_side_passes(run, typical, all_tiles),
        *_arithmetic_passes(run, typical, all_tiles, some),
    )
    return (*passes, *compared)


def _is_sampled(run: RouterRun, reduction: str) -> bool:
    """Whether a sample is enough: for what costs more than the product, curved walls among it."""
    is_curved = not run.router.rule.is_affine and "distance" in REDUCTIONS[reduction].needs
    return REDUCTIONS[reduction].use.is_sampled or is_curved


def _side_passes(run: RouterRun, typical: float | None, tiles: Sequence[int]) -> Iterator[Pass]:
    """What another run chose, and what another router chooses, for all tokens."""
    if "switches" in _missing(run) or (run.other is None and run.against is None):
        return
    kept = reductions_for(lambda use: use.of_switch)
    task = _task(run, run.router, kept, typical)
    # walls serve the noise model of arithmetics alone
    task = dataclasses.replace(task, wanted=task.wanted - {"distance", "pair"})
    if run.other is not None and run.router.name in run.other.source.facts.routers:
        yield Pass(OTHER, dataclasses.replace(task, other=run.other), kept, tiles)
    if run.against is not None:
        theirs = prepare(run.against, with_distances=False)
        compared = dataclasses.replace(task, against=theirs)
        # a token may overflow in the second checkpoint alone
        yield Pass(AGAINST, compared, kept, tiles, run.skip_non_finite)


def _arithmetic_passes(
    run: RouterRun, typical: float | None, tiles: Sequence[int], some: Sequence[int]
) -> Iterator[Pass]:
    """The router under each arithmetic on all tokens, its null on a sample of them."""
    if "switches" in _missing(run):
        return
    null = random_router(run.router, run.seed)
    for how in run.arithmetics:
        for name, router, kept, chosen in (
            (how.name, run.router, reductions_for(lambda use: use.of_switch), tiles),
            (
                under_null(how.name),
                null,
                reductions_for(lambda use: use.of_random_switch),
                some,
            ),
        ):
            task = dataclasses.replace(
                _task(run, router, kept, typical),
                variant=emulate(router, how),
                reference=None if run.reference is None else emulate(router, run.reference),
            )
            yield Pass(name, task, kept, chosen)


def finish_passes(
    run: RouterRun, passes: Sequence[Pass], progress: Mapping[str, Progress], seconds: float
) -> MeasuredRouter:
    """Rows and facts from what every pass folded.

    BLAS keeps to one thread: the last bit of a product may depend on their number.
    """
    with threadpool_limits(1, user_api="blas"):
        rows, reasons = _finished_rows(run, passes, progress)
    main = progress[MAIN]
    measured = int(main.states["token_counts"]["counts"][..., TOKENS].sum())
    facts = {
        "num_tokens": measured,
        "num_excluded": main.num_tokens - main.num_non_finite - measured,
        "num_non_finite": main.num_non_finite,
        "first_non_finite": list(main.non_finite),
        "reasons": reasons,
        "seconds": seconds,
        "disagreements": _disagreements(main),
    }
    return MeasuredRouter(rows, facts)


def _finished_rows(
    run: RouterRun, passes: Sequence[Pass], progress: Mapping[str, Progress]
) -> tuple[Rows, dict[str, str]]:
    missing = _missing(run)
    whole = f"prior={run.source.facts.name}" if run.source.facts.is_synthetic else ALL
    names = passes[0].task.populations.names
    states = progress[MAIN].states | _states(progress, "sampled")
    metrics = [metric for metric in run.metrics if metric.scope != "switch"]
    finished = finish_router(run.router, states, names, metrics, missing, whole=whole)
    rows = finished.rows
    null = next((planned for planned in passes if planned.name == "null"), None)
    if null is not None:
        states = progress["null"].states | _states(progress, "null sampled")
        absent = missing | dict.fromkeys(
            reductions_for(lambda use: not use.of_random_router), "not kept for the null"
        )
        metrics = [metric for metric in run.metrics if metric.scope in ONE_CHOICE]
        router = null.task.prepared.router
        _extend(rows, finish_router(router, states, names, metrics, absent, "null", whole).rows)
    reasons = dict(finished.reasons)
    if run.arithmetics or run.other is not None or run.against is not None:
        _extend(rows, _switch_rows(run, passes, progress, whole))
        metrics = [metric for metric in run.metrics if metric.scope == "switch"]
        reasons |= {m.name: missing["switches"] for m in metrics if "switches" in missing}
    return rows, reasons


def _switch_rows(
    run: RouterRun, passes: Sequence[Pass], progress: Mapping[str, Progress], whole: str
) -> Rows:
    """Rows of the metrics that compare, for each variant, and their tokens."""
    metrics = [m for m in run.metrics if m.scope == "switch" or m.needs == ("token_counts",)]
    rows: Rows = {}
    for planned in passes:
        if not planned.task.compares:
            continue
        states, router = progress[planned.name].states, planned.task.prepared.router
        absent = {
            name: "not kept for the null"
            for name in reductions_for(lambda use: use.of_switch)
            if name not in states
        }
        names = planned.task.populations.names
        found = finish_router(router, states, names, metrics, absent, planned.name, whole)
        _extend(rows, found.rows)
        if run.bitmaps is not None:
            write_bitmap(run.bitmaps, planned.name, states["switch_bits"])
    return rows


def _states(progress: Mapping[str, Progress], name: str) -> dict[str, State]:
    return progress[name].states if name in progress else {}


def _wanted(run: RouterRun) -> list[str]:
    """Reductions that some metric asks for and that can be had."""
    missing = _missing(run)
    needed = {reduction_of(need) for m in run.metrics if m.scope in ONE_CHOICE for need in m.needs}
    return [n for n in REDUCTIONS.names() if n not in missing and n in {*needed, "token_counts"}]


def _typical_norm(run: RouterRun) -> float | None:
    """Median length of the first router inputs; None where none are recorded."""
    facts = run.source.facts
    if facts.stage not in INPUT_STAGES:
        return None
    task = _task(run, run.router, ("ambiguity",), None)  # asks for lengths
    with threadpool_limits(1, user_api="blas"):
        found = measure(task, 0, min(_TYPICAL_TOKENS, facts.num_tokens)).quantities
    if found.input_norm is None or not len(found.input_norm):
        return None
    return float(np.median(found.input_norm))


def _missing(run: RouterRun) -> dict[str, str]:
    """Reductions that cannot be had from this router and source, each with the reason."""
    facts = run.source.facts
    absent = unavailable(run.router, facts)
    missing = {}
    for name in REDUCTIONS.names():
        lacking = [need for need in REDUCTIONS[name].needs if need in absent]
        if lacking:
            missing[name] = absent[lacking[0]]
        elif facts.is_synthetic and not REDUCTIONS[name].use.on_prior:
            missing[name] = PRIOR
        elif run.noise is None and "noise" in REDUCTIONS[name].needs:
            missing[name] = "no noise on the inputs was asked for"
    return missing


def _task(
    run: RouterRun, router: Router, reductions: Sequence[str], typical_norm: float | None
) -> Task:
    wanted = {need for name in reductions for need in REDUCTIONS[name].needs}
    if "matches_recording" in wanted and run.source.facts.stage in INPUT_STAGES:
        wanted.add("input_norm")  # a disagreement is judged by the float bound
    if typical_norm is not None:
        wanted.add("input_norm")  # outlier tokens are told by it
    if run.per_token is not None and router is run.router:
        wanted |= {"weights", "distance", "pair"}
    if "switch" in wanted and router.rule.is_affine:
        wanted |= {"distance", "pair"}
    return Task(
        prepared=prepare(
            router,
            with_distances=not wanted.isdisjoint({"distance", "noise", "angle"}),
            with_coordinates="order_distance" in wanted,
        ),
        source=run.source,
        populations=Populations(run.source.facts.domains),
        kernels=run.kernels,
        wanted=frozenset(wanted),
        typical_norm=typical_norm,
        exclude_first=run.exclude_first,
        noise=run.noise,
        seed=run.seed,
    )


def _pace(run: RouterRun) -> Pace:
    return Pace(run.batch_tokens or batch_tokens(run.router.hidden_size), run.num_workers)


def _scan(run: RouterRun, planned: Pass) -> Progress:
    """The pass over all tokens, with rows per token or with snapshots to go on from."""
    task, reductions, tiles = planned.task, planned.reductions, planned.tiles
    engine = engine_for(task, run.devices, run.batch_tokens, run.said)
    if run.per_token is not None:
        # a Parquet file cannot be continued: with rows per token a router is scanned in one go
        rows = PerTokenFile(run.per_token, run.router)
        try:
            hooks = Hooks(advanced=run.advanced, rows=rows.write)
            return engine(task, reductions, tiles, _pace(run), run.skip_non_finite, hooks)
        finally:
            rows.close()
    snapshot = run.snapshot
    begin = read_snapshot(snapshot) if snapshot else None
    if begin and run.advanced:
        run.advanced(begin.num_tokens)
    hooks = Hooks(
        advanced=run.advanced,
        snapshot=(lambda progress: write_snapshot(snapshot, progress)) if snapshot else None,
    )
    return engine(task, reductions, tiles, _pace(run), run.skip_non_finite, hooks, begin)


def _extend(rows: Rows, more: Rows) -> None:
    for table, listed in more.items():
        rows.setdefault(table, []).extend(listed)


def _disagreements(progress: Progress) -> list[list[float]]:
    """Token and margin of the first choices that differ from the recorded ones."""
    state = progress.states.get("agreement")
    if state is None:
        return []
    pairs = zip(state["token"].tolist(), state["margin"].tolist(), strict=True)
    return [list(pair) for pair in pairs]
