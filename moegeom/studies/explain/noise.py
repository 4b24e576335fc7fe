"""The noise on router inputs that switches tell of, and switches that noise cannot have made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from moegeom.engine.choice import chosen_by
from moegeom.engine.prepared import PreparedRouter
from moegeom.geometry.arithmetic.rounding import ROUNDING_RMS, UNIT_BFLOAT16
from moegeom.geometry.noise.calibration import noise_between
from moegeom.geometry.noise.upstream import upstream_noise
from moegeom.geometry.noise.wall_sigmas import wall_sigmas
from moegeom.studies.explain.record import FlipNoise
from moegeom.studies.explain.sides import Sides
from moegeom.tokens.stages import INPUT_STAGES

#: Nearest walls of a token that are looked at.
_WALLS = 4

#: Probability below which noise has not switched a token, and examples that are named.
_IMPOSSIBLE, _EXAMPLES = 1e-6, 3

#: Tokens whose inputs are compared, where both sides recorded them.
_MEASURED = 2048


@dataclass(frozen=True, eq=False)
class Nearest:
    """Distances to the nearest walls of tokens that are routed, over the rms of their input.

    Filled batch by batch; a curved rule has one lower bound for each token, and an unknown one no
    column. ``num_walls`` are all walls of a token.
    """

    distance: Float64[np.ndarray, "rows walls"]
    num_walls: int

    @staticmethod
    def of(prepared: PreparedRouter, num_rows: int) -> Nearest:
        """Nothing noted yet."""
        experts, k = prepared.router.num_experts, prepared.router.rule.top_k
        walls = k * (experts - k)
        columns = 0 if prepared.curved is None else 1
        if prepared.rows is not None:
            columns = min(walls, _WALLS)
        return Nearest(np.full((num_rows, columns), np.nan), walls)

    def note(
        self,
        there: slice,
        prepared: PreparedRouter,
        sides: Sides,
        logits: Float[np.ndarray, "tokens experts"],
        norm: Float64[np.ndarray, "tokens"] | None,
    ) -> None:
        """Tokens with these logits; nothing where the lengths of their inputs are not known."""
        columns = self.distance.shape[1]
        if not columns or norm is None:
            return
        chosen = chosen_by(prepared, logits, sides.kernels)
        if prepared.rows is not None:
            found = wall_sigmas(logits, chosen, prepared.rows)
            found = np.partition(found, columns - 1, axis=1)[:, :columns]
        else:
            lower, _, _ = sides.kernels["curved_distance"](logits, chosen, prepared.curved)
            found = lower[:, None]
        rms = norm / np.sqrt(prepared.router.hidden_size)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.distance[there] = found / rms[:, None]


def flip_noise(
    nearest: Nearest,
    sides: Sides,
    prepared: PreparedRouter,
    rows: Int64[np.ndarray, "tokens"],
    agrees: Bool[np.ndarray, "tokens"],
    is_clean: Bool[np.ndarray, "tokens"],
) -> FlipNoise | None:
    """Noise that fits what switched for the first time at this router; None without distances."""
    if not nearest.distance.shape[1] or sides.source.facts.stage not in INPUT_STAGES:
        return None
    fits = is_clean & ~np.isnan(nearest.distance).any(axis=1)
    switched = ~agrees
    found = upstream_noise(nearest.distance[fits], switched[fits])
    if np.isnan(found.scale):
        return None
    least = nearest.distance.min(axis=1)
    # the nearest wall, as often as there are walls, bounds the chance for all of them
    chance = nearest.num_walls * found.chance(least[:, None])
    beyond = np.flatnonzero(fits & switched & (chance < _IMPOSSIBLE) & (least > 0.0))
    # the farthest ones are the clearest
    named = rows[beyond[np.argsort(-least[beyond])][:_EXAMPLES]]
    examples = tuple(
        (int(sides.columns.document[row]), int(sides.columns.position[row])) for row in named
    )
    return FlipNoise(
        scale=found.scale,
        spread=found.spread,
        roundings=found.scale / (ROUNDING_RMS * UNIT_BFLOAT16),
        observed=found.observed,
        expected=found.expected,
        expected_error=found.expected_error,
        num_beyond=len(beyond) if found.excess else 0,
        examples=examples if found.excess else (),
        measured=_measured(sides, prepared, rows),
    )


def _measured(sides: Sides, prepared: PreparedRouter, rows: np.ndarray) -> float | None:
    """Rms difference of the inputs over their rms, where both sides recorded them."""
    if not sides.has_other_inputs:
        return None
    rows = rows[:_MEASURED]
    mine = [batch.values for batch in sides.batches(prepared, rows)]
    a = np.concatenate([values for values in mine if values is not None])
    found = noise_between(a, sides.other_values(prepared.router, rows))
    size = float(np.sqrt((a.astype(np.float64) ** 2).mean()))
    return np.sqrt(2.0) * found.scale / size if size else None
