r"""Slices of the input space on which cells are enumerated and drawn: :math:`y = c + B x`.

A slice turns a router into a smaller one, :math:`z = (W B) x + (W c + b)`. Both products are
rounded to float64 once, and the rounded numbers *are* the instance: cells of a slice are exact for
them. Source: docs/theory.md G4.

Behind an RMS norm inputs lie on the ellipsoid :math:`y = \sqrt D\, g \odot u, |u| = 1`. On a great
circle of it :math:`z_i(\theta) = p_i \cos\theta + q_i \sin\theta + b_i`: two experts tie at most
twice, where :math:`R \cos(\theta - \phi) = \beta`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int16, Int64


@dataclass(frozen=True, eq=False)
class Slice:
    """A centre c and an orthonormal basis B of a part of the input space."""

    centre: Float64[np.ndarray, "hidden"]
    basis: Float64[np.ndarray, "hidden dims"]

    @property
    def dims(self) -> int:
        return self.basis.shape[1]

    def instance(
        self, weight: Float[np.ndarray, "experts hidden"], bias: Float[np.ndarray, "experts"] | None
    ) -> tuple[Float64[np.ndarray, "experts dims"], Float64[np.ndarray, "experts"]]:
        """Rows and biases of the router on the slice, in float64; equal rows stay equal.

        BLAS may round the same row differently at another place of the matrix.
        """
        rows = weight.astype(np.float64)
        places: dict[bytes, int] = {}
        first = [places.setdefault(row.tobytes(), n) for n, row in enumerate(rows)]
        offset = (rows @ self.centre)[first]
        own = (rows @ self.basis)[first]
        return own, offset if bias is None else offset + bias.astype(np.float64)

    def coordinates(
        self, inputs: Float[np.ndarray, "tokens hidden"]
    ) -> Float64[np.ndarray, "tokens dims"]:
        """Where the inputs lie when they are projected onto the slice, a block at a time."""
        starts = range(0, len(inputs), _ROWS)
        parts = [(inputs[n : n + _ROWS] - self.centre) @ self.basis for n in starts]
        return np.concatenate([np.empty((0, self.dims)), *parts])

    def inputs(
        self, points: Float64[np.ndarray, "points dims"]
    ) -> Float64[np.ndarray, "points hidden"]:
        """Points of the slice as inputs of the router."""
        return self.centre + points @ self.basis.T


#: Dimensions up to which all directions are computed; inputs that are read at a time; vectors that
#: products are taken of beyond those that are looked for; and passes that a search is planned with.
_DENSE, _ROWS, _BESIDE, PASSES = 512, 64, 6, 12

#: Residue of a direction over the largest square at which it counts as one of largest variance.
_CLOSE = 1e-8


def principal_slice(
    inputs: Float[np.ndarray, "tokens hidden"],
    dims: int,
    rows: Int64[np.ndarray, "some"] | None = None,
    advance: Callable[[int], None] = lambda more: None,
) -> tuple[Slice, float]:
    r"""The ``dims`` directions of largest variance about the mean, and their share of the variance.

    Of some ``rows`` alone, read a block at a time. The widest directions are those of
    :math:`C = \sum_t (y_t - c)(y_t - c)^T` on the span of :math:`Q, C Q, C^2 Q, \dots`, Q being a
    few random vectors, which grows until C leaves them where they are but for 1e-8 of the largest
    square. Each direction points to where its largest entry is positive. The share is 1 where all
    inputs are equal. ``advance`` hears of inputs that are read, about ``PASSES`` times each.

    Raises ValueError for fewer than ``dims`` + 1 inputs. Oracle in tests: scikit-learn.
    """
    rows = np.arange(len(inputs)) if rows is None else rows
    tokens, hidden = len(rows), inputs.shape[1]
    if not 1 <= dims <= min(tokens - 1, hidden):
        raise ValueError(f"{dims} directions of {tokens} inputs in {hidden} dimensions")

    def less(centre: Float64[np.ndarray, "_"]) -> Iterator[Float64[np.ndarray, "_ hidden"]]:
        """Inputs less a point, in room for one block that stays in a cache."""
        room = np.empty((_ROWS, hidden))
        for start in range(0, tokens, _ROWS):
            block = inputs[rows[start : start + _ROWS]]
            yield np.subtract(block, centre, out=room[: len(block)])
            advance(len(block))

    centre = sum((block.sum(axis=0) for block in less(np.zeros(1))), np.zeros(hidden)) / tokens
    total = sum(float(np.vdot(block, block)) for block in less(centre))

    def scattered(vectors: Float64[np.ndarray, "hidden any"]) -> Float64[np.ndarray, "hidden any"]:
        products = ((block @ vectors).T @ block for block in less(centre))
        return sum(products, np.zeros(vectors.T.shape)).T

    if hidden <= max(_DENSE, dims + _BESIDE) or not total:
        squares, vectors = np.linalg.eigh(scattered(np.eye(hidden)))
        squares, vectors = squares[::-1][:dims], vectors[:, ::-1][:, :dims]
    else:  # only the widest: all of them would take minutes at thousands of dimensions
        squares, vectors = _widest(scattered, hidden, dims)
    basis = _pointed(np.linalg.qr(vectors)[0])
    share = float(np.maximum(squares, 0.0).sum()) / total if total > 0.0 else 1.0
    return Slice(centre, basis), min(share, 1.0)


def _widest(
    scattered: Callable[[np.ndarray], np.ndarray], hidden: int, dims: int
) -> tuple[Float64[np.ndarray, "dims"], Float64[np.ndarray, "hidden dims"]]:
    """Largest eigenvalues and eigenvectors of products with a symmetric matrix, descending."""
    generator = np.random.Generator(np.random.PCG64(0))
    block = np.linalg.qr(generator.standard_normal((hidden, dims + _BESIDE)))[0]
    span = image = np.empty((hidden, 0))
    while True:
        span, image = np.hstack([span, block]), np.hstack([image, scattered(block)])
        squares, mixed = np.linalg.eigh(span.T @ image)
        squares, mixed = squares[::-1][:dims], mixed[:, ::-1][:, :dims]
        vectors = span @ mixed
        residue = np.linalg.norm(image @ mixed - vectors * squares, axis=0).max()
        left = hidden - span.shape[1]
        if residue <= _CLOSE * squares[0] or not left:
            return squares, vectors
        block = image[:, -min(dims + _BESIDE, left) :]
        for _ in range(2):  # once leaves what rounding lost
            block = np.linalg.qr(block - span @ (span.T @ block))[0]


def random_slice(centre: Float[np.ndarray, "hidden"], dims: int, seed: int) -> Slice:
    """A slice through ``centre`` in directions that are uniform on the Grassmannian.

    Raises ValueError for more directions than dimensions.
    """
    if not 1 <= dims <= len(centre):
        raise ValueError(f"{dims} directions in {len(centre)} dimensions")
    normal = np.random.default_rng(seed).standard_normal((len(centre), dims))
    return Slice(centre.astype(np.float64), _pointed(np.linalg.qr(normal)[0]))


def slice_through(points: Float[np.ndarray, "points hidden"]) -> Slice:
    """The plane through three points, or the flat through n + 1; its centre is their mean.

    Raises ValueError where they do not span it.
    """
    values = points.astype(np.float64)
    edges = (values[1:] - values[0]).T
    basis, triangle = np.linalg.qr(edges)
    lengths = np.linalg.norm(edges, axis=0)
    if (np.abs(np.diag(triangle)) <= 1e-9 * lengths.max(initial=0.0)).any():
        raise ValueError(f"{len(points)} points that span fewer than {len(points) - 1} dimensions")
    return Slice(values.mean(axis=0), basis * np.sign(np.diag(triangle)))


def _pointed(basis: Float64[np.ndarray, "hidden dims"]) -> Float64[np.ndarray, "hidden dims"]:
    """The same directions with the sign that makes their largest entry positive."""
    largest = np.take_along_axis(basis, np.abs(basis).argmax(axis=0)[None, :], axis=0)
    return basis * np.where(largest < 0.0, -1.0, 1.0)


#: Angles that are evaluated at a time.
_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class Arcs:
    """Arcs in order around the circle; the first begins at the first tie at or above 0.

    An arc ends where the next begins, the last where the first begins, once around. ``is_proved``
    where the margin in the middle of the arc is larger than what float64 may be wrong by.
    """

    start: Float64[np.ndarray, "arcs"]
    expert_set: Int16[np.ndarray, "arcs k"]
    is_proved: Bool[np.ndarray, "arcs"]

    @property
    def stop(self) -> Float64[np.ndarray, "arcs"]:
        return np.append(self.start[1:], self.start[0] + 2.0 * np.pi)


def circle_arcs(
    cosine: Float64[np.ndarray, "experts"],
    sine: Float64[np.ndarray, "experts"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
) -> Arcs:
    """The expert sets on the circle, from the ties of all pairs; ties to the lower number.

    One arc without start (0) where nothing changes. Ends are right to some units of rounding over
    the angle at which logits cross. For 0 < k <= E. Oracle in tests: dense angles, and
    cells of a central router in two dimensions.
    """
    ties = np.unique(_ties(cosine, sine, bias))
    if not len(ties):
        return Arcs(np.zeros(1), _top(cosine, sine, bias, k, np.zeros(1))[0], np.ones(1, bool))
    stops = np.append(ties[1:], ties[0] + 2.0 * np.pi)
    expert_set, is_proved = _top(cosine, sine, bias, k, (ties + stops) / 2.0)
    # pieces that rounding alone put between two ties tell nothing
    is_piece = is_proved | (stops - ties > 1e-9)
    ties, expert_set, is_proved = ties[is_piece], expert_set[is_piece], is_proved[is_piece]
    is_new = (expert_set != np.roll(expert_set, 1, axis=0)).any(axis=1)
    if not is_new.any():
        return Arcs(np.zeros(1), expert_set[:1], np.array([is_proved.all()]))
    first = np.flatnonzero(is_new)
    proved = np.logical_and.reduceat(np.roll(is_proved, -first[0]), first - first[0])
    return Arcs(ties[first], expert_set[first], proved)


def _ties(
    cosine: Float64[np.ndarray, "experts"],
    sine: Float64[np.ndarray, "experts"],
    bias: Float64[np.ndarray, "experts"],
) -> Float64[np.ndarray, "ties"]:
    """Angles in [0, 2 pi) at which some pair ties."""
    one, other = np.triu_indices(len(cosine), 1)
    p, q, beta = cosine[one] - cosine[other], sine[one] - sine[other], bias[other] - bias[one]
    reach = np.hypot(p, q)
    meets = (reach > 0.0) & (np.abs(beta) <= reach)
    middle = np.arctan2(q[meets], p[meets])
    half = np.arccos(beta[meets] / reach[meets])
    return np.mod(np.concatenate([middle - half, middle + half]), 2.0 * np.pi)


def _top(
    cosine: Float64[np.ndarray, "experts"],
    sine: Float64[np.ndarray, "experts"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
    angles: Float64[np.ndarray, "angles"],
) -> tuple[Int16[np.ndarray, "angles k"], Bool[np.ndarray, "angles"]]:
    """The k largest logits at each angle, and whether the margin proves them."""
    reach = (np.abs(cosine) + np.abs(sine) + np.abs(bias)).max()
    sets, proved = [], []
    for start in range(0, len(angles), _CHUNK):
        angle = angles[start : start + _CHUNK, None]
        logits = cosine * np.cos(angle) + sine * np.sin(angle) + bias
        order = np.argsort(-logits, axis=1, kind="stable")
        ranked = np.take_along_axis(logits, order, axis=1)
        sets.append(np.sort(order[:, :k], axis=1).astype(np.int16))
        # eight roundings of numbers of at most ``reach``, on both sides
        gap = ranked[:, k - 1] - ranked[:, k] if k < len(bias) else np.full(len(angle), np.inf)
        proved.append(gap > 16.0 * 2.0**-53 * reach)
    return np.concatenate(sets), np.concatenate(proved)
