"""A router with orthonormal rows and Gaussian tokens: what it does with them is known."""

import dataclasses

import numpy as np

from moegeom.core.router import Provenance, Router, Rule, Weights
from tests.array_source import ArraySource

EXPERTS, TOP_K, HIDDEN, LENGTH = 16, 2, 24, 32


def router_of(selection_bias=None, groups=None, experts: int = EXPERTS, **changes) -> Router:
    """Isotropic tokens load all experts alike in expectation.

    A sigmoid rule, or softmax without a bias.
    """
    rows = np.linalg.qr(np.random.default_rng(0).standard_normal((HIDDEN, HIDDEN)))[0]
    rows = np.ascontiguousarray(rows[:experts]).astype(np.float32)
    curved = selection_bias is not None or groups is not None
    rule = Rule(
        TOP_K,
        "sigmoid" if curved else "softmax",
        Weights("scores", True),
        has_selection_bias=selection_bias is not None,
        groups=groups,
    )
    router = Router("text/0", "text", 0, rows, rule, Provenance("made", ("w",), "made", "F32"))
    bias = None if selection_bias is None else selection_bias.astype(np.float32)
    return dataclasses.replace(router, selection_bias=bias, **changes)


def inputs_of(documents: int, lean: np.ndarray | None = None, seed: int = 1) -> np.ndarray:
    """Gaussian tokens, document by document; ``lean`` [documents hidden] is what each leans to."""
    random = np.random.default_rng(seed)
    tokens = random.standard_normal((documents * LENGTH, HIDDEN))
    if lean is not None:
        tokens += np.repeat(lean, LENGTH, axis=0)
    return tokens.astype(np.float32)


def source_of(inputs: np.ndarray) -> ArraySource:
    return ArraySource({"text/0": inputs}, document_tokens=LENGTH)
