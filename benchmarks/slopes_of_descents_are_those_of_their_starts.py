"""Slopes of the loss of parameters against n are those of where descents start, gated or not.

The experiment of S2, Figure 1, beside a control that starts equally far from the truth for every n
(docs/theory.md C3 and C6, docs/hmoe.md). Printed are, for each activation and number of channels,
slopes of log L_2 against log n: at the end, at the start, and of the error of the function.
``--full`` takes hours of a core, without it some twenty seconds; ``--out FILE.json`` keeps every
descent.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.stats import linregress, t

from benchmarks.gated_attention import (
    NOISE,
    POSITIONS,
    Mixture,
    Position,
    published_truth,
    regression,
    sensitivity,
    square,
    traced,
)

#: The slope that S2 reads from its Figure 1 where there is a gate.
PUBLISHED = -0.5

#: Share of the decrease that a line promises which a step must keep, and the first step tried.
ARMIJO, TRIAL = 0.25, 0.05

#: Halvings of a step after which there is no lower place in this direction.
MOST_HALVINGS = 40

#: The size at which all starts are equally far from the truth.
EQUAL_AT = 100_000

#: Inputs on which functions and channels are compared.
POINTS = 2000


# ------------------------------------------------------------------------------------------- moves
def moved(mixture: Mixture, direction: Mixture, step: float) -> Mixture:
    """All parameters but the gates, ``step`` times ``direction`` further on."""
    return Mixture(
        mixture.weights + step * direction.weights,
        mixture.scores + step * direction.scores,
        mixture.experts + step * direction.experts,
    )


def centred(mixture: Mixture) -> Mixture:
    """The same function with scores that add up to 0: a softmax does not see their mean (F-21)."""
    mean = mixture.scores.mean(axis=1, keepdims=True)
    return dataclasses.replace(mixture, scores=mixture.scores - mean)


def with_channels(mixture: Mixture, channels: int) -> Mixture:
    """The same function with more channels: copies of the first ones, weights split evenly."""
    source = np.arange(channels) % mixture.weights.shape[1]
    weights = mixture.weights[:, source] / np.bincount(source)[source]
    return dataclasses.replace(mixture, weights=weights, experts=mixture.experts[:, :, source])


def split(mixture: Mixture, shift: np.ndarray) -> Mixture:
    """The first channel of every head as two of half its weight, experts ``shift`` either side.

    Without an activation the function stays, however long the shift; with one behind the values or
    around the mixture it moves by the square of the shift (S2 equation 19; docs/theory.md C4).
    """
    first, half = mixture.experts[:, :, :1], mixture.weights[:, :1] / 2.0
    return dataclasses.replace(
        mixture,
        weights=np.concatenate([half, half, mixture.weights[:, 1:]], axis=1),
        experts=np.concatenate([first + shift, first - shift, mixture.experts[:, :, 1:]], axis=2),
    )


# ------------------------------------------------------------------------------------------ losses
def channel_functions(mixture: Mixture, inputs: np.ndarray, position: Position) -> np.ndarray:
    """(samples, heads, channels): what each channel gives before its weight."""
    return np.moveaxis(traced(mixture, inputs, position).inner, -1, 0)


def voronoi_cells(fitted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Of each fitted channel the number of the true one nearest in the mean square; ties: lowest.

    S2 prints the same index on both sides, K* for K and a missing star (F-20).
    """
    channels, true_channels = fitted.reshape(len(fitted), -1), true.reshape(len(true), -1)
    distances = np.stack([((channels - one[:, None]) ** 2).mean(axis=0) for one in true_channels.T])
    return distances.argmin(axis=0).reshape(fitted.shape[1:])


def matched_experts(
    fitted: Mixture, true: Mixture, at: tuple[int, int], of: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Distances of scores and of expert vectors under the permutation with the least squares.

    ``at`` and ``of`` are (head, channel). S2 takes the nearest, which need not be a permutation.
    """
    (head, channel), (true_head, true_channel) = at, of
    score = fitted.scores[head][:, None] - true.scores[true_head]
    expert = fitted.experts[head, :, channel][:, None] - true.experts[true_head, :, true_channel]
    score_square, expert_square = (score**2).sum(axis=(2, 3)), (expert**2).sum(axis=2)
    pairs = linear_sum_assignment(score_square + expert_square)
    return np.sqrt(score_square[pairs]), np.sqrt(expert_square[pairs])


def _loss(
    fitted: Mixture,
    true: Mixture,
    inputs: np.ndarray,
    position: Position,
    power: Callable[[np.ndarray], np.ndarray],
) -> float:
    """``power`` gives the exponent r of each fitted channel from the size of its cell."""
    fitted, true = centred(fitted), centred(true)
    functions = (channel_functions(mixture, inputs, position) for mixture in (fitted, true))
    cell = voronoi_cells(*functions)
    pairs = [
        matched_experts(fitted, true, place, divmod(int(cell[place]), true.weights.shape[1]))
        for place in np.ndindex(cell.shape)
    ]
    score, expert = (np.stack(parts) for parts in zip(*pairs, strict=True))
    members = np.bincount(cell.ravel(), minlength=true.weights.size)
    r = power(members[cell.ravel()])[:, None]
    weights = fitted.weights.ravel()
    misplaced = np.bincount(cell.ravel(), weights, true.weights.size) - true.weights.ravel()
    return float(np.abs(misplaced).sum() + np.abs(weights) @ (score**r + expert**r).sum(axis=1))


def loss_1(
    fitted: Mixture, true: Mixture, inputs: np.ndarray, r: float, position: Position = "none"
) -> float:
    """L_{1,r} of S2 section 3 (docs/theory.md C3); an empty cell costs its weight."""
    return _loss(fitted, true, inputs, position, lambda members: np.full(members.shape, r))


def loss_2(
    fitted: Mixture, true: Mixture, inputs: np.ndarray, position: Position = "none"
) -> float:
    """L_2 of S2 section 4.1: r = 1 in cells of one fitted channel, 2 in those of several."""
    return _loss(fitted, true, inputs, position, lambda members: np.where(members == 1, 1.0, 2.0))


# --------------------------------------------------------------------------------------- descents
#: From parameters to a loss and its gradient in all of them but gates.
Objective = Callable[[Mixture], tuple[float, Mixture]]


def mean_square(inputs: np.ndarray, targets: np.ndarray, position: Position = "none") -> Objective:
    """Mean of (f(x) - y)^2, and its gradient; entries of a score matrix are free of each other."""

    def at(mixture: Mixture) -> tuple[float, Mixture]:
        trace = traced(mixture, inputs, position)
        apart = trace.output - targets
        moves = sensitivity(mixture, trace)
        x, scale = trace.inputs, 2.0 / len(targets)
        products = (apart * x[:, None] * x).reshape(len(x) ** 2, -1)
        scores = (moves.score @ products.T).reshape(mixture.scores.shape)
        gradient = Mixture(
            scale * (moves.weight @ apart), scale * scores, scale * (moves.product @ (apart * x).T)
        )
        return float(np.mean(apart**2)), gradient

    return at


@dataclass(frozen=True, eq=False)
class Descended:
    """Where a descent ended: ``loss`` is what was made small; not ``settled``: steps ran out."""

    mixture: Mixture
    loss: float
    epochs: int
    settled: bool


def descended(
    start: Mixture, objective: Objective, epochs: int = 1000, trial: float = TRIAL
) -> Descended:
    """Every step is tried at ``trial`` and halved until Armijo's inequality holds (C6)."""
    here = start
    loss, slope = objective(here)
    for epoch in range(epochs):
        square_of_slope = sum(
            float(np.vdot(part, part)) for part in (slope.weights, slope.scores, slope.experts)
        )
        step = trial
        for _ in range(MOST_HALVINGS):
            tried = moved(here, slope, -step)
            lower, ahead = objective(tried)
            if lower <= loss - ARMIJO * step * square_of_slope and lower < loss:
                break
            step /= 2.0
        else:
            return Descended(here, loss, epoch, True)
        here, loss, slope = tried, lower, ahead
    return Descended(here, loss, epochs, False)


@dataclass(frozen=True)
class Design:
    """Every combination is a series of descents, one for each size; start 0 is the control."""

    models: tuple[str, ...] = ("mha", "1", "2")
    channels: tuple[int, ...] = (3, 4)
    sizes: tuple[int, ...] = (10_000, 30_000, 100_000)
    starts: tuple[float, ...] = (0.0, 0.083, 0.3, 0.5)
    repeats: int = 10
    epochs: int = 1000
    start_size: float = 0.385
    seed: int = 0


QUICK = Design(channels=(3,), sizes=(10_000, 100_000), starts=(0.0, 0.083), repeats=2, epochs=100)


@dataclass(frozen=True)
class DescentRun:
    """A descent: L_2 and the distance of the functions where it began and where it ended."""

    model: str
    channels: int
    start: float
    repeat: int
    size: int
    start_loss: float
    loss: float
    start_error: float
    error: float
    epochs: int
    settled: bool


def runs_of(task: tuple[Design, str, int, int, int]) -> list[DescentRun]:
    """The descents by start; starts equally far from the truth are run once.

    Seeds do not depend on the size: smaller samples are the beginnings of larger ones.
    """
    design, model, channels, repeat, size = task
    position, truth = POSITIONS[model], published_truth()
    nearest = with_channels(truth, channels)
    away = direction(nearest, (design.seed, repeat, channels))
    generator = np.random.default_rng((design.seed, repeat, 0))
    inputs = square(max(design.sizes), generator)[:size]
    noise = generator.normal(scale=NOISE, size=max(design.sizes))[:size]
    objective = mean_square(inputs, regression(truth, inputs, position) + noise, position)
    points = square(POINTS, np.random.default_rng((design.seed, 1)))

    def error(mixture: Mixture) -> float:
        apart = regression(mixture, points, position) - regression(truth, points, position)
        return float(np.sqrt(np.mean(apart**2)))

    def descent(start: float, begun: Mixture, fit: Descended) -> DescentRun:
        losses = (loss_2(mixture, truth, points, position) for mixture in (begun, fit.mixture))
        return DescentRun(
            *(model, channels, start, repeat, size, *losses),
            *(error(begun), error(fit.mixture), fit.epochs, fit.settled),
        )

    @functools.cache
    def fitted(distance: float) -> tuple[Mixture, Descended]:
        begun = moved(nearest, away, distance)
        return begun, descended(begun, objective, design.epochs)

    return [
        descent(start, *fitted(design.start_size * (size / EQUAL_AT) ** -start))
        for start in design.starts
    ]


def direction(like: Mixture, seed: tuple[int, ...]) -> Mixture:
    """Standard normal numbers for every parameter, score matrices symmetric."""
    generator = np.random.default_rng(seed)
    weights, scores, experts = (
        generator.normal(size=part.shape) for part in (like.weights, like.scores, like.experts)
    )
    return Mixture(weights, (scores + scores.transpose(0, 1, 3, 2)) / math.sqrt(2.0), experts)


# ------------------------------------------------------------------------------------------ slopes
@dataclass(frozen=True)
class Exponent:
    """Slope of a logarithm against log n, mean over repeats; half of its 95 % interval, or nan."""

    value: float
    half_width: float


def exponent(
    series: Sequence[Sequence[DescentRun]], value: Callable[[DescentRun], float]
) -> Exponent:
    """Student's interval: repeats have their own seeds, which sizes share."""
    slopes = [
        linregress(np.log([run.size for run in runs]), np.log([value(run) for run in runs])).slope
        for runs in series
    ]
    repeats = len(slopes)
    if repeats < 2:
        return Exponent(float(slopes[0]), math.nan)
    error = float(np.std(slopes, ddof=1)) / math.sqrt(repeats)
    return Exponent(float(np.mean(slopes)), float(t.ppf(0.975, repeats - 1)) * error)


def state_of(model: str, control: Exponent, growth: float) -> str:
    """What the slope of L_2 from a start that is the same for every n says of a rate.

    ``growth`` is the mean logarithm of L_2 at the end over L_2 at the start. "none": no rate
    exists; "explained": the control stands still; "undecided": its interval holds 0 and -1/2;
    "away": it falls because noise drove descents off the truth, which is no estimate; "beyond": it
    falls, and descents came nearer.
    """
    if model == "mha":
        return "none"
    low, high = control.value - control.half_width, control.value + control.half_width
    if high < 0.0:
        return "beyond" if growth < 0.0 else "away"
    return "explained" if low > PUBLISHED else "undecided"


def rates_of(design: Design, runs: Sequence[DescentRun]) -> Iterator[dict]:
    """Slopes by model, channels and start, the control first, and what they say of a rate."""
    for model, channels in itertools.product(design.models, design.channels):
        own = [run for run in runs if (run.model, run.channels) == (model, channels)]
        starts = []
        for start in design.starts:
            series = [
                [run for run in own if (run.start, run.repeat) == (start, repeat)]
                for repeat in range(design.repeats)
            ]
            slopes = {
                name: exponent(series, lambda run, name=name: getattr(run, name))
                for name in ("loss", "start_loss", "error")
            }
            starts.append({"start": start, **slopes})
        control = [math.log(run.loss / run.start_loss) for run in own if run.start == 0.0]
        state = state_of(model, starts[0]["loss"], float(np.mean(control)))
        yield {"model": model, "channels": channels, "state": state, "starts": starts}


def experiment(design: Design) -> tuple[DescentRun, ...]:
    tasks = [
        (design, *task)
        for task in itertools.product(
            design.models, design.channels, range(design.repeats), design.sizes
        )
    ]
    with ProcessPoolExecutor() as pool:
        return tuple(itertools.chain.from_iterable(pool.map(runs_of, tasks)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    design = Design() if asked.full else QUICK
    runs = experiment(design)
    rates = [*rates_of(design, runs)]
    print("activation, channels   start p    L_2              L_2 at the start   error of f")
    for one in rates:
        for start in one["starts"]:
            slopes = (start[name] for name in ("loss", "start_loss", "error"))
            texts = (f"{slope.value:+.3f} +- {slope.half_width:.3f}" for slope in slopes)
            place = f"{one['model']}, {one['channels']}"
            print(f"{place:<22} {start['start']:<10g}", *(f"{text:<18}" for text in texts))
    if asked.out:
        result = {"design": design, "rates": rates, "runs": runs}
        names = ("moegeom", "numpy", "scipy")
        versions = {name: importlib.metadata.version(name) for name in names}
        whole = {
            "command": f"python benchmarks/{Path(__file__).name}",
            "core": platform.processor() or platform.machine(),
            "versions": {**versions, "python": platform.python_version()},
            "result": result,
        }
        asked.out.write_text(json.dumps(whole, default=vars, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
