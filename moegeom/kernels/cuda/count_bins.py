"""Histograms over the bits of a value."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.cuda.counts_program import counts_program
from moegeom.kernels.cuda.cupy_device import first_device
from moegeom.kernels.cuda.device import Device
from moegeom.kernels.cuda.part import run_part


def count_bins(
    histogram: np.ndarray,
    values: np.ndarray,
    population: np.ndarray,
    block: np.ndarray,
    device: Device | None = None,
) -> None:
    """Adds 1 at (population, block, bin of the value)."""
    inputs = [values, population, block]
    program = counts_program("count_bins")
    (counts,) = run_part(device or first_device(), program, None, inputs, [histogram])
    histogram[...] = counts
