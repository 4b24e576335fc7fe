"""``research perturb``: how far an input may drift before its experts change, and to which."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float32, Float64, Int32, Int64
from moegeom.core.text import number_of, percent
from moegeom.core.tokens import InputNoise, TokenSource
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS, one_blas_thread
from moegeom.engine.prepared import unavailable
from moegeom.engine.sample import draw_sample, drawn_tokens, refuse_tokens_beyond
from moegeom.engine.session import Session
from moegeom.geometry import paths as diffusion
from moegeom.geometry.boundary.linear import RowDistances, row_distances
from moegeom.geometry.boundary.orders import row_coordinates
from moegeom.geometry.noise import boundary_sigmas, noisy_distances, noisy_rows
from moegeom.geometry.selection import top_k
from moegeom.pipeline import Watch
from moegeom.research.perturb import STUDY
from moegeom.research.perturb.record import (
    ExitAt,
    ExitPair,
    HalfTime,
    NearTie,
    Perturbed,
    PerturbRequest,
    RouterPaths,
    TokenPaths,
)
from moegeom.studies.boundary.study import asked_noise, second_recording
from moegeom.studies.study import each
from moegeom.studies.written import write_rows
from moegeom.tokens.foreign.npy import read_numbers

#: Noise where none is asked for, as a share of the rms of each input.
USUAL = 0.1

#: Orders of ties that a search ends in time for.
_ORDERS = (1, 2, 3)

#: Tokens of --at at most.
_MOST_TOKENS = 4096


def perturb(request: PerturbRequest, watch: Watch | None = None) -> Perturbed:
    """Exit curves, exits and time near ties of some tokens at each linear router.

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
    recorded = opened.recorded
    tokens = _tokens(request, source)
    noise, moving = _moving(request, opened, recorded)
    paths, samples, left_out = [], [], list(opened.left_out)
    for router in each(recorded, watch, len(tokens)):
        moved = moving[router.name]
        reason = why_not(router, source) or (moved if isinstance(moved, str) else "")
        if reason or isinstance(moved, str):
            left_out.append((router.name, reason))
        else:
            some = opened.sample(router, ("input",), at=tokens)
            samples.append(some)
            with one_blas_thread():  # small products gain nothing from threads
                paths.append(router_paths(router, some.inputs, some.token, moved, request))
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
        eps=request.eps,
        sample=opened.sample_counts(samples, bool(request.at)),
        seed=request.seed,
        written=None if request.out is None else request.out.name,
    )


def _check(request: PerturbRequest) -> None:
    """Raises UsageError for what cannot be meant, before anything is read."""
    if request.cov is not None and request.noise is not None:
        raise UsageError("--noise and --cov exclude each other: both say what moves the inputs.")
    if request.drift and (request.noise is None or _is_number(request.noise)):
        raise UsageError(
            "--drift: what all tokens have in common takes a second recording.",
            "Name it: --noise REC2 --drift.",
        )
    for name in ("time", "eps"):
        value = getattr(request, name)
        if not 0.0 < value < math.inf:
            raise UsageError(f"--{name} {value}: expected a positive number.")
    if not request.orders or not set(request.orders) <= set(_ORDERS):
        orders = ",".join(map(str, request.orders))
        raise UsageError(f"--orders {orders}: expected numbers from 1 to {_ORDERS[-1]}.")


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
    if request.cov is not None:
        factors = _read_factors(request.cov, routers)
        text = f"covariance F F' per unit of time, F of {request.cov.name}"
        return text, {name: Moved(factor, False, None) for name, factor in factors.items()}
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


def _read_factors(
    path: Path, routers: Sequence[Router]
) -> dict[str, Float64[np.ndarray, "hidden"] | Float64[np.ndarray, "hidden noises"]]:
    """A diagonal (D,) or a factor (D, r) for each router: by its name, or the one of the file."""
    arrays = {name: array.astype(np.float64) for name, array in read_numbers(path).items()}
    factors = {}
    for router in routers:
        name = router.name if router.name in arrays else next(iter(arrays), "")
        if not arrays or (name != router.name and len(arrays) > 1):
            raise UsageError(
                f"--cov {path}: no array is called {router.name}.",
                f"It holds {', '.join(list(arrays)[:4]) or 'none'}; one for all, or one for each. "
                "numpy.savez writes one: F (D,) or (D, r) moves inputs by F times normal numbers.",
            )
        factor = arrays[name]
        if factor.ndim not in (1, 2) or len(factor) != router.hidden_size or not factor.size:
            raise UsageError(
                f"--cov {path}: array {name} has the shape {factor.shape}; router {router.name} "
                f"needs ({router.hidden_size},) or ({router.hidden_size}, r)."
            )
        if not np.isfinite(factor).all() or not factor.any():
            raise UsageError(f"--cov {path}: array {name} is not finite, or 0 throughout.")
        factors[router.name] = factor
    return factors


# --------------------------------------------------------------------------------------------- file


def rows_of(router: RouterPaths) -> Iterator[dict[str, Any]]:
    """Rows of the file: curves and time near ties by token, the medians without one, and exits."""
    whole = (None, router.curve, router.near)
    for token, curve, near in (*((t.token, t.curve, t.near) for t in router.tokens), whole):
        for at in curve:
            values = {f"p_{name}": value for name, value in dataclasses.asdict(at).items()}
            yield {"what": "curve", "token": token, "time": values.pop("p_time"), **values}
        for tie in near:
            yield {
                "what": "near a tie",
                "token": token,
                "time": curve[-1].time,
                "order": tie.order,
                "occupation": tie.share,
                "occupation_se": tie.share_se,
                "occupation_bound": tie.bound,
                "undecided": tie.undecided,
            }
    for pair in router.exits:
        values = dataclasses.asdict(pair)
        del values["apart"]
        yield {"what": "exit", **values}


# --------------------------------------------------------------------------------------- one router
#: Tokens that are looked at where none are named.
SAMPLE = 64

#: Times that are told, in shares of the last.
TIMES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)

#: Times of a simulation around the half time.
_AROUND = 12

#: How far, in half times without drift, the half time with drift is looked for.
_FROM, _TO = 1e-3, 10.0

#: Paths of one token, walks, and draws near ties; numbers times boundaries for the first two.
_PATHS, _FEWEST_PATHS, _PATHS_TIMES = 256, 32, 2**17
_WALKS, _FEWEST_WALKS, _WALKS_TIMES = 128, 16, 2**15
DRAWS = 256

#: Flats of a union bound at most.
_MOST_FLATS = 50_000

#: Samples of tokens, drawn from those there are, that tell the error of a median.
_RESAMPLED = 200

#: How near a second boundary is at an exit that counts as one at a corner, in first distances.
_CORNER = 0.01

#: Rms of an input of zeros, which noise in shares of its rms does not move.
_NO_LENGTH = 1e-100


@dataclass(frozen=True, eq=False)
class Moved:
    """What moves the inputs of one router: ``factor`` of the covariance per unit of time, in units
    of the input or, ``is_relative``, of the rms of each; ``drift`` of the input.

    ``size`` is the standard deviation in shares of the rms, None where it is not isotropic.
    """

    factor: float | Float64[np.ndarray, "hidden"] | Float64[np.ndarray, "hidden noises"]
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
    needed = ("input", "order_distance", "noise")
    return next((absent[name] for name in needed if name in absent), "")


# ------------------------------------------------------------------------------------------- router


def router_paths(
    router: Router,
    inputs: Float32[np.ndarray, "tokens hidden"],
    tokens: Int64[np.ndarray, "tokens"],
    moved: Moved,
    request: PerturbRequest,
) -> RouterPaths:
    """Curves, exits and time near ties of these inputs of a linear router."""
    values, weight = inputs.astype(np.float64), router.weight.astype(np.float64)
    bias = router.affine_bias
    logits = values @ weight.T + (0.0 if bias is None else bias.astype(np.float64))
    chosen = top_k(logits, router.rule.top_k)
    plain = row_distances(weight, bias)
    # a path does not know its unit: what is relative moves by 1, and distances are over the rms
    rms = np.sqrt((values**2).mean(axis=1))
    scaled = logits
    if moved.is_relative:
        scaled = logits / np.maximum(rms, _NO_LENGTH)[:, None]
    noise = row_coordinates(noisy_rows(weight, moved.factor))
    distances = noisy_distances(weight, moved.factor, bias)
    drift = None if moved.drift is None else weight @ moved.drift
    seeds = np.random.SeedSequence([request.seed, router.layer, *router.name.encode()])
    streams = [np.random.default_rng(stream) for stream in seeds.spawn(len(tokens) + 2)]
    near = _Near(weight, noise, plain, moved, drift, request, router.rule.top_k)
    of_tokens = []
    for row, token in enumerate(tokens.tolist()):
        cell = _Cell(scaled[row], chosen[row], noise, distances, drift)
        curve, half = cell.curve(request.time, streams[row])
        width = request.eps * (1.0 if moved.is_relative else float(rms[row]))
        ties = near.of(scaled[row], width, streams[row])
        of_tokens.append(TokenPaths(token, cell.nearest, curve, half, ties))
    nearest = np.array([token.nearest for token in of_tokens], np.int32)
    exits: tuple[ExitPair, ...] = ()
    elsewhere = elsewhere_se = at_corners = None
    unfinished = 0.0
    if drift is None:
        pairs = router.rule.top_k * (router.num_experts - router.rule.top_k)
        walks = int(np.clip(_WALKS_TIMES // pairs, _FEWEST_WALKS, _WALKS))
        arrivals = diffusion.exit_boundaries(scaled, chosen, noise, distances, walks, streams[-2])
        has_arrived = arrivals.pair[:, :, 0] >= 0
        unfinished = 1.0 - float(has_arrived.mean())
        if has_arrived.any():
            exits = _exits(arrivals, nearest)
            is_elsewhere = arrivals.pair[:, :, 1] != nearest[:, None, 1]
            elsewhere, elsewhere_se = _mean(_by_token(arrivals, is_elsewhere)[0])
            at_corners = float((arrivals.second[has_arrived] < _CORNER).mean())
    return RouterPaths(
        router=router.name,
        num_experts=router.num_experts,
        top_k=router.rule.top_k,
        tokens=tuple(of_tokens),
        size=moved.size,
        curve=_median_curve(of_tokens, streams[-1]),
        half=HalfTime(
            *(
                float(np.median([getattr(token.half, name) for token in of_tokens]))
                for name in ("earliest", "simulated", "latest")
            )
        ),
        near=_mean_near(of_tokens),
        exits=exits,
        elsewhere=elsewhere,
        elsewhere_se=elsewhere_se,
        at_corners=at_corners,
        unfinished=unfinished,
    )


@dataclass(frozen=True, eq=False)
class _Cell:
    """The cell of one input, and the noise and drift that move it."""

    logits: Float64[np.ndarray, "experts"]
    chosen: Int32[np.ndarray, "k"]
    noise: Float64[np.ndarray, "experts noises"]
    distances: RowDistances
    drift: Float64[np.ndarray, "experts"] | None

    @property
    def sigmas(self) -> Float64[np.ndarray, "one boundaries"]:
        return boundary_sigmas(self.logits[None], self.chosen[None], self.distances)

    @property
    def nearest(self) -> tuple[int, int]:
        """The pair (expert out, expert in) of the nearest boundary."""
        outside = np.setdiff1d(np.arange(len(self.logits)), self.chosen)
        out, into = divmod(int(self.sigmas[0].argmin()), len(outside))
        return int(self.chosen[out]), int(outside[into])

    def curve(
        self, horizon: float, generator: np.random.Generator
    ) -> tuple[tuple[ExitAt, ...], HalfTime]:
        """The curve at the reported times, and the half time."""
        sigmas = self.sigmas
        marks = horizon * np.array(TIMES)
        times = np.union1d(marks, self._around(sigmas))
        drifts = None
        if self.drift is not None:
            drifts = boundary_sigmas(self.drift[None], self.chosen[None], self.distances)
        bounds = [
            diffusion.exit_probability(sigmas, time, drifts=drifts) for time in times.tolist()
        ]
        lower = np.array([bound.lower[0] for bound in bounds])
        upper = np.array([bound.upper[0] for bound in bounds])
        paths = int(np.clip(_PATHS_TIMES // sigmas.shape[1], _FEWEST_PATHS, _PATHS))
        simulation = diffusion.simulate_exit(
            self.logits,
            self.chosen,
            self.noise,
            self.distances,
            times,
            paths,
            generator,
            self.drift,
        )
        # few paths see nothing of what is rare, and the bounds do
        simulated = [np.clip(bound, lower, upper) for bound in (simulation.lower, simulation.upper)]
        error = np.maximum(simulation.lower_error, simulation.upper_error)
        columns = (times, lower, upper, *simulated, error)
        rows = np.stack(columns, axis=1)[np.searchsorted(times, marks)]
        middle = (simulated[0] + simulated[1]) / 2.0
        early, half, late = (_half(times, chance) for chance in (upper, middle, lower))
        curve = tuple(ExitAt(*row) for row in rows.tolist())
        return curve, HalfTime(early, half, late)

    def _around(
        self, sigmas: Float64[np.ndarray, "one boundaries"]
    ) -> Float64[np.ndarray, "times"]:
        """Times between which half of the paths have left; none on a boundary and out of reach."""
        nearest = sigmas.min()
        if not 0.0 < nearest < math.inf:
            return np.empty(0)
        if self.drift is None:
            (first,), (last,) = diffusion.cell_quantiles(sigmas, 0.5)
            return np.geomspace(0.99 * first, 1.01 * last, _AROUND)
        still = float(diffusion.face_quantile(np.array([nearest]), 0.5)[0])
        return np.geomspace(_FROM * still, _TO * still, 2 * _AROUND)


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


def _median_curve(
    tokens: Sequence[TokenPaths], generator: np.random.Generator
) -> tuple[ExitAt, ...]:
    """Medians over the tokens, and the error of the simulated one by drawing tokens again."""
    names = ("time", "lower", "upper", "simulated_lower", "simulated_upper")
    values = np.array([[[getattr(at, n) for n in names] for at in one.curve] for one in tokens])
    again = generator.integers(len(tokens), size=(_RESAMPLED, len(tokens)))
    errors = np.median(values[again], axis=1).std(axis=0, ddof=1)[:, 3:].max(axis=1)
    medians = np.median(values, axis=0)
    rows = np.column_stack([medians, errors]).tolist()
    return tuple(ExitAt(*row) for row in rows)


# -------------------------------------------------------------------------------------------- exits


def _exits(walks: diffusion.Exits, nearest: Int32[np.ndarray, "tokens 2"]) -> tuple[ExitPair, ...]:
    """Exits by pair, the most frequent first."""
    exits = []
    for pair in np.unique(walks.pair[walks.pair[:, :, 0] >= 0], axis=0):
        shares, arrived = _by_token(walks, (walks.pair == pair).all(axis=2))
        is_nearest = (nearest[arrived] == pair).all(axis=1).astype(np.float64)
        apart = _mean(shares - is_nearest)[1]
        one = (int(pair[0]), int(pair[1]), *_mean(shares), float(is_nearest.mean()), apart)
        exits.append(ExitPair(*one))
    return tuple(sorted(exits, key=lambda one: -one.share))


def _by_token(
    walks: diffusion.Exits, hits: Bool[np.ndarray, "tokens walks"]
) -> tuple[Float64[np.ndarray, "arrived"], Int64[np.ndarray, "arrived"]]:
    """Share of the walks that arrived, for each token of which any did, and which tokens."""
    has_arrived = walks.pair[:, :, 0] >= 0
    rows = np.flatnonzero(has_arrived.any(axis=1))
    return (hits & has_arrived)[rows].sum(axis=1) / has_arrived[rows].sum(axis=1), rows


def _mean(values: Float64[np.ndarray, "tokens"]) -> tuple[float, float]:
    """Mean over tokens and its standard error; nan for one token."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


# ---------------------------------------------------------------------------------------- near ties


class _Near:
    """How long inputs of one router are near ties."""

    def __init__(
        self,
        weight: Float64[np.ndarray, "experts hidden"],
        noise: Float64[np.ndarray, "experts noises"],
        plain: RowDistances,
        moved: Moved,
        drift: Float64[np.ndarray, "experts"] | None,
        request: PerturbRequest,
        k: int,
    ) -> None:
        self.rows, self.noise, self.plain = row_coordinates(weight), noise, plain
        self.drift, self.request, self.k = drift, request, k
        self.scale = moved.factor if isinstance(moved.factor, float) else None
        self.flats: dict[int, diffusion.Flats] = {}
        if self.scale is not None and drift is None:
            for order in request.orders:
                if math.comb(len(weight), order + 1) <= _MOST_FLATS:
                    self.flats[order] = diffusion.flats_of(weight, order)

    def of(
        self, logits: Float64[np.ndarray, "experts"], width: float, generator: np.random.Generator
    ) -> tuple[NearTie, ...]:
        horizon = self.request.time
        ties = diffusion.occupations(
            logits,
            self.rows,
            self.noise,
            self.plain,
            self.k,
            self.request.orders,
            width,
            horizon,
            DRAWS,
            generator,
            self.drift,
        )
        bounds = {
            order: diffusion.union_bound(logits, flats, width, horizon, self.scale) / horizon
            for order, flats in self.flats.items()
            if self.scale is not None
        }
        return tuple(
            NearTie(one.order, one.share, one.error, bounds.get(one.order), one.undecided)
            for one in ties
        )


def _mean_near(tokens: Sequence[TokenPaths]) -> tuple[NearTie, ...]:
    """Means over the tokens; errors over tokens, or of the draws where there is one."""
    ties = []
    for those in zip(*(token.near for token in tokens), strict=True):
        share, error = _mean(np.array([one.share for one in those]))
        least = math.sqrt(sum(one.share_se**2 for one in those)) / len(those)
        bounds = [one.bound for one in those if one.bound is not None]
        ties.append(
            NearTie(
                those[0].order,
                share,
                least if math.isnan(error) else max(error, least),
                float(np.mean(bounds)) if bounds else None,
                float(np.mean([one.undecided for one in those])),
            )
        )
    return tuple(ties)
