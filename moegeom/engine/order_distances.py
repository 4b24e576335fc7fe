"""Distances to ties of more than two experts, for a few tokens of every tile."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int64

from moegeom.core.tokens import TILE
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.engine.prepared import PreparedRouter
from moegeom.geometry.boundary.order_distance import order_distance
from moegeom.kernels.quantities import ORDERS, OrderDistances

#: Tokens that are looked at, times experts: a search takes about as long as there are experts, so
#: that every router takes a second or two.
_TOKENS_TIMES_EXPERTS = 4096
_LEAST_TOKENS, _MOST_TOKENS = 8, 64

#: Steps of one search; nearly all end by themselves after two for each expert.
_MOST_NODES = 1000


def order_distances(
    prepared: PreparedRouter,
    logits: Float[np.ndarray, "tokens experts"],
    token: Int64[np.ndarray, "tokens"],
    num_tokens: int,
    seed: int,
) -> OrderDistances:
    """Brackets for some tokens of a stream of ``num_tokens``, drawn from seed and tile alone.

    The router is affine and was prepared with coordinates.
    """
    rows, k = prepared.coordinates, prepared.router.rule.top_k
    assert rows is not None, "prepared with coordinates where these distances are wanted"
    looked_at = _rows_looked_at(token, tokens_of_tile(logits.shape[1], num_tokens), seed)
    found = [
        [order_distance(of_token, rows, k, order, _MOST_NODES) for order in ORDERS]
        for of_token in logits[looked_at].astype(np.float64)
    ]
    shape = (len(looked_at), len(ORDERS))
    return OrderDistances(
        looked_at,
        np.array([[bracket.lower for bracket in of_token] for of_token in found]).reshape(shape),
        np.array([[bracket.upper for bracket in of_token] for of_token in found]).reshape(shape),
    )


def tokens_of_tile(num_experts: int, num_tokens: int) -> int:
    """How many tokens of each tile are looked at; a stream has the same number in all at most."""
    wanted = min(max(_TOKENS_TIMES_EXPERTS // num_experts, _LEAST_TOKENS), _MOST_TOKENS)
    tiles = min(-(-num_tokens // TILE), SMALL_SAMPLE_TOKENS // TILE)
    return -(-wanted // tiles)


def _rows_looked_at(
    token: Int64[np.ndarray, "tokens"], of_tile: int, seed: int
) -> Int64[np.ndarray, "looked_at"]:
    """Rows of ``of_tile`` tokens of each tile, or of all that it holds; ascending."""
    rows = [np.empty(0, np.int64)]
    for tile in np.unique(token // TILE):
        held = np.flatnonzero(token // TILE == tile)
        generator = np.random.Generator(np.random.PCG64([seed, int(tile)]))
        drawn = generator.choice(len(held), min(of_tile, len(held)), replace=False)
        rows.append(held[np.sort(drawn)])
    return np.concatenate(rows)
