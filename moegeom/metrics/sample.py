"""A sample of tokens in the plane of their two widest directions, with what they chose.

``x`` and ``y`` are coordinates on the two principal components of the router inputs, the mean taken
off, in units of the input; experts are the rows of the effective router on the same axes, scaled to
the spread of the tokens. A plane shows what it can: ``plane_share`` is the part of the variance in
it, and figures that do not depend on any plane stand beside it. ``widest`` are the coordinates of a
token on the 30 widest directions, of which ``widest_share`` is the part of the variance: enough to
draw maps that keep near tokens near, such as t-SNE. ``near_same_choice`` is the share
of the 10 nearest tokens, in the full space, with the same first choice, by chance the sum of
squared shares of first choices; ``choice_silhouette`` says how much nearer tokens are to those of
their own first choice than to the next, -1 to 1.

No token ids and no positions: of a token only its domain, choice and margin are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.gram import effective_rows
from moegeom.geometry.space import (
    neighbours_of_same_label,
    principal_components,
    silhouette,
    squared_distances,
)

#: Tokens that are kept, and without which nothing is told of neighbours.
MOST_TOKENS, LEAST_TOKENS = 500, 50

#: Nearest tokens that are asked for their choice.
NEIGHBOURS = 10

#: Directions whose coordinates are kept: those that van der Maaten and Hinton 2008 draw t-SNE from.
MOST_DIRECTIONS = 30


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    sample = reductions["input_sample"]
    tokens = min(len(sample.inputs), MOST_TOKENS)
    if not facts.is_whole or tokens < LEAST_TOKENS:
        return {"layers": {}}
    inputs, first = sample.inputs[:tokens].astype(np.float64), sample.first[:tokens]
    squared = squared_distances(inputs)
    wide = principal_components(inputs, squared, min(MOST_DIRECTIONS, inputs.shape[1]))
    plane, on_plane = wide.points[:, :2], wide.axes[:2]
    same, chance = neighbours_of_same_label(squared, first, NEIGHBOURS)
    rows = effective_rows(facts.router.weight, facts.router.gain)
    experts = rows.centred @ on_plane.T if rows.centred.shape[1] == inputs.shape[1] else None
    table = {
        "expert": first,
        "is_expert": np.zeros(tokens, np.bool_),
        "domain_number": sample.population[:tokens],
        "x": plane[:, 0],
        "y": plane[:, 1],
        "margin": sample.margin[:tokens],
        "widest": wide.points.tolist(),
    }
    if experts is not None and np.abs(experts).max(initial=0.0) > 0.0:
        experts *= np.abs(plane).max() / np.abs(experts).max()
        own = np.flatnonzero(rows.finite)
        blank = np.full(len(own), np.nan)
        marks = (own, np.ones(len(own), np.bool_), np.full(len(own), -1), *experts.T, blank)
        joined = zip(table.items(), marks, strict=False)
        table |= {name: np.concatenate([column, mark]) for (name, column), mark in joined}
        table["widest"] = [*wide.points.tolist(), *([None] * len(own))]
    return {
        "layers": {
            "plane_share": float(wide.shares[:2].sum()),
            "widest_share": float(wide.shares.sum()),
            "near_same_choice": same,
            "near_same_choice_chance": chance,
            "choice_silhouette": silhouette(squared, first),
        },
        "sample": table,
    }


METRIC = Metric(
    name="sample",
    version=1,
    text=f"About {MOST_TOKENS} tokens and the experts in the plane of the two widest directions "
    "of the router inputs, and whether near tokens choose alike.",
    scope="router",
    needs=("input_sample",),
    columns={
        "layers": (
            Column("plane_share", "share of the variance of the inputs in their widest plane"),
            Column("widest_share", f"the same in their {MOST_DIRECTIONS} widest directions"),
            Column(
                "near_same_choice",
                f"share of the {NEIGHBOURS} nearest tokens with the same first choice",
            ),
            Column(
                "near_same_choice_chance",
                "the same for two tokens drawn at random: sum of squared shares of first choices",
            ),
            Column(
                "choice_silhouette",
                "mean silhouette of first choices: how much nearer tokens are to their own",
            ),
        ),
        "sample": (
            Column("expert", "first choice of the token, or the expert itself", "expert", "int"),
            Column("is_expert", "a row of the router, not a token", "", "bool"),
            Column(
                "domain_number", "domain of the token in the order of names; -1: none", "", "int"
            ),
            Column("x", "coordinate on the widest direction of the inputs", "input"),
            Column("y", "coordinate on the second", "input"),
            Column("margin", "k-th minus (k+1)-th selection score of the token", "selection score"),
            Column(
                "widest",
                f"coordinates of a token on the {MOST_DIRECTIONS} widest directions of the inputs",
                "input",
                "list",
            ),
        ),
    },
    finish=_finish,
    is_for_figures=True,
)
