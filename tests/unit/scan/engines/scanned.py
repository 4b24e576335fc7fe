"""Routers, recordings in memory, and a scan of them on the processor and on emulated devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from moegeom.core.router import GroupMask, Provenance, Router, Rule, Weights
from moegeom.core.tokens import TILE, SourceFacts, TokenColumns, TopLogits
from moegeom.engine.devices.cuda import scan_on_devices
from moegeom.engine.loop import Pace, Progress, scan_router
from moegeom.engine.prepared import prepare, unavailable
from moegeom.engine.task import Task
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import REDUCTIONS
from moegeom.kernels.table import load_kernels
from tests.emulator.emulated_device import EmulatedDevice

NAME = "text/0"

#: Folded on the device, whatever the rule.
COUNTED = ("token_counts", "expert_counts", "expert_pairs", "margin_histogram")
COUNTED += ("effective_margin_histogram", "ambiguity")

#: Folded on the device for rules with linear boundaries.
DISTANCES = ("distance_histogram", "relative_distance_histogram", "noise_sigmas_histogram")

#: Folded on the host from what the device gives.
ON_HOST = ("agreement", "expert_sets", "top1", "mask_fill", "neighbours", "routing_entropy")
ON_HOST += ("score_sums", "log_sum_exp", "tile_load", "token_sample", "input_sample", "orders")

#: And those of them that look at boundaries.
OF_BOUNDARIES = ("boundary_pairs", "bracket_histogram", "bf16_flip", "rounding_sigmas_histogram")


class Recorded:
    """A recording in memory: documents of 97 tokens, three in four of them with a domain."""

    def __init__(
        self,
        values: np.ndarray,
        stage: str = "router_input",
        domains: Sequence[str] = ("code", "prose"),
        chosen: np.ndarray | None = None,
        document: np.ndarray | None = None,
        domain: np.ndarray | None = None,
    ) -> None:
        self.values, self.chosen = values, chosen
        token = np.arange(len(values))
        named = np.array([0, 1, -1, 0], np.int16)[token // 97 % 4]
        self.columns = TokenColumns(
            document=token // 97 if document is None else document,
            position=(token % 97).astype(np.int32) if document is None else unknown(len(token)),
            token_id=(token % 1000).astype(np.int32),
            domain=named if domain is None else domain,
        )
        self.facts = SourceFacts(
            name="recorded",
            stage=stage,
            num_tokens=len(values),
            routers=(NAME,),
            domains=tuple(domains),
            has_documents=document is None,
            has_chosen=chosen is not None,
        )

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return self.columns.at(slice(start, stop))

    def read_values(self, router: str, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop].astype(np.float32)

    def stored_dtype(self, router: str) -> np.dtype:
        return self.values.dtype

    def read_stored(self, router: str, start: int, out: np.ndarray) -> None:
        out[...] = self.values[start : start + len(out)]

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        raise AssertionError("no recording of the largest logits")

    def read_chosen(self, router: str, start: int, stop: int) -> np.ndarray | None:
        return None if self.chosen is None else self.chosen[start:stop]

    def read_output(self, router: str, kind: str, start: int, stop: int) -> None:
        return None


def unknown(tokens: int) -> np.ndarray:
    return np.full(tokens, -1, np.int32)


def without_labels(values: np.ndarray) -> Recorded:
    """A stream that tells no documents and no domains."""
    none = unknown(len(values))
    return Recorded(
        values, domains=(), document=none.astype(np.int64), domain=none.astype(np.int16)
    )


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
        Weights("scores"),
        has_selection_bias="selection_bias" in biases,
        has_logit_bias="logit_bias" in biases,
        groups=groups,
    )
    made = Provenance("made", ("gate.weight",), "made.safetensors", "F32")
    return Router(NAME, "text", 0, weight, rule, made, **biases)


def normal(*shape: int, seed: int = 1, scale: float = 1.0) -> np.ndarray:
    """Normal float32 numbers."""
    drawn = scale * np.random.default_rng([seed, *shape]).standard_normal(shape)
    return drawn.astype(np.float32)


def inputs(tokens: int, hidden: int, seed: int = 1) -> np.ndarray:
    """Multiples of 1/16 near normal numbers.

    Their squares add up without rounding, so that lengths are the same whatever the order.
    """
    return np.rint(normal(tokens, hidden, seed=seed, scale=16.0)) / np.float32(16.0)


def bf16(values: np.ndarray) -> np.ndarray:
    """The same numbers rounded to bfloat16."""
    return values.astype(ml_dtypes.bfloat16)


def every_reduction(router: Router, source: Recorded) -> tuple[str, ...]:
    """All reductions that the engine of devices can give for this router and source."""
    names = (*COUNTED, *ON_HOST, *((*DISTANCES, *OF_BOUNDARIES) if router.rule.is_affine else ()))
    absent = unavailable(router, source.facts)
    return tuple(n for n in names if not set(REDUCTIONS[n].needs) & set(absent))


def task_of(router: Router, source: Recorded, reductions: Sequence[str], **changes: Any) -> Task:
    """A task of these reductions."""
    return Task(prepare(router), source, load_kernels("cpu"), tuple(reductions), **changes)


def all_tiles(source: Recorded) -> range:
    return range(-(-source.facts.num_tokens // TILE))


def product_of_tiles(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The product as :func:`moegeom.engine.products.tile_logits` makes it, to the last bit."""
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


def assert_equal(found: Progress, expected: Progress, but_for: tuple[str, ...] = ()) -> None:
    """Every state, ``but_for`` some arrays, every count and every lost token are the same."""
    assert set(differences(found, expected)) <= set(but_for)
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
