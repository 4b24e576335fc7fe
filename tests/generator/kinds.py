"""What a kind of fault needs: its stage, the model in which it shows, and where in model and text
it acts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from moegeom.studies.explain.record import Cause
from tests.generator.engine import Reach, Schedule, Stage
from tests.generator.model import FAMILIES, Model, Stored, Text


@dataclass(frozen=True, eq=False)
class Ground:
    rng: np.random.Generator
    model: Model
    text: Text
    schedule: Schedule


def _one_layer(ground: Ground, lowest: int) -> np.ndarray:
    return np.array([ground.rng.integers(lowest, ground.model.shape.layers)])


def _layers_from(ground: Ground, lowest: int) -> np.ndarray:
    layers = ground.model.shape.layers
    return np.arange(ground.rng.integers(min(max(lowest, 1), layers - 1), layers), layers)


def _layer_interval(ground: Ground, lowest: int) -> np.ndarray:
    """Two layers or more, not all; of a model of two layers one."""
    layers = ground.model.shape.layers
    length = int(ground.rng.integers(min(2, layers - 1), layers))
    first = int(ground.rng.integers(min(lowest, layers - length), layers - length + 1))
    return np.arange(max(first, lowest), first + length)


def _expert_set(ground: Ground) -> np.ndarray:
    experts = ground.model.shape.experts
    count = int(ground.rng.integers(2, max(3, experts // 4 + 1)))
    return np.sort(ground.rng.permutation(experts)[:count])


def _expert_block(ground: Ground) -> np.ndarray:
    experts = ground.model.shape.experts
    ranks = int(ground.rng.choice([4, 8] if experts >= 16 else [2, 4]))
    return np.arange(experts).reshape(ranks, -1)[int(ground.rng.integers(ranks))]


def _expert_half(ground: Ground) -> np.ndarray:
    return np.arange(ground.model.shape.experts).reshape(2, -1)[int(ground.rng.integers(2))]


def _documents(ground: Ground) -> np.ndarray:
    documents = len(ground.text.lengths)
    some = ground.rng.permutation(documents)[: max(1, documents // 4)]
    return np.isin(np.arange(documents), some)[:, None]


def _border(ground: Ground) -> int:
    length = ground.text.token_id.shape[1]
    return int(ground.rng.integers(length // 5, length * 3 // 5))


def _position_interval(ground: Ground) -> np.ndarray:
    first, position = _border(ground), ground.text.position
    return (position >= first) & (position < first + max(4, position.shape[1] // 5))


def _every_nth(ground: Ground) -> np.ndarray:
    n = int(ground.rng.choice([2, 3, 4, 8]))
    return ground.text.position % n == int(ground.rng.integers(n))


def _chunk_starts(ground: Ground) -> np.ndarray:
    position, schedule = ground.text.position, ground.schedule
    is_start = (position % schedule.chunk == 0) & (position > 0)
    return is_start & (position < schedule.decode_from)


def _ranks(ground: Ground) -> np.ndarray:
    n = int(ground.rng.choice([2, 4, 8]))
    return ground.text.index % n == int(ground.rng.integers(n))


LAYERS: Mapping[str, Callable[[Ground, int], np.ndarray]] = {
    "one_layer": _one_layer,
    "layers_from": _layers_from,
    "layer_interval": _layer_interval,
}
EXPERTS: Mapping[str, Callable[[Ground], np.ndarray]] = {
    "expert_set": _expert_set,
    "expert_block": _expert_block,
    "expert_half": _expert_half,
}
POSITIONS: Mapping[str, Callable[[Ground], np.ndarray]] = {
    "positions_from": lambda ground: ground.text.position >= _border(ground),
    "positions_before": lambda ground: ground.text.position < _border(ground),
    "position_interval": _position_interval,
}
TOKENS: Mapping[str, Callable[[Ground], np.ndarray]] = {
    "documents": _documents,
    **POSITIONS,
    "every_nth": _every_nth,
    "chunk_starts": _chunk_starts,
    "ranks": _ranks,
}

#: Every scope; those of tokens and of experts act in every layer.
SCOPES = ("all", *LAYERS, *EXPERTS, *TOKENS)


def draw_scope(scope: str, ground: Ground, lowest: int = 0) -> tuple[str, Reach]:
    """Where a fault of this scope acts (from ``lowest`` on), with the plainest name of it."""
    layers = np.arange(lowest, ground.model.shape.layers)
    shape = ground.text.token_id.shape
    tokens, experts = np.ones(shape, bool), None
    if scope in LAYERS:
        layers = LAYERS[scope](ground, lowest)
    elif scope in EXPERTS:
        experts = EXPERTS[scope](ground)
    elif scope in TOKENS:
        tokens = TOKENS[scope](ground)
    # padding is nobody's token, and rows that a writer takes from there are not asked for
    tokens = np.broadcast_to(tokens, shape) & ground.text.is_token
    return _plainest(scope, layers, ground), Reach(frozenset(map(int, layers)), tokens, experts)


def draw_part(ground: Ground) -> np.ndarray:
    """Experts of any scope, or one."""
    parts = [
        *EXPERTS.values(),
        lambda ground: ground.rng.integers(ground.model.shape.experts, size=1),
    ]
    return parts[int(ground.rng.integers(len(parts)))](ground)


def _plainest(scope: str, layers: np.ndarray, ground: Ground) -> str:
    """One word for one reach: layers from the last one on are one layer."""
    if scope not in LAYERS:
        return scope
    if len(layers) == 1:
        return "one_layer"
    return "layers_from" if layers[-1] == ground.model.shape.layers - 1 else scope


#: Another checkpoint: an older one, another training, or none.
Named = Literal["", "older", "other"]

#: The change of a stage.
Made = Callable[..., Any]

WITH_SELECTION_BIAS = ("deepseek_v3", "deepseek_v3_ungrouped")
WITH_BIAS = (*WITH_SELECTION_BIAS, "gpt_oss")
WITH_GROUPS = ("deepseek_v3",)


@dataclass(frozen=True, eq=False)
class Draw:
    ground: Ground
    reach: Reach
    seed: int

    @property
    def rng(self) -> np.random.Generator:
        return self.ground.rng

    @property
    def model(self) -> Model:
        return self.ground.model

    @property
    def experts(self) -> np.ndarray:
        every = np.arange(self.model.shape.experts)
        return every if self.reach.experts is None else self.reach.experts

    def rng_at(self, *place: int) -> np.random.Generator:
        """The same numbers whenever the same place is met, such as a layer."""
        return np.random.default_rng([self.seed, *place])

    def another_layer(self) -> Callable[[int], int]:
        """A layer for each layer that is another, by a shift that is drawn once."""
        layers = self.model.shape.layers
        shift = int(self.rng.integers(1, layers))
        return lambda layer: (layer + shift) % layers

    def choice(self, *of: Any) -> Any:
        return of[int(self.rng.integers(len(of)))]


def with_one(change: Callable[[Any, Any], Any], *options: Any) -> Callable[[Draw], Made]:
    """A change that takes one of the options first."""
    return lambda draw: partial(change, draw.choice(*options))


@dataclass(frozen=True)
class Kind:
    """A kind of fault, ``named`` by some verdicts, in a model with what it needs (``draw_model``).

    It acts from the ``lowest`` layer on, and in caches where requests start or later steps of the
    prefill do. Of B ids must be recorded, weights beside them, or (``ids_only``) nothing else, since
    the writer alone is wrong. Some show only where all arithmetics are float32 (``is_exact``).
    ``loaded`` is the other checkpoint that the faulty engine loaded from; a trace whose ids cannot
    be choices ``may_be_refused``. ``unseen`` are right too where B does not record what tells them
    from what is ``named``: its inputs, or what else they are ``told_by``. With ``in_part`` it touches
    some experts alone, wherever it acts.
    """

    stage: Stage
    scopes: tuple[str, ...]
    make: Callable[[Draw], Made]
    named: tuple[Cause, ...]
    families: tuple[str, ...] = tuple(FAMILIES)
    bend: str = ""
    stored: Stored | None = None
    equal_rows: bool = False
    bias_level: float | None = None
    lowest: int = 0
    starts: Literal["", "requests", "steps"] = ""
    visible_in: Literal["ids", "weights", "ids_only"] = "ids"
    is_exact: bool = False
    loaded: Named = ""
    may_be_refused: bool = False
    unseen: tuple[Cause, ...] = ()
    told_by: Literal["router_input", "logits"] = "router_input"
    in_part: bool = False


def kind(
    stage: Stage, scopes: Sequence[str], make: Callable[[Draw], Made], *named: Cause, **needs: Any
) -> Kind:
    return Kind(stage, tuple(scopes), make, named, **needs)
