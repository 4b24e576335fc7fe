"""Where faults act: layers, experts, documents, positions, ranks; drawn for one model and text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tests.generator.engine import Reach, Schedule
from tests.generator.model import Model
from tests.generator.text import Text
from tests.generator.words import Scope

LAYERS = (Scope.ONE_LAYER, Scope.LAYERS_FROM, Scope.LAYER_INTERVAL)
EXPERTS = (Scope.EXPERT_SET, Scope.EXPERT_BLOCK, Scope.EXPERT_HALF)
POSITIONS = (Scope.POSITIONS_FROM, Scope.POSITIONS_BEFORE, Scope.POSITION_INTERVAL)
TOKENS = (Scope.DOCUMENTS, *POSITIONS, Scope.EVERY_NTH, Scope.CHUNK_STARTS, Scope.RANKS)


@dataclass(frozen=True, eq=False)
class Ground:
    """What a scope is drawn from."""

    rng: np.random.Generator
    model: Model
    text: Text
    schedule: Schedule


@dataclass(frozen=True, eq=False)
class DrawnScope:
    """A reach, its plainest name, and what was drawn, as text."""

    scope: Scope
    reach: Reach
    parameters: Mapping[str, str]


Places = tuple[np.ndarray, dict[str, str]]


def _one_layer(ground: Ground, lowest: int) -> Places:
    return np.array([ground.rng.integers(lowest, ground.model.shape.layers)]), {}


def _layers_from(ground: Ground, lowest: int) -> Places:
    layers = ground.model.shape.layers
    return np.arange(ground.rng.integers(min(max(lowest, 1), layers - 1), layers), layers), {}


def _layer_interval(ground: Ground, lowest: int) -> Places:
    """Two layers or more, not all; of a model of two layers one."""
    layers = ground.model.shape.layers
    length = int(ground.rng.integers(min(2, layers - 1), layers))
    first = int(ground.rng.integers(min(lowest, layers - length), layers - length + 1))
    return np.arange(max(first, lowest), first + length), {}


def _expert_set(ground: Ground) -> Places:
    experts = ground.model.shape.experts
    count = int(ground.rng.integers(2, max(3, experts // 4 + 1)))
    return np.sort(ground.rng.permutation(experts)[:count]), {}


def _expert_block(ground: Ground) -> Places:
    experts = ground.model.shape.experts
    ranks = int(ground.rng.choice([4, 8] if experts >= 16 else [2, 4]))
    rank = int(ground.rng.integers(ranks))
    return np.arange(experts).reshape(ranks, -1)[rank], {"rank": f"{rank} of {ranks}"}


def _expert_half(ground: Ground) -> Places:
    half = int(ground.rng.integers(2))
    return np.arange(ground.model.shape.experts).reshape(2, -1)[half], {"half": str(half)}


def _documents(ground: Ground) -> Places:
    documents = len(ground.text.lengths)
    some = ground.rng.permutation(documents)[: max(1, documents // 4)]
    return np.isin(np.arange(documents), some)[:, None], {
        "documents": " ".join(map(str, np.sort(some)))
    }


def _border(ground: Ground) -> int:
    length = ground.text.token_id.shape[1]
    return int(ground.rng.integers(length // 5, length * 3 // 5))


def _positions_from(ground: Ground) -> Places:
    first = _border(ground)
    return ground.text.position >= first, {"from_position": str(first)}


def _positions_before(ground: Ground) -> Places:
    end = _border(ground)
    return ground.text.position < end, {"before_position": str(end)}


def _position_interval(ground: Ground) -> Places:
    first = _border(ground)
    end = first + max(4, ground.text.token_id.shape[1] // 5)
    position = ground.text.position
    return (position >= first) & (position < end), {"positions": f"{first} to {end - 1}"}


def _every_nth(ground: Ground) -> Places:
    n = int(ground.rng.choice([2, 3, 4, 8]))
    rest = int(ground.rng.integers(n))
    return ground.text.position % n == rest, {"position": f"{rest} modulo {n}"}


def _chunk_starts(ground: Ground) -> Places:
    chunk = ground.schedule.chunk
    position = ground.text.position
    is_start = (position % chunk == 0) & (position > 0) & (position < ground.schedule.decode_from)
    return is_start, {"chunk": str(chunk)}


def _ranks(ground: Ground) -> Places:
    n = int(ground.rng.choice([2, 4, 8]))
    rank = int(ground.rng.integers(n))
    return ground.text.index % n == rank, {"rank": f"token index {rank} modulo {n}"}


_LAYERS: Mapping[Scope, Callable[[Ground, int], Places]] = {
    Scope.ONE_LAYER: _one_layer,
    Scope.LAYERS_FROM: _layers_from,
    Scope.LAYER_INTERVAL: _layer_interval,
}
_EXPERTS: Mapping[Scope, Callable[[Ground], Places]] = {
    Scope.EXPERT_SET: _expert_set,
    Scope.EXPERT_BLOCK: _expert_block,
    Scope.EXPERT_HALF: _expert_half,
}
_TOKENS: Mapping[Scope, Callable[[Ground], Places]] = {
    Scope.DOCUMENTS: _documents,
    Scope.POSITIONS_FROM: _positions_from,
    Scope.POSITIONS_BEFORE: _positions_before,
    Scope.POSITION_INTERVAL: _position_interval,
    Scope.EVERY_NTH: _every_nth,
    Scope.CHUNK_STARTS: _chunk_starts,
    Scope.RANKS: _ranks,
}


def draw_scope(scope: Scope, ground: Ground, lowest: int = 0) -> DrawnScope:
    """Layers (from ``lowest`` on), tokens and experts in which a fault of this scope acts."""
    layers = np.arange(lowest, ground.model.shape.layers)
    shape = ground.text.token_id.shape
    tokens, experts, parameters = np.ones(shape, bool), None, {}
    if scope in _LAYERS:
        layers, parameters = _LAYERS[scope](ground, lowest)
    elif scope in _EXPERTS:
        experts, parameters = _EXPERTS[scope](ground)
        parameters["experts"] = " ".join(map(str, experts))
    elif scope in _TOKENS:
        tokens, parameters = _TOKENS[scope](ground)
    # padding is nobody's token, and rows that a writer takes from there are not asked for
    tokens = np.broadcast_to(tokens, shape) & ground.text.is_token
    reach = Reach(frozenset(map(int, layers)), tokens, experts)
    return DrawnScope(_plainest(scope, layers, ground), reach, parameters)


def _plainest(scope: Scope, layers: np.ndarray, ground: Ground) -> Scope:
    """One word for one reach: layers from the last one on are one layer."""
    if scope not in LAYERS:
        return scope
    if len(layers) == 1:
        return Scope.ONE_LAYER
    return Scope.LAYERS_FROM if layers[-1] == ground.model.shape.layers - 1 else scope
