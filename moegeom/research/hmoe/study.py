"""``moegeom hmoe``: descents from starts that shrink with n and from one that does not."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, get_args

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float64
from moegeom.core.text import half_width
from moegeom.engine.parameters import option_of
from moegeom.engine.plan import on_all_cores
from moegeom.geometry.hmoe import (
    ACTIVATIONS,
    PLACEMENTS,
    Descended,
    Mixture,
    Position,
    cramer_rao_sd,
    descended,
    gauge_dimensions,
    jacobian,
    loss_2,
    numerical_rank,
    published_truth,
    regression,
    with_channels,
)
from moegeom.geometry.statistics import slope
from moegeom.kernels.cpu.mixture import mean_square
from moegeom.research.hmoe.record import (
    DescentRun,
    Design,
    Exponent,
    HmoeRequest,
    LeastDeviation,
    Mixtures,
    Model,
    ModelRates,
    PositionRank,
    StartRates,
    State,
    What,
)
from moegeom.studies.written import refuse_out, write_rows

if TYPE_CHECKING:
    from moegeom.pipeline import Watch


# -------------------------------------------------------------------------------------------- ranks
#: Standard deviation of the noise; S2 calls the same number a variance (F-25).
NOISE = 0.1

#: Models -> where their activation stands.
POSITIONS: dict[Model, Position] = {"mha": "none", "1": "value", "2": "sdpa"}

#: Points at which derivatives are taken.
_RANK_POINTS = 5000

#: Rows of the table: where, and with which activation.
_ROWS: Sequence[tuple[Position, str]] = (
    *((position, "sigmoid") for position in PLACEMENTS),
    ("value", "silu"),
    ("sdpa", "silu"),
)


def square(size: int, generator: np.random.Generator) -> Float64[np.ndarray, "samples dims"]:
    """Inputs of the experiment: uniform on [-1, 1]^2."""
    return generator.uniform(-1.0, 1.0, (size, 2))


def position_ranks(seed: int) -> tuple[PositionRank, ...]:
    """Ranks at the published parameters; rows of gates, which it has not, are normal numbers."""
    return tuple(_position_rank(*row, seed) for row in _ROWS)


def _position_rank(position: Position, activation: str, seed: int) -> PositionRank:
    generator = np.random.default_rng(seed)
    mixture = _with_gates(published_truth(), position, generator)
    points = square(_RANK_POINTS, generator)
    derivatives = jacobian(mixture, points, position, ACTIVATIONS[activation])
    rank = numerical_rank(derivatives)
    gauge = gauge_dimensions(mixture, position)
    return PositionRank(
        position,
        activation,
        rank.columns,
        rank.rank,
        gauge,
        rank.columns - rank.rank - gauge,
        rank.least,
        rank.rest,
    )


def _with_gates(truth: Mixture, position: Position, generator: np.random.Generator) -> Mixture:
    heads, _, channels, dims = truth.experts.shape
    rows = {"none": 0, "head": 1, "channel": channels}[PLACEMENTS[position].gates]
    gates = generator.normal(size=(heads, rows, dims)) if rows else None
    return dataclasses.replace(truth, gates=gates)


def least_deviation(model: Model, size: int, seed: int) -> LeastDeviation:
    """With as many channels as the truth has, and the last score of each head held at its value."""
    truth = published_truth()
    heads, experts, _, dims = truth.scores.shape
    points = square(_RANK_POINTS, np.random.default_rng(seed))
    derivatives = jacobian(truth, points, POSITIONS[model])
    entries = dims * (dims + 1) // 2
    is_held = np.zeros(derivatives.shape[1], dtype=bool)
    scores = is_held[truth.weights.size :][: heads * experts * entries]
    scores.reshape(heads, experts, entries)[:, -1] = True
    deviations = cramer_rao_sd(derivatives[:, ~is_held], NOISE, size, flat=0)
    return LeastDeviation(model, size, float(np.median(deviations)))


#: Channels, sizes, starts, repeats and epochs of a run where nothing is asked, in full and quick.
_FULL = (3, 4), (10_000, 30_000, 100_000), (0.0, 0.083, 0.3, 0.5), 10, 1000
_QUICK = (3,), (10_000, 100_000), (0.0, 0.083), 2, 100

#: The size at which all starts are equally far from the truth.
_EQUAL_AT = 100_000

#: Inputs on which functions and channels are compared.
_POINTS = 2000

#: The slope that S2 reads from its Figure 1.
PUBLISHED = -0.5


def hmoe(request: HmoeRequest, watch: Watch | None = None) -> Mixtures:
    """Ranks by position and, for ``rates``, slopes of descents with what explains them.

    ``what`` is "ranks", by where a non-linearity stands, or "rates": the experiment of S2 beside
    its control, which takes ten minutes of a core in full and seconds with ``quick``.

    Raises
    ------
    UsageError
        When the options cannot be meant, or ``out`` exists or cannot be written.

    Examples
    --------
    >>> import moegeom as mg
    >>> report = mg.hmoe(what="ranks")
    >>> [one.position for one in report.value.ranks if one.beyond == 0]
    ['value', 'sdpa', 'value', 'sdpa']
    """
    if request.what not in get_args(What):
        raise UsageError(f"{request.what}: expected {' or '.join(get_args(What))}.")
    if request.out is not None:
        if request.what == "ranks":
            raise UsageError("--out keeps descents.", "moegeom hmoe rates --out FILE.parquet")
        refuse_out(request.out, request.overwrite, (".parquet",))
    ranks = position_ranks(request.seed)
    if request.what == "ranks":
        return Mixtures(ranks)
    design = requested_design(request)
    runs = _runs(design, request.num_workers, watch)
    if request.out is not None:
        write_rows(request.out, [dataclasses.asdict(run) for run in runs])
    return Mixtures(
        ranks,
        design,
        tuple(
            least_deviation(model, max(design.sizes), request.seed)
            for model in design.models
            if model != "mha"
        ),
        rates_of(design, runs),
        runs,
        request.out.name if request.out else "",
    )


# ------------------------------------------------------------------------------------------- design


def requested_design(request: HmoeRequest) -> Design:
    """The experiment of a request; UsageError for one that cannot be meant."""
    usual = Design(get_args(Model), *(_QUICK if request.quick else _FULL), 1.0, 0)
    sizes, starts = _numbers("sizes", request.sizes), _numbers("starts", request.starts)
    design = Design(
        models=_models(request.models),
        channels=tuple(dict.fromkeys(request.channels)) or usual.channels,
        sizes=tuple(sorted({*map(int, sizes)})) or usual.sizes,
        starts=tuple(sorted({0.0, *starts})) if starts else usual.starts,
        repeats=usual.repeats if request.repeats is None else request.repeats,
        epochs=usual.epochs if request.epochs is None else request.epochs,
        start_size=request.start_size,
        seed=request.seed,
    )
    own = published_truth().num_channels
    limits: Sequence[tuple[str, Sequence[float], float, float]] = (
        ("channels", design.channels, own, 64),
        ("sizes", design.sizes, 10, 10_000_000),
        ("starts", design.starts, 0, 2),
        ("repeats", [design.repeats], 1, 1000),
        ("epochs", [design.epochs], 1, 1_000_000),
        ("start_size", [design.start_size], 1e-6, 10),
    )
    for name, values, least, most in limits:
        for value in values:
            if not least <= value <= most:
                message = f"{option_of(name)} {value:g}: expected {least:g} to {most:,}."
                raise UsageError(message)
    if len(design.sizes) < 2:
        only = ",".join(map(str, design.sizes))
        raise UsageError(
            f"{option_of('sizes')} {only}: a slope needs two sizes or more.",
            "For example --sizes 1e4,1e5.",
        )
    return design


def _models(words: Sequence[str]) -> tuple[Model, ...]:
    models = get_args(Model)
    for word in (names := ",".join(words).split(",")):
        if word not in models:
            raise UsageError(f"--models {word}: expected {', '.join(models)}.")
    return tuple(model for model in models if model in names)


def _numbers(name: str, words: Sequence[str]) -> list[float]:
    """Numbers such as ``1e4,3e4``, or those that a program gives."""
    parts = ",".join(map(str, words)).split(",") if words else []
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise UsageError(f"{option_of(name)} {','.join(parts)}: expected numbers.")
    return numbers


# ----------------------------------------------------------------------------------------- descents


def _runs(design: Design, threads: int | None, watch: Watch | None) -> tuple[DescentRun, ...]:
    tasks = [
        *itertools.product(design.models, design.channels, range(design.repeats), design.sizes)
    ]
    if watch:
        watch.start(len(tasks) * len(design.starts))
        watch.begin("descents")
    done: list[DescentRun] = []
    for runs in on_all_cores(lambda task: [*_runs_of(design, *task)], tasks, threads):
        done += runs
        if watch:
            watch.advance(len(runs))
    return tuple(done)


def _runs_of(
    design: Design, model: Model, channels: int, repeat: int, size: int
) -> Iterator[DescentRun]:
    """The descents by start; starts equally far from the truth are run once.

    Seeds do not depend on the size: smaller samples are the beginnings of larger ones.
    """
    position, truth = POSITIONS[model], published_truth()
    nearest = with_channels(truth, channels)
    away = _direction(nearest, (design.seed, repeat, channels))
    generator = np.random.default_rng((design.seed, repeat, 0))
    inputs = square(max(design.sizes), generator)[:size]
    noise = generator.normal(scale=NOISE, size=max(design.sizes))[:size]
    objective = mean_square(inputs, regression(truth, inputs, position) + noise, position)
    points = square(_POINTS, np.random.default_rng((design.seed, 1)))

    def error(mixture: Mixture) -> float:
        apart = regression(mixture, points, position) - regression(truth, points, position)
        return float(np.sqrt(np.mean(apart**2)))

    loss = functools.partial(loss_2, true=truth, inputs=points, position=position)
    fits: dict[float, Descended] = {}
    for start in design.starts:
        distance = design.start_size * (size / _EQUAL_AT) ** -start
        begun = nearest.moved(away, distance)
        if distance not in fits:
            fits[distance] = descended(begun, objective, design.epochs)
        fit = fits[distance]
        yield DescentRun(
            model,
            channels,
            start,
            repeat,
            size,
            loss(begun),
            loss(fit.mixture),
            error(begun),
            error(fit.mixture),
            fit.epochs,
            fit.settled,
        )


def _direction(like: Mixture, seed: tuple[int, ...]) -> Mixture:
    """Standard normal numbers for every parameter, score matrices symmetric."""
    generator = np.random.default_rng(seed)
    weights, scores, experts = (
        generator.normal(size=part.shape) for part in (like.weights, like.scores, like.experts)
    )
    return Mixture(weights, (scores + scores.transpose(0, 1, 3, 2)) / math.sqrt(2.0), experts)


# ------------------------------------------------------------------------------------------- slopes


def rates_of(design: Design, runs: Sequence[DescentRun]) -> tuple[ModelRates, ...]:
    """Slopes by model, channels and start, the control first, and what they say of a rate."""
    return tuple(_rates(design, runs)) if runs else ()


def _rates(design: Design, runs: Sequence[DescentRun]) -> Iterator[ModelRates]:
    for model, channels in itertools.product(design.models, design.channels):
        own = [run for run in runs if (run.model, run.channels) == (model, channels)]
        starts = tuple(_start_rates(design, start, own) for start in design.starts)
        control = [math.log(run.loss / run.start_loss) for run in own if run.start == 0.0]
        state = state_of(model, starts[0].loss, float(np.mean(control)))
        yield ModelRates(model, channels, state, starts)


def _start_rates(design: Design, start: float, runs: Sequence[DescentRun]) -> StartRates:
    series = [
        [run for run in runs if (run.start, run.repeat) == (start, repeat)]
        for repeat in range(design.repeats)
    ]
    return StartRates(
        start,
        exponent(series, lambda run: run.loss),
        exponent(series, lambda run: run.start_loss),
        exponent(series, lambda run: run.error),
    )


def exponent(
    series: Sequence[Sequence[DescentRun]], value: Callable[[DescentRun], float]
) -> Exponent:
    """Mean over repeats of the slope of log value against log n, with Student's interval.

    Repeats have their own seeds and sizes share them, so slopes of repeats are independent; the
    interval is nan with one repeat.
    Oracle in tests: scipy.stats.linregress, scipy.stats.ttest_1samp.
    """
    slopes = [
        slope(np.log([float(run.size) for run in runs]), np.log([value(run) for run in runs])).value
        for runs in series
    ]
    repeats = len(slopes)
    if repeats < 2:
        return Exponent(slopes[0], math.nan)
    error = float(np.std(slopes, ddof=1)) / math.sqrt(repeats)
    return Exponent(float(np.mean(slopes)), half_width(error, repeats))


def state_of(model: Model, control: Exponent, growth: float) -> State:
    """What the slope of L_2 from a start that is the same for every n says of a rate.

    ``growth`` is the mean logarithm of L_2 at the end over L_2 at the start. Descents that begin at
    the truth are driven away by noise, as n^-1/2 with an activation or none: that is no estimate.
    """
    if model == "mha":
        return "none"
    low, high = control.value - control.half_width, control.value + control.half_width
    if high < 0.0:
        return "beyond" if growth < 0.0 else "away"
    return "explained" if low > PUBLISHED else "undecided"
