"""Rows that are not what was stored: copied over each other, zero, turned round, or scaled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32, Int64

from moegeom.geometry.set_code import set_distances
from moegeom.studies.faults.operator import Candidate, Operator, Site, routed

#: Tokens to which the rows are fitted.
_FITTED = 2048

#: Factors of a single row that are tried; 0 is a row of zeros.
_FACTORS = (0.0, -1.0, 0.25, 0.5, 2.0 / 3.0, 0.8, 1.25, 1.5, 2.0, 4.0, 8.0)

#: Bits by which another row has to fit better, beside naming it.
_BETTER = 20.0


def _copied(site: Site) -> Iterator[Candidate]:
    """Each expert behind the row that fits its choices best; where rows are copies, not renamed."""
    if not site.has_logits:
        return
    experts = len(site.matching)
    cost = row_costs(site)
    own = np.diag(cost)
    best = cost.argmin(axis=1)
    is_other = (own - cost[np.arange(experts), best]) > _BETTER + math.log2(experts)
    place = np.where(is_other, best, np.arange(experts))
    if not is_other.any() or len(np.unique(place)) == experts:
        return
    bias = site.router.logit_bias
    edited = dataclasses.replace(
        site.router,
        weight=site.router.weight[place],
        logit_bias=None if bias is None else bias[place],
    )
    number = int(is_other.sum())
    text = f"{number} of {experts} rows are copies of other rows"
    yield from routed(
        site,
        "rows_copied",
        text,
        "rows damaged",
        edited,
        own_bits=number * 2.0 * math.log2(experts),
    )


COPIED = Operator("rows_copied", _copied)


def row_costs(site: Site) -> Float32[np.ndarray, "experts rows"]:
    r"""Bits of the choices of expert i for the scores of row j, beside the own boundary.

    :math:`C_{ij} = \sum_t \log_2(1 + e^{\mp (s_{tj} - \mu_t)/T})`, minus where B chose i.
    """
    rows = _rows(site)
    found = set_distances(site.selection[rows], site.theirs[rows])
    chosen = np.signbit(found.wrong)
    above = np.where(chosen, -found.wrong, found.wrong)
    scaled = np.clip(above / np.float32(0.25 * found.spacing), -30.0, 30.0)
    taken, left = np.log1p(np.exp(-scaled)), np.log1p(np.exp(scaled))
    is_chosen = chosen.astype(np.float32)
    total = is_chosen.T @ taken + (1.0 - is_chosen).T @ left
    return np.asarray(total / math.log(2.0), np.float32)


def _rows(site: Site) -> Int64[np.ndarray, "rows"]:
    return np.arange(0, len(site.theirs), max(1, len(site.theirs) // _FITTED))


def _scaled(site: Site) -> Iterator[Candidate]:
    """All rows times one factor: of some experts only, where the choices of the others say so."""
    for factor in _FACTORS:
        rows = site.router.weight * site.router.weight.dtype.type(factor)
        edited = dataclasses.replace(site.router, weight=rows)
        words = {0.0: "rows of zeros", -1.0: "rows turned round"}
        text = words.get(factor, f"rows times {factor:.3g}")
        name = f"rows_times_{factor:.3g}"
        for one in routed(site, name, text, "rows damaged", edited, bits=4.0):
            # zeros for all leave nothing to choose by
            yield dataclasses.replace(one, of_some_only=factor == 0.0)


SCALED = Operator("rows_scaled", _scaled)


def _transposed(site: Site) -> Iterator[Candidate]:
    experts, hidden = site.router.weight.shape
    if experts != hidden:
        flat = np.ascontiguousarray(site.router.weight).reshape(hidden, experts).T
        text = "rows read as columns (shapes exchanged)"
    else:
        flat, text = site.router.weight.T, "rows read as columns"
    edited = dataclasses.replace(site.router, weight=np.ascontiguousarray(flat))
    yield from routed(site, "transposed", text, "rows damaged", edited)


TRANSPOSED = Operator("transposed", _transposed)
