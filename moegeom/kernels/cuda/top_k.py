"""Chosen experts and margin."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.cuda.cupy_device import first_device
from moegeom.kernels.cuda.device import Device
from moegeom.kernels.cuda.layout import layout_of
from moegeom.kernels.cuda.part import WARPS, c_type, run_part
from moegeom.kernels.cuda.program import Program


def top_k(
    selection: np.ndarray, k: int, device: Device | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The k largest in descending order, ties to the lowest index, and the margin."""
    layout = layout_of(selection.shape[1], k)
    defines = (*layout.defines(WARPS), ("SCORE_TYPE", c_type(selection)))
    program = Program("top_k", ("lanes.cuh", "selection.cuh", "top_k.cu"), defines)
    outputs = [np.empty((len(selection), k), np.int32), np.empty(len(selection))]
    chosen, margin = run_part(device or first_device(), program, layout, [selection], outputs)
    assert chosen is not None and margin is not None
    return chosen, margin
