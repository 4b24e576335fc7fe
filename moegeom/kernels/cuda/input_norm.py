"""Euclidean norm of router inputs."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.cuda.cupy_device import first_device
from moegeom.kernels.cuda.device import Device, DeviceArray, Queue
from moegeom.kernels.cuda.program import Program

#: How inputs are kept on the device, and the number by which ``input_norm.cu`` knows it.
INPUT_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}

_WARPS = 8


def norm_program(kind: str) -> Program:
    """The kernel for inputs kept as ``kind``."""
    return Program("input_norm", ("input_norm.cu",), (("INPUT", str(INPUT_KINDS[kind])),))


def launch_input_norm(
    queue: Queue, kind: str, values: DeviceArray, tokens: int, norm: DeviceArray
) -> None:
    """Puts the lengths of the first ``tokens`` rows into ``norm``."""
    sizes = (np.int64(tokens), np.int64(values.shape[1]))
    queue.launch(norm_program(kind), -(-tokens // _WARPS), 32 * _WARPS, (*sizes, values, norm))


def input_norm(values: np.ndarray, device: Device | None = None) -> np.ndarray:
    """|y| of each token; float32 sums, done again in float64 where they leave its range."""
    on = device or first_device()
    found = on.put(np.empty(len(values)))
    queue = on.queue()
    given = on.put(np.ascontiguousarray(values.astype(np.float32)))
    launch_input_norm(queue, "float32", given, len(values), found)
    queue.finish()
    return on.get(found)
