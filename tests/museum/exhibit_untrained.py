"""Incidents of rows that were never trained."""

from collections.abc import Sequence

import numpy as np

from tests.museum.checkpoint import Build, Checkpoint, edited
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import softmax_model

#: What the config draws with: four fifths of the spread of the trained rows.
_RANGE = 0.8 / np.sqrt(512)


def model() -> Checkpoint:
    """Trained rows share a direction, and are longer than drawn ones."""

    def shared(weight: np.ndarray, layer: int) -> np.ndarray:
        direction = np.random.default_rng([2995, layer]).standard_normal(weight.shape[1])
        return weight + 0.3 * direction / np.sqrt(direction.size)

    trained = softmax_model(hidden=512).changed(config={"initializer_range": float(_RANGE)})
    return trained.edited("weight", shared)


def _drawn(layers: Sequence[int], rows: slice = slice(None)) -> Build:
    def drawn(weight: np.ndarray, layer: int) -> np.ndarray:
        fresh = _RANGE * np.random.default_rng([858, layer]).standard_normal(weight.shape)
        weight[rows] = fresh[rows]
        return weight

    return edited(model, "weight", drawn, layers)


ROWS_NEVER_TRAINED = Incident(
    "rows_never_trained",
    "No gradient reached the router, or a part of its rows: it is as it was drawn, and routes no "
    "better than a random one.",
    "MGG207",
    Case("half of the rows of one layer", _drawn([1], slice(16, 32)), (1,)),
    Case("one layer of four", _drawn([1]), (1,)),
    Case("all layers", _drawn(range(4)), range(4)),
    (Case("as trained", model),),
    threads=("NVIDIA-NeMo/Automodel#2995", "jingyaogong/minimind#858"),
)
