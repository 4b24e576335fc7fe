"""What is looked at for some tokens of each tile alone: ties of several experts, and noise."""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float, Float64, Int32, Int64
from moegeom.core.tokens import TILE, InputNoise
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS, by_tile
from moegeom.engine.prepared import PreparedRouter
from moegeom.geometry.boundary.linear import RowDistances
from moegeom.geometry.boundary.orders import (
    free_logit_distance,
    logit_distance,
    order_distance,
    rows_apart,
)
from moegeom.geometry.noise import boundary_sigmas, flip_bounds, simulate_flip
from moegeom.geometry.paths import cell_quantiles
from moegeom.kernels.batch import ORDERS, NoisyFlip, OrderDistances

#: Tokens that are looked at, times experts: a search takes about as long as there are experts, so
#: that every router takes a second or two.
_TOKENS_TIMES_EXPERTS = 4096
_LEAST_TOKENS, _MOST_TOKENS = 8, 64

#: Tokens of a tile at which dependent rows are looked at.
_STRETCHED = 8

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
    apart = rows_apart(rows)
    brackets = [
        [order_distance(of_token, rows, k, order, _MOST_NODES, apart) for order in ORDERS]
        for of_token in logits[looked_at].astype(np.float64)
    ]
    shape = (len(looked_at), len(ORDERS))
    return OrderDistances(
        looked_at,
        np.array([[bracket.lower for bracket in of_token] for of_token in brackets]).reshape(shape),
        np.array([[bracket.upper for bracket in of_token] for of_token in brackets]).reshape(shape),
        _stretches(prepared, logits[looked_at].astype(np.float64)),
    )


def _stretches(
    prepared: PreparedRouter, logits: Float64[np.ndarray, "tokens experts"]
) -> Float64[np.ndarray, "tokens"]:
    """How far logits must move to the boundary, over half the margin.

    nan for independent rows, and beyond the first few tokens: each is a tree of linear programs.
    """
    rows, k = prepared.coordinates, prepared.router.rule.top_k
    # less their mean, independent rows span one dimension less than there are experts
    if rows is None or k >= len(rows) or np.linalg.matrix_rank(rows) >= len(rows) - 1:
        return np.full(len(logits), np.nan)
    own = np.linalg.qr(prepared.router.weight.astype(np.float64).T)[1].T
    distances = np.full(len(logits), np.nan)
    distances[:_STRETCHED] = [
        logit_distance(one, own, k, 1, _MOST_NODES).upper for one in logits[:_STRETCHED]
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        return distances / free_logit_distance(logits, k, 1)


def tokens_of_tile(num_experts: int, num_tokens: int) -> int:
    """How many tokens of each tile are looked at; a stream has the same number in all at most."""
    total = min(max(_TOKENS_TIMES_EXPERTS // num_experts, _LEAST_TOKENS), _MOST_TOKENS)
    tiles = min(-(-num_tokens // TILE), SMALL_SAMPLE_TOKENS // TILE)
    return -(-total // tiles)


def _rows_looked_at(
    token: Int64[np.ndarray, "tokens"], of_tile: int, seed: int
) -> Int64[np.ndarray, "looked_at"]:
    """Rows of ``of_tile`` tokens of each tile, or of all that it holds; ascending."""
    rows = [np.empty(0, np.int64)]
    for start, of_this in by_tile(token):
        generator = np.random.Generator(np.random.PCG64([seed, start // TILE]))
        places = generator.choice(len(of_this), min(of_tile, len(of_this)), replace=False)
        rows.append(of_this[np.sort(places)])
    return np.concatenate(rows)


#: Tokens of each tile that are simulated, and how often.
LOOKED_AT, DRAWS = 256, 8

#: Exit times are those of half of the paths.
_HALF = 0.5


def noisy_flip(
    noise: InputNoise,
    prepared: PreparedRouter,
    values: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    norm: Float64[np.ndarray, "tokens"],
    token: Int64[np.ndarray, "tokens"],
    seed: int,
) -> NoisyFlip:
    """What the noise does to some tokens; random numbers depend on seed, router and tile alone."""
    router = prepared.router
    scale = np.full(len(norm), noise.scale)
    if noise.is_relative:
        scale = noise.scale * norm / np.sqrt(router.hidden_size)
    rows, flipped = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start, of_this in by_tile(token):
        first = of_this[:LOOKED_AT]
        generator = np.random.Generator(
            np.random.PCG64([seed, router.layer, *router.name.encode(), start // TILE])
        )
        simulation = simulate_flip(
            values[first],
            router.weight,
            router.rule,
            scale[first, None],
            DRAWS,
            generator,
            router.logit_bias,
            router.selection_bias,
        )
        rows.append(first)
        flipped.append(simulation)
    row = np.concatenate(rows)
    if prepared.rows is None:
        return NoisyFlip(None, None, None, row, np.concatenate(flipped), DRAWS)
    bounds = flip_bounds(logits, chosen, prepared.rows, scale)
    early, late = _exit_times(logits[row], chosen[row], prepared.rows, scale[row])
    return NoisyFlip(
        bounds.lower,
        bounds.estimate,
        bounds.upper,
        row,
        np.concatenate(flipped),
        DRAWS,
        early,
        late,
    )


def _exit_times(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: RowDistances,
    scale: Float64[np.ndarray, "tokens"],
) -> tuple[Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"]]:
    """Bounds on the time by which half of the paths have left; no noise is never."""
    early, late = np.full((2, len(logits)), np.inf)
    moving = np.flatnonzero(scale > 0.0)
    sigmas = boundary_sigmas(logits[moving], chosen[moving], rows) / scale[moving, None]
    early[moving], late[moving] = cell_quantiles(sigmas, _HALF)
    return early, late
