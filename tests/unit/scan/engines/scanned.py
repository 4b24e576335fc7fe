"""Routers, recordings in memory, and a scan of them on the processor and on emulated devices."""

import dataclasses
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from moegeom.core.router import GroupMask, Router, Rule
from moegeom.core.tokens import TILE
from moegeom.engine.devices.cuda import scan_on_devices
from moegeom.engine.loop import Pace, Progress, scan_router
from moegeom.engine.prepared import prepare, unavailable
from moegeom.engine.task import Task
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import REDUCTIONS
from moegeom.kernels.table import load_kernels
from tests.emulator.emulated_device import EmulatedDevice
from tests.unit.scan.made import SOFTMAX, Recorded, router_with, unlabelled

#: Folded on the device, whatever the rule.
COUNTED = ("token_counts", "expert_counts", "expert_pairs", "margin_histogram")
COUNTED += ("effective_margin_histogram", "ambiguity")

#: Folded on the device for rules with linear boundaries.
DISTANCES = ("distance_histogram", "relative_distance_histogram", "noise_sigmas_histogram")

#: Folded by array programs from what the kernel leaves of each token.
BY_PROGRAM = ("agreement", "expert_sets", "top1", "mask_fill", "neighbours", "routing_entropy")
BY_PROGRAM += ("score_sums", "log_sum_exp", "input_sample", "beginnings")

#: And those of them that look at boundaries.
OF_BOUNDARIES = ("boundary_pairs", "bracket_histogram", "bf16_flip")


def without_labels(values: np.ndarray) -> Recorded:
    """A stream that tells no documents and no domains."""
    return Recorded(values, labels=unlabelled(len(values)), domains=())


def router_of(
    experts: int = 12,
    hidden: int = 8,
    top_k: int = 3,
    score: str = "softmax",
    groups: GroupMask | None = None,
    weight: np.ndarray | None = None,
    seed: int = 0,
    **biases: np.ndarray,
) -> Router:
    """A router of normal rows; ``biases`` are ``logit_bias`` and ``selection_bias``."""
    random = np.random.default_rng([seed, experts, hidden])
    if weight is None:
        weight = (random.standard_normal((experts, hidden)) / np.sqrt(hidden)).astype(np.float32)
    rule = Rule(
        top_k,
        score,
        SOFTMAX,
        has_selection_bias="selection_bias" in biases,
        has_logit_bias="logit_bias" in biases,
        groups=groups,
    )
    return router_with(weight, rule, **biases)


def normal(*shape: int, seed: int = 1, scale: float = 1.0) -> np.ndarray:
    """Normal float32 numbers."""
    drawn = scale * np.random.default_rng([seed, *shape]).standard_normal(shape)
    return drawn.astype(np.float32)


def inputs(tokens: int, hidden: int, seed: int = 1) -> np.ndarray:
    """Multiples of 1/16 near normal numbers: squares add up without rounding in any order."""
    return np.rint(normal(tokens, hidden, seed=seed, scale=16.0)) / np.float32(16.0)


def bf16(values: np.ndarray) -> np.ndarray:
    """The same numbers rounded to bfloat16."""
    return values.astype(ml_dtypes.bfloat16)


def every_reduction(router: Router, source: Recorded) -> tuple[str, ...]:
    """All reductions that the engine of devices can give for this router and source."""
    names = (
        *COUNTED,
        *BY_PROGRAM,
        *((*DISTANCES, *OF_BOUNDARIES) if router.rule.is_affine else ()),
    )
    absent = unavailable(router, source.facts)
    return tuple(n for n in names if not set(REDUCTIONS[n].needs) & set(absent))


def task_of(router: Router, source: Recorded, reductions: Sequence[str], **changes: Any) -> Task:
    """A task of these reductions."""
    return Task(prepare(router), source, load_kernels("cpu"), tuple(reductions), **changes)


def all_tiles(source: Recorded) -> range:
    return range(-(-source.facts.num_tokens // TILE))


def product_of_tiles(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The product as :func:`moegeom.engine.choice.tile_logits` makes it, to the last bit."""
    columns = np.ascontiguousarray(rows.T)
    tiles = [values[start : start + TILE] @ columns for start in range(0, len(values), TILE)]
    return np.concatenate(tiles)


def exact_product(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Sums in float64, rounded once."""
    return values.astype(np.float64) @ rows.astype(np.float64).T


def emulated(count: int = 1, seed: int = 0, **given: Any) -> list[EmulatedDevice]:
    """Devices whose queues take turns in an order drawn from ``seed``."""
    given = {"product": product_of_tiles} | given
    return [EmulatedDevice(seed=100 * seed + number, **given) for number in range(count)]


def on_processor(task: Task, reductions: Sequence[str], **changes: Any) -> Progress:
    given = {"tiles": all_tiles(task.source), "pace": Pace(4 * TILE, 2)} | changes
    return scan_router(dataclasses.replace(task, reductions=tuple(reductions)), **given)


def on_devices(task: Task, reductions: Sequence[str], **changes: Any) -> Progress:
    given = {"tiles": all_tiles(task.source), "pace": Pace(2 * TILE, 2)} | changes
    if "devices" not in given:
        given["devices"] = emulated()
    given.setdefault("batch_tokens", given["pace"].batch_tokens)
    return scan_on_devices(dataclasses.replace(task, reductions=tuple(reductions)), **given)


def keeping(rows: list, *quantities: str) -> dict[str, Any]:
    """Hooks by which ``rows`` get these quantities of each batch."""

    def row(batch: TokenBatch) -> SimpleNamespace:
        return SimpleNamespace(**{name: getattr(batch, name) for name in quantities})

    return {"rows": row, "written": rows.append}


def told_by(rows: list, quantity: str) -> np.ndarray:
    """One quantity of all tokens of such rows."""
    return np.concatenate([getattr(row, quantity) for row in rows])


def differences(found: Progress, expected: Progress) -> dict[str, int]:
    """Entries that differ, by reduction and array; empty where the two are equal."""
    assert set(found.states) == set(expected.states)
    counted = {}
    for name, state in expected.states.items():
        assert set(found.states[name]) == set(state)
        for key, array in state.items():
            ours = found.states[name][key]
            assert (ours.shape, ours.dtype) == (array.shape, array.dtype), f"{name} {key}"
            if number := int((ours != array).sum()):
                counted[f"{name}/{key}"] = number
    return counted


#: Sums of powers of e, which each machine rounds in its own way.
OF_POWERS = ("routing_entropy/counts", "log_sum_exp/counts", "score_sums/counts")
OF_POWERS += ("beginnings/weights", "bf16_flip/counts")


def assert_equal(found: Progress, expected: Progress, but_for: tuple[str, ...] = ()) -> None:
    """Every state, ``but_for`` some arrays, every count and every lost token are the same.

    Sums of powers agree to six digits.
    """
    differing = set(differences(found, expected)) - set(but_for)
    for place in sorted(differing & set(OF_POWERS)):
        name, key = place.split("/")
        ours, theirs = (of.states[name][key] for of in (found, expected))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())
    assert differing <= set(OF_POWERS)
    for field in ("next_tile", "num_tokens", "non_finite", "num_non_finite"):
        assert getattr(found, field) == getattr(expected, field), field


@functools.cache
def usual() -> tuple[Task, tuple[str, ...], Progress]:
    """A task with everything in it, what to fold, and what the processor makes of it."""
    source = Recorded(inputs(4 * TILE + 100, 8), chosen=some_choices(4 * TILE + 100, 12, 3))
    router = router_of()
    names = every_reduction(router, source)
    task = task_of(router, source, names, typical_norm=float(np.sqrt(8)))
    return task, names, on_processor(task, names)


def some_choices(tokens: int, experts: int, top_k: int) -> np.ndarray:
    """Different experts, drawn at random."""
    drawn = np.random.default_rng(5).random((tokens, experts))
    return np.argsort(drawn, axis=1)[:, :top_k].astype(np.int32)
