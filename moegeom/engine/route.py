"""Inputs through one router, token by token, on the road of a scan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.errors import NonFiniteError, RouterRuleError, UsageError
from moegeom.core.router import Router
from moegeom.core.shapes import Float64, Int32
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE
from moegeom.engine.loop import Hooks, Pace, scan_router
from moegeom.engine.plan import batch_tokens, num_workers
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.kernels.table import load_kernels
from moegeom.tokens.memory import HeldArrays
from moegeom.tokens.rows import as_array
from moegeom.tokens.source import Request


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """What a router chooses for each token, and how nearly it would choose otherwise.

    ``chosen`` (int32) are the experts in descending selection score, ``num_chosen`` how many of the
    slots are taken; an empty slot holds -1 and the weight 0. ``weights`` are routing weights.
    ``margin`` is the last chosen selection score minus the first that is not, in the router's
    ``rule.selection_score_unit``; inf where all experts are chosen. ``boundary_distance`` is the
    Euclidean distance, in the space of the router inputs, to the nearest input with another chosen
    set; where it is not known exactly, the true one lies between it and
    ``boundary_distance_upper``. What cannot be known of the router is None, and ``unknown`` says
    why.
    """

    chosen: Int32[np.ndarray, "tokens slots"]
    num_chosen: Int32[np.ndarray, "tokens"]
    weights: Float64[np.ndarray, "tokens slots"] | None
    margin: Float64[np.ndarray, "tokens"] | None
    boundary_distance: Float64[np.ndarray, "tokens"] | None
    boundary_distance_upper: Float64[np.ndarray, "tokens"] | None
    unknown: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.chosen)

    def __repr__(self) -> str:
        tokens, slots = self.chosen.shape
        unknown = ", ".join(self.unknown) or "nothing"
        counted = f"{number_of(tokens, 'token')}, {number_of(slots, 'slot')}"
        return f"RoutedTokens({counted}; {unknown} unknown)"


#: What a batch calls the quantities.
_OF_BATCH = {
    "chosen": "chosen",
    "weights": "weights",
    "margin": "margin",
    "boundary_distance": "distance",
    "boundary_distance_upper": "distance_upper",
}


def route(router: Router, inputs: Any) -> RoutedTokens:
    """The choices of a router for inputs [tokens, hidden], an array or a tensor.

    Raises
    ------
    UsageError
        When the inputs have another shape.
    RouterRuleError
        When the choice does not follow from router and input.
    NonFiniteError
        When an input or its logits are not finite.
    """
    if router.listed:
        raise RouterRuleError(
            f"router {router.name}: its choice does not follow from router and input: "
            f"{router.listed}."
        )
    values = as_array(inputs)
    if values.ndim != 2 or values.shape[1] != router.hidden_size:
        raise UsageError(
            f"inputs has shape {values.shape}; router {router.name} reads (tokens, "
            f"{router.hidden_size}).",
            f"For (batch, sequence, hidden): inputs.reshape(-1, {router.hidden_size}).",
        )
    if not len(values):
        raise UsageError("inputs holds no token.")
    arrays = HeldArrays({router.name: values})
    source = arrays.open(Request("router_input", routers=(router.name,)))
    task = Task(prepare(router), source, load_kernels("cpu"))
    parts: list[dict[str, np.ndarray | None]] = []
    progress = scan_router(
        task,
        range(-(-len(values) // TILE)),
        Pace(batch_tokens(router.hidden_size), num_workers()),
        skip_non_finite=True,
        hooks=Hooks(
            rows=lambda batch: {name: getattr(batch, of) for name, of in _OF_BATCH.items()},
            written=parts.append,
        ),
    )
    if progress.num_non_finite:
        raise NonFiniteError(
            f"inputs: {progress.num_non_finite:,} of {len(values):,} tokens are not finite or "
            f"overflow at router {router.name} (first: token {progress.non_finite[0]})."
        )
    quantities = {name: _joined([part[name] for part in parts]) for name in _OF_BATCH}
    chosen = quantities["chosen"]
    assert chosen is not None
    absent = {name: task.absent.get(of, "") for name, of in _OF_BATCH.items()}
    return RoutedTokens(
        **quantities,
        num_chosen=(chosen >= 0).sum(axis=1, dtype=np.int32),
        unknown={name: why for name, why in absent.items() if quantities[name] is None},
    )


def _joined(parts: list[np.ndarray | None]) -> Any:
    arrays = [part for part in parts if part is not None]
    return np.concatenate(arrays) if len(arrays) == len(parts) else None
