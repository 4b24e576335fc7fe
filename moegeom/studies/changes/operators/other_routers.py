"""Rows or biases of another layer, of an unrelated router, or further training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.shapes import Int64
from moegeom.core.text import percent
from moegeom.geometry.rows import likeness_z, own_cosines, size
from moegeom.studies.changes.edit import Edit, EditFit, error
from moegeom.studies.changes.row_pair import BiasPair, RowPair, share

#: Rows are those of another layer where they are nearer to them than this share of their length:
#: rows that have nothing to do with each other are 1.4 lengths apart.
_NEAR = 0.5


def _of_layer(pair: RowPair) -> Iterator[EditFit]:
    if pair.others is None or OF_LAYER.name in pair.named:
        return
    far = np.linalg.norm(pair.left, axis=1) > _NEAR * np.linalg.norm(pair.b, axis=1)
    if not far.any():
        return
    projections = pair.others.projections()
    now = pair.others.project(pair.b)
    lengths = np.maximum(np.linalg.norm(now, axis=1), np.finfo(float).tiny)
    near = {}
    for name, rows in projections.items():
        if name != pair.name and rows.shape == now.shape:
            apart = np.linalg.norm(now - rows, axis=1) / lengths
            near[name] = int((apart[far] < _NEAR).sum())
    source = max(near, key=lambda name: near[name], default="")
    if not source or not near[source]:
        return
    for kind, rows in pair.others.rows(source).items():
        yield EditFit(
            rows,
            math.log2(max(len(projections), 2)) + 1.0,
            kind=f"{place_in_words(source)} of A{kind}",
            evidence={"source": source},
            allows_subset=True,
        )


def place_in_words(router: str) -> str:
    """``layer 1`` for a router of the main stack, else its whole name."""
    stack, layer, *slot = router.split("/")
    return router if slot or stack != "text" else f"layer {layer}"


OF_LAYER = Edit(
    "another layer",
    "router of {kind}",
    "these routers are those of other layers of A: tokens go to other experts.",
    fit=_of_layer,
    gate=error,
)


def _bias_of_layer(pair: BiasPair) -> Iterator[EditFit]:
    bits = math.log2(max(len(pair.others), 2))
    for name, stored in pair.others.items():
        if len(stored) == len(pair.stored) and size(pair.b[None]) > 0.0:
            kind = f"{pair.kind} of {place_in_words(name)} of A"
            yield EditFit(stored[pair.place].astype(np.float64), bits, kind, "", {"source": name})


BIAS_OF_LAYER = Edit(
    "bias of another layer",
    "{kind}",
    "experts are preferred as in another layer: choices change.",
    fit_bias=_bias_of_layer,
    gate=error,
)


#: Below this many standard errors own rows are no more alike than those of different experts.
_UNRELATED_Z = 4.0

#: Words after which rows are known to be those of A.
_LIKE = frozenset({"scaled", "negated", "rows scaled", "columns scaled", "rotated"})

#: Experts that are named as having moved most.
_MOST_MOVED = 3

#: A ratio of lengths this far from 1 is worth telling.
_OTHER_LENGTH = 0.1


@dataclass(frozen=True, eq=False)
class _Residual:
    """Unexplained change: in which rows, and the cosines of these with the original rows."""

    rows: Int64[np.ndarray, "rows"]
    is_local: bool
    is_unrelated: bool
    size: float
    detail: str
    facts: Mapping[str, Any]


def _residual(pair: RowPair) -> _Residual | None:
    has_moved = pair.has_moved
    if pair.is_settled:
        return None
    if not has_moved.any():  # less than rounding, yet not equal
        has_moved = (pair.left != 0.0).any(axis=1)
    is_local = 2 * int(has_moved.sum()) <= len(pair.a)
    rows = np.flatnonzero(has_moved) if is_local else np.arange(len(pair.a))
    (before, after), left = (side[rows] for side in pair.centred), pair.left[rows]
    if is_local:  # beside rows that did not move nothing is common to all
        before, after = pair.a[rows], pair.b[rows]
    cosines = own_cosines(before, after)
    cosines = cosines[~np.isnan(cosines)]
    lowest = float(cosines.min()) if cosines.size else float("nan")
    median = float(np.median(cosines)) if cosines.size else float("nan")
    z = likeness_z(*pair.centred) if len(pair.a) > 2 else float("nan")
    above = f"{z:+.1f} standard errors above that of other rows" if z == z else "too few rows"
    detail = f"cosine of a row with its former self: median {median:.3g}, lowest {lowest:.3g}"
    facts = {"median_cosine": median, "lowest_cosine": lowest, "z": float(z)}
    if not cosines.size:
        detail = "the rows of one side are all the same"
        return _Residual(rows, is_local, not is_local, pair.change_size, detail, facts)
    is_random = abs(median) < _UNRELATED_Z / np.sqrt(pair.a.shape[1])
    if is_local or len(pair.a) <= 2:
        # the rows by themselves: 4 standard deviations of random directions
        is_unrelated = bool(is_random and size(left) > 0.5 * size(before))
    else:
        is_unrelated = z < _UNRELATED_Z
        detail += f"; {above}" if is_unrelated else ""
    is_unrelated = bool(is_unrelated) and not _LIKE & set(pair.named)
    moved = share(size(left), size(before)) if is_local else pair.change_size
    return _Residual(rows, is_local, is_unrelated, moved, detail, facts)


def _where(pair: RowPair, rest: _Residual) -> str:
    return f"{len(rest.rows)} of {len(pair.a)} rows" if rest.is_local else "rows"


def _trained(pair: RowPair) -> Iterator[EditFit]:
    rest = _residual(pair)
    if rest is None or rest.is_unrelated:
        return
    sizes = pair.row_sizes()
    order = rest.rows[np.argsort(-sizes[rest.rows], kind="stable")][:_MOST_MOVED]
    most = {int(expert): float(sizes[expert]) for expert in order}
    listed = ", ".join(f"{expert} ({percent(moved)})" for expert, moved in most.items())
    lengths = [size(side[rest.rows]) for side in (pair.a, pair.a + pair.left)]
    ratio = share(lengths[1], lengths[0])
    longer = f"; rows {ratio:.3g} times as long" if abs(ratio - 1.0) > _OTHER_LENGTH else ""
    yield EditFit(
        pair.b,
        0.0,
        kind=_where(pair, rest),
        size=rest.size,
        detail=f"{rest.detail}; experts that moved most: {listed}{longer}",
        evidence={
            "num_rows": len(rest.rows),
            "most_moved": most,
            "length_ratio": ratio,
            **rest.facts,
        },
    )


TRAINED = Edit(
    "trained on",
    "{kind} changed by {size}, no pattern",
    "no factor, common vector, rotation, update of low rank or other layer explains it, as "
    "after training or quantisation. Tokens near a boundary can flip; only tokens tell how many.",
    of_rest=_trained,
)


def _unrelated(pair: RowPair) -> Iterator[EditFit]:
    rest = _residual(pair)
    if rest is None or not rest.is_unrelated:
        return
    kind = f"in {_where(pair, rest)}" if rest.is_local else ""
    evidence = {"num_rows": len(rest.rows), **rest.facts}
    yield EditFit(pair.b, 0.0, kind=kind, detail=rest.detail, evidence=evidence)


UNRELATED = Edit(
    "unrelated",
    "unrelated {kind}",
    "rows are no more alike than those of different experts: another router.",
    of_rest=_unrelated,
    gate=error,
)
