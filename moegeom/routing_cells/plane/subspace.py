r"""Slices of the input space on which cells are enumerated and drawn: :math:`y = c + B x`.

A slice turns a router into a smaller one, :math:`z = (W B) x + (W c + b)`. Both products are
rounded to float64 once, and the rounded numbers *are* the instance: cells of a slice are exact for
them. Source: docs/theory.md G4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float, Float64


@dataclass(frozen=True, eq=False)
class Slice:
    """A centre c and an orthonormal basis B of a part of the input space."""

    centre: Float64[np.ndarray, "hidden"]
    basis: Float64[np.ndarray, "hidden dims"]

    @property
    def dims(self) -> int:
        return self.basis.shape[1]

    def instance(
        self,
        weight: Float[np.ndarray, "experts hidden"],
        bias: Float[np.ndarray, "experts"] | None,
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
        """Where the inputs lie when they are projected onto the slice."""
        return (inputs.astype(np.float64) - self.centre) @ self.basis

    def inputs(
        self, points: Float64[np.ndarray, "points dims"]
    ) -> Float64[np.ndarray, "points hidden"]:
        """Points of the slice as inputs of the router."""
        return self.centre + points @ self.basis.T


def principal_slice(inputs: Float[np.ndarray, "tokens hidden"], dims: int) -> tuple[Slice, float]:
    """The ``dims`` directions of largest variance about the mean, and their share of the variance.

    Each direction points to where its largest entry is positive. The share is 1 where all inputs
    are equal. Raises ValueError for fewer than ``dims`` + 1 inputs. Oracle in tests: scikit-learn.
    """
    tokens, hidden = inputs.shape
    if not 1 <= dims <= min(tokens - 1, hidden):
        raise ValueError(f"{dims} directions of {tokens} inputs in {hidden} dimensions")
    values = inputs.astype(np.float64)
    centre = values.mean(axis=0)
    values -= centre
    if tokens < hidden:
        squares, vectors = np.linalg.eigh(values @ values.T)
        spanned = values.T @ vectors[:, ::-1][:, :dims]
        squares = squares[::-1]
    else:
        squares, vectors = np.linalg.eigh(values.T @ values)
        spanned, squares = vectors[:, ::-1][:, :dims], squares[::-1]
    basis = _pointed(np.linalg.qr(spanned)[0])
    total = float((values * values).sum())
    share = float(np.maximum(squares[:dims], 0.0).sum()) / total if total > 0.0 else 1.0
    return Slice(centre, basis), min(share, 1.0)


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


def _pointed(
    basis: Float64[np.ndarray, "hidden dims"],
) -> Float64[np.ndarray, "hidden dims"]:
    """The same directions with the sign that makes their largest entry positive."""
    largest = np.take_along_axis(basis, np.abs(basis).argmax(axis=0)[None, :], axis=0)
    return basis * np.where(largest < 0.0, -1.0, 1.0)
