"""Which figures may be compared: the lists behind ``figures``, as data."""

from __future__ import annotations

from fnmatch import fnmatchcase

from moegeom.core.tokens import TILE

#: Figures whose expected value does not depend on the number of tokens: means over tokens or over
#: pairs of tokens, quantiles with many tokens below them, and what was corrected for it. All others
#: do: the largest of many counts, entropies and squares of counts, shares of sets seen before and
#: the length of a mean move with T even when nothing else does, so a figure that is not listed is
#: compared at equal T only.
FREE_OF_T: tuple[str, ...] = (
    "ambiguous_share",
    "bf16_switch_share*",
    "boundary_distance*_p01",
    "boundary_distance*_p50",
    "chosen_entropy_*",
    "chosen_score_share",
    "distance_exact_share",
    "first_choice_repeat",
    "load_cv_squared_debiased",
    "log_sum_exp_mean",
    "margin_p01",
    "margin_p50",
    "mean_pairwise_cosine",
    "neighbour_overlap",
    "neighbour_same_set",
    "noise_sigmas_p01",
    "noise_sigmas_p50",
    "overlap_output",
    "participation_ratio",
    "pre_norm_angle_p01",
    "pre_norm_angle_p50",
    "rounding_sigmas_p01",
    "rounding_sigmas_p50",
    "routing_entropy_*",
    "same_token_overlap",
    "z_loss",
)

#: Figures that are another one times, or plus, a number that does not change for one router: the
#: same test twice would only cost power.
SAME_TEST: dict[str, str] = {
    "boundary_distance_rms_p50": "boundary_distance_p50",
    "chosen_entropy_normalised": "chosen_entropy_nats",
    "diversity": "effective_experts",
    "kl_to_uniform_nats": "load_entropy_normalised",
    "load_balancing_loss_hf": "load_balancing_loss_megatron",
    "load_cv_ddof1": "load_cv_ddof0",
    "load_entropy_nats": "load_entropy_normalised",
    "load_imbalance_global": "max_vio_global",
    "routing_entropy_nats": "routing_entropy_normalised",
}

#: Quantiles with few tokens below them have no standard error by leaving out documents: the share,
#: by the end of the name.
QUANTILES: dict[str, float] = {"_p001": 0.001, "_p01": 0.01}

#: Tokens that must lie below a quantile on both sides.
LEAST_BELOW = 100

#: Figures of larger units than tokens, and the tokens that give enough of them: a tile belongs to
#: one block, so with two tiles the error is that of two numbers and not of sixteen blocks.
LEAST_TOKENS: dict[str, int] = {"max_vio_tile_mean": 64 * TILE}


def is_free_of_t(column: str) -> bool:
    """True for a figure that may be compared between different numbers of tokens."""
    return any(fnmatchcase(column, pattern) for pattern in FREE_OF_T)


def least_tokens(column: str) -> float:
    """Tokens that both sides must have for the figure to be tested."""
    share = next((s for end, s in QUANTILES.items() if column.endswith(end)), None)
    return LEAST_TOKENS.get(column, 0) if share is None else LEAST_BELOW / share
