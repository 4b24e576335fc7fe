"""Group-limited selection."""

from __future__ import annotations

import numpy as np

from moegeom.core.router import GroupMask
from moegeom.kernels.cuda.cupy_device import first_device
from moegeom.kernels.cuda.device import Device
from moegeom.kernels.cuda.layout import layout_of
from moegeom.kernels.cuda.part import WARPS, run_part
from moegeom.kernels.cuda.program import Program


def group_mask(
    selection: np.ndarray, groups: GroupMask, device: Device | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Masked selection scores and the group margin."""
    layout = layout_of(selection.shape[1], 1)
    defines = (*layout.defines(WARPS), ("NUM_GROUPS", str(groups.num_groups)))
    program = Program("group_mask", ("lanes.cuh", "groups.cuh", "group_mask.cu"), defines)
    outputs = [np.empty(selection.shape), np.empty(len(selection))]
    is_sum = np.int64(groups.score == "top2_sum")
    sizes = [np.int64(groups.num_kept), is_sum, np.float64(groups.fill)]
    masked, margin = run_part(
        device or first_device(), program, layout, [selection], outputs, sizes
    )
    assert masked is not None and margin is not None
    return masked, margin
