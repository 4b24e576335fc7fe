"""Shares as people read them."""

from __future__ import annotations

import math


def percent(share: float | None) -> str:
    """Two significant figures below ten per cent; ``0`` is said only where nothing switched."""
    if share is None:
        return "-"
    if share == 0.0:
        return "0 %"
    value = 100.0 * share
    if value < 0.005:
        return "<.01 %"
    return (
        f"{value:.2f} %" if value < 1.0 else f"{value:.1f} %" if value < 99.95 else f"{value:.0f} %"
    )


def certain(share: float | None) -> str:
    """A share that is proved: rounded down, so that 100 % means all of them."""
    if share is None:
        return "-"
    value = math.floor(1e4 * share) / 100.0
    return f"{value:.0f} %" if value == 100.0 else f"{value:.4g} %"
