"""Single CUDA kernels, on arrays of a device or, copied there and back, of the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from moegeom.core.router import GroupMask
from moegeom.core.shapes import Float32, Float64
from moegeom.geometry.boundary.linear import NO_BOUNDARY, RowDistances
from moegeom.kernels.cuda.cupy_device import first_device
from moegeom.kernels.cuda.device import Device, DeviceArray, Queue
from moegeom.kernels.cuda.program import SCORE_KINDS, TALLY_DEFINES, LaneLayout, Program, layout_of
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.table import load_kernels

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
    copies = [
        device.put(np.ascontiguousarray(v)) if isinstance(v, np.ndarray) else v for v in inputs
    ]
    made = [None if v is None else device.put(v) for v in outputs]
    queue = device.queue()
    block = _THREADS if layout is None else 32 * WARPS
    grid = -(-tokens // per_block)
    queue.launch(program, grid, block, (np.int64(tokens), *sizes, *copies, *made))
    queue.finish()
    return [None if v is None else device.get(v) for v in made]


# ------------------------------------------------------------------------------------------- tables
#: Inverse row distances for which float32 quotients of gaps keep their digits; see boundaries.cuh.
_LEAST, _LARGEST = 1e-6, 1e30


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Inverse distances, and rounded copies that a kernel compares first.

    ``rounded`` and ``smallest`` are inf for what is no boundary. Where ``fits_float32`` is false
    some distance is so small or large that float64 is used throughout.
    """

    inverse: Float64[np.ndarray, "experts experts"]
    rounded: Float32[np.ndarray, "experts experts"]
    smallest: Float32[np.ndarray, "experts"]
    fits_float32: bool


def device_rows(rows: RowDistances) -> DeviceRows:
    """The tables of a router; 0 (a permanent tie) is kept as it is."""
    boundaries = rows.inverse[(rows.inverse < NO_BOUNDARY) & (rows.inverse != 0.0)]
    with np.errstate(over="ignore"):  # NO_BOUNDARY becomes inf, which is meant
        rounded, smallest = rows.inverse.astype(np.float32), rows.smallest.astype(np.float32)
    fits = bool(((boundaries >= _LEAST) & (boundaries <= _LARGEST)).all())
    return DeviceRows(np.ascontiguousarray(rows.inverse), rounded, smallest, fits)


# ------------------------------------------------------------------------------------------- inputs
#: How inputs are kept on the device, and the number by which ``input_norm.cu`` knows it.
INPUT_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}

_NORM_WARPS = 8


def norm_program(kind: str) -> Program:
    """The kernel for inputs kept as ``kind``."""
    return Program("input_norm", ("input_norm.cu",), (("INPUT", str(INPUT_KINDS[kind])),))


def launch_input_norm(
    queue: Queue, kind: str, values: DeviceArray, tokens: int, norm: DeviceArray
) -> None:
    """Puts the lengths of the first ``tokens`` rows into ``norm``."""
    sizes = (np.int64(tokens), np.int64(values.shape[1]))
    grid = -(-tokens // _NORM_WARPS)
    queue.launch(norm_program(kind), grid, 32 * _NORM_WARPS, (*sizes, values, norm))


def input_norm(values: np.ndarray, device: Device | None = None) -> np.ndarray:
    """|y| of each token; float32 sums, done again in float64 where they leave its range."""
    on = device or first_device()
    norm = on.put(np.empty(len(values)))
    queue = on.queue()
    rows = on.put(np.ascontiguousarray(values.astype(np.float32)))
    launch_input_norm(queue, "float32", rows, len(values), norm)
    queue.finish()
    return on.get(norm)


# ------------------------------------------------------------------------------------------- choice
def selection_scores(
    logits: np.ndarray, score: str, bias: np.ndarray, device: Device | None = None
) -> np.ndarray:
    """``score(logit) + bias`` in float64."""
    layout = layout_of(logits.shape[1], 1)
    defines = (*layout.defines(WARPS), ("LOGIT_TYPE", c_type(logits)))
    program = Program(
        "selection_scores", ("lanes.cuh", "scores.cuh", "selection_scores.cu"), defines
    )
    sizes, outputs = [np.int64(SCORE_KINDS[score])], [np.empty(logits.shape)]
    (scores,) = run_part(device or first_device(), program, layout, [logits, bias], outputs, sizes)
    assert scores is not None
    return scores


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


# ---------------------------------------------------------------------------------------- distances
_DISTANCE_PARTS = ("lanes.cuh", "selection.cuh", "boundaries.cuh", "boundary_distance.cu")


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
    program = Program("boundary_distance", _DISTANCE_PARTS, defines)
    tables = device_rows(rows)
    inputs = [logits, chosen.astype(np.int32), margin]
    inputs += [tables.inverse, tables.rounded, tables.smallest, np.int64(tables.fits_float32)]
    pair = np.empty((len(logits), 2), np.int32) if wants_pair else None
    outputs = [np.empty(len(logits)), pair]
    distance, pair = run_part(device or first_device(), program, layout, inputs, outputs)
    assert distance is not None
    return distance, pair


# ------------------------------------------------------------------------------------------- counts
#: Tokens of a block of threads, by kernel: ``RUN`` and ``ROWS`` of counts.cu.
_TOKENS_OF_BLOCK = {"count_labels": 16 * _THREADS, "add_scores": 128}


def counts_program(entry: str, probability: str = "float") -> Program:
    """``entry`` of ``counts.cu``; the layout of its headers is not used."""
    defines = (*layout_of(1, 1).defines(1), *TALLY_DEFINES, ("PROBABILITY", probability))
    return Program(entry, ("lanes.cuh", "tally.cuh", "counts.cu"), defines)


def launch_count(
    queue: Queue, entry: str, counts: DeviceArray, values: DeviceArray, *labels: DeviceArray
) -> None:
    """Adds what ``entry`` of ``counts.cu`` counts; arrays lie on the device, one row a token."""
    if not len(labels[0]):
        return
    is_of_choice = entry in ("count_experts", "count_pairs")
    experts = (counts.shape[-1],) if is_of_choice or entry == "add_scores" else ()
    sizes = (len(labels[0]), *((values.shape[1],) if is_of_choice else ()), *experts)
    program = counts_program(entry, c_type(values))
    grid = -(-len(labels[0]) // _TOKENS_OF_BLOCK.get(entry, _THREADS))
    queue.launch(program, grid, _THREADS, (*map(np.int64, sizes), values, *labels, counts))


def _count(
    entry: str, counts: np.ndarray, *arrays: np.ndarray, device: Device | None = None
) -> None:
    """The same for arrays of the host."""
    on = device or first_device()
    queue, copies = on.queue(), [on.put(np.ascontiguousarray(array)) for array in (counts, *arrays)]
    launch_count(queue, entry, *copies)
    queue.finish()
    counts[...] = on.get(copies[0])


#: Adds to its first array what the others tell, on the device ``device`` or the first one.
Counting = Callable[..., None]

count_bins: Counting = functools.partial(_count, "count_bins")
count_experts: Counting = functools.partial(_count, "count_experts")
count_pairs: Counting = functools.partial(_count, "count_pairs")
add_scores: Counting = functools.partial(_count, "add_scores")


def kernels_in(queue: Queue) -> Kernels:
    """Kernels of arrays that lie on a device, to be called while ``queue`` is the current one.

    The definitions of the reference are programs over arrays of either machine; counts are CUDA.
    """
    names = ("count_bins", "count_experts", "count_pairs", "count_labels", "add_scores")
    counts = {name: functools.partial(_launch_in, queue, name) for name in names}
    return MappingProxyType({**load_kernels("reference"), **counts})


def _launch_in(queue: Queue, entry: str, counts: DeviceArray, *arrays: DeviceArray) -> None:
    launch_count(queue, entry, counts, *(np.ascontiguousarray(one, like=one) for one in arrays))
