"""The fused kernel on arrays of the host, and what the kernels of the reference make of them."""

import dataclasses
from typing import Any

import numpy as np

from moegeom.core.router import GroupMask
from moegeom.geometry.boundary.linear import RowDistances
from moegeom.geometry.histogram import NUM_BINS
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16, UNIT_FLOAT32
from moegeom.geometry.selection import LARGEST_SLOPE
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.cuda.parts import device_rows, selection_scores
from moegeom.kernels.cuda.program import NOT_COUNTED
from moegeom.kernels.cuda.route import (
    RouteCounters,
    RouteNumbers,
    RouteOutputs,
    RouteRule,
    RouteTables,
    launch_route,
)
from moegeom.kernels.table import load_kernels
from tests.emulator.emulated_device import EmulatedDevice

#: What the kernel writes of each token: dtype, and columns beyond one.
OUTPUTS: dict[str, tuple[type, str]] = {
    "is_lost": (np.uint8, ""),
    "logits": (np.float32, "experts"),
    "chosen": (np.int32, "top_k"),
    "margin": (np.float64, ""),
    "group_margin": (np.float64, ""),
    "distance": (np.float64, ""),
    "pair": (np.int32, "two"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Logits as the product gives them, and what is known about the router and the tokens."""

    rule: RouteRule
    logits: np.ndarray
    rows: RowDistances | None = None
    logit_bias: np.ndarray | None = None
    selection_bias: np.ndarray | None = None
    norm: np.ndarray | None = None
    label: np.ndarray | None = None
    populations: int = 3
    typical_norm: float = 0.0
    start: int = 0

    @property
    def own_bias(self) -> np.ndarray:
        given = self.selection_bias
        return np.zeros(self.rule.num_experts) if given is None else given.astype(np.float64)


def rule_of(
    experts: int,
    top_k: int,
    score: str = "softmax",
    is_affine: bool = True,
    has_bias: bool = False,
    groups: GroupMask | None = None,
    terms: int = 1,
) -> RouteRule:
    return RouteRule(experts, top_k, score, is_affine, has_bias, groups, terms)


def numbers(case: Case) -> RouteNumbers:
    fits = case.rows is not None and device_rows(case.rows).fits_float32
    return RouteNumbers(
        typical_norm=case.typical_norm,
        outlier_factor=4.0,
        two_gamma=1e-6,
        underflow=0.0,
        longest_row=2.0,
        largest_bias=0.5,
        noise_factor=ROUNDING_RMS * UNIT_BFLOAT16,
        root_hidden=3.0,
        slope=LARGEST_SLOPE[case.rule.score],
        unit=8.0 * UNIT_FLOAT32,
        largest_selection_bias=float(np.abs(case.own_bias).max()),
        outliers=float(case.populations - 1),
        fits_float32=float(fits),
        unlabelled=float(case.populations - 2),
    )


#: Names of the counters.
COUNTERS = tuple(field.name for field in dataclasses.fields(RouteCounters))


def fused(case: Case, kept: tuple[str, ...] = COUNTERS) -> dict[str, np.ndarray]:
    """Everything that the kernel gives, by name: outputs of each token, and counters ``kept``."""
    rule, tokens, device = case.rule, len(case.logits), EmulatedDevice()
    put = lambda array: None if array is None else device.put(np.ascontiguousarray(array))
    boundaries = None if case.rows is None else device_rows(case.rows)
    tables = RouteTables(
        logit_bias=put(case.logit_bias),
        selection_bias=put(case.own_bias),
        number=put(numbers(case).array()),
        **{
            name: put(getattr(boundaries, name, None))
            for name in ("inverse", "rounded", "smallest")
        },
    )
    columns = {"experts": rule.num_experts, "top_k": rule.top_k, "two": 2}
    outputs = {
        name: put(np.zeros((tokens, columns[more]) if more else tokens, dtype))
        for name, (dtype, more) in OUTPUTS.items()
    }
    labels = (case.populations, NUM_BLOCKS)
    tail = {"token_counts": 2, "ambiguity": 2, "expert_counts": rule.num_experts}
    shapes = {name: (*labels, tail.get(name, NUM_BINS)) for name in kept}
    if "expert_pairs" in shapes:
        shapes["expert_pairs"] = (NUM_BLOCKS, rule.num_experts, rule.num_experts)
    counters = {name: put(np.zeros(shape, np.uint64)) for name, shape in shapes.items()}
    # held until the work is done: what nobody holds is given back
    logits, norm, label = put(case.logits), put(case.norm), put(case.label)
    queue = device.queue()
    written = RouteOutputs(**outputs), RouteCounters(**counters)
    launch_route(queue, rule, tokens, logits, tables, norm, label, *written, case.start)
    queue.finish()
    return {name: device.get(array) for name, array in (outputs | counters).items()}


def in_parts(case: Case) -> dict[str, np.ndarray]:
    """The same from kernels of the reference, with the device's own scores of curved rules."""
    reference, rule = load_kernels("reference"), case.rule
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        terms = case.logits.reshape(len(case.logits), rule.terms, rule.num_experts)
        logits = terms[:, 0] if rule.terms == 1 else (terms[:, 2] + terms[:, 1]) + terms[:, 0]
        if case.logit_bias is not None:
            logits = logits + case.logit_bias
        is_lost = ~np.isfinite(logits).all(axis=1)
        found: dict[str, Any] = {"is_lost": is_lost.astype(np.uint8), "logits": logits}
        z = np.where(is_lost[:, None], np.float32(0.0), logits)
        compared = z
        if not rule.is_affine:
            compared = selection_scores(z, rule.score, case.own_bias, EmulatedDevice())
        group_margin = np.full(len(z), np.inf)
        if rule.groups is not None:
            compared, group_margin = reference["group_mask"](compared, rule.groups)
        chosen, margin = reference["top_k"](compared, rule.top_k)
        distance, pair = np.full(len(z), np.inf), np.full((len(z), 2), -1, np.int32)
        if case.rows is not None:
            distance, pair = reference["boundary_distance"](z, chosen, margin, case.rows)
    found |= {"chosen": chosen, "margin": margin, "group_margin": group_margin}
    return found | {"distance": distance, "pair": pair} | _counted(case, found, distance)


def _counted(
    case: Case, found: dict[str, np.ndarray], distance: np.ndarray
) -> dict[str, np.ndarray]:
    """Counters of the tokens that are neither lost nor left out."""
    reference, rule, tokens = load_kernels("reference"), case.rule, len(distance)
    if case.label is None:
        run = (case.start + np.arange(tokens)) // 256
        label = (case.populations - 2) * NUM_BLOCKS + (run + run // NUM_BLOCKS) % NUM_BLOCKS
    else:
        label = case.label.astype(np.int64)
    kept = (label != NOT_COUNTED) & (found["is_lost"] == 0)
    population, block = label[kept] // NUM_BLOCKS, label[kept] % NUM_BLOCKS
    norm = np.zeros(tokens) if case.norm is None else case.norm
    if case.typical_norm:
        far = (norm > 4.0 * case.typical_norm) | (norm * 4.0 < case.typical_norm)
        population = np.where(far[kept], case.populations - 1, population)
    population, block = population.astype(np.int32), block.astype(np.int32)
    effective_margin = np.minimum(found["margin"], found["group_margin"] / 2.0)
    scale = ROUNDING_RMS * UNIT_BFLOAT16 * norm / 3.0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        beyond = np.where(distance == 0.0, 0.0, np.inf)
        relative = np.where(norm > 0.0, distance / norm, beyond)
        sigmas = np.where(scale > 0.0, distance / scale, beyond)
    histograms = {
        "margin_histogram": found["margin"],
        "effective_margin_histogram": effective_margin,
        "distance_histogram": distance,
        "relative_distance_histogram": relative,
        "noise_sigmas_histogram": sigmas,
    }
    counts = {}
    for name, values in histograms.items():
        counts[name] = np.zeros((case.populations, NUM_BLOCKS, NUM_BINS), np.int64)
        reference["count_bins"](counts[name], values[kept], population, block)
    experts = np.zeros((case.populations, NUM_BLOCKS, rule.num_experts), np.int64)
    reference["count_experts"](experts, found["chosen"][kept], population, block)
    pairs = np.zeros((NUM_BLOCKS, rule.num_experts, rule.num_experts), np.int64)
    reference["count_pairs"](pairs, found["chosen"][kept], block)
    token_counts = np.zeros((case.populations, NUM_BLOCKS, 2), np.int64)
    np.add.at(token_counts[..., 0], (population, block), 1)
    np.add.at(token_counts[..., 1], (population, block), effective_margin[kept] == 0.0)
    return counts | {"expert_counts": experts, "expert_pairs": pairs, "token_counts": token_counts}


def disagreements(case: Case) -> dict[str, int]:
    """Entries that differ, by name; of a lost token its loss and its logits alone count."""
    found, expected = fused(case), in_parts(case)
    there = expected["is_lost"] == 0
    wrong = {}
    for name, theirs in expected.items():
        ours = found[name]
        if name in OUTPUTS and name not in ("is_lost", "logits"):
            ours, theirs = ours[there], theirs[there]
        is_equal = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        if not is_equal.all():
            wrong[name] = int((~is_equal).sum())
    return wrong
