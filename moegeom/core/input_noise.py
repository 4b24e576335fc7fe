"""Noise on router inputs: how large it is taken to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputNoise:
    """Standard deviation per coordinate; ``is_relative``: in units of the rms of each input.

    Where it was measured: ``relative`` is the scale over the rms of all inputs, ``kappa`` the size
    of the difference in roundings to bfloat16, and ``systematic_share`` the share of its square
    that all tokens have in common. None for a number that was given.
    """

    scale: float
    is_relative: bool = True
    relative: float | None = None
    kappa: float | None = None
    systematic_share: float | None = None
