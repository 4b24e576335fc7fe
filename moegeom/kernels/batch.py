"""A batch of tokens at one router: labels that reductions count by, and quantities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.shapes import Bool, Float, Float32, Float64, Int32, Int64


def on_host(array: Any) -> Any:
    """An array, wherever it lies, in memory of the host; waits for a device."""
    return array.get() if hasattr(array, "get") else array


# ------------------------------------------------------------------------ what other choices change
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


# ------------------------------------------------------------------------------------------ batches
#: Blocks that every reduction is kept in, for standard errors by leaving one out.
NUM_BLOCKS = 16

#: Tokens that share a block where no document is known.
RUN_TOKENS = 256


@dataclass(frozen=True, eq=False)
class Jumps:
    """What crossing the nearest boundary of each token does to the output of the experts.

    ``height`` is how far the output jumps there, ``relative`` the same over the length of the
    output at the token: nan where the boundary point is not known. ``chance`` is the probability
    that rounding the input to bfloat16 flips the token, 0 where nothing is known.
    """

    height: Float64[np.ndarray, "tokens"]
    relative: Float64[np.ndarray, "tokens"]
    chance: Float64[np.ndarray, "tokens"]
    pair: Int32[np.ndarray, "tokens 2"]


@dataclass(frozen=True, eq=False)
class Harm:
    """What flips of tokens that were made in the running model cost, as a recording has them."""

    kl: Float64[np.ndarray, "tokens"]
    kl_later: Float64[np.ndarray, "tokens"]
    kl_beside: Float64[np.ndarray, "tokens"]
    is_other_token: Bool[np.ndarray, "tokens"]


class TokenBatch:
    """Some tokens at one router; a quantity is None where it cannot be known.

    This is what reductions read. What is given is known; the engine's batch
    (``moegeom/engine/batch.py``) computes the rest when it is first asked for.

    ``chosen`` is in descending selection score; where tokens choose different numbers of experts,
    ``num_chosen`` of them, then -1. ``float_bound`` is how far two correct float32
    engines can put the selection scores apart; a token whose margin is not above it is ambiguous.
    ``logits`` are ``W y + b`` and ``mapped`` what scores are taken of: those behind the logit map,
    without a bias that only selects. ``noise_scale`` is the error, per coordinate, of rounding the
    input to bfloat16; ``direction`` the router input over its length, 0 for a zero input;
    ``weight_sum`` is the sum of weights that were divided by their sum, before any factor;
    ``selection`` holds the selection scores, masked groups at their fill, and ``scores`` the same
    without selection bias and mask; ``probability`` the scores of a token over their sum,
    ``entropy`` its entropy in nats and ``log_sum_exp`` that of the logits; ``angle`` is the angle,
    in radians, to the nearest direction before the norm with another chosen set;
    ``rounding_sigmas`` the distance to the nearest boundary in standard deviations of what rounding
    the input to bfloat16 does along it; ``distance_upper`` is ``distance`` where that is exact;
    where the largest logits do not decide it, they are the largest and the least value that these
    allow; ``flip`` says what the variant of the pass changes about the choice and ``noise`` what
    noise on the input does; ``jumps`` are those of a sample whose experts were read, ``harm`` is of
    tokens that were flipped; ``document``, ``position`` and ``token_id`` are -1 where a recording
    does not say.
    """

    token: Int64[np.ndarray, "tokens"]
    population: Int32[np.ndarray, "tokens"]
    block: Int32[np.ndarray, "tokens"]
    chosen: Int32[np.ndarray, "tokens k"]
    num_chosen: Int32[np.ndarray, "tokens"] | None = None
    margin: Float64[np.ndarray, "tokens"] | None = None
    group_margin: Float64[np.ndarray, "tokens"] | None = None
    distance: Float64[np.ndarray, "tokens"] | None = None
    distance_upper: Float64[np.ndarray, "tokens"] | None = None
    pair: Int32[np.ndarray, "tokens 2"] | None = None
    weights: Float64[np.ndarray, "tokens k"] | None = None
    weight_sum: Float64[np.ndarray, "tokens"] | None = None
    input_norm: Float64[np.ndarray, "tokens"] | None = None
    float_bound: Float64[np.ndarray, "tokens"] | None = None
    noise_scale: Float64[np.ndarray, "tokens"] | None = None
    matches_recording: Bool[np.ndarray, "tokens"] | None = None
    direction: Float64[np.ndarray, "tokens hidden"] | None = None
    logits: Float[np.ndarray, "tokens experts"] | None = None
    mapped: Float[np.ndarray, "tokens experts"] | None = None
    selection: Float[np.ndarray, "tokens experts"] | None = None
    scores: Float[np.ndarray, "tokens experts"] | None = None
    fill_decides: Bool[np.ndarray, "tokens"] | None = None
    probability: Float[np.ndarray, "tokens experts"] | None = None
    entropy: Float64[np.ndarray, "tokens"] | None = None
    log_sum_exp: Float64[np.ndarray, "tokens"] | None = None
    angle: Float64[np.ndarray, "tokens"] | None = None
    rounding_sigmas: Float64[np.ndarray, "tokens"] | None = None
    input: Float[np.ndarray, "tokens hidden"] | None = None
    document: Int64[np.ndarray, "tokens"] | None = None
    position: Int32[np.ndarray, "tokens"] | None = None
    token_id: Int32[np.ndarray, "tokens"] | None = None
    shared_output: Float32[np.ndarray, "tokens output"] | None = None
    routed_output: Float32[np.ndarray, "tokens output"] | None = None
    expert_output: Float32[np.ndarray, "tokens experts expert_width"] | None = None
    flip: Flip | None = None
    noise: NoisyFlip | None = None
    jumps: Jumps | None = None
    harm: Harm | None = None

    def __init__(self, **quantities: object) -> None:
        vars(self).update(quantities)

    def count_labels(self, num_populations: int, weights: np.ndarray | None = None) -> np.ndarray:
        """Tokens, or sums of integer ``weights`` below 2^53, by population and block; int64."""
        label = self.population * NUM_BLOCKS + self.block
        size = num_populations * NUM_BLOCKS
        counts = np.bincount(label, weights, size).astype(np.int64)
        return counts.reshape(num_populations, NUM_BLOCKS)

    def is_near_tie(self) -> Bool[np.ndarray, "tokens"]:
        """Whether a margin is not above the bound; without one, whether it is 0."""
        margin, bound = self.effective_margin, self.float_bound
        assert margin is not None
        return margin <= (0.0 if bound is None else bound)

    @property
    def effective_margin(self) -> Float64[np.ndarray, "tokens"] | None:
        """The smaller of margin and half the group margin, comparable with ``float_bound``.

        A group score sums two selection scores at most, so its error is twice theirs.
        """
        if self.margin is None or self.group_margin is None:
            return self.margin
        return np.minimum(self.margin, self.group_margin / 2.0)
