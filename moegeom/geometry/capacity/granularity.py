r"""Every expert cut into g: (E, k, N) becomes (g E, g k, N / g), at the same cost per token."""

from __future__ import annotations

import math

from moegeom.geometry.capacity.hypersimplex import log10_count


def split_sets_log10(num_experts: int, k: int, split: int) -> float:
    r"""How many times more expert sets there are, :math:`\log_{10} \binom{gE}{gk} / \binom E k`.

    To float64 of the exact integers; 0 for g = 1 and for k = E. It counts sets, not cells that
    inputs reach (``most_cells``). Raises ValueError for k outside 1..E and g < 1. Source:
    docs/theory.md B8; oracle in tests: log-gamma of mpmath.
    """
    _refuse(num_experts, k, split)
    more = math.comb(split * num_experts, split * k)
    return log10_count(more) - log10_count(math.comb(num_experts, k))


def published_split_log10(num_experts: int, k: int, split: int, dims: float) -> float:
    r"""The gain as S1 prints it, as a decimal logarithm.

    .. math:: \Big[(g - 1) k \ln \frac{e E}{k} - (d + \tfrac12) \ln g\Big] / \ln 10

    0 for g = 1. The factor :math:`g^{-d}` is wrong: experts become narrower, but as many more are
    active, k' N' = k N, and :math:`\Phi(k N, d)` does not change. It can turn a gain into a loss.
    Raises ValueError as ``split_sets_log10`` and for d < 0. Source: S1 Theorem 5.1; docs/theory.md
    B8.
    """
    _refuse(num_experts, k, split)
    if dims < 0:
        raise ValueError(f"{dims} dimensions")
    sets = (split - 1) * k * math.log(math.e * num_experts / k)
    return (sets - (dims + 0.5) * math.log(split)) / math.log(10.0)


def largest_split(width: int, dims: int) -> int:
    r"""The rule of thumb :math:`\lfloor N / d \rfloor`: an expert keeps a neuron per dimension.

    Each expert alone then still spans d dimensions; the count of regions itself asks for
    k N >= d only, which no split changes. Raises ValueError for N < 1 and d < 1. Source: S1
    Corollary 5.3; docs/theory.md B8.
    """
    if width < 1 or dims < 1:
        raise ValueError(f"{width} neurons on {dims} dimensions")
    return width // dims


def _refuse(num_experts: int, k: int, split: int) -> None:
    if not 1 <= k <= num_experts or split < 1:
        raise ValueError(f"top_k {k} of {num_experts} experts, each split into {split}")
