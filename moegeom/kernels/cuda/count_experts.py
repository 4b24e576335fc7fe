"""Counts by expert."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.cuda.counts_program import counts_program
from moegeom.kernels.cuda.cupy_device import first_device
from moegeom.kernels.cuda.device import Device
from moegeom.kernels.cuda.part import run_part


def count_experts(
    counts: np.ndarray,
    chosen: np.ndarray,
    population: np.ndarray,
    block: np.ndarray,
    device: Device | None = None,
) -> None:
    """Adds 1 at (population, block, expert) for each chosen slot; -1 is an empty slot."""
    sizes = [np.int64(chosen.shape[1]), np.int64(counts.shape[-1])]
    program = counts_program("count_experts")
    inputs = [chosen, population, block]
    (found,) = run_part(device or first_device(), program, None, inputs, [counts], sizes)
    counts[...] = found
