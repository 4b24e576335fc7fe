"""What another arithmetic, or noise on the input, changes about the choice of some tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64


@dataclass(frozen=True, eq=False)
class Flip:
    """The choice of a variant beside that of the reference, token by token.

    ``differs``: the set is another one, exact ties going to the lowest expert; ``surely`` whichever
    way ties are broken, ``perhaps`` if some way gives another set. ``weight_moved``: share of the
    reference's routing weight on experts that leave. ``swaps``: (row, expert out, expert in).
    The others are None where nothing of the kind is known. ``reordered``: the same set in another
    order of scores. ``tied``: the last chosen expert and the first other one have equal scores,
    which they had not before. ``proved``: the set stays, by a bound on everything that is not known
    about the variant. ``predicted``: probability of a flip by the noise model, without emulation.
    """

    differs: Bool[np.ndarray, "tokens"]
    surely: Bool[np.ndarray, "tokens"]
    perhaps: Bool[np.ndarray, "tokens"]
    weight_moved: Float64[np.ndarray, "tokens"]
    swaps: Int32[np.ndarray, "swaps 3"]
    reordered: Bool[np.ndarray, "tokens"] | None = None
    tied: Bool[np.ndarray, "tokens"] | None = None
    proved: Bool[np.ndarray, "tokens"] | None = None
    predicted: Float64[np.ndarray, "tokens"] | None = None


@dataclass(frozen=True, eq=False)
class NoisyFlip:
    """How often noise on the router input flips a token.

    ``lower``, ``estimate`` and ``upper`` are probabilities by linear boundaries, None for curved
    ones. ``row`` are the tokens that were looked at more closely: ``flipped`` of ``draws`` noisy
    copies each had another set, and half of the paths of a diffusion with this noise per unit of
    time leave the cell between ``exit_early`` and ``exit_late`` (None for curved boundaries).
    """

    lower: Float64[np.ndarray, "tokens"] | None
    estimate: Float64[np.ndarray, "tokens"] | None
    upper: Float64[np.ndarray, "tokens"] | None
    row: Int64[np.ndarray, "looked_at"]
    flipped: Int64[np.ndarray, "looked_at"]
    draws: int
    exit_early: Float64[np.ndarray, "looked_at"] | None = None
    exit_late: Float64[np.ndarray, "looked_at"] | None = None
