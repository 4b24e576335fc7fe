"""Routers of any rows and rule, for tests that say no more about them."""

from typing import Any

import numpy as np

from moegeom.core.router import Provenance, Router, Rule, Weights

SOFTMAX = Weights("scores")
SUM_TO_ONE = Weights("scores", renormalise=True)


def router_with(weight: np.ndarray, rule: Rule, **fields: Any) -> Router:
    """A router of layer 0 with these rows; ``fields`` are biases, a gain, another name."""
    made = Provenance("made", ("gate.weight",), "made.safetensors", "F32")
    of_layer_0 = {"name": "text/0", "stack": "text", "layer": 0}
    return Router(**(of_layer_0 | fields), weight=weight, rule=rule, provenance=made)


def normal_rows(experts: int, hidden: int, seed: int = 0) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal((experts, hidden)).astype(np.float32)
