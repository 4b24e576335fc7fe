"""``research perturb``: how far an input may drift before its experts change, and to which."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float32, Float64, Int32, Int64
from moegeom.core.text import number_of, percent
from moegeom.core.tokens import InputNoise, TokenSource
from moegeom.engine.jumps import ExactRouter
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS, one_blas_thread
from moegeom.engine.prepared import unavailable
from moegeom.engine.sample import draw_sample, drawn_tokens, refuse_tokens_beyond
from moegeom.engine.search_pace import SearchPace
from moegeom.engine.session import Session
from moegeom.geometry import paths as diffusion
from moegeom.geometry.boundary.barriers import Barriers
from moegeom.geometry.noise import noisy_distances, noisy_rows
from moegeom.geometry.statistics import share_error
from moegeom.kernels.cpu.barriers import CompiledBarriers
from moegeom.pipeline import Watch
from moegeom.research.perturb import STUDY
from moegeom.research.perturb.record import (
    ExitAt,
    ExitPair,
    HalfTime,
    Perturbed,
    PerturbRequest,
    RouterPaths,
    TokenPaths,
)
from moegeom.studies.boundary.study import asked_noise, second_recording
from moegeom.studies.study import each
from moegeom.studies.written import write_rows

#: Noise where none is asked for, as a share of the rms of each input.
USUAL = 0.1

#: Tokens of --at at most.
_MOST_TOKENS = 4096


def perturb(request: PerturbRequest, watch: Watch | None = None) -> Perturbed:
    """Exit curves and exits of some tokens at each router.

    Raises
    ------
    RecordingError
        When the recording holds no router inputs, or none of the routers.
    UsageError
        Without tokens, when the options cannot be meant, and when ``out`` cannot be written.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-balanced"
    >>> found = mg.perturb(f"{sample}/step_1500", f"{sample}/rec/step_1500", layers=0, at=(5, 77))
    >>> [token.nearest for token in found.value.routers[0].tokens]
    [(8, 2), (1, 3)]
    """
    _check(request)
    opened, source = STUDY.open(request)
    recorded, tokens = opened.recorded, _tokens(request, source)
    reasons = {router.name: why_not(router, source) for router in recorded}
    chosen = [router for router in recorded if not reasons[router.name]]
    noise, moving = _moving(request, opened, chosen)
    paths, samples = [], []
    left_out = [*opened.left_out, *((name, why) for name, why in reasons.items() if why)]
    for router in each(chosen, watch, len(tokens), is_paced=True):
        moved = moving[router.name]
        if isinstance(moved, str):
            left_out.append((router.name, moved))
        else:
            some = opened.sample(router, ("input",), at=tokens)
            samples.append(some)
            with one_blas_thread():  # small products gain nothing from threads
                pace = SearchPace(
                    watch, request.budget, f"{router.name}: {number_of(len(some.token), 'token')}"
                )
                paths.append(router_paths(router, some.inputs, some.token, moved, request, pace))
    if request.out is not None:
        rows = ({"router": one.router, **row} for one in paths for row in rows_of(one))
        write_rows(request.out, rows, recorded)
    return Perturbed(
        run=opened.facts(recorded),
        routers=tuple(paths),
        left_out=tuple(left_out),
        noise=noise,
        has_drift=request.drift,
        time=request.time,
        sample=opened.sample_counts(samples, bool(request.at)),
        seed=request.seed,
        written=None if request.out is None else request.out.name,
    )


def _check(request: PerturbRequest) -> None:
    """Raises UsageError for what cannot be meant, before anything is read."""
    if request.drift and (request.noise is None or _is_number(request.noise)):
        raise UsageError(
            "--drift: what all tokens have in common takes a second recording.",
            "Name it: --noise REC2 --drift.",
        )
    if not 0.0 < request.time < math.inf:
        raise UsageError(f"--time {request.time}: expected a positive number.")


def _is_number(noise: Any) -> bool:
    try:
        float(noise)
    except (TypeError, ValueError):
        return not isinstance(noise, str)
    return True


def _tokens(request: PerturbRequest, source: TokenSource) -> Int64[np.ndarray, "tokens"]:
    """The named tokens in ascending order, else a sample."""
    if not request.at:
        return drawn_tokens(source, request, SAMPLE)
    if len(request.at) > _MOST_TOKENS:
        raise UsageError(f"--at: expected at most {number_of(_MOST_TOKENS, 'token')}.")
    refuse_tokens_beyond(request.at, source, "--at")
    return np.unique(np.array(request.at, dtype=np.int64))


# -------------------------------------------------------------------------------- what moves inputs


def _moving(
    request: PerturbRequest, opened: Session, routers: Sequence[Router]
) -> tuple[str, Mapping[str, Moved | str]]:
    """The noise in words, and by router what moves its inputs, or why it is left out."""
    noise = asked_noise(str(USUAL) if request.noise is None else request.noise, opened)
    assert noise is not None
    if isinstance(noise, InputNoise):
        size = f"{percent(noise.scale)} of its rms" if noise.is_relative else f"{noise.scale:.3g}"
        text = f"each input moves by {size} a coordinate in a unit of time, the same in all"
        return text, dict.fromkeys((router.name for router in routers), Moved.by(noise))
    by_router: dict[str, Moved | str] = {}
    again = None
    if request.drift:
        assert isinstance(request.noise, str)
        again = second_recording(request.noise, opened)
    for router in routers:
        one = noise.get(router.name)
        if one is None:
            by_router[router.name] = "the second recording does not record it"
        elif one.scale == 0.0:
            by_router[router.name] = "both recordings hold the same inputs: nothing moves them"
        elif again is None:
            by_router[router.name] = Moved.by(one)
        else:
            by_router[router.name] = _drifting(router, one, opened, again, request)
    drifts = ", and what all tokens have in common as a drift" if request.drift else ""
    second = Path(request.noise).name if isinstance(request.noise, str) else "the second recording"
    text = f"a unit of time is the noise of one of two runs, by {second}{drifts}"
    return text, by_router


def _drifting(
    router: Router, noise: InputNoise, opened: Session, again: TokenSource, request: PerturbRequest
) -> Moved | str:
    """The mean of B less A as the drift, and what is left of the noise of one run."""
    first = opened.source
    assert first is not None
    assert noise.systematic_share is not None
    if noise.systematic_share >= 1.0 - 1e-9:
        return "all tokens differ in the same way: there is no noise beside the drift"
    tokens = drawn_tokens(first, request, SMALL_SAMPLE_TOKENS)
    a, b = (draw_sample(router, one, request, ("input",), at=tokens) for one in (first, again))
    both = np.intersect1d(a.token, b.token)
    drift = (b.at(both).inputs.astype(np.float64) - a.at(both).inputs).mean(axis=0)
    return Moved(noise.scale * math.sqrt(1.0 - noise.systematic_share), False, None, drift)


# --------------------------------------------------------------------------------------------- file


def rows_of(router: RouterPaths) -> Iterator[dict[str, Any]]:
    """Rows of the file: curves by token, the medians without one, and exits."""
    for token, curve in (*((one.token, one.curve) for one in router.tokens), (None, router.curve)):
        for at in curve:
            values = {f"p_{name}": value for name, value in dataclasses.asdict(at).items()}
            yield {"what": "curve", "token": token, "time": values.pop("p_time"), **values}
    for pair in router.exits:
        values = dataclasses.asdict(pair)
        del values["apart"]
        yield {"what": "exit", **values}


# --------------------------------------------------------------------------------------- one router
#: Tokens that are looked at where none are named.
SAMPLE = 64

#: Times that are told, in shares of the last.
TIMES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)

#: Times of a simulation around the half time; of rules that are not linear four times as many, and
#: more before the times that are told: from one to the next the nearest boundary is so many squared
#: deviations away, but no more than so many between two that are told.
_AROUND, _SHORT, _BETWEEN = 12, 16.0, 4

#: How far, in half times of the nearest boundary alone, the half time is looked for: with drift,
#: and where distances are those of tangents.
_FROM, _TO, _CURVED_FROM, _CURVED_TO = 1e-3, 10.0, 0.02, 4.0

#: Paths and walks of all tokens together, and of one token at least and at most;
#: numbers times boundaries.
_PATHS_TIMES, _ALL_PATHS, _FEWEST_PATHS, _PATHS = 2**22, 2**14, 32, 4096
_WALKS_TIMES, _ALL_WALKS, _FEWEST_WALKS, _WALKS = 2**20, 2**13, 16, 4096

#: Samples of tokens, drawn from those there are, that tell the error of a median.
_RESAMPLED = 200

#: How near a second boundary is at an exit that counts as one at a corner, in first distances.
_CORNER = 0.01

#: Rms of an input of zeros, which noise in shares of its rms does not move.
_NO_LENGTH = 1e-100

#: Tokens whose paths are simulated together: the steps of progress.
_TOGETHER = 8


@dataclass(frozen=True, eq=False)
class Moved:
    """What moves the inputs of one router: ``factor`` of normal numbers per unit of time, in units
    of the input or, ``is_relative``, of the rms of each; ``drift`` of the input.

    ``size`` is the standard deviation in shares of the rms, None where it is not isotropic.
    """

    factor: float
    is_relative: bool
    size: float | None
    drift: Float64[np.ndarray, "hidden"] | None = None

    @classmethod
    def by(cls, noise: InputNoise) -> Moved:
        size = noise.scale if noise.is_relative else noise.relative
        return cls(noise.scale, noise.is_relative, size)


def why_not(router: Router, source: TokenSource) -> str:
    """The reason why a router has no paths; empty where it has."""
    absent = unavailable(router, source.facts)
    if router.rule.top_k >= router.num_experts:
        return "every expert is chosen: nothing can change"
    needed = ("input", "distance", "noise")
    return next((absent[name] for name in needed if name in absent), "")


# ------------------------------------------------------------------------------------------- router


def router_paths(
    router: Router,
    inputs: Float32[np.ndarray, "tokens hidden"],
    tokens: Int64[np.ndarray, "tokens"],
    moved: Moved,
    request: PerturbRequest,
    pace: SearchPace | None = None,
) -> RouterPaths:
    """Curves and exits of these inputs, of all of them that ``pace`` leaves time for."""
    pace = SearchPace(None, None) if pace is None else pace
    drift = None if moved.drift is None else router.weight.astype(np.float64) @ moved.drift
    seeds = np.random.SeedSequence([request.seed, router.layer, *router.name.encode()])
    streams = [np.random.default_rng(stream) for stream in seeds.spawn(len(tokens) + 2)]
    cells = _Cells.of(router, inputs, moved, drift, request)
    nearest = cells.nearest
    of_tokens: list[TokenPaths] = []
    parts = [
        np.arange(n, min(n + _TOGETHER, len(tokens))) for n in range(0, len(tokens), _TOGETHER)
    ]
    exits_of = []
    for rows in pace.parts(parts, len):
        curves = cells.curves(rows, [streams[row] for row in rows.tolist()])
        for row, (curve, half) in zip(rows.tolist(), curves, strict=True):
            pair = int(nearest[row, 0]), int(nearest[row, 1])
            of_tokens.append(TokenPaths(int(tokens[row]), pair, curve, half))
        if drift is None:
            exits_of.append(cells.exits(rows, streams[-2]))
    nearest = nearest[: len(of_tokens)]
    exits: tuple[ExitPair, ...] = ()
    elsewhere = elsewhere_se = at_corners = None
    unfinished = 0.0
    if exits_of:
        arrivals = diffusion.Exits(
            *(np.concatenate([getattr(e, n) for e in exits_of]) for n in _OF_EXITS)
        )
        has_arrived = arrivals.pair[:, :, 0] >= 0
        unfinished = 1.0 - float(has_arrived.mean())
        if has_arrived.any():
            exits = _exits(arrivals, nearest)
            is_elsewhere = arrivals.pair[:, :, 1] != nearest[:, None, 1]
            elsewhere, elsewhere_se = _share(*_by_token(arrivals, is_elsewhere)[:2])
            at_corners = float((arrivals.second[has_arrived] < _CORNER).mean())
    curve, half = _medians(of_tokens, streams[-1])
    return RouterPaths(
        router=router.name,
        num_experts=router.num_experts,
        top_k=router.rule.top_k,
        is_linear=cells.barriers.is_exact,
        tokens=tuple(of_tokens),
        size=moved.size,
        curve=curve,
        half=half,
        exits=exits,
        elsewhere=elsewhere,
        elsewhere_se=elsewhere_se,
        at_corners=at_corners,
        unfinished=unfinished,
        num_left=len(tokens) - len(of_tokens),
    )


#: What walks are.
_OF_EXITS = tuple(of.name for of in dataclasses.fields(diffusion.Exits))


@dataclass(frozen=True, eq=False)
class _Cells:
    """The cells of some inputs, and the noise and drift that move them."""

    logits: Float64[np.ndarray, "tokens experts"]
    barriers: Barriers
    moved: Moved
    drift: Float64[np.ndarray, "experts"] | None
    request: PerturbRequest

    @classmethod
    def of(
        cls,
        router: Router,
        inputs: Float32[np.ndarray, "tokens hidden"],
        moved: Moved,
        drift: Float64[np.ndarray, "experts"] | None,
        request: PerturbRequest,
    ) -> _Cells:
        values, weight = inputs.astype(np.float64), router.weight.astype(np.float64)
        exact, rule, bias = ExactRouter(router), router.rule, router.selection_bias
        logits = exact.logits(values)
        rms = np.sqrt((values**2).mean(axis=1))
        barriers = CompiledBarriers.of(
            rule,
            None if rule.is_affine or bias is None else bias.astype(np.float64),
            exact.chosen(logits),
            noisy_rows(weight, moved.factor),
            noisy_distances(weight, moved.factor, router.affine_bias if rule.is_affine else None),
            np.maximum(rms, _NO_LENGTH) if moved.is_relative else None,
        )
        return cls(logits, barriers, moved, drift, request)

    @cached_property
    def sigmas(self) -> Float64[np.ndarray, "tokens barriers"]:
        return self.barriers.sigmas(np.arange(len(self.logits)), self.logits)

    @cached_property
    def _quantiles(self) -> tuple[Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"]]:
        return diffusion.cell_quantiles(self.sigmas, 0.5)

    @property
    def nearest(self) -> Int32[np.ndarray, "tokens 2"]:
        """The pair (expert out, expert in) of the nearest boundary of each."""
        every = np.arange(len(self.logits))
        return self.barriers.exchange(every, self.logits, self.sigmas.argmin(axis=1))

    def _number(self, times: int, of_all: int, fewest: int, most: int) -> int:
        """How many paths or walks each token has, so that all together take one time."""
        together = min(times // max(self.sigmas.shape[1], 1), of_all)
        return int(np.clip(together // len(self.logits), fewest, most))

    def exits(
        self, rows: Int64[np.ndarray, "some"], generator: np.random.Generator
    ) -> diffusion.Exits:
        """Where walks from some of the inputs leave."""
        walks = self._number(_WALKS_TIMES, _ALL_WALKS, _FEWEST_WALKS, _WALKS)
        return diffusion.exit_boundaries(self.logits, self.barriers, rows, walks, generator)

    def curves(
        self, rows: Int64[np.ndarray, "some"], generators: Sequence[np.random.Generator]
    ) -> Iterator[tuple[tuple[ExitAt, ...], HalfTime]]:
        """The curve at the reported times, and the half time, of some of the inputs."""
        marks = self.request.time * np.array(TIMES)
        around = [self._times(row, marks) for row in rows.tolist()]
        # tokens that need fewer times pass the last one again, in no time
        width = max(map(len, around))
        times = np.array([np.pad(one, (0, width - len(one)), "edge") for one in around])
        paths = self._number(_PATHS_TIMES, _ALL_PATHS, _FEWEST_PATHS, _PATHS)
        curve = diffusion.simulate_exit(
            self.logits, self.barriers, rows, times, paths, generators, self.drift
        )
        error = np.maximum(curve.lower_error, curve.upper_error)
        error = np.hypot(error, curve.step_error[:, None])
        for place, row in enumerate(rows.tolist()):
            yield self._curve(
                row, times[place], (curve.lower[place], curve.upper[place]), error[place], marks
            )

    def _curve(
        self,
        row: int,
        times: Float64[np.ndarray, "times"],
        simulated: Sequence[Float64[np.ndarray, "times"]],
        error: Float64[np.ndarray, "times"],
        marks: Float64[np.ndarray, "marks"],
    ) -> tuple[tuple[ExitAt, ...], HalfTime]:
        proved: list[np.ndarray] = []
        if self.barriers.is_exact:
            # a time t is time 1 for noise of deviation t^(1/2)
            root, drifts = np.sqrt(times)[:, None], self._drifts(row)
            bounds = diffusion.exit_probability(
                self.sigmas[row] / root, 1.0, None if drifts is None else drifts * root
            )
            proved = [bounds.lower, bounds.upper]
            # few paths see nothing of what is rare, and the bounds do
            simulated = [np.clip(bound, *proved) for bound in simulated]
        middle = (simulated[0] + simulated[1]) / 2.0
        half = _half(times, middle)
        early, late = (
            (_half(times, chance) for chance in reversed(proved)) if proved else (None,) * 2
        )
        at = np.searchsorted(times, marks)
        nothing = [np.full(len(times), None)] * 2
        columns = (times, *(proved or nothing), *simulated, error)
        curve = tuple(
            ExitAt(*row) for row in zip(*(column[at].tolist() for column in columns), strict=True)
        )
        spread = np.hypot(error, (simulated[1] - simulated[0]) / 2.0)
        return curve, HalfTime(early, half, _half_error(times, middle, spread, half), late)

    def _drifts(self, row: int) -> Float64[np.ndarray, "one boundaries"] | None:
        """The drift in deviations; of linear rules the same quotient as the distance."""
        if self.drift is None:
            return None
        return self.barriers.sigmas(np.array([row]), self.drift[None])

    def _times(self, row: int, marks: Float64[np.ndarray, "marks"]) -> Float64[np.ndarray, "times"]:
        """The times that are told, and those between which half of the paths have left; none of
        these on a boundary and out of reach.
        """
        nearest, is_exact = self.sigmas[row].min(initial=math.inf), self.barriers.is_exact
        if not 0.0 < nearest < math.inf:
            return marks
        if not is_exact:
            steps = math.ceil(min(_SHORT * marks[-1] / nearest**2, _BETWEEN * len(TIMES) ** 2))
            marks = np.union1d(marks, np.linspace(0.0, marks[-1], steps + 1)[1:])
        still = float(diffusion.face_quantile(np.array([nearest]), 0.5)[0])
        ends = _FROM * still, _TO * still
        if not is_exact:
            ends = _CURVED_FROM * still, _CURVED_TO * still
        elif self.drift is None:
            first, last = (float(end[row]) for end in self._quantiles)
            return np.union1d(marks, np.geomspace(0.99 * first, 1.01 * last, _AROUND))
        return np.union1d(marks, np.geomspace(*ends, (2 if is_exact else 4) * _AROUND))


def _half_error(
    times: Float64[np.ndarray, "times"],
    chance: Float64[np.ndarray, "times"],
    error: Float64[np.ndarray, "times"],
    half: float,
) -> float | None:
    """Error of the half time: that of the chance there over how fast it grows."""
    if not 0.0 < half < math.inf:
        return None
    place = int(np.clip(np.searchsorted(times, half), 1, len(times) - 1))
    # over as many times as the error is long, so that noise of the slope counts for little
    low = np.flatnonzero(chance[: place + 1] <= 0.5 - 0.1)
    first = int(low[-1]) if len(low) else 0
    last = min(max(place, int(np.searchsorted(chance, 0.5 + 0.1))), len(times) - 1)
    rise = chance[last] - chance[first]
    if rise <= 0.0 or times[last] <= times[first]:
        return None
    pace = math.log(times[last] / times[first]) / rise if times[first] > 0.0 else times[last] / rise
    return float(error[place] * pace * (half if times[first] > 0.0 else 1.0))


def _half(times: Float64[np.ndarray, "times"], chance: Float64[np.ndarray, "times"]) -> float:
    """The time at which a growing probability reaches 1/2; inf where it does not."""
    reached = np.flatnonzero(chance >= 0.5)
    if not reached.size:
        return math.inf
    place = int(reached[0])
    if place == 0:
        return 0.0 if chance[0] >= 1.0 else float(times[0])
    part = (0.5 - chance[place - 1]) / (chance[place] - chance[place - 1])
    return float(times[place - 1] * (times[place] / times[place - 1]) ** part)


def _medians(
    tokens: Sequence[TokenPaths], generator: np.random.Generator
) -> tuple[tuple[ExitAt, ...], HalfTime]:
    """Medians over the tokens; errors by drawing tokens again, each with its own error."""
    again = generator.integers(len(tokens), size=(_RESAMPLED, len(tokens)))
    noise = generator.standard_normal(again.shape)

    def error(values: np.ndarray, own: np.ndarray) -> float:
        with np.errstate(invalid="ignore"):
            medians = np.median(values[again] + np.nan_to_num(own)[again] * noise, axis=1)
        return float(medians.std(ddof=1)) if np.isfinite(medians).all() else math.inf

    def median(values: Sequence[Any]) -> float | None:
        return None if None in values else float(np.median(np.array(values)))

    curve = []
    for those in zip(*(token.curve for token in tokens), strict=True):
        own = np.array([at.simulated_se for at in those])
        ends = [np.array([getattr(at, f"simulated_{end}") for at in those]) for end in _ENDS]
        lower, upper = (median([getattr(at, end) for at in those]) for end in _ENDS)
        least, most = (float(np.median(end)) for end in ends)
        spread = max(error(end, own) for end in ends)
        curve.append(ExitAt(those[0].time, lower, upper, least, most, spread))
    halves = [token.half for token in tokens]
    values = np.array([half.simulated for half in halves])
    own = np.array([half.simulated_se or 0.0 for half in halves])
    middle, spread = float(np.median(values)), error(values, own)
    is_there = 0.0 < middle < math.inf and spread < math.inf
    early, late = (median([getattr(h, n) for h in halves]) for n in ("earliest", "latest"))
    return tuple(curve), HalfTime(early, middle, spread if is_there else None, late)


#: Both ends of a chance.
_ENDS = ("lower", "upper")


# -------------------------------------------------------------------------------------------- exits


def _exits(walks: diffusion.Exits, nearest: Int32[np.ndarray, "tokens 2"]) -> tuple[ExitPair, ...]:
    """Exits by pair, the most frequent first."""
    exits = []
    for pair in np.unique(walks.pair[walks.pair[:, :, 0] >= 0], axis=0):
        shares, number, arrived = _by_token(walks, (walks.pair == pair).all(axis=2))
        is_nearest = (nearest[arrived] == pair).all(axis=1).astype(np.float64)
        share, error = _share(shares, number)
        apart = _mean(shares - is_nearest)[1]
        one = (int(pair[0]), int(pair[1]), share, error, float(is_nearest.mean()))
        exits.append(ExitPair(*one, error if math.isnan(apart) else apart))
    return tuple(sorted(exits, key=lambda one: -one.share))


def _by_token(
    walks: diffusion.Exits, hits: Bool[np.ndarray, "tokens walks"]
) -> tuple[
    Float64[np.ndarray, "arrived"], Int64[np.ndarray, "arrived"], Int64[np.ndarray, "arrived"]
]:
    """Share of the walks that arrived, of how many, for each token of which any did, and which."""
    has_arrived = walks.pair[:, :, 0] >= 0
    rows = np.flatnonzero(has_arrived.any(axis=1))
    number = has_arrived[rows].sum(axis=1)
    return (hits & has_arrived)[rows].sum(axis=1) / number, number, rows


def _share(
    shares: Float64[np.ndarray, "tokens"], number: Int64[np.ndarray, "tokens"]
) -> tuple[float, float]:
    """Mean over tokens and its standard error; of one token that of its walks."""
    mean, error = _mean(shares)
    if math.isnan(error):
        error = share_error(mean, int(number[0]))
    return mean, float(error)


def _mean(values: Float64[np.ndarray, "tokens"]) -> tuple[float, float]:
    """Mean over tokens and its standard error; nan for one token."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)
