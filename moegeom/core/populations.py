"""Which tokens a row of the results is about: the column ``population``."""

from __future__ import annotations

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
