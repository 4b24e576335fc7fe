"""A router on a device: its rows and tables, and the way from a batch of inputs to counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float32, UInt16
from moegeom.engine.loop import extent_of
from moegeom.engine.task import OUTLIER_FACTOR, Task
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16, UNIT_FLOAT32, engine_error
from moegeom.geometry.selection import LARGEST_SLOPE
from moegeom.kernels.cuda.device import Device, DeviceArray, Queue
from moegeom.kernels.cuda.parts import device_rows, launch_input_norm
from moegeom.kernels.cuda.route import (
    ON_DEVICE,
    RouteCounters,
    RouteNumbers,
    RouteOutputs,
    RouteRule,
    RouteTables,
    launch_route,
)
from moegeom.kernels.reduction import REDUCTIONS, State

#: Quantities that need the length of an input.
_OF_NORM = frozenset({"input_norm", "float_bound", "noise_scale"})


#: What a device knows of each token, or makes of what it knows.
QUANTITIES = frozenset(
    {
        *("chosen", "margin", "group_margin", "last_score", "fill_decides", "weights"),
        *("weight_sum",),
        *("distance", "distance_upper", "pair", "noise_scale", "float_bound"),
        *("input", "input_norm", "matches_recording", "document", "position"),
        *("probability", "entropy", "log_sum_exp"),
    }
)

#: Stages of recordings that a device routes.
DEVICE_STAGES = ("router_input", "logits")


def refusal(task: Task) -> str:
    """Why this task stays on the processor; empty where a device can do it."""
    router, stage = task.prepared.router, task.source.facts.stage
    if task.compares or task.noise is not None:
        return "choices are compared under another arithmetic, router or noise"
    if router.rule.num_chosen is None:
        return "tokens choose different numbers of experts"
    if stage not in DEVICE_STAGES:
        return f"the recording holds {stage.replace('_', ' ')}"
    if router.has_cosine_logits:
        return "logits are divided by the length of a projected input"
    if router.rule.logit_map is not None:
        return "logits go through a map before they are scored"
    if not router.rule.is_affine and "distance" in task.needs:
        return "distances to curved or grouped boundaries are found there"
    if router.weight.dtype != np.float32:
        return "rows are stored in float64"
    others = [n for n in task.reductions if not QUANTITIES.issuperset(REDUCTIONS[n].needs)]
    if others:
        return f"{', '.join(others)} look at what a device does not know of a token"
    return _rule(task, 1).refusal


def refuse(task: Task) -> None:
    """Raises UsageError with the reason for a task that devices do not do."""
    if reason := refusal(task):
        name = task.prepared.router.name
        raise UsageError(f"Router {name} is not routed on a device: {reason}.")


def _rule(task: Task, terms: int) -> RouteRule:
    rule = task.prepared.router.rule
    return RouteRule(
        task.prepared.router.num_experts,
        rule.top_k,
        rule.score,
        rule.is_affine,
        _logit_bias(task) is not None,
        rule.groups,
        terms,
    )


def _logit_bias(task: Task) -> np.ndarray | None:
    """What is added to the product; recorded logits lack only a bias that selects."""
    router = task.prepared.router
    if task.source.facts.stage == "logits":
        return router.selection_bias if router.rule.is_affine else None
    return task.prepared.logit_bias


@dataclass(frozen=True, eq=False)
class DeviceRouter:
    """The arrays of one router on one device.

    ``rows`` are the terms of its rows, one below the other, None for recorded logits; ``kind`` is
    how inputs are kept: ``bfloat16`` or ``float32``.
    """

    rule: RouteRule
    kind: str
    rows: DeviceArray | None
    tables: RouteTables
    needs_norm: bool

    @property
    def is_direct(self) -> bool:
        """Whether the product's numbers are logits, and nothing is added to them."""
        is_sum = self.rule.terms > 1 or self.rule.has_logit_bias
        return self.rows is not None and not is_sum

    @property
    def logit_columns(self) -> int:
        return self.rule.terms * self.rule.num_experts


def device_router(task: Task, device: Device, kind: str) -> DeviceRouter:
    """Moves a router to a device; ``kind`` is that of the inputs."""
    prepared, bias = task.prepared, _logit_bias(task)
    rows = None
    if task.source.facts.stage == "router_input":
        weight = prepared.router.weight
        rows = bf16_terms(weight) if kind == "bfloat16" else [weight]
    distances = prepared.rows if "distance" in task.needs else None
    boundaries = None if distances is None else device_rows(distances)
    fits = boundaries is not None and boundaries.fits_float32
    tables = RouteTables(
        logit_bias=None if bias is None else device.put(bias.astype(np.float32)),
        selection_bias=device.put(prepared.selection_bias),
        inverse=None if boundaries is None else device.put(boundaries.inverse),
        rounded=None if boundaries is None else device.put(boundaries.rounded),
        smallest=None if boundaries is None else device.put(boundaries.smallest),
        number=device.put(_numbers(task, fits).array()),
    )
    return DeviceRouter(
        rule=_rule(task, 1 if rows is None else len(rows)),
        kind=kind,
        rows=None if rows is None else device.put(np.concatenate(rows)),
        tables=tables,
        needs_norm=rows is not None
        and (task.typical_norm is not None or not _OF_NORM.isdisjoint(task.needs)),
    )


def _numbers(task: Task, fits_float32: bool) -> RouteNumbers:
    prepared, score = task.prepared, task.prepared.router.rule.score
    two_gamma, underflow = engine_error(prepared.num_terms)
    return RouteNumbers(
        typical_norm=task.typical_norm or 0.0,
        outlier_factor=OUTLIER_FACTOR,
        two_gamma=two_gamma,
        underflow=underflow,
        longest_row=prepared.longest_row,
        largest_bias=prepared.largest_bias,
        noise_factor=ROUNDING_RMS * UNIT_BFLOAT16,
        root_hidden=float(np.sqrt(prepared.router.hidden_size)),
        slope=LARGEST_SLOPE[score],
        unit=8.0 * UNIT_FLOAT32,
        largest_selection_bias=float(np.abs(prepared.selection_bias).max()),
        outliers=float(task.populations.outliers),
        fits_float32=float(fits_float32),
        unlabelled=float(task.populations.unlabelled),
    )


def kept_on_device(task: Task) -> tuple[str, ...]:
    """Of the task's reductions those whose counters the device keeps."""
    return tuple(name for name in ON_DEVICE if name in task.reductions)


def start_counters(task: Task, device: Device, names: Collection[str]) -> dict[str, DeviceArray]:
    """Counters of zeros for the reductions ``names``."""
    extent = extent_of(task)
    shapes = {name: REDUCTIONS[name].start(extent).state()["counts"].shape for name in names}
    made = {name: device.empty(shape, np.dtype(np.uint64)) for name, shape in shapes.items()}
    queue = device.queue()
    for counters in made.values():
        queue.fill(counters, 0)
    queue.finish()
    return made


def states_of(device: Device, counters: Mapping[str, DeviceArray | None]) -> dict[str, State]:
    """States of the reductions, as the processor's engine would give them."""
    return {
        name: {"counts": device.get(array).view(np.int64)}
        for name, array in counters.items()
        if array is not None
    }


def route_batch(
    queue: Queue,
    router: DeviceRouter,
    values: DeviceArray,
    label: DeviceArray | None,
    tokens: int,
    logits: DeviceArray,
    norm: DeviceArray | None,
    outputs: RouteOutputs,
    counters: RouteCounters,
    start: int = 0,
) -> None:
    """Queues everything that is done to ``tokens`` inputs.

    The product takes all rows of ``values``, whose number must not change from batch to batch: so
    each token meets the same product whatever the batch. ``logits`` is where they go, or the
    recorded ones.
    """
    if router.rows is not None:
        queue.product(logits, values, router.rows)
    if norm is not None:
        launch_input_norm(queue, router.kind, values, tokens, norm)
    launch_route(
        queue, router.rule, tokens, logits, router.tables, norm, label, outputs, counters, start
    )


def bf16_terms(
    weight: Float32[np.ndarray, "experts hidden"],
) -> list[UInt16[np.ndarray, "experts hidden"]]:
    r"""Rows that add up to ``weight``, as the bits of bfloat16: one, or three of falling size.

    A bfloat16 keeps 8 of the 24 bits of a float32. One term where nothing is cut off; else each
    term is what the ones before it leave, cut off after 8 bits: :math:`W = T_1 + T_2 + T_3`
    exactly for weights of at least 2^-110 in size, and within 2^-133 below. Products of bfloat16
    are exact in float32, so a sum of the three products has the accuracy of a float32 one.
    """
    terms, rest = [], np.ascontiguousarray(weight)
    while len(terms) < 3:
        bits = rest.view(np.uint32)
        terms.append((bits >> 16).astype(np.uint16))
        rest = rest - (bits & np.uint32(0xFFFF0000)).view(np.float32)
        if not rest.any():
            break
    if len(terms) == 2:  # the kernel knows one term and three
        terms.append(np.zeros_like(terms[0]))
    return terms
