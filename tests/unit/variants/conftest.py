"""Routers of every kind of rule, and batches of tokens as the engine makes them."""

import numpy as np
import pytest

from moegeom.core.router import GroupMask, Router, Rule, Weights
from moegeom.core.tokens import TILE
from moegeom.engine.batch import LazyBatch
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.table import load_kernels
from moegeom.tokens.memory import HeldArrays
from moegeom.tokens.source import Request
from moegeom.variants.what_if import FitSample, FittedGate, parse_what_ifs
from tests.unit.scan.made import SOFTMAX, router_with

EXPERTS, HIDDEN, TOP_K, TOKENS, BATCH = 12, 10, 3, 192, 32

_SELECTED = Weights("softmax_of_selected_logits")
_SUM_TO_ONE = Weights("scores", renormalise=True, epsilon=1e-20, scale=2.5)
_GROUPS = GroupMask(4, 2, "top2_sum", -np.inf)

_BIASED = {"has_selection_bias": True}

RULES = {
    "softmax": Rule(TOP_K, "softmax", SOFTMAX),
    "softmax renormalised": Rule(TOP_K, "softmax", Weights("scores", renormalise=True)),
    "logits": Rule(TOP_K, "identity", _SELECTED, has_logit_bias=True),
    "biased sigmoid": Rule(TOP_K, "sigmoid", _SUM_TO_ONE, **_BIASED),
    "groups": Rule(TOP_K, "sigmoid", _SUM_TO_ONE, **_BIASED, groups=_GROUPS),
    "groups at 0": Rule(
        TOP_K, "sigmoid", _SUM_TO_ONE, **_BIASED, groups=GroupMask(4, 2, "max", 0.0)
    ),
}
# scores below 0, so that experts of groups that are left out win
RULES["fill decides"] = RULES["groups at 0"]


def _bias(rule: str, random: np.random.Generator) -> np.ndarray:
    shift = 0.6 if rule == "fill decides" else 0.0
    return (0.1 * random.standard_normal(EXPERTS) - shift).astype(np.float32)


class Made:
    """A router with one of the rules, and 192 tokens of it."""

    def __init__(self, name: str) -> None:
        random = np.random.default_rng(list(RULES).index(name))
        weight = random.standard_normal((EXPERTS, HIDDEN)) * random.uniform(0.3, 1.0, (EXPERTS, 1))
        rule = RULES[name]
        bias = _bias(name, random) if rule.has_selection_bias else None
        self.router = router_with(
            weight.astype(np.float32),
            rule,
            selection_bias=bias,
            logit_bias=0.5 * random.standard_normal(EXPERTS).astype(np.float32)
            if rule.has_logit_bias
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

    def sample(self, tokens: TokenBatch | None = None) -> FitSample:
        return FitSample(tokens or self.tokens, load_kernels("cpu"), batch=BATCH, seed=0)

    def gate(self, text: str, router: Router | None = None) -> FittedGate:
        """The gate of a what-if as people write it."""
        return self.fitted(text, router or self.router, self.sample())

    def fitted(self, text: str, router: Router, sample: FitSample) -> FittedGate:
        (what_if,) = parse_what_ifs([text])
        return what_if.kind.make(router, what_if.values, sample)


_MADE = {rule: Made(rule) for rule in RULES}


@pytest.fixture(params=RULES)
def made(request: pytest.FixtureRequest) -> Made:
    return _MADE[request.param]


@pytest.fixture
def made_by() -> dict[str, Made]:
    return _MADE
