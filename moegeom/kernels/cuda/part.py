"""Running one kernel on arrays of the host: to the device, through the kernel, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moegeom.kernels.cuda.device import Device
from moegeom.kernels.cuda.layout import LaneLayout
from moegeom.kernels.cuda.program import Program

#: Threads of a block in kernels that give a token to a thread.
_THREADS = 256

#: Warps of a block in kernels that give a token to several lanes.
WARPS = 4


def c_type(array: np.ndarray) -> str:
    """What a kernel calls numbers of this dtype, float32 or float64."""
    return "float" if array.dtype == np.float32 else "double"


def run_part(
    device: Device,
    program: Program,
    layout: LaneLayout | None,
    inputs: Sequence[Any],
    outputs: Sequence[np.ndarray | None],
    sizes: Sequence[np.generic] = (),
) -> list[np.ndarray | None]:
    """Calls ``program(tokens, *sizes, *inputs, *outputs)`` and returns the outputs afterwards.

    Arrays are copied to the device and outputs back; the first input has one row a token. With
    a ``layout`` its lanes work on a token, else one thread does.
    """
    tokens = len(inputs[0])
    if not tokens:
        return list(outputs)
    per_block = _THREADS if layout is None else WARPS * layout.tokens_in_warp
    given = [
        device.put(np.ascontiguousarray(v)) if isinstance(v, np.ndarray) else v for v in inputs
    ]
    made = [None if v is None else device.put(v) for v in outputs]
    queue = device.queue()
    block = _THREADS if layout is None else 32 * WARPS
    queue.launch(program, -(-tokens // per_block), block, (np.int64(tokens), *sizes, *given, *made))
    queue.finish()
    return [None if v is None else device.get(v) for v in made]
