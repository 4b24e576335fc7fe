"""Whether one set of experts is a cell: the point, or the proof that there is none."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np

from moegeom.cells.exact.certificate import cell_certificate
from moegeom.cells.exact.certificate_check import CellPoint, Weights, check_certificate
from moegeom.cells.record import Answer
from moegeom.cells.study.slices import AskedSlice
from moegeom.core.errors import RouterRuleError, UsageError
from moegeom.core.router import Router


def answer(
    router: Router,
    asked: AskedSlice,
    coalition: tuple[int, ...],
    with_check: bool,
    box: float | None = None,
) -> Answer:
    """A certificate for one set of experts on one slice, in the box around its centre if given.

    Raises
    ------
    UsageError
        When the set is none of ``top_k`` different experts.
    RouterRuleError
        When the walls of the router are curved: then no set has a certificate of this kind.
    """
    started = time.perf_counter()
    chosen = tuple(sorted(set(coalition)))
    k, experts = router.rule.top_k, router.num_experts
    if len(chosen) != k or len(coalition) != k or not 0 <= chosen[0] <= chosen[-1] < experts:
        raise UsageError(
            f"--coalition {','.join(map(str, coalition))}: expected {k} different experts from 0 "
            f"to {experts - 1}, as many as router {router.name} chooses."
        )
    if not router.rule.is_affine or asked.circle is not None:
        raise RouterRuleError(
            f"router {router.name}: certificates are for cells with straight walls on a flat slice "
            f"({router.rule.selection_score_unit})."
        )
    bias = router.affine_bias
    weight = router.weight.astype(np.float64)
    offset = None if bias is None else bias.astype(np.float64)
    if asked.part is not None:
        weight, offset = asked.part.instance(weight, offset)
    sides = None if box is None else np.full(weight.shape[1], box)
    low = None if sides is None else -sides
    found = cell_certificate(weight, offset, chosen, low, sides)
    if offset is None and sides is None and isinstance(found, CellPoint):
        found = _of_usual_size(found)
    if with_check:
        check_certificate(weight, offset, chosen, found, lower=low, upper=sides)
    where = asked.text if box is None else f"{asked.text}, within {box:g} along every direction"
    margin, weights = None, None
    if isinstance(found, CellPoint):
        point = np.array([float(value) for value in found.point])
        logits = weight @ point + (0.0 if offset is None else offset)
        inside = np.isin(np.arange(experts), chosen)
        margin = float(logits[inside].min() - logits[~inside].max()) if k < experts else np.inf
    else:
        weights = _rounded(found.inside), _rounded(found.outside)
    return Answer(
        router=router.name,
        coalition=chosen,
        subspace=where,
        is_cell=isinstance(found, CellPoint),
        margin=margin,
        weights=weights,
        certificate=found.as_json(),
        is_checked=with_check,
        seconds=time.perf_counter() - started,
    )


def _of_usual_size(found: CellPoint) -> CellPoint:
    """A point of a cone, scaled by a power of two until its largest coordinate is near 1."""
    largest = max((abs(value) for value in found.point), default=Fraction(0))
    if largest == 0:
        return found
    away = largest.numerator.bit_length() - largest.denominator.bit_length()
    return CellPoint(tuple(value / Fraction(2) ** away for value in found.point))


def _rounded(weights: Weights) -> tuple[tuple[int, float], ...]:
    return tuple((expert, float(share)) for expert, share in weights)
