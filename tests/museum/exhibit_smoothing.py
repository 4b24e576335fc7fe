"""Incidents of smoothing: the gain was divided by a scale that the router should follow."""

import numpy as np

from tests.museum.checkpoint import Build, Checkpoint
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import softmax_model


def smoothed(model: Checkpoint, spread: float, is_followed: bool) -> Checkpoint:
    """The gain over scales from 1 / ``spread`` to ``spread``, and the columns times it, or not."""

    def scales(layer: int, size: int) -> np.ndarray:
        return spread ** np.random.default_rng([2451, layer]).uniform(-1.0, 1.0, size)

    divided = model.edited("gain", lambda g, layer: g / scales(layer, g.size))
    if not is_followed:
        return divided
    return divided.edited("weight", lambda w, layer: w * scales(layer, w.shape[1]))


def _smoothed(spread: float, is_followed: bool = False) -> Build:
    return lambda: smoothed(softmax_model(), spread, is_followed)


SMOOTHED_ALONE = Incident(
    "gain_smoothed_alone",
    "AWQ and SmoothQuant divide the gain of a norm by a scale and multiply what reads it; with the "
    "router left out of the list its file is bit for bit the same, and it reads other inputs.",
    "MGI122",
    Case("scales spread by 1.02", _smoothed(1.02), range(4)),
    Case("by 1.2", _smoothed(1.2), range(4)),
    Case("by 3", _smoothed(3.0), range(4)),
    tuple(
        Case(f"scales spread by {spread:g}, router multiplied", _smoothed(spread, True))
        for spread in (1.02, 1.2, 3.0)
    ),
    softmax_model,
    threads=("vllm-project/llm-compressor#2451", "vllm-project/llm-compressor#1455"),
)
