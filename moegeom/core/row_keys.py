"""Names in the columns ``population`` and ``variant`` of the results."""

from __future__ import annotations

# --------------------------------------------------------------------------------------- population
#: Every token of a recording.
ALL = "all"

#: Tokens whose router input is far longer or shorter than usual, such as attention sinks.
OUTLIERS = "outliers"


def is_domain(population: str) -> bool:
    """True for the tokens of one domain."""
    return population.startswith("domain=")


def is_whole(population: str) -> bool:
    """True for everything that was measured together: all tokens, or all those of a prior."""
    return population == ALL or population.startswith("prior=")


# ------------------------------------------------------------------------------------------ variant
#: The routers as the checkpoint stores them, and their random router.
AS_STORED, RANDOM = "as_stored", "random"

#: What another run chose for the same tokens.
RUN_B = "run-b"

#: What the routers of a second checkpoint choose on the same inputs.
CHECKPOINT_B = "checkpoint-b"

#: Variants that are choices of somebody else, and no arithmetic of these routers.
SIDES = (RUN_B, CHECKPOINT_B)


def under_random(variant: str) -> str:
    """The random router under the same arithmetic as ``variant``."""
    return f"{RANDOM}+{variant}"


def is_random(variant: str) -> bool:
    """Whether a variant is a random router, under whatever arithmetic."""
    return variant == RANDOM or variant.startswith(f"{RANDOM}+")
