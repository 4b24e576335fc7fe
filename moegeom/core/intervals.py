"""Ranges from standard errors that come from few blocks of documents."""

from __future__ import annotations

#: Level of every range that is printed.
LEVEL = 0.95


def range_text(
    value: float, error: float, num_blocks: int | None, digits: int, least: float = 0.0
) -> str:
    """``0.21-0.34``: the 95 % range of a figure that is not below ``least``."""
    half = half_width(error, num_blocks)
    return f"{max(least, value - half):.{digits}f}-{value + half:.{digits}f}"


def half_width(error: float, num_blocks: int | None) -> float:
    """Half the width of the 95 % range, t x error, t Student's quantile for blocks - 1.

    With 16 blocks t is 2.13: the factor 1.96 of many blocks would hold in 93 of 100 cases only. It
    is used where the number of blocks is not known. Oracle in tests: scipy.stats.t.
    """
    from scipy.special import stdtrit

    freedom = (num_blocks or 0) - 1
    probability = 0.5 + LEVEL / 2.0
    return error * float(stdtrit(freedom if freedom > 0 else 1e9, probability))
