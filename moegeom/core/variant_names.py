"""Names in the variant column of the results."""

from __future__ import annotations

#: The routers as the checkpoint stores them, and their null.
AS_STORED, NULL = "as_stored", "null"

#: What another run chose for the same tokens.
OTHER = "other"

#: What the routers of a second checkpoint choose on the same inputs.
AGAINST = "against"

#: Variants that are choices of somebody else, and no arithmetic of these routers.
SIDES = (OTHER, AGAINST)


def under_null(variant: str) -> str:
    """The null under the same arithmetic as ``variant``."""
    return f"{NULL}+{variant}"


def is_null(variant: str) -> bool:
    """Whether a variant is a random router, under whatever arithmetic."""
    return variant == NULL or variant.startswith(f"{NULL}+")
