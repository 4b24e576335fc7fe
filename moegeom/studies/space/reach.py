"""Which expert sets the data can meet, and how large those are that they do meet."""

from __future__ import annotations

import math

import numpy as np

from moegeom.engine.prepared import PreparedRouter
from moegeom.engine.sample import Sample
from moegeom.geometry.border_shares import sampled_angles, shares_of
from moegeom.geometry.capacity.cell_bounds import expected_diagram, most_cells
from moegeom.geometry.capacity.hypersimplex import log10_count
from moegeom.geometry.space import dimension_estimates, distinct_rows
from moegeom.studies.space.measure import bias_of
from moegeom.studies.space.record import ConeShares, Reach

#: Inputs of which neighbours are looked for.
_NEIGHBOURS_OF = 2048

#: Logits of directions, and directions at most.
_LOGITS, _DIRECTIONS = 2**22, 2**18

#: Share of the visited cells that directions must meet for their sizes to be compared.
_LEAST_MET = 0.5


def dimension_range(sample: Sample, seed: int) -> tuple[float, float] | None:
    """The range of the intrinsic dimension of the inputs; None where nothing can be said."""
    if sample.input is None:
        return None
    order = np.random.default_rng(seed).permutation(len(sample.inputs))[:_NEIGHBOURS_OF]
    rows = sample.inputs[order].astype(np.float64)
    found = dimension_estimates(rows[np.sort(distinct_rows(rows))])
    values = [value for _, _, value in found if np.isfinite(value)]
    return (min(values), max(values)) if values else None


def reach(prepared: PreparedRouter, dimension: tuple[float, float] | None) -> tuple[Reach, ...]:
    """Cells on affine sets of the least and of the largest dimension, of linear boundaries."""
    if dimension is None or prepared.rows is None or prepared.curved is not None:
        return ()
    experts, k = prepared.router.num_experts, prepared.router.rule.top_k
    found = []
    for dims in sorted({math.ceil(end) for end in dimension}):
        mean = expected_diagram(experts, k, dims, is_central=False).cells
        random = math.log10(mean) if 0.0 < mean < math.inf else None
        most = most_cells(experts, k, dims, is_central=False)
        found.append(Reach(dims, log10_count(most), random))
    return tuple(found)


def cone_shares(prepared: PreparedRouter, sample: Sample, seed: int) -> ConeShares | None:
    """How large the cells of the visited expert sets are, seen from 0: of routers without bias."""
    rows, bias = prepared.coordinates, bias_of(prepared.router)
    if rows is None or np.ptp(bias) > 0.0:
        return None
    k, directions = prepared.router.rule.top_k, min(_LOGITS // len(rows), _DIRECTIONS)
    angles = sampled_angles(rows, k, directions, seed)
    visited, visits = np.unique(np.sort(sample.chosen, axis=1), axis=0, return_counts=True)
    shares = shares_of(angles, visited)
    covered = float(shares.sum())
    correlation = by_size = None
    if (shares > 0.0).mean() >= _LEAST_MET:
        # what the counts of as many tokens show of sizes where sizes are all there is
        drawn = np.random.default_rng(seed).multinomial(len(sample.chosen), angles.share)
        by_size = _rank_correlation(drawn[drawn > 0], angles.share[drawn > 0])
        correlation = _rank_correlation(visits, shares)
    return ConeShares(
        directions=directions,
        covered=covered,
        covered_se=math.sqrt(covered * (1.0 - covered) / directions),
        correlation=correlation,
        correlation_by_size=by_size,
        modal=float(shares[visits.argmax()]),
    )


def _rank_correlation(one: np.ndarray, other: np.ndarray) -> float | None:
    """Spearman's; None where one of them is constant."""
    from scipy.stats import rankdata

    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(rankdata(one), rankdata(other))[0, 1])
