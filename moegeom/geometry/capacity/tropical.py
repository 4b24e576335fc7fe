r"""The max-plus (tropical) semiring, in which top-k routing is a polynomial.

:math:`a \oplus b = \max(a, b)` and :math:`a \otimes b = a + b` on the numbers and
:math:`-\infty`, which is the zero; the one is 0. The sum of the k largest logits is the k-th
elementary symmetric polynomial :math:`e_k(z)`, and the boundaries of top-k routing are where its
maximum is attained twice. float64 throughout: sums round, maxima do not.
"""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int64

#: Neutral in ``tropical_sum``, absorbing in ``tropical_product``.
TROPICAL_ZERO = -np.inf

#: Neutral in ``tropical_product``.
TROPICAL_ONE = 0.0


def tropical_sum(
    a: Float64[np.ndarray, "*shape"], b: Float64[np.ndarray, "*shape"]
) -> Float64[np.ndarray, "*shape"]:
    r""":math:`a \oplus b = \max(a, b)`, exactly; nan where one of them is.

    Source: docs/theory.md B1.
    """
    return np.maximum(a, b)


def tropical_product(
    a: Float64[np.ndarray, "*shape"], b: Float64[np.ndarray, "*shape"]
) -> Float64[np.ndarray, "*shape"]:
    r""":math:`a \otimes b = a + b`; the zero times anything of the semiring is the zero.

    Infinity is not of the semiring. Source: docs/theory.md B1.
    """
    return a + b


def elementary_symmetric(
    logits: Float64[np.ndarray, "tokens experts"], k: int
) -> Float64[np.ndarray, "tokens"]:
    r""":math:`e_k(z) = \bigoplus_{|S| = k} \bigotimes_{i \in S} z_i`: the sum of the k largest.

    By :math:`e_j \leftarrow e_j \oplus (e_{j-1} \otimes z_i)`, expert by expert. The one for k = 0,
    the zero for k > E. Raises ValueError for k < 0. Source: S1 Theorem 4.5; docs/theory.md B1;
    oracle in tests: the sorted logits.
    """
    if k < 0:
        raise ValueError(f"top_k {k}")
    sums = np.full((k + 1, len(logits)), TROPICAL_ZERO)
    sums[0] = TROPICAL_ONE
    for z in logits.T:
        sums[1:] = tropical_sum(sums[1:], tropical_product(sums[:-1], z[None, :].repeat(k, 0)))
    return sums[k]


def tropical_value(
    coefficients: Float64[np.ndarray, "terms"],
    exponents: Int64[np.ndarray, "terms variables"] | Float64[np.ndarray, "terms variables"],
    points: Float64[np.ndarray, "points variables"],
) -> Float64[np.ndarray, "points"]:
    r"""A polynomial :math:`\bigoplus_j c_j \otimes x^{a_j} = \max_j (c_j + a_j \cdot x)`.

    With rows and biases of a router as exponents and coefficients it is the largest logit. The zero
    without terms. Source: docs/theory.md B1; oracle in tests: every term of its own.
    """
    return _terms(coefficients, exponents, points).max(axis=1, initial=TROPICAL_ZERO)


def on_tropical_hypersurface(
    coefficients: Float64[np.ndarray, "terms"],
    exponents: Int64[np.ndarray, "terms variables"] | Float64[np.ndarray, "terms variables"],
    points: Float64[np.ndarray, "points variables"],
    tolerance: float = 0.0,
) -> Bool[np.ndarray, "points"]:
    """Whether two terms attain the maximum, within ``tolerance`` of each other.

    There the polynomial has no gradient. With the 0/1 vectors of k ones as exponents and
    coefficients 0 these are the logits with z_[k] = z_[k+1], the boundaries of top-k routing. False
    for fewer than two terms. Source: docs/theory.md B1; oracle in tests: the margin.
    """
    terms = np.sort(_terms(coefficients, exponents, points), axis=1)
    if terms.shape[1] < 2:
        return np.zeros(len(points), bool)
    return terms[:, -1] - terms[:, -2] <= tolerance


def _terms(
    coefficients: Float64[np.ndarray, "terms"],
    exponents: Int64[np.ndarray, "terms variables"] | Float64[np.ndarray, "terms variables"],
    points: Float64[np.ndarray, "points variables"],
) -> Float64[np.ndarray, "points terms"]:
    return points @ exponents.T.astype(np.float64) + coefficients


def power_weights(
    weight: Float64[np.ndarray, "experts dims"], bias: Float64[np.ndarray, "experts"]
) -> Float64[np.ndarray, "experts"]:
    r"""Weights :math:`|w_i|^2 + 2 b_i` of the sites w_i of the power diagram of a router.

    All equal where the diagram is a Voronoi diagram of the rows: :math:`b_i = -|w_i|^2 / 2`, then
    0. Source: Aurenhammer 1987; docs/theory.md B1.
    """
    return (weight**2).sum(axis=1) + 2.0 * bias


def power_distances(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    points: Float64[np.ndarray, "points dims"],
) -> Float64[np.ndarray, "points experts"]:
    r""":math:`|x - w_i|^2 - (|w_i|^2 + 2 b_i) = |x|^2 - 2 z_i`, in squared units of the input.

    The k least of them are those of the k largest logits. Source: Aurenhammer 1987;
    docs/theory.md B1; oracle in tests: the logits.
    """
    apart = ((points[:, None, :] - weight[None, :, :]) ** 2).sum(axis=2)
    return apart - power_weights(weight, bias)
