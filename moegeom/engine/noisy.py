"""Noise on router inputs: bounds and an estimate for every token, a closer look at some."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32, Int64

from moegeom.core.input_noise import InputNoise
from moegeom.core.tokens import TILE
from moegeom.engine.prepared import PreparedRouter
from moegeom.geometry.boundary.linear import RowDistances
from moegeom.geometry.noise.noise_switch import simulate_switch, switch_bounds
from moegeom.geometry.noise.wall_sigmas import wall_sigmas
from moegeom.geometry.paths.exit_time import cell_quantiles
from moegeom.kernels.switch import NoisySwitch

#: Tokens of each tile that are simulated, and how often.
LOOKED_AT, DRAWS = 256, 8

#: Exit times are those of half of the paths.
_HALF = 0.5


def noisy_switch(
    noise: InputNoise,
    prepared: PreparedRouter,
    values: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    norm: Float64[np.ndarray, "tokens"],
    token: Int64[np.ndarray, "tokens"],
    seed: int,
) -> NoisySwitch:
    """What the noise does to some tokens; random numbers depend on seed, router and tile alone."""
    router = prepared.router
    scale = np.full(len(norm), noise.scale)
    if noise.is_relative:
        scale = noise.scale * norm / np.sqrt(router.hidden_size)
    rows, switched = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for tile in np.unique(token // TILE):
        first = np.flatnonzero(token // TILE == tile)[:LOOKED_AT]
        generator = np.random.Generator(
            np.random.PCG64([seed, router.layer, *router.name.encode(), int(tile)])
        )
        found = simulate_switch(
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
        switched.append(found.switched)
    row = np.concatenate(rows)
    if prepared.rows is None:
        return NoisySwitch(None, None, None, row, np.concatenate(switched), DRAWS)
    bounds = switch_bounds(logits, chosen, prepared.rows, scale)
    early, late = _exit_times(logits[row], chosen[row], prepared.rows, scale[row])
    return NoisySwitch(
        bounds.lower,
        bounds.estimate,
        bounds.upper,
        row,
        np.concatenate(switched),
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
    sigmas = wall_sigmas(logits[moving], chosen[moving], rows) / scale[moving, None]
    early[moving], late[moving] = cell_quantiles(sigmas, _HALF)
    return early, late
