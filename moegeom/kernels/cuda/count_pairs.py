"""Counts by pair of experts."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.cuda.counts_program import counts_program
from moegeom.kernels.cuda.cupy_device import first_device
from moegeom.kernels.cuda.device import Device
from moegeom.kernels.cuda.part import run_part


def count_pairs(
    counts: np.ndarray, chosen: np.ndarray, block: np.ndarray, device: Device | None = None
) -> None:
    """Adds 1 at (block, i, j) for each two slots of a token with i <= j; -1 is an empty slot."""
    sizes = [np.int64(chosen.shape[1]), np.int64(counts.shape[-1])]
    program = counts_program("count_pairs")
    (found,) = run_part(device or first_device(), program, None, [chosen, block], [counts], sizes)
    counts[...] = found
