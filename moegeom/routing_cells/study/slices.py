"""``--subspace``: from what was typed to the slice of one router, and the part looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.router import Router
from moegeom.core.shapes import Float64, Int64
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, TokenSource
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import Sample, draw_sample
from moegeom.routing_cells.plane.subspace import Slice, principal_slice, random_slice, slice_through
from moegeom.routing_cells.study.request import CellsRequest, read_named
from moegeom.tokens.stages import INPUT_STAGES


# ------------------------------------------------------------------------------------------- tokens
class SliceTokens(Sample):
    """What the router reads of some tokens, and what it chooses.

    ``distance`` to the nearest facet in all dimensions, a lower bound of curved and grouped rules.
    """

    def rows_of(self, numbers: tuple[int, ...], source: str) -> Int64[np.ndarray, "asked"]:
        """Rows of tokens by number; UsageError for one that is not in the sample."""
        row_of = {number: row for row, number in enumerate(self.token.tolist())}
        for number in numbers:
            if number not in row_of:
                raise UsageError(
                    f"{source}: token {number} is not among the "
                    f"{number_of(len(self.token), 'token')} that "
                    "are looked at.",
                    f"Tokens {self.token[0]} to {self.token[-1]} are, in whole tiles of {TILE}.",
                )
        return np.array([row_of[number] for number in numbers])


def token_sample(router: Router, source: TokenSource, options: ComputeOptions) -> SliceTokens:
    """A sample of the tokens, as every study draws it.

    Raises RecordingError where the recording does not hold what the router reads.
    """
    if source.facts.stage not in INPUT_STAGES:
        raise RecordingError(
            f"{source.facts.name}: holds {source.facts.stage.replace('_', ' ')}; slices are laid "
            "through router inputs.",
            "moegeom capture --keep hidden records them.",
        )
    names = ("input", "chosen", "document") + (("distance",) if router.rule.is_affine else ())
    return SliceTokens(**vars(draw_sample(router, source, options, names)))


#: What --subspace may say.
KINDS = "full, pca:D, random:D, plane:A,B,C, circle:A,B or FILE.npz"


@dataclass(frozen=True, eq=False)
class RequestedSlice:
    """A slice and how it came about; ``part`` is None for the whole input space.

    A ``circle`` [hidden, 2] holds its two axes: inputs are ``centre + circle (cos, sin)``.
    """

    text: str
    part: Slice | None
    variance_share: float | None = None
    circle: Float64[np.ndarray, "hidden 2"] | None = None
    centre: Float64[np.ndarray, "hidden"] | None = None
    at: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class _SliceQuery:
    """One router, its tokens if there are any, and what stands behind the colon."""

    router: Router
    sample: SliceTokens | None
    source: str
    value: str
    seed: int

    def tokens(self, kind: str) -> SliceTokens:
        if self.sample is None:
            raise UsageError(
                f"--subspace {kind} is laid through recorded tokens of a checkpoint.",
                "Add --tokens REC; a bare matrix has random:D and full.",
            )
        return self.sample

    def dims(self, kind: str) -> int:
        most = self.router.hidden_size
        if not self.value.isdigit() or not 1 <= int(self.value) <= most:
            raise UsageError(
                f"--subspace {kind}:{self.value}: expected dimensions from 1 to {most}.",
                f"For example {kind}:3.",
            )
        return int(self.value)

    def numbers(self, kind: str, names: str) -> tuple[int, ...]:
        parts = self.value.split(",")
        if len(parts) != len(names.split(",")) or not all(part.strip().isdigit() for part in parts):
            raise UsageError(
                f"--subspace {kind}:{self.value}: expected tokens {kind}:{names}.",
                f"For example {kind}:{','.join('170 4 95'.split()[: len(names.split(','))])}.",
            )
        return tuple(int(part) for part in parts)


def requested_slice(
    text: str, router: Router, sample: SliceTokens | None, source: str, seed: int
) -> RequestedSlice:
    """The slice that ``text`` names, for one router.

    Raises UsageError for what names none, or needs tokens that are not there.
    """
    kind, _, value = text.partition(":")
    if kind in _KINDS:
        return _KINDS[kind](_SliceQuery(router, sample, source, value, seed))
    path = Path(text)
    if path.suffix == ".npz":
        return _of_file(path, router)
    raise UsageError(f"--subspace {text}: expected {KINDS}.")


def _full(asked: _SliceQuery) -> RequestedSlice:
    return RequestedSlice("the whole input space", None)


def _principal(asked: _SliceQuery) -> RequestedSlice:
    sample, dims = asked.tokens("pca"), asked.dims("pca")
    try:
        part, share = principal_slice(sample.inputs, dims)
    except ValueError as error:
        raise UsageError(f"--subspace pca:{dims}: {error}.", "Ask for fewer.") from None
    return RequestedSlice(f"pca:{dims} of {len(sample.inputs):,} tokens", part, share)


def _random(asked: _SliceQuery) -> RequestedSlice:
    dims = asked.dims("random")
    if asked.sample is None:
        centre, where = np.zeros(asked.router.hidden_size), "0"
    else:
        centre = asked.sample.inputs.astype(np.float64).mean(axis=0)
        where = f"the mean of {len(asked.sample.inputs):,} tokens"
    text = f"random:{dims} through {where}, seed {asked.seed}"
    return RequestedSlice(text, random_slice(centre, dims, asked.seed))


def _plane(asked: _SliceQuery) -> RequestedSlice:
    numbers = asked.numbers("plane", "A,B,C")
    sample = asked.tokens("plane")
    points = sample.inputs[sample.rows_of(numbers, asked.source)]
    try:
        part = slice_through(points)
    except ValueError:
        raise UsageError(
            f"--subspace plane:{asked.value}: the inputs of these tokens lie on one line.",
            "Choose three tokens that differ.",
        ) from None
    return RequestedSlice(f"the plane through the tokens {_listed(numbers)}", part, at=numbers)


def _circle(asked: _SliceQuery) -> RequestedSlice:
    numbers = asked.numbers("circle", "A,B")
    sample, router = asked.tokens("circle"), asked.router
    hidden = router.hidden_size
    gain = np.ones(hidden) if router.gain is None else router.gain.astype(np.float64)
    shift = np.zeros(hidden) if router.norm_bias is None else router.norm_bias.astype(np.float64)
    if not (gain != 0.0).all():
        raise UsageError("--subspace circle: the norm in front has a gain of 0 somewhere.")
    inputs = sample.inputs[sample.rows_of(numbers, asked.source)].astype(np.float64)
    unit = (inputs - shift) / gain
    first = unit[0] / np.linalg.norm(unit[0])
    second = unit[1] - (unit[1] @ first) * first
    length = float(np.linalg.norm(second))
    if length <= 1e-9 * float(np.linalg.norm(unit[1])):
        raise UsageError(
            f"--subspace circle:{asked.value}: both tokens have one direction.",
            "Choose two tokens that differ.",
        )
    radius = math.sqrt(hidden) if router.gain is not None else float(np.linalg.norm(unit[0]))
    axes = radius * gain[:, None] * np.column_stack([first, second / length])
    text = f"the great circle through the tokens {_listed(numbers)}"
    return RequestedSlice(text, None, circle=axes, centre=shift, at=numbers)


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _of_file(path: Path, router: Router) -> RequestedSlice:
    """Arrays ``centre`` (hidden) and ``basis`` (hidden, dims), made orthonormal if they are not."""
    how = "numpy.savez writes one: centre=c (hidden), basis=B (hidden, dims)."
    found = read_named(path, how)
    if not {"centre", "basis"} <= set(found):
        raise UsageError(
            f"--subspace {path.name}: holds {', '.join(found) or 'nothing'}; expected centre and "
            "basis.",
            how,
        )
    centre, basis = (found[name].astype(np.float64) for name in ("centre", "basis"))
    hidden = router.hidden_size
    if centre.shape != (hidden,) or basis.ndim != 2 or len(basis) != hidden:
        raise UsageError(
            f"--subspace {path.name}: centre {centre.shape} and basis {basis.shape}; expected "
            f"({hidden},) and ({hidden}, dims) at router {router.name}."
        )
    if not (np.isfinite(centre).all() and np.isfinite(basis).all()):
        raise UsageError(f"--subspace {path.name}: holds numbers that are not finite.")
    dims = basis.shape[1]
    if dims == 0 or np.linalg.matrix_rank(basis) < dims:
        raise UsageError(f"--subspace {path.name}: the columns of basis depend on one another.")
    if not np.allclose(basis.T @ basis, np.eye(dims), atol=1e-9):
        basis = np.linalg.qr(basis)[0]
    return RequestedSlice(f"the slice {path.name}", Slice(centre, basis))


_KINDS: dict[str, Callable[[_SliceQuery], RequestedSlice]] = {
    "full": _full,
    "pca": _principal,
    "random": _random,
    "plane": _plane,
    "circle": _circle,
}


Frame = tuple[float, float, float, float]

#: Shares of the tokens that are left out at either end of an axis, and the margin around the rest.
_TAIL, _MARGIN = 0.002, 0.08


def frame_of(
    points: Float64[np.ndarray, "tokens 2"] | None,
    asked: RequestedSlice,
    sample: SliceTokens | None,
    request: CellsRequest,
    reach: float,
) -> Frame:
    """x0, x1, y0, y1: what was asked for, or room for the tokens; a square of ``reach`` without.

    Of a plane through three tokens those three are shown, whatever lies around them.
    """
    if request.frame is not None:
        half = request.frame
        return -half, half, -half, half
    if points is None or not len(points):
        return -reach, reach, -reach, reach
    if asked.at and sample is not None:
        points = points[sample.rows_of(asked.at, "--subspace")]
        low, high = points.min(axis=0), points.max(axis=0)
        margin = 0.5 * float((high - low).max())
    else:
        low, high = np.quantile(points, [_TAIL, 1.0 - _TAIL], axis=0)
        margin = _MARGIN * float((high - low).max())
    margin = margin or reach  # all tokens at one place
    (x0, y0), (x1, y1) = (low - margin).tolist(), (high + margin).tolist()
    return x0, x1, y0, y1
