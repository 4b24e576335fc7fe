"""Which reductions mean something where: on a prior, of the null, of a variant."""

from __future__ import annotations

#: Why a synthetic prior gives some metrics no value.
PRIOR = "a synthetic prior says where walls are, not which tokens come (geometry only)"

#: Reductions that mean something on a synthetic prior.
GEOMETRY = frozenset(
    {
        "token_counts",
        "ambiguity",
        "margin_histogram",
        "distance_histogram",
        "bracket_histogram",
        "wall_pairs",
        "bf16_switch",
        "orders",
        "relative_distance_histogram",
        "noise_sigmas_histogram",
        "rounding_sigmas_histogram",
        "rounding_switch",
        "angle_histogram",
    }
)


#: Reductions that say nothing about a random router, too much, or cost too much.
NOT_FOR_NULL = (
    "agreement",
    "block_outputs",
    "coalitions",
    "directions",
    "document_counts",
    "input_sample",
    "order_distances",
    "output_cosines",
    "token_sample",
    "wall_pairs",
)

#: Scopes of metrics of one choice, as the router is stored.
ONE_CHOICE = ("router", "noise", "exposure")

#: Reductions of a variant, and those that are kept of the null's.
SWITCHES: tuple[str, ...] = (
    "token_counts",
    "switches",
    "weight_moved_histogram",
    "traded_pairs",
    "switch_bits",
    "tightness_histogram",
    "switched_tightness_histogram",
)
SWITCHES_OF_NULL: tuple[str, ...] = ("token_counts", "switches", "switch_bits")
