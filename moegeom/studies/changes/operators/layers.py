"""Rows, or biases, of another layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.geometry.rows import size
from moegeom.studies.changes.bias_pair import BiasPair
from moegeom.studies.changes.edit import BiasFit, Edit, RowFit, always, error, says
from moegeom.studies.changes.row_pair import RowPair

#: Rows are those of another layer where they are nearer to them than this share of their length:
#: rows that have nothing to do with each other are 1.4 lengths apart.
_NEAR = 0.5


def _of_layer(pair: RowPair) -> Iterator[RowFit]:
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
        yield RowFit(
            rows,
            math.log2(max(len(projections), 2)) + 1.0,
            kind=f"{kind}{place_in_words(source)}",
            evidence={"source": source},
            allows_subset=True,
        )


def place_in_words(router: str) -> str:
    """``layer 1`` for a router of the main stack, else its whole name."""
    stack, layer, *slot = router.split("/")
    return router if slot or stack != "text" else f"layer {layer}"


OF_LAYER = Edit(
    "another layer",
    "router of {kind} of A",
    says("these routers are those of other layers of A: tokens go to other experts."),
    always("failed"),
    _of_layer,
    gate=error,
)


def _bias_of_layer(pair: BiasPair) -> Iterator[BiasFit]:
    bits = math.log2(max(len(pair.others), 2))
    for name, stored in pair.others.items():
        if len(stored) == len(pair.stored) and size(pair.b[None]) > 0.0:
            kind = f"{pair.kind} of {place_in_words(name)} of A"
            yield BiasFit(stored[pair.place].astype(np.float64), bits, kind, "", {"source": name})


BIAS_OF_LAYER = Edit(
    "bias of another layer",
    "{kind}",
    says("experts are preferred as in another layer: choices change."),
    always("failed"),
    fit_bias=_bias_of_layer,
    gate=error,
)
