"""Names in the variant column of the results."""

from __future__ import annotations

#: The routers as the checkpoint stores them, and their random router.
AS_STORED, RANDOM = "as_stored", "random"

#: What another run chose for the same tokens.
OTHER = "run_b"

#: What the routers of a second checkpoint choose on the same inputs.
AGAINST = "checkpoint_b"

#: Variants that are choices of somebody else, and no arithmetic of these routers.
SIDES = (OTHER, AGAINST)


def under_random(variant: str) -> str:
    """The random router under the same arithmetic as ``variant``."""
    return f"{RANDOM}+{variant}"


def is_random(variant: str) -> bool:
    """Whether a variant is a random router, under whatever arithmetic."""
    return variant == RANDOM or variant.startswith(f"{RANDOM}+")
