"""Least-squares fits of gated attention find the function at once, and parameters of one head too.

Levenberg-Marquardt with the derivatives of docs/theory.md C4 until it converges, of the
parameters of S2's appendix D and of a head whose parameters data do tell (docs/hmoe.md). Printed
are, for each activation, number of channels and start, the error of the function over all sizes,
its slope, the slope of the loss L_2 and its median at the largest size. ``--full`` takes hours of
a core, without it some seconds; ``--out FILE.json`` keeps every fit.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.gated_attention import (
    NOISE,
    POSITIONS,
    Mixture,
    Position,
    jacobian,
    published_truth,
    regression,
    square,
)
from benchmarks.slopes_of_descents_are_those_of_their_starts import (
    POINTS,
    Exponent,
    centred,
    direction,
    exponent,
    loss_2,
    moved,
    with_channels,
)

#: Decrease of the sum of squares in a step that counts as none, as a share of what the noise of one
#: parameter makes, 1 / n of the sum; and change of parameters that does.
SAME, STILL = 1e-4, 1e-12

#: Evaluations after which a fit has not converged.
MOST_EVALUATIONS = 300


# ---------------------------------------------------------------------------------------- the truth
def one_head() -> Mixture:
    """One head of two experts and one channel, steep enough that its parameters can be found."""
    return Mixture(
        np.array([[1.0]]),
        np.array([[[[2.0, 0.5], [0.5, -1.0]], [[0.0, 0.0], [0.0, 0.0]]]]),
        np.array([[[[3.0, -1.0]], [[-2.0, 2.0]]]]),
    )


TRUTHS: dict[str, Callable[[], Mixture]] = {"published": published_truth, "one head": one_head}


# -------------------------------------------------------------------------------------------- a fit
def free(mixture: Mixture) -> np.ndarray:
    """Parameters as one vector: weights, upper triangles less those of the last expert, experts.

    A softmax sees no more of the scores: S2 sets the last of each head to 0 (A.3).
    """
    rows, columns = np.triu_indices(mixture.scores.shape[-1])
    scores = mixture.scores - mixture.scores[:, -1:]
    upper = scores[:, :-1, rows, columns]
    return np.concatenate([mixture.weights.ravel(), upper.ravel(), mixture.experts.ravel()])


def filled(vector: np.ndarray, like: Mixture) -> Mixture:
    """The mixture with these free parameters, its last scores 0."""
    heads, experts, _, dims = like.experts.shape
    rows, columns = np.triu_indices(dims)
    ends = np.cumsum([like.weights.size, heads * (experts - 1) * len(rows)])
    weights, upper, rest = np.split(vector, ends)
    scores = np.zeros_like(like.scores)
    for row, column in ((rows, columns), (columns, rows)):
        scores[:, :-1, row, column] = upper.reshape(heads, experts - 1, -1)
    return Mixture(weights.reshape(like.weights.shape), scores, rest.reshape(like.experts.shape))


def free_columns(like: Mixture) -> np.ndarray:
    """Which columns of a Jacobian are of free parameters."""
    heads, experts, _, dims = like.experts.shape
    of_scores = np.ones((heads, experts, dims * (dims + 1) // 2), bool)
    of_scores[:, -1] = False
    others = np.ones(like.weights.size, bool), np.ones(like.experts.size, bool)
    return np.concatenate([others[0], of_scores.ravel(), others[1]])


@dataclass(frozen=True, eq=False)
class Fit:
    """Where least squares ended: ``loss`` is the mean square of what is left."""

    mixture: Mixture
    loss: float
    evaluations: int
    has_converged: bool


def fitted(start: Mixture, inputs: np.ndarray, targets: np.ndarray, position: Position) -> Fit:
    """The nearest least-squares fit by Levenberg-Marquardt (MINPACK) with exact derivatives."""
    columns = free_columns(start)

    def rest(vector: np.ndarray) -> np.ndarray:
        return regression(filled(vector, start), inputs, position) - targets

    def slopes(vector: np.ndarray) -> np.ndarray:
        return jacobian(filled(vector, start), inputs, position)[:, columns]

    with np.errstate(over="ignore", invalid="ignore"):
        end = least_squares(
            rest,
            free(start),
            slopes,
            method="lm",
            x_scale="jac",
            ftol=SAME / len(targets),
            xtol=STILL,
            gtol=STILL,
            max_nfev=MOST_EVALUATIONS,
        )
    loss = 2.0 * float(end.cost) / len(targets)
    return Fit(filled(end.x, start), loss, end.nfev, end.status > 0)


# ----------------------------------------------------------------------------------- the experiment
@dataclass(frozen=True)
class Case:
    """Which truth, where its activation stands, how many channels, and how far off a fit begins."""

    truth: str
    model: str
    channels: int
    start: float


#: As far from the truth as the descents of the control begin.
_AWAY = 0.385

CASES = (
    Case("published", "mha", 2, 0.0),
    *(Case("published", m, 2, start) for m in ("1", "2") for start in (0.0, _AWAY)),
    *(Case("published", m, 3, _AWAY) for m in ("1", "2")),
    *(Case("one head", m, c, _AWAY) for m in ("1", "2") for c in (1, 2)),
)


@dataclass(frozen=True)
class Design:
    """Every case with every size and repeat; smaller samples are the beginnings of larger ones."""

    cases: tuple[Case, ...] = CASES
    sizes: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {
            "published": (1_000, 3_000, 10_000),
            "one head": (1_000, 6_000, 36_000),
        }
    )
    repeats: int = 5
    seed: int = 0


QUICK = Design((CASES[1], CASES[-4]), {"published": (300, 900), "one head": (1_000, 4_000)}, 2)


@dataclass(frozen=True)
class FitRun:
    """A fit: error of the function and L_2; ``gain`` is the mean square over that of the truth."""

    truth: str
    model: str
    channels: int
    start: float
    repeat: int
    size: int
    error: float
    loss: float
    gain: float
    evaluations: int
    has_converged: bool


def run_of(design: Design, case: Case, repeat: int, size: int) -> FitRun:
    """One fit; noise, inputs and the direction of its start do not depend on the size."""
    position, truth = POSITIONS[case.model], TRUTHS[case.truth]()
    nearest = with_channels(truth, case.channels)
    away = direction(nearest, (design.seed, repeat, case.channels))
    generator = np.random.default_rng((design.seed, repeat, 0))
    most = max(design.sizes[case.truth])
    inputs = square(most, generator)[:size]
    noise = generator.normal(scale=NOISE, size=most)[:size]
    targets = regression(truth, inputs, position) + noise
    fit = fitted(moved(nearest, away, case.start), inputs, targets, position)
    points = square(10 * POINTS, np.random.default_rng((design.seed, 1)))
    apart = regression(fit.mixture, points, position) - regression(truth, points, position)
    return FitRun(
        *(case.truth, case.model, case.channels, case.start, repeat, size),
        error=float(np.sqrt(np.mean(apart**2))),
        loss=loss_2(centred(fit.mixture), truth, points[:POINTS], position),
        gain=fit.loss / float(np.mean(noise**2)),
        evaluations=fit.evaluations,
        has_converged=fit.has_converged,
    )


def experiment(design: Design) -> Iterator[FitRun]:
    for repeat, case in itertools.product(range(design.repeats), design.cases):
        for size in design.sizes[case.truth]:
            yield run_of(design, case, repeat, size)


# ------------------------------------------------------------------------------------------ summary
@dataclass(frozen=True)
class Rate:
    """Of one case: slopes of the error and of L_2, and medians by size.

    ``parameters`` are n error^2 / noise^2: as many as the truth has free ones where a fit follows
    the noise in each of them.
    """

    case: Case
    error: Exponent
    loss: Exponent
    errors: tuple[float, ...]
    losses: tuple[float, ...]
    parameters: tuple[float, ...]
    num_below_truth: int
    num_converged: int
    num_fits: int


def rates_of(design: Design, runs: Sequence[FitRun]) -> Iterator[Rate]:
    """Fits that did not converge are counted, and are in the figures."""
    for case in design.cases:
        own = [r for r in runs if Case(r.truth, r.model, r.channels, r.start) == case]
        series = [[r for r in own if r.repeat == n] for n in range(design.repeats)]
        at = [[r for r in own if r.size == size] for size in design.sizes[case.truth]]
        medians = functools.partial(_medians, at)
        yield Rate(
            case,
            exponent(series, lambda run: run.error),
            exponent(series, lambda run: run.loss),
            medians(lambda run: run.error),
            medians(lambda run: run.loss),
            tuple(
                float(np.mean([run.size * run.error**2 for run in some])) / NOISE**2 for some in at
            ),
            sum(run.gain < 1.0 for run in own),
            sum(run.has_converged for run in own),
            len(own),
        )


def _medians(at: Sequence[Sequence[FitRun]], value: Callable[[FitRun], float]) -> tuple[float, ...]:
    return tuple(float(np.median([value(run) for run in some])) for some in at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    design = Design() if options.full else QUICK
    runs = []
    for run in experiment(design):
        runs.append(run)
        print(json.dumps(vars(run)), file=sys.stderr, flush=True)
    rates = [*rates_of(design, runs)]
    print("truth, activation, channels, start   slope of the error   of L_2             converged")
    for rate in rates:
        slopes = (f"{s.value:+.3f} +- {s.half_width:.3f}" for s in (rate.error, rate.loss))
        case = f"{rate.case.truth}, {rate.case.model}, {rate.case.channels}, {rate.case.start:g}"
        count = f"{rate.num_converged} of {rate.num_fits}"
        print(f"{case:<36}", *(f"{text:<19}" for text in slopes), count)
    if options.out:
        names = ("moegeom", "numpy", "scipy")
        whole = {
            "command": f"python -m benchmarks.{Path(__file__).stem} --full",
            "core": platform.processor() or platform.machine(),
            "versions": {name: importlib.metadata.version(name) for name in names}
            | {"python": platform.python_version()},
            "result": {"design": design, "rates": rates, "runs": runs},
        }
        options.out.write_text(json.dumps(whole, default=vars, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
