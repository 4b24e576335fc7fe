"""``moegeom perturb``: how far an input may drift before its experts change, and to which."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from moegeom.core.errors import UsageError
from moegeom.core.files import write_whole
from moegeom.core.router import Router
from moegeom.core.shapes import Float64, Int64
from moegeom.core.text import number_of, percent
from moegeom.core.tokens import InputNoise, TokenSource
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.engine.sample import draw_sample, drawn_tokens, refuse_tokens_beyond
from moegeom.engine.session import Session
from moegeom.pipeline import Watch
from moegeom.research.perturb import STUDY
from moegeom.research.perturb.record import Perturbed, PerturbRequest, RouterPaths
from moegeom.research.perturb.router import SAMPLE, Moved, router_paths, why_not
from moegeom.studies.boundary.recorded_noise import asked_noise, second_recording
from moegeom.studies.study import each
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
            with threadpool_limits(1, user_api="blas"):  # small products gain nothing from threads
                paths.append(router_paths(router, some.inputs, some.token, moved, request))
    if request.out is not None:
        _write(request.out, paths)
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


def _write(out: Path, routers: Sequence[RouterPaths]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"router": one.router, **row} for one in routers for row in rows_of(one)]
    arrays = [pa.array([row.get(name) for row in rows], kind) for name, kind in _COLUMNS.items()]
    table = pa.Table.from_arrays(arrays, names=list(_COLUMNS))
    write_whole(out, lambda file: pq.write_table(table, file))


_TEXTS, _NUMBERS = ("router", "what"), ("token", "order", "expert_out", "expert_in")

#: Columns and their types, as Arrow calls them; what does not belong to a row is missing in it.
_COLUMNS: Mapping[str, str] = {
    name: "string" if name in _TEXTS else "int64" if name in _NUMBERS else "double"
    for name in (
        *("router", "what", "token", "time", "p_lower", "p_upper", "p_simulated_lower"),
        *("p_simulated_upper", "p_simulated_se", "order", "occupation", "occupation_se"),
        *("occupation_bound", "undecided", "expert_out", "expert_in", "share", "share_se"),
        "share_nearest",
    )
}
