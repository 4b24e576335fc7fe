"""Routers of every kind of rule, and batches of tokens as the engine makes them."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.core.router import GroupMask, Provenance, Router, Rule, Weights
from moegeom.core.tokens import TILE
from moegeom.engine.batch import LazyBatch
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.table import load_kernels
from moegeom.tokens.held import HeldArrays
from moegeom.tokens.source import Request
from moegeom.variants.what_if import Gate, Sample, parse_what_ifs

EXPERTS, HIDDEN, TOP_K, TOKENS, BATCH = 12, 10, 3, 192, 32

_SELECTED = Weights("softmax_of_selected_logits")
_SUM_TO_ONE = Weights("scores", renormalise=True, epsilon=1e-20, scale=2.5)
_GROUPS = GroupMask(4, 2, "top2_sum", -np.inf)

RULES = {
    "softmax": Rule(TOP_K, "softmax", Weights("scores")),
    "softmax renormalised": Rule(TOP_K, "softmax", Weights("scores", renormalise=True)),
    "logits": Rule(TOP_K, "identity", _SELECTED, has_logit_bias=True),
    "biased sigmoid": Rule(TOP_K, "sigmoid", _SUM_TO_ONE, has_selection_bias=True),
    "groups": Rule(TOP_K, "sigmoid", _SUM_TO_ONE, has_selection_bias=True, groups=_GROUPS),
    "groups at 0": Rule(
        TOP_K, "sigmoid", _SUM_TO_ONE, groups=GroupMask(4, 2, "max", 0.0), has_selection_bias=True
    ),
}
# scores below 0, so that experts of groups that are left out win
RULES["fill decides"] = RULES["groups at 0"]


def _bias(rule: str, random: np.random.Generator) -> np.ndarray:
    shift = 0.6 if rule == "fill decides" else 0.0
    return (0.1 * random.standard_normal(EXPERTS) - shift).astype(np.float32)


class Made:
    """A router with one of the rules, and 192 tokens of it."""

    def __init__(self, rule: str) -> None:
        random = np.random.default_rng(list(RULES).index(rule))
        weight = random.standard_normal((EXPERTS, HIDDEN)) * random.uniform(0.3, 1.0, (EXPERTS, 1))
        self.router = Router(
            name="text/0",
            stack="text",
            layer=0,
            weight=weight.astype(np.float32),
            rule=RULES[rule],
            provenance=Provenance("made", ("gate.weight",), "made.safetensors", "F32"),
            selection_bias=_bias(rule, random) if RULES[rule].has_selection_bias else None,
            logit_bias=0.5 * random.standard_normal(EXPERTS).astype(np.float32)
            if RULES[rule].has_logit_bias
            else None,
        )
        lean = random.standard_normal(HIDDEN)
        inputs = random.standard_normal((TOKENS, HIDDEN)) + 0.5 * lean
        self.inputs = inputs.astype(np.float32)
        self.tokens = self.batch(self.router)

    def batch(self, router: Router, inputs: np.ndarray | None = None) -> TokenBatch:
        """All tokens at a router, by the engine."""
        values = self.inputs if inputs is None else inputs
        source = HeldArrays({router.name: values}).open(
            Request("router_input", routers=(router.name,))
        )
        assert len(values) <= TILE
        return LazyBatch(Task(prepare(router), source, load_kernels("cpu")), 0, len(values))

    def sample(self, tokens: TokenBatch | None = None) -> Sample:
        return Sample(tokens or self.tokens, load_kernels("cpu"), batch=BATCH, seed=0)

    def gate(self, text: str, router: Router | None = None) -> Gate:
        """The gate of a what-if as people write it."""
        (asked,) = parse_what_ifs([text])
        return asked.kind.make(router or self.router, asked.values, self.sample())


_MADE = {rule: Made(rule) for rule in RULES}


@pytest.fixture(params=RULES)
def made(request: pytest.FixtureRequest) -> Made:
    return _MADE[request.param]


@pytest.fixture
def made_by() -> dict[str, Made]:
    return _MADE
