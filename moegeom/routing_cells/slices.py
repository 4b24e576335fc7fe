"""A bare matrix, and the slice that ``--subspace`` names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError, RouterError, UsageError
from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.core.shapes import Float64, Int64
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, TokenSource
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import Sample, draw_sample
from moegeom.routing_cells.plane.polygons import Frame
from moegeom.routing_cells.plane.subspace import (
    PASSES,
    Slice,
    principal_slice,
    random_slice,
    slice_through,
)
from moegeom.routing_cells.request import CellsRequest
from moegeom.tokens.foreign.npy import read_numbers
from moegeom.tokens.stages import INPUT_STAGES


def matrix_router(path: Path, top_k: int) -> Router:
    """A router of the arrays ``weight`` (experts, dims) and ``bias`` (experts, may be left out).

    Raises RecordingError for a file that is none and RouterError for arrays that do not fit.
    """
    arrays = _arrays(path)
    weight = arrays["weight"]
    bias = arrays.get("bias")
    if weight.ndim != 2 or 0 in weight.shape:
        raise RouterError(
            f"{path.name}: weight has the shape {weight.shape}; expected (experts, dims)."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RouterError(
            f"{path.name}: bias has the shape {bias.shape}; expected ({len(weight)},)."
        )
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise RouterError(f"{path.name}: {name} holds numbers that are not finite.")
    if not 1 <= top_k <= len(weight):
        raise UsageError(f"--top-k {top_k}: expected 1 to {len(weight)}, the number of experts.")
    return Router(
        name=path.stem,
        stack="",
        layer=0,
        weight=weight,
        rule=Rule(top_k, "identity", Weights("scores"), has_logit_bias=bias is not None),
        provenance=Provenance("matrix", ("weight",), path.name, str(weight.dtype)),
        logit_bias=bias,
    )


def read_named(path: Path, how: str) -> dict[str, np.ndarray]:
    """The arrays of an npz file; ``how`` to write one is the hint where another file is there.

    Raises RecordingError for a file that is none.
    """
    try:
        return read_numbers(path)
    except RecordingError as error:
        hint = how if path.is_file() else ""
        raise RecordingError(error.message, error.hint or hint) from None


def _arrays(path: Path) -> dict[str, np.ndarray]:
    how = "numpy.savez writes one: weight=W (experts, dims) and bias=b (experts)."
    arrays = read_named(path, how)
    if "weight" not in arrays:
        raise RouterError(
            f"{path.name}: holds {', '.join(arrays) or 'nothing'}; expected weight.", how
        )
    for name in ("weight", "bias"):
        whole = name in arrays and arrays[name].dtype.kind in "iu"
        if whole and ((arrays[name] > 2**53) | (arrays[name] < -(2**53))).any():
            raise RouterError(
                f"{path.name}: {name} holds integers that float64 does not tell apart.",
                "Store it as float64: cells are exact for the numbers that are read.",
            )
    return {name: arrays[name].astype(np.float64) for name in ("weight", "bias") if name in arrays}


# ------------------------------------------------------------------------------------------- tokens
class SliceTokens(Sample):
    """What the router reads of some tokens, and what it chooses."""

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


def token_sample(
    router: Router,
    source: TokenSource,
    options: ComputeOptions,
    advance: Callable[[int], None] | None = None,
) -> SliceTokens:
    """A sample of the tokens, as every study draws it.

    Raises RecordingError where the recording does not hold what the router reads.
    """
    if source.facts.stage not in INPUT_STAGES:
        raise RecordingError(
            f"{source.facts.name}: holds {source.facts.stage.replace('_', ' ')}; slices are laid "
            "through router inputs.",
            "moegeom capture --keep hidden records them.",
        )
    names = ("input", "chosen", "document")
    return SliceTokens(**vars(draw_sample(router, source, options, names, advance=advance)))


# ------------------------------------------------------------------------------------------- slices
#: The forms of --subspace.
KINDS = "full, pca:D, random:D, plane:A,B,C, circle:A,B or FILE.npz"


@dataclass(frozen=True, eq=False)
class RequestedSlice:
    """A slice and how it came about; ``part`` is None for the whole input space.

    Inputs of a ``circle`` are those of its plane at (cos, sin); its two axes are the basis.
    """

    text: str
    part: Slice | None
    variance_share: float | None = None
    circle: Slice | None = None
    at: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class _SliceQuery:
    """One router, its tokens if there are any, and what stands before and behind the colon."""

    router: Router
    sample: SliceTokens | None
    source: str
    kind: str
    value: str
    seed: int = 0
    part: Callable[[int], Callable[[int], None]] = lambda size: lambda more: None

    @property
    def tokens(self) -> SliceTokens:
        if self.sample is None:
            raise UsageError(
                f"--subspace {self.kind} is laid through recorded tokens of a checkpoint.",
                "Add --tokens REC; a bare matrix has random:D and full.",
            )
        return self.sample

    @property
    def dims(self) -> int:
        most = self.router.hidden_size
        if not self.value.isdigit() or not 1 <= int(self.value) <= most:
            raise UsageError(
                f"--subspace {self.kind}:{self.value}: expected dimensions from 1 to {most}.",
                f"For example {self.kind}:{min(most, 3)}.",
            )
        return int(self.value)

    @property
    def numbers(self) -> tuple[int, ...]:
        parts, names = self.value.split(","), _THROUGH[self.kind]
        if len(parts) != len(names.split(",")) or not all(part.strip().isdigit() for part in parts):
            example = ",".join("170 4 95".split()[: len(names.split(","))])
            raise UsageError(
                f"--subspace {self.kind}:{self.value}: expected tokens {self.kind}:{names}.",
                f"For example {self.kind}:{example}.",
            )
        return tuple(int(part) for part in parts)

    def full(self) -> RequestedSlice:
        return RequestedSlice("the whole input space", None)

    def pca(self) -> RequestedSlice:
        sample, dims = self.tokens, self.dims
        try:
            usual = sample.usual
            part, share = principal_slice(
                sample.inputs, dims, usual, self.part(PASSES * len(usual))
            )
        except ValueError as error:
            raise UsageError(f"--subspace pca:{dims}: {error}.", "Ask for fewer.") from None
        return RequestedSlice(f"pca:{dims} of {len(usual):,} tokens", part, share)

    def random(self) -> RequestedSlice:
        dims, centre, where = self.dims, np.zeros(self.router.hidden_size), "0"
        if self.sample is not None:
            centre = self.sample.inputs.mean(axis=0, dtype=np.float64)
            where = f"the mean of {len(self.sample.inputs):,} tokens"
        text = f"random:{dims} through {where}, seed {self.seed}"
        return RequestedSlice(text, random_slice(centre, dims, self.seed))

    def plane(self) -> RequestedSlice:
        numbers = self.numbers
        points = self.tokens.inputs[self.tokens.rows_of(numbers, self.source)]
        try:
            part = slice_through(points)
        except ValueError:
            raise UsageError(
                f"--subspace plane:{self.value}: the inputs of these tokens lie on one line.",
                "Choose three tokens that differ.",
            ) from None
        return RequestedSlice(f"the plane through the tokens {_listed(numbers)}", part, at=numbers)

    def circle(self) -> RequestedSlice:
        numbers = self.numbers
        sample, router = self.tokens, self.router
        hidden = router.hidden_size
        gain = np.ones(hidden) if router.gain is None else router.gain.astype(np.float64)
        shift = (
            np.zeros(hidden) if router.norm_bias is None else router.norm_bias.astype(np.float64)
        )
        if not (gain != 0.0).all():
            raise UsageError("--subspace circle: the norm in front has a gain of 0 somewhere.")
        inputs = sample.inputs[sample.rows_of(numbers, self.source)].astype(np.float64)
        unit = (inputs - shift) / gain
        first = unit[0] / np.linalg.norm(unit[0])
        second = unit[1] - (unit[1] @ first) * first
        length = float(np.linalg.norm(second))
        if length <= 1e-9 * float(np.linalg.norm(unit[1])):
            raise UsageError(
                f"--subspace circle:{self.value}: both tokens have one direction.",
                "Choose two tokens that differ.",
            )
        radius = math.sqrt(hidden) if router.gain is not None else float(np.linalg.norm(unit[0]))
        axes = radius * gain[:, None] * np.column_stack([first, second / length])
        text = f"the great circle through the tokens {_listed(numbers)}"
        return RequestedSlice(text, None, circle=Slice(shift, axes), at=numbers)


#: Slices through tokens, with what stands behind the colon.
_THROUGH = {"plane": "A,B,C", "circle": "A,B"}

_LAID = (_SliceQuery.full, _SliceQuery.pca, _SliceQuery.random, _SliceQuery.plane)
_KINDS = {kind.__name__: kind for kind in (*_LAID, _SliceQuery.circle)}


def dims_of(text: str, router: Router, has_tokens: bool) -> int | None:
    """Dimensions of the slice that ``text`` names, 1 for a circle, None for the whole input space.

    Raises UsageError for what names none, or needs tokens, before any is read.
    """
    kind, _, value = text.partition(":")
    if kind not in _KINDS:
        part = requested_slice(text, router, None, "", 0).part
        return None if part is None else part.dims
    query = _SliceQuery(router, None, "", kind, value)
    if not has_tokens and kind in ("pca", *_THROUGH):
        _ = query.tokens
    if kind in _THROUGH:
        return len(query.numbers) - 1
    return None if kind == "full" else query.dims


def requested_slice(
    text: str,
    router: Router,
    sample: SliceTokens | None,
    source: str,
    seed: int,
    part: Callable[[int], Callable[[int], None]] = _SliceQuery.part,
) -> RequestedSlice:
    """The slice that ``text`` names, for one router; ``part`` gives a listener to so many steps.

    Raises UsageError for what names none, or needs tokens that are not there.
    """
    kind, _, value = text.partition(":")
    if kind in _KINDS:
        return _KINDS[kind](_SliceQuery(router, sample, source, kind, value, seed, part))
    path = Path(text)
    if path.suffix == ".npz":
        return _of_file(path, router)
    raise UsageError(f"--subspace {text}: expected {KINDS}.")


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _of_file(path: Path, router: Router) -> RequestedSlice:
    """Arrays ``centre`` (hidden) and ``basis`` (hidden, dims), made orthonormal if they are not."""
    how = "numpy.savez writes one: centre=c (hidden), basis=B (hidden, dims)."
    arrays = read_named(path, how)
    if not {"centre", "basis"} <= set(arrays):
        raise UsageError(
            f"--subspace {path.name}: holds {', '.join(arrays) or 'nothing'}; expected centre and "
            "basis.",
            how,
        )
    centre, basis = (arrays[name].astype(np.float64) for name in ("centre", "basis"))
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


#: Shares of the tokens that are left out at either end of an axis, and the margin around the rest.
_TAIL, _MARGIN = 0.002, 0.08


def frame_of(
    points: Float64[np.ndarray, "tokens 2"] | None,
    requested: RequestedSlice,
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
    if requested.at and sample is not None:
        points = points[sample.rows_of(requested.at, "--subspace")]
        low, high = points.min(axis=0), points.max(axis=0)
        margin = 0.5 * float((high - low).max())
    else:
        low, high = np.quantile(points, [_TAIL, 1.0 - _TAIL], axis=0)
        margin = _MARGIN * float((high - low).max())
    margin = margin or reach  # all tokens at one place
    (x0, y0), (x1, y1) = (low - margin).tolist(), (high + margin).tolist()
    return x0, x1, y0, y1
