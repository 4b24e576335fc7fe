r"""Polytopes whose vertices are cells: the hypersimplex, and the sums of k experts.

The hypersimplex :math:`\Delta(k, E)` is the hull of the 0/1 vectors with k ones. Its normal fan is
the central router whose experts are the coordinates, so that vertices stand for cells, edges for
facets and n-faces for strata of codimension n: n + 1 experts that tie, and those above them.

.. math:: Q_k = \mathrm{conv}\{\textstyle\sum_{i \in S} (w_i, b_i) : |S| = k\}, \qquad
   e_k(x) = \max_{|S| = k} \sum_{i \in S} z_i(x) = \max_{v \in Q_k} \langle v, (x, 1) \rangle

The normal cone of a vertex, cut at the height 1, is the closure of a cell: cells of (W, b) are the
vertices that are seen from above, those of (W, -b) the ones from below; facets are edges. Without
biases every vertex is a cell. On a cell :math:`e_k` is linear with the vertex as its coefficients.
"""

from __future__ import annotations

import math


def face_count(k: int, num_experts: int, n: int) -> int:
    r"""Faces of dimension n of :math:`\Delta(k, E)`, exactly; 0 outside 0..E - 1.

    .. math:: f_0 = \binom E k, \quad
       f_n = \binom{E}{n+1} \sum_{a = \max(0, k - n)}^{\min(k - 1, E - n - 1)} \binom{E-n-1}{a}

    The number of ways in which n + 1 experts can tie at the boundary with a others above them. The
    polytope is a point for k = 0 and k = E. Raises ValueError for k outside 0..E. Source:
    docs/theory.md B2; oracle in tests: faces enumerated as sets of vertices.
    """
    if not 0 <= k <= num_experts:
        raise ValueError(f"top_k {k} of {num_experts} experts")
    if n == 0:
        return math.comb(num_experts, k)
    if not 0 < n < num_experts or k in (0, num_experts):
        return 0
    above = range(max(0, k - n), min(k - 1, num_experts - n - 1) + 1)
    return math.comb(num_experts, n + 1) * sum(math.comb(num_experts - n - 1, a) for a in above)


def face_counts(k: int, num_experts: int) -> list[int]:
    r"""Faces of :math:`\Delta(k, E)` by dimension, from vertices to the polytope itself.

    :math:`\sum_n (-1)^n f_n = 1`. Raises ValueError as ``face_count``.
    """
    if k in (0, num_experts):
        return [face_count(k, num_experts, 0)]
    return [face_count(k, num_experts, n) for n in range(num_experts)]


def num_edges(k: int, num_experts: int) -> int:
    r"""Edges of :math:`\Delta(k, E)`, :math:`\binom E k k (E - k) / 2`: all facets there can be."""
    return math.comb(num_experts, k) * k * (num_experts - k) // 2


def num_facets(k: int, num_experts: int) -> int:
    r"""Facets of :math:`\Delta(k, E)`: 2 E, or E for k = 1 and k = E - 1; 2 for a segment.

    0 for a point (k = 0 or E). Raises ValueError as ``face_count``.
    """
    return face_count(k, num_experts, num_experts - 2) if num_experts > 1 else 0


def log10_count(count: int) -> float:
    """Decimal logarithm of a count of any size, to float64; -inf for 0."""
    return math.log10(count) if count > 0 else -math.inf
