"""What a kind of fault needs: its stage, where it may act, and the model in which it shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moegeom.studies.explain.record import Cause
from tests.generator.engine import Reach, Stage
from tests.generator.model import FAMILIES, Model, Stored
from tests.generator.scopes import Ground

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


@dataclass(frozen=True)
class Kind:
    """A kind of fault, ``named`` by some verdicts, in a model with what it needs (``draw_model``).

    It acts from the ``lowest`` layer on, and in caches where requests start or later steps of the
    prefill do. Of B ids must be recorded, weights beside them, or (``ids_only``) nothing else, since
    the writer alone is wrong. Some show only where all arithmetics are float32 (``is_exact``).
    ``loaded`` is the other checkpoint that the faulty engine loaded from; a trace whose ids cannot
    be choices ``may_be_refused``.
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


def kind(
    stage: Stage, scopes: Sequence[str], make: Callable[[Draw], Made], *named: Cause, **needs: Any
) -> Kind:
    return Kind(stage, tuple(scopes), make, named, **needs)
