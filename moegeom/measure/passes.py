"""One router from tokens to rows: the scan, its random router, and the metrics on both."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError, RouterRuleError
from moegeom.core.metric import NO_FLIPS_MADE, Metric
from moegeom.core.router import Router
from moegeom.core.row_keys import CHECKPOINT_B, RUN_B, under_random
from moegeom.core.shapes import Int64
from moegeom.core.tokens import TILE, InputNoise, MadeFlips, StoredValues, TokenSource
from moegeom.engine.batch import LazyBatch
from moegeom.engine.devices.cuda import scan_on_devices
from moegeom.engine.devices.device_router import refusal
from moegeom.engine.jumps import token_jumps, why_no_jumps
from moegeom.engine.loop import (
    Hooks,
    Lane,
    Pace,
    Progress,
    extent_of,
    read_snapshot,
    scan_in_step,
    write_snapshot,
)
from moegeom.engine.parts import Folding
from moegeom.engine.plan import (
    SAMPLE_TOKENS,
    SMALL_SAMPLE_TOKENS,
    batch_tokens,
    by_tile,
    num_workers,
    one_blas_thread,
    sample_batches,
    sample_tiles,
)
from moegeom.engine.prepared import PreparedRouter, prepare, unavailable
from moegeom.engine.request import DEFAULTS, MeasureOptions
from moegeom.engine.sample import drawn_tokens
from moegeom.engine.task import MadeWhatIf, Task, block_of
from moegeom.engine.what_if import make_what_if, moved_under, read_sample, why_missing
from moegeom.geometry.jump import Mixture
from moegeom.geometry.rounding import bf16_noise_scale, flip_probability
from moegeom.kernels.batch import NUM_BLOCKS, Harm, Jumps, TokenBatch
from moegeom.kernels.cuda.device import Device
from moegeom.kernels.reduction import (
    MOST_TOKENS,
    REDUCTIONS,
    Extent,
    State,
    reduction_of,
    reductions_for,
)
from moegeom.kernels.reductions.choices import TOKENS
from moegeom.kernels.table import load_kernels
from moegeom.measure.finish import MeasuredRouter, Rows, finish_router
from moegeom.results.plans import write_bitmap
from moegeom.tokens.stages import INPUT_STAGES
from moegeom.tokens.traces.alignment import RunB
from moegeom.variants.emulated import arithmetic, emulate
from moegeom.variants.random_router import random_router
from moegeom.variants.what_if import parse_what_ifs

#: Tokens whose median length is the usual length of a router input: one tile, so that tokens of a
#: running model can be told apart as soon as the first tile is full.
_TYPICAL_TOKENS = TILE


@dataclass(frozen=True)
class RouterRun:
    """One router to measure on tokens, as ``options`` say.

    With the choice of the router as stored those of the ``other`` run are compared, and those of
    the router ``checkpoint_b`` for the same inputs. Rows per token, and which tokens flip, go to
    ``folder``; ``snapshot`` is what an interrupted run goes on from. The pass over all tokens runs
    on ``devices``, if any can do it; ``on_message`` hears what a user should know about that.
    ``experts`` make the output whose jumps are measured, None where they are not read. ``folding``
    gives the progress of passes that are folded in parts.
    """

    router: Router
    source: TokenSource
    metrics: Sequence[Metric]
    options: MeasureOptions = DEFAULTS
    run_b: RunB | None = None
    checkpoint_b: Router | None = None
    folder: Path | None = None
    snapshot: Path | None = None
    devices: tuple[Device, ...] = ()
    advanced: Callable[[int], None] | None = None
    on_message: Callable[[str], None] | None = None
    experts: Mixture | None = None
    folding: Folding | None = None

    @property
    def is_whole(self) -> bool:
        """Whether what is folded is all of the tokens, so that rows can be made of it."""
        return self.folding is None or self.folding.is_whole

    @property
    def noise(self) -> InputNoise | None:
        """What the inputs of this router are disturbed by."""
        return self.options.noise_at(self.router.name)

    @property
    def compares(self) -> bool:
        """Whether some other choice is compared with that of the router as stored."""
        return bool(
            self.options.arithmetics or self.run_b is not None or self.checkpoint_b is not None
        )


@dataclass(frozen=True)
class Pass:
    """Tokens of the tiles ``tiles`` through ``task``.

    A router needs several: the stored router on all tokens (``main``) and, for what is costly, on
    a sample (``sampled``); its random router on a sample (``random``, ``random sampled``). Under
    another arithmetic passes have the name of their variant.
    """

    name: str
    task: Task
    tiles: Sequence[int]
    skip_non_finite: bool = True


@dataclass(frozen=True)
class Plan:
    """The passes of a router, and the arithmetics whose whole effect its inputs hold already."""

    passes: tuple[Pass, ...]
    recorded_effects: Sequence[str]


#: Scopes of metrics of one choice, as the router is stored.
ONE_CHOICE = ("router", "noise", "exposure")

#: Scopes of metrics of a variant beside the router as stored.
OF_VARIANTS = ("flip", "flip_jump")

#: The pass that sees every token, and that of the random router.
MAIN, RANDOM = "main", "random"


def measure_router(run: RouterRun) -> MeasuredRouter:
    """Rows of all metrics for the stored router and, where tokens allow, for its random router.

    None of a part of the tokens.
    """
    return next(measure_in_step([run]))


def measure_in_step(runs: Sequence[RouterRun]) -> Iterator[MeasuredRouter]:
    """What :func:`measure_router` gives for each run; passes of one name are one for all.

    The runs are of one source, and differ in the router alone.
    """
    started = time.perf_counter()
    plans = [plan_passes(run) for run in runs]
    even_runs = [
        dataclasses.replace(run, advanced=_evenly(run, plan.passes))
        for run, plan in zip(runs, plans, strict=True)
    ]
    together = _Together(even_runs, [plan.passes for plan in plans])
    planning = (time.perf_counter() - started) / len(runs)
    for run, plan in zip(even_runs, plans, strict=True):
        started, before = time.perf_counter(), together.seconds
        progress = {one.name: fold_pass(run, one, together.scan) for one in plan.passes}
        if not run.is_whole:
            yield MeasuredRouter({}, {})
            continue
        alone = time.perf_counter() - started - (together.seconds - before)
        seconds = planning + alone + together.seconds / len(runs)
        yield finish_passes(run, plan, progress, seconds)


class _Together:
    """The passes of runs that are in step: those of one name are gone through with the first."""

    def __init__(self, runs: Sequence[RouterRun], planned: Sequence[Sequence[Pass]]) -> None:
        self._passes: dict[str, list[tuple[RouterRun, Pass]]] = {}
        for run, passes in zip(runs, planned, strict=True):
            for one in passes:
                self._passes.setdefault(one.name, []).append((run, one))
        self._found: dict[tuple[str, str], Progress] = {}
        self.seconds = 0.0

    def scan(self, run: RouterRun, planned: Pass) -> Progress:
        """What the pass folds; ``planned.tiles``, those of a part, are the same for all runs."""
        key = (planned.name, run.router.name)
        if key not in self._found:
            started = time.perf_counter()
            runs, passes = zip(*self._beside(run, planned), strict=True)
            progresses = _scan_in_step(runs, passes, planned.tiles)
            for other, one, progress in zip(runs, passes, progresses, strict=True):
                self._found[one.name, other.router.name] = progress
            self.seconds += time.perf_counter() - started
        return self._found.pop(key)

    def _beside(self, run: RouterRun, planned: Pass) -> list[tuple[RouterRun, Pass]]:
        """Passes of one name in step; of a single run all of the same batches, computed once."""
        of_name = self._passes[planned.name]
        if len(of_name) > 1 or run.folding is not None or run.devices:
            return of_name
        alike = [one for ((_, one),) in self._passes.values() if one.tiles == planned.tiles]
        return [(run, one) for one in alike if one.task.has_batches_of(planned.task)]


def scan_pass(run: RouterRun, planned: Pass) -> Progress:
    """The pass of one run."""
    return _scan_in_step([run], [planned], planned.tiles)[0]


def fold_pass(
    run: RouterRun, planned: Pass, scan: Callable[[RouterRun, Pass], Progress] = scan_pass
) -> Progress:
    """A pass by ``scan``, whole or in the parts of the run."""
    if run.folding is None:
        return scan(run, planned)
    what_if = planned.task.what_if
    return run.folding.fold(
        run.router.name,
        planned.name,
        planned.tiles,
        max(what_if.batch // TILE, 1) if what_if is not None else 1,
        lambda tiles: scan(run, dataclasses.replace(planned, tiles=tiles)),
    )


def _evenly(run: RouterRun, passes: Sequence[Pass]) -> Callable[[int], None] | None:
    """Tells the tokens of every pass as a part of those that count: of all tokens, and of all once
    more for each arithmetic.
    """
    tell = run.advanced
    if tell is None:
        return None
    num_tokens, done, num_reported = run.source.facts.num_tokens, 0, 0
    work = [min(len(planned.tiles) * TILE, num_tokens) for planned in passes]
    counted = [
        planned.name == MAIN
        or (planned.task.compares and planned.task.prepared.router is run.router)
        for planned in passes
    ]
    share = sum(tokens for tokens, counts in zip(work, counted, strict=True) if counts)
    share /= max(sum(work), 1)

    def advance(tokens: int) -> None:
        nonlocal done, num_reported
        done += tokens
        due = round(share * done)
        tell(due - num_reported)
        num_reported = due

    return advance


def plan_passes(run: RouterRun, first: tuple[int, int] | None = None) -> Plan:
    """Every pass that the metrics need; reads the first tile, for the usual length of an input.

    ``first`` is where that tile lies, at the beginning of the source by default.
    """
    own, needs, recorded = prepare(run.router), _wanted(run), effects_recorded(run)
    typical = typical_norm(run, own, first)
    num_tokens = run.source.facts.num_tokens
    all_tiles = range(-(-num_tokens // TILE))
    some, few = (
        sample_tiles(num_tokens, run.options.seed, tokens)
        for tokens in (SAMPLE_TOKENS, SMALL_SAMPLE_TOKENS)
    )
    random = None
    planned = [(MAIN, own, needs, False, all_tiles), ("sampled", own, needs, True, few)]
    if run.source.facts.stage in INPUT_STAGES:
        random = prepare(random_router(run.router, run.options.seed))
        random_needs = [name for name in needs if REDUCTIONS[name].use.of_random_router]
        planned += [
            (RANDOM, random, random_needs, False, some),
            ("random sampled", random, random_needs, True, few),
        ]
    passes = []
    for name, prepared, names, is_sampled, tiles in planned:
        reductions = tuple(n for n in names if _is_sampled(run, n) == is_sampled)
        if reductions:
            task = task_of(run, prepared, reductions, typical)
            skips = run.options.skips_non_finite or name != MAIN
            passes.append(Pass(name, task, tiles, skips))
    if random is not None and "flips" not in _missing(run):
        passes += _side_passes(run, own, typical, all_tiles)
        passes += _arithmetic_passes(run, own, random, recorded, typical, all_tiles, some)
    return Plan(tuple(passes), recorded)


def _is_sampled(run: RouterRun, reduction: str) -> bool:
    """Whether a sample is enough: for what costs more than the product, as curved distances do."""
    is_curved = not run.router.rule.is_linear and "distance" in REDUCTIONS[reduction].needs
    return REDUCTIONS[reduction].use.is_sampled or is_curved


def _side_passes(
    run: RouterRun, own: PreparedRouter, typical: float | None, tiles: Sequence[int]
) -> Iterator[Pass]:
    """What another run chose, and what another router chooses, for all tokens."""
    task = task_of(run, own, reductions_for(lambda use: use.of_flip), typical)
    if run.run_b is not None and run.router.name in run.run_b.source.facts.routers:
        yield Pass(RUN_B, dataclasses.replace(task, run_b=run.run_b), tiles)
    if run.checkpoint_b is not None:
        compared = dataclasses.replace(task, checkpoint_b=prepare(run.checkpoint_b))
        # a token may overflow in the second checkpoint alone
        yield Pass(CHECKPOINT_B, compared, tiles, run.options.skips_non_finite)


def _arithmetic_passes(
    run: RouterRun,
    own: PreparedRouter,
    random: PreparedRouter,
    recorded: Sequence[str],
    typical: float | None,
    tiles: Sequence[int],
    some: Sequence[int],
) -> Iterator[Pass]:
    """The router under each arithmetic on all tokens, its random router on a sample of them."""
    reference = run.options.reference and arithmetic(run.options.reference)
    for how in map(arithmetic, run.options.arithmetics):
        if how.name in recorded:
            continue
        for name, prepared, reductions, chosen in (
            (how.name, own, reductions_for(lambda use: use.of_flip), tiles),
            (under_random(how.name), random, reductions_for(lambda use: use.of_random_flip), some),
        ):
            task = dataclasses.replace(
                task_of(run, prepared, reductions, typical),
                variant=emulate(prepared.router, how),
                reference=emulate(prepared.router, reference) if reference else None,
            )
            yield Pass(name, task, chosen)


#: Tokens whose numbers tell in which format inputs were recorded.
_TELLING_TOKENS = 64


def effects_recorded(run: RouterRun) -> list[str]:
    """Arithmetics of which nothing is left to see: all that they round is rounded as recorded.

    So bf16 on inputs that are bfloat16 numbers, by whatever dtype they are stored, and on rows that
    are: no choice can flip, whatever it did to the model that was recorded. Judged by the first
    tokens of router inputs.
    """
    source, router, options = run.source, run.router, run.options
    is_input = source.facts.stage == "router_input" and isinstance(source, StoredValues)
    if not (options.arithmetics and is_input) or options.reference:
        return []
    values = source.read_values(router.name, 0, min(_TELLING_TOKENS, source.facts.num_tokens))
    arithmetics = map(arithmetic, options.arithmetics)
    return [how.name for how in arithmetics if emulate(router, how).changes_nothing_of(values)]


def finish_passes(
    run: RouterRun, plan: Plan, progress: Mapping[str, Progress], seconds: float
) -> MeasuredRouter:
    """Rows and facts from what every pass folded.

    BLAS keeps to one thread: the last bit of a product may depend on their number.
    """
    with one_blas_thread():
        rows, reasons = _finished_rows(run, plan.passes, progress)
    main = progress[MAIN]
    _refuse_too_many(run, main)
    measured = int(main.states["token_counts"]["counts"][..., TOKENS].sum())
    facts = {
        "num_tokens": measured,
        "num_excluded": main.num_tokens - main.num_non_finite - measured,
        "num_non_finite": main.num_non_finite,
        "first_non_finite": list(main.non_finite),
        "reasons": reasons,
        "seconds": seconds,
        "disagreements": _disagreements(main),
        "recorded_effects": plan.recorded_effects,
    }
    return MeasuredRouter(rows, facts)


def _refuse_too_many(run: RouterRun, main: Progress) -> None:
    """Raises RecordingError where a block of documents has more tokens than its sums hold."""
    most = int(main.states["token_counts"]["counts"][..., TOKENS].max(initial=0))
    if most > MOST_TOKENS:
        raise RecordingError(
            f"{run.source.facts.name}: {most:,} tokens in one of {NUM_BLOCKS} blocks of documents; "
            f"its sums in units of 2^-36 hold {MOST_TOKENS:,}.",
            "Measure parts of the text apart, each into results of its own.",
        )


def _finished_rows(
    run: RouterRun, passes: Sequence[Pass], progress: Mapping[str, Progress]
) -> tuple[Rows, dict[str, str]]:
    missing = _missing(run)
    names = passes[0].task.populations.names
    jumps, flip_jumps = _jumps(run, passes, progress, missing)
    states = progress[MAIN].states | _states(progress, "sampled") | jumps
    if "harm" not in missing:
        states["harm"] = _harm_state(passes[0].task)
    metrics = [metric for metric in run.metrics if metric.scope not in OF_VARIANTS]
    finished = finish_router(run.router, states, names, metrics, missing)
    rows = finished.rows
    random = next((planned for planned in passes if planned.name == RANDOM), None)
    if random is not None:
        states = progress[RANDOM].states | _states(progress, "random sampled")
        absent = missing | dict.fromkeys(
            reductions_for(lambda use: not use.of_random_router), "not kept for the random router"
        )
        metrics = [metric for metric in run.metrics if metric.scope in ONE_CHOICE]
        router = random.task.prepared.router
        extend_rows(rows, finish_router(router, states, names, metrics, absent, "random").rows)
    reasons = dict(finished.reasons)
    if run.compares:
        extend_rows(rows, _flip_rows(run, passes, progress, flip_jumps))
        metrics = [metric for metric in run.metrics if metric.scope in OF_VARIANTS]
        reasons |= {
            metric.name: missing[need]
            for metric in metrics
            for need in ("flips", *metric.needs)
            if need in missing
        }
    return rows, reasons


def _jumps(
    run: RouterRun,
    passes: Sequence[Pass],
    progress: Mapping[str, Progress],
    missing: Mapping[str, str],
) -> tuple[dict[str, State], dict[str, State]]:
    """States of jumps: of the router as stored, and of the flips of each variant of it."""
    if run.experts is None or "jumps" in missing:
        return {}, {}
    flipped = {
        planned.name: progress[planned.name].states["flip_bits"]
        for planned in passes
        if planned.task.compares and planned.task.prepared.router is run.router
    }
    of_sample, of_flips = jump_states(passes[0].task, run.experts, flipped)
    return {"jumps": of_sample}, of_flips


def _flips_in(source: TokenSource, router: str) -> Mapping[str, np.ndarray] | None:
    return source.made_flips(router) if isinstance(source, MadeFlips) else None


def _harm_state(task: Task) -> State:
    """The state of ``harm``: flips of the router, with the labels of their tokens."""
    source = task.source
    flips = _flips_in(source, task.prepared.router.name)
    assert flips is not None
    labels: dict[str, list[np.ndarray]] = {"population": [], "block": []}
    for token in flips["token"].tolist():
        columns = source.read_columns(token, token + 1)
        labels["population"].append(task.populations.label(columns))
        labels["block"].append(block_of(columns, token, source.facts.num_documents))
    names = (field.name for field in dataclasses.fields(Harm))
    batch = TokenBatch(
        token=flips["token"],
        harm=Harm(**{name: flips[name] for name in names}),
        **{name: np.concatenate(each) for name, each in labels.items()},
    )
    accumulator = REDUCTIONS["harm"].start(extent_of(task))
    accumulator.fold(batch, task.kernels)
    return accumulator.state()


def _flip_rows(
    run: RouterRun,
    passes: Sequence[Pass],
    progress: Mapping[str, Progress],
    flip_jumps: Mapping[str, State],
) -> Rows:
    """Rows of the metrics that compare, for each variant, and their tokens."""
    metrics = [m for m in run.metrics if m.scope in OF_VARIANTS or m.needs == ("token_counts",)]
    rows: Rows = {}
    for planned in passes:
        if not planned.task.compares:
            continue
        states, router = progress[planned.name].states, planned.task.prepared.router
        if planned.name in flip_jumps:
            states = states | {"flip_jumps": flip_jumps[planned.name]}
        absent = {
            name: "not kept for the random router"
            for name in (*reductions_for(lambda use: use.of_flip), "flip_jumps")
            if name not in states
        }
        names = planned.task.populations.names
        finished = finish_router(router, states, names, metrics, absent, planned.name)
        extend_rows(rows, finished.rows)
        if run.folder is not None:
            write_bitmap(run.folder, planned.name, states["flip_bits"])
    return rows


def _states(progress: Mapping[str, Progress], name: str) -> dict[str, State]:
    return progress[name].states if name in progress else {}


def _wanted(run: RouterRun) -> list[str]:
    """Reductions that some metric asks for and that can be had."""
    missing = _missing(run)
    needed = {reduction_of(need) for m in run.metrics if m.scope in ONE_CHOICE for need in m.needs}
    return [n for n in REDUCTIONS.names() if n not in missing and n in {*needed, "token_counts"}]


def typical_norm(
    run: RouterRun, own: PreparedRouter, first: tuple[int, int] | None = None
) -> float | None:
    """Median length of the first router inputs; None where none are recorded."""
    facts = run.source.facts
    if facts.stage not in INPUT_STAGES:
        return None
    task = task_of(run, own, (), None)
    with one_blas_thread():
        start, stop = first or (0, min(_TYPICAL_TOKENS, facts.num_tokens))
        norm = LazyBatch(task, start, stop).input_norm
    return None if norm is None or not len(norm) else float(np.median(norm))


def _missing(run: RouterRun) -> dict[str, str]:
    """Reductions that cannot be had from this router and source, each with the reason."""
    facts = run.source.facts
    no_harm = "" if _flips_in(run.source, run.router.name) else NO_FLIPS_MADE
    absent = unavailable(run.router, facts) | {"jumps": _why_no_jumps(run), "harm": no_harm}
    absent = {quantity: why for quantity, why in absent.items() if why}
    missing = {}
    for name in REDUCTIONS.names():
        lacking = [need for need in REDUCTIONS[name].needs if need in absent]
        if lacking:
            missing[name] = absent[lacking[0]]
        elif run.noise is None and "noise" in REDUCTIONS[name].needs:
            missing[name] = "no noise on the inputs was asked for"
    return missing


def _why_no_jumps(run: RouterRun) -> str:
    if run.experts is None:
        return "no experts were read (--experts)"
    return why_no_jumps(run.router, run.source.facts)


def task_of(
    run: RouterRun, prepared: PreparedRouter, reductions: Sequence[str], typical: float | None
) -> Task:
    """What workers need to know to fold the tokens of a run into ``reductions``."""
    return Task(
        prepared,
        run.source,
        load_kernels(run.options.backend),
        tuple(reductions),
        typical,
        run.options,
        noise=run.noise,
    )


def pace_of(run: RouterRun) -> Pace:
    """How the work of a run is cut."""
    options = run.options
    tokens = options.batch_tokens or batch_tokens(run.router.hidden_size)
    return Pace(tokens, options.num_workers or num_workers())


def _scan_in_step(
    runs: Sequence[RouterRun], passes: Sequence[Pass], tiles: Sequence[int]
) -> list[Progress]:
    """Passes in step; those over all tokens go to devices, where there are any."""
    pace, options = pace_of(runs[0]), runs[0].options
    with ExitStack() as files:
        lanes = [_lane(run, one, files) for run, one in zip(runs, passes, strict=True)]
        if not all(map(_is_for_devices, runs, passes)):
            return scan_in_step(lanes, tiles, pace)
        return [
            scan_on_devices(
                lane.task,
                tiles,
                pace,
                lane.skip_non_finite,
                lane.hooks,
                lane.begin,
                devices=runs[0].devices,
                batch_tokens=options.batch_tokens,
                on_message=runs[0].on_message,
            )
            for lane in lanes
        ]


def _lane(run: RouterRun, planned: Pass, files: ExitStack) -> Lane:
    """The pass of a run as the loop takes it: that over all tokens with rows per token, which
    ``files`` closes, or with snapshots to go on from.
    """
    hooks, skips, snapshot = Hooks(advanced=run.advanced), planned.skip_non_finite, run.snapshot
    if planned.name != MAIN:
        return Lane(planned.task, skips, hooks)
    if run.options.per_token and run.folder is not None:
        # a Parquet file cannot be continued: with rows per token a router is scanned in one go
        from moegeom.measure.per_token import PerTokenFile

        file = PerTokenFile(run.folder / "tokens.parquet", run.router)
        files.callback(file.close)
        hooks = dataclasses.replace(hooks, rows=file.rows, written=file.write)
        return Lane(planned.task, skips, hooks)
    if snapshot is None:
        return Lane(planned.task, skips, hooks)
    begin = read_snapshot(snapshot)
    if begin and run.advanced:
        run.advanced(begin.num_tokens)
    hooks = dataclasses.replace(hooks, snapshot=lambda progress: write_snapshot(snapshot, progress))
    return Lane(planned.task, skips, hooks, begin or Progress())


def _is_for_devices(run: RouterRun, planned: Pass) -> bool:
    """Whether there are devices and they can do the task; where they cannot, that is said."""
    if not run.devices or planned.name != MAIN:
        return False
    reason = refusal(planned.task)
    if reason and run.on_message:
        run.on_message(f"router {run.router.name}: on the processor, since {reason}")
    return not reason


def extend_rows(rows: Rows, more: Rows) -> None:
    """Adds rows to those of the same tables."""
    for table, listed in more.items():
        rows.setdefault(table, []).extend(listed)


def _disagreements(progress: Progress) -> list[list[float]]:
    """Token and margin of the first choices that differ from the recorded ones."""
    state = progress.states.get("agreement")
    if state is None:
        return []
    pairs = zip(state["token"].tolist(), state["margin"].tolist(), strict=True)
    return [list(pair) for pair in pairs]


#: Tokens whose jump is computed: of a sample, and of those that a variant flips. Experts are most
#: of what is read, and each is read once for all of them.
SAMPLED, FLIPPED = 1024, 512


def jump_states(
    task: Task, mixed: Mixture, flipped: Mapping[str, State]
) -> tuple[State, dict[str, State]]:
    """The state of ``jumps``, and that of ``flip_jumps`` for each variant.

    ``flipped`` are the bits of the tokens that each variant flips (``flip_bits``).
    """
    sample = drawn_tokens(task.source, task.options, SAMPLED)
    of_variant = {
        name: _sample_of(np.flatnonzero(np.unpackbits(bits["flipped"], bitorder="little")), task)
        for name, bits in flipped.items()
    }
    tokens = np.unique(np.concatenate([sample, *of_variant.values()]))
    measured = _with_jumps(task, mixed, tokens)
    return (
        _jump_state("jumps", task, measured, sample),
        {name: _jump_state("flip_jumps", task, measured, own) for name, own in of_variant.items()},
    )


def _sample_of(token: Int64[np.ndarray, "tokens"], task: Task) -> Int64[np.ndarray, "drawn"]:
    """At most FLIPPED of the tokens, by the seed of the scan, ascending."""
    if len(token) <= FLIPPED:
        return token
    generator = np.random.default_rng([task.options.seed, len(token)])
    return np.sort(generator.choice(token, FLIPPED, replace=False))


def _with_jumps(task: Task, mixed: Mixture, tokens: Int64[np.ndarray, "tokens"]) -> TokenBatch:
    """These tokens with their labels and jumps; those that are not finite are left out."""
    prepared, names = task.prepared, ("token", "population", "block", "chosen", "logits", "input")
    total, parts = task.source.facts.num_tokens, []
    with one_blas_thread():  # the arithmetic of the scan
        for start, _ in by_tile(tokens):
            batch = LazyBatch(task, start, min(start + TILE, total))
            row = np.flatnonzero(np.isin(batch.token, tokens))
            parts.append([getattr(batch, name)[row] for name in names])
    token, population, block, chosen, logits, inputs = map(np.concatenate, zip(*parts, strict=True))
    jumps_at = token_jumps(prepared, inputs, logits, chosen, task.kernels, mixed)
    length = np.sqrt((inputs.astype(np.float64) ** 2).sum(axis=1))
    chance = np.zeros(len(token))
    is_known = jumps_at.is_known
    noise = bf16_noise_scale(length[is_known], prepared.router.hidden_size)
    chance[is_known] = flip_probability(np.maximum(jumps_at.tie.distance[is_known], 0.0), noise)
    jumps = Jumps(jumps_at.height, jumps_at.relative, chance, jumps_at.pair)
    return TokenBatch(token=token, population=population, block=block, chosen=chosen, jumps=jumps)


def _jump_state(
    name: str, task: Task, measured: TokenBatch, token: Int64[np.ndarray, "tokens"]
) -> State:
    """The reduction of that name over some of the tokens."""
    assert measured.jumps is not None
    row = np.flatnonzero(np.isin(measured.token, token))
    router = task.prepared.router
    names = task.populations.names
    extent = Extent(len(names), router.num_experts, router.rule.top_k, router.hidden_size)
    accumulator = REDUCTIONS[name].start(extent)
    some = Jumps(**{part: values[row] for part, values in vars(measured.jumps).items()})
    labels = {part: getattr(measured, part)[row] for part in ("token", "population", "block")}
    accumulator.fold(TokenBatch(**labels, jumps=some), task.kernels)
    return accumulator.state()


def with_what_ifs(run: RouterRun, measured: MeasuredRouter) -> MeasuredRouter:
    """The rows of a router with those of every what-if, each a variant of its own.

    A what-if that means nothing for its rule has no rows: ``facts["what_ifs"]`` says why.
    """
    own = prepare(run.router)
    tiles = sample_batches(
        run.source.facts.num_tokens, run.options.seed, SAMPLE_TOKENS, run.options.what_if_batch
    )
    task = task_of(run, own, (), typical_norm(run, own))
    with one_blas_thread():
        sample = read_sample(task, tiles, run.options.what_if_batch)
    rows: Rows = {}
    facts: dict[str, Any] = {}
    extend_rows(rows, measured.rows)
    with one_blas_thread():
        made: list[MadeWhatIf] = []
        for request in parse_what_ifs(run.options.what_ifs):
            try:
                made.append(make_what_if(request, task, sample))
            except RouterRuleError as refusal:
                facts[request.name] = {"refused": refusal.message}
        moved = [
            moved_under(made, task, arithmetic(n), tiles)
            for n in run.options.arithmetics
            if run.is_whole
        ]
    for number, one in enumerate(made):
        tried, reasons = _tried(one, run, task)
        extend_rows(rows, tried)
        figures = dict(one.figures)
        for under in moved:
            figures |= under[number]
        facts[one.name] = _what_if_facts(one, figures, reasons)
    return MeasuredRouter(rows, {**measured.facts, "what_ifs": facts})


def _tried(made: MadeWhatIf, run: RouterRun, task: Task) -> tuple[Rows, dict[str, str]]:
    """Rows of the metrics of one choice, and of those that compare it with the router as stored."""
    metrics = [m for m in run.metrics if m.scope in ("router", "flip") and not m.is_for_figures]
    needed = {reduction_of(need) for metric in metrics for need in metric.needs}
    missing = {name: why for name in needed if (why := why_missing(made, name))}
    reductions = sorted((needed - missing.keys()) | {"token_counts"})
    tried = dataclasses.replace(task, reductions=tuple(reductions), what_if=made)
    tiles = range(-(-run.source.facts.num_tokens // TILE))
    planned = Pass(made.name, tried, tiles, run.options.skips_non_finite)
    progress = fold_pass(run, planned)
    if not run.is_whole:
        return {}, {}
    names = task.populations.names
    with one_blas_thread():
        finished = finish_router(made.router, progress.states, names, metrics, missing, made.name)
    return finished.rows, finished.reasons


def _what_if_facts(
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


# ----------------------------------------------------------------------------------- rows per token
