"""Damaged columns: runs of them, every n-th, or blocks that weigh otherwise; or the same
coordinates of what the router reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int64
from moegeom.engine.plan import one_blas_thread
from moegeom.geometry.low_rank_fit import fitted_factors
from moegeom.geometry.set_code import chosen_mask
from moegeom.studies.faults.operator import Proposal, Site, operator, routed
from moegeom.studies.faults.scope import listed

#: Tokens with other sets that columns are looked for in, at least and at most.
_LEAST, _LOOKED = 24, 2048

#: Standard errors by which a run of columns has to pull, all together, and what each column has to
#: pull more than by chance.
_PULLS, _BEYOND = 8.0, 0.7

#: Factors of columns that hold back B's choices, and of those that push them, with words.
_HELD = {0.0: "read as zeros", 0.5: "halved", -1.0: "with the other sign"}
_PUSHED = {2.0: "twice as large", 4.0: "four times as large"}

#: Parts of the width at whose borders slices begin, and numbers of ranks that take turns.
_PARTS, _MOST_TURNS = (2, 4, 8, 16, 32), 16

#: Columns that share a scale, and the most blocks of them; entries in all that factors are fitted
#: to, tokens at most, and bits of each factor.
_BLOCKS, _MOST_BLOCKS, _CELLS, _FITTED, _FACTOR_BITS = (32, 64, 128), 64, 2**23, 768, 10.0


@operator
def columns_scaled(site: Site) -> Iterator[Proposal]:
    r"""Runs of columns, and every n-th, times one factor.

    Where they are follows from how each column pulls at the choices that differ,
    :math:`g_d = \sum_t x_{td} \sum_e (b_{te} - a_{te}) W_{ed}`, b and a the sets of B and A, over
    its standard error: below 0 where B has less of the column.
    """
    rows = np.flatnonzero(site.differs)
    if not site.has_inputs or len(rows) < _LEAST:
        return
    pull = _pulls(site, rows[:: max(1, math.ceil(len(rows) / _LOOKED))])
    router, hidden = site.router, site.router.hidden_size
    for sign, factors in ((-1.0, _HELD), (1.0, _PUSHED)):
        for text, is_some, bits in _columns(sign * pull):
            for factor, words in factors.items():
                rows_of = np.where(
                    is_some, router.weight * router.weight.dtype.type(factor), router.weight
                )
                edited = dataclasses.replace(router, weight=rows_of)
                name = f"{text} times {factor:g}"
                for one in routed(
                    site, name, f"{text} of {hidden} {words}", "columns damaged", edited, bits=bits
                ):
                    yield dataclasses.replace(one, of_all_only=True)


def _pulls(site: Site, rows: Int64[np.ndarray, "rows"]) -> Float64[np.ndarray, "hidden"]:
    """How each column pulls, in standard errors."""
    values, experts = site.values_at(site.number)(rows), len(site.matching)
    assert values is not None
    gained = chosen_mask(site.theirs[rows], experts).astype(np.float32)
    gained -= chosen_mask(site.mine[rows], experts)
    with one_blas_thread():
        each = values * (gained @ site.router.weight.astype(np.float32))
    size = np.sqrt((each.astype(np.float64) ** 2).sum(axis=0))
    total = each.sum(axis=0, dtype=np.float64)
    return np.divide(total, size, out=np.zeros_like(total), where=size > 0.0)


def _columns(
    pull: Float64[np.ndarray, "hidden"],
) -> Iterator[tuple[str, Bool[np.ndarray, "hidden"], float]]:
    """Runs and every n-th of columns with a positive pull, in words, and the bits of a name."""
    hidden, number = len(pull), np.arange(len(pull))
    total = np.concatenate([[0.0], np.cumsum(pull - _BEYOND)])
    stop = int((total - np.minimum.accumulate(total)).argmax())
    start = int(total[: stop + 1].argmin())
    ends = {(start, stop)}
    for parts in _PARTS:
        part = hidden / parts
        ends.add((round(round(start / part) * part), round(round(stop / part) * part)))
    for first, last in sorted(ends):
        inside = (number >= first) & (number < last)
        few = inside.sum()
        if 0 < few < hidden and pull[inside].sum() > _PULLS * math.sqrt(few):
            # half of most columns is twice the others: few are said first
            yield (
                f"columns {first}-{last - 1}",
                inside,
                2.0 * math.log2(hidden) + 4.0 * few / hidden,
            )
    best: tuple[float, int, np.ndarray] = (0.0, 0, number)
    for count in range(2, min(_MOST_TURNS, hidden // 2) + 1):
        of_each = np.bincount(number % count, weights=pull - _BEYOND, minlength=count)
        some = np.flatnonzero(of_each > 0.0)
        if len(some) < count:
            best = max(
                best, (float(of_each[some].sum()) - count, count, some), key=lambda one: one[0]
            )
    worth, count, some = best
    inside = np.isin(number % max(count, 1), some) & (count > 0)
    if count and worth > 0.0 and pull[inside].sum() > _PULLS * math.sqrt(inside.sum()):
        yield f"columns {listed(some)} modulo {count}", inside, 4.0 + count


@operator
def columns_in_blocks(site: Site) -> Iterator[Proposal]:
    """A factor for each block of columns, fitted to B's choices: scales in another order, say."""
    rows, hidden = np.flatnonzero(site.differs), site.router.hidden_size
    sizes = [size for size in _BLOCKS if hidden % size == 0 and 2 < hidden // size <= _MOST_BLOCKS]
    if not site.has_inputs or len(rows) < _LEAST or not sizes:
        return
    pull = _pulls(site, rows[:: max(1, math.ceil(len(rows) / _LOOKED))])
    size = sizes[0]
    blocks = pull.reshape(-1, size).sum(axis=1) / math.sqrt(size)
    if (np.abs(blocks) > _PULLS / 2.0).sum() < 2:
        return
    number, experts = hidden // size, len(site.matching)
    most = min(_FITTED, max(_LEAST, _CELLS // (number * experts)))
    # those that agree say where factors would break what holds
    parts = (rows, np.flatnonzero(~site.differs))
    some = np.sort(np.concatenate([part[:: max(1, math.ceil(len(part) / most))] for part in parts]))
    values = site.values_at(site.number)(some)
    assert values is not None
    weight = site.router.weight.astype(np.float32)
    with one_blas_thread():
        shares = np.stack(
            [
                values[:, at : at + size] @ weight[:, at : at + size].T
                for at in range(0, hidden, size)
            ]
        )
        factors = fitted_factors(shares, site.selection[some], site.theirs[some])
    changed = np.flatnonzero(np.abs(factors - 1.0) > 0.05)
    if not len(changed):
        return
    edited = dataclasses.replace(
        site.router,
        weight=(weight * np.repeat(factors, size).astype(np.float32)).astype(
            site.router.weight.dtype
        ),
    )
    text = (
        f"{len(changed)} of {number} blocks of {size} columns weighed otherwise ({listed(changed)})"
    )
    for one in routed(
        site, "columns_in_blocks", text, "columns damaged", edited, own_bits=_FACTOR_BITS * number
    ):
        yield dataclasses.replace(one, of_all_only=True)
