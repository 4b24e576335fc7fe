"""Distance to the boundary of an affine cell."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.boundary.linear import RowDistances
from moegeom.kernels.cuda.cupy_device import first_device
from moegeom.kernels.cuda.device import Device
from moegeom.kernels.cuda.device_rows import device_rows
from moegeom.kernels.cuda.layout import layout_of
from moegeom.kernels.cuda.part import WARPS, c_type, run_part
from moegeom.kernels.cuda.program import Program

_PARTS = ("lanes.cuh", "selection.cuh", "boundaries.cuh", "boundary_distance.cu")


def boundary_distance(
    logits: np.ndarray,
    chosen: np.ndarray,
    margin: np.ndarray,
    rows: RowDistances,
    wants_pair: bool = True,
    device: Device | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Distance and, if wanted, nearest boundary (expert out, expert in)."""
    layout = layout_of(logits.shape[1], chosen.shape[1])
    defines = (*layout.defines(WARPS), ("LOGIT_TYPE", c_type(logits)))
    program = Program("boundary_distance", _PARTS, defines)
    tables = device_rows(rows)
    inputs = [logits, chosen.astype(np.int32), margin]
    inputs += [tables.inverse, tables.rounded, tables.smallest, np.int64(tables.fits_float32)]
    pair = np.empty((len(logits), 2), np.int32) if wants_pair else None
    outputs = [np.empty(len(logits)), pair]
    distance, pair = run_part(device or first_device(), program, layout, inputs, outputs)
    assert distance is not None
    return distance, pair
