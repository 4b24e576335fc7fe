"""Disagreements because of the selection bias, or of the rule around it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.museum.checkpoint import Checkpoint
from tests.museum.disagreement import Disagreement, Pair
from tests.museum.disagreements_of_weights import bf16
from tests.museum.healthy import glm_model, sigmoid_model
from tests.museum.two_runs import Engine, TwoRuns


def plain_model() -> Checkpoint:
    """Two layers, 64 experts, no groups: 4 chosen by sigmoid score and bias."""
    return sigmoid_model(layers=2).changed(config={"n_group": 1, "topk_group": 1})


def _glm(
    offset: float, engine: Engine, noise: float = 0.0, tokens: int = 1024
) -> Callable[[], TwoRuns]:
    return lambda: TwoRuns(glm_model(offset), engine=engine, noise=noise, tokens=tokens)


_CAST = Engine(bias=bf16)
_SUM = Engine(bias=bf16, selection=bf16)

BIAS_CAST = Disagreement(
    "bias_collapses_in_bfloat16",
    ("sgl-project/sglang#37133",),
    "The engine cast the selection bias to bfloat16: values that spread 0.25 around 7 became a "
    "dozen.",
    (
        Pair("biases around 1", _glm(1.0, _CAST), "bias rounded", "text/0"),
        Pair("biases around 7", _glm(7.0, _CAST), "bias rounded", "text/0"),
        Pair("around 7, with noise of 0.1 %", _glm(7.0, _CAST, 0.001), "bias rounded", "text/0"),
    ),
    (
        Pair("bias kept in float32", _glm(7.0, Engine(), 0.001, 2048), "arithmetic noise only"),
        Pair("bias kept in float32, no noise", _glm(7.0, Engine()), "no disagreement"),
    ),
)

SUM_ROUNDED = Disagreement(
    "bias_swallows_scores",
    ("sgl-project/sglang#31001",),
    "Score and bias were added up in bfloat16, where a step at the bias is larger than what scores "
    "differ by.",
    (
        Pair("biases around 7", _glm(7.0, _SUM), "bias rounded", "text/0"),
        Pair("biases around 30", _glm(30.0, _SUM), "bias rounded", "text/0"),
    ),
    (Pair("added up in float32", _glm(30.0, Engine(), 0.0005, 4096), "arithmetic noise only"),),
)


def biases(scale: float, seed: int) -> Checkpoint:
    """The model with biases that were drawn anew around where they were."""

    def drawn(bias: np.ndarray, layer: int) -> np.ndarray:
        return bias + scale * np.random.default_rng([seed, layer]).standard_normal(bias.size)

    return plain_model().edited("bias", drawn)


def _frozen(scale: float) -> Callable[[], TwoRuns]:
    """A's biases moved on, B's did not."""
    return lambda: TwoRuns(biases(scale, 1), plain_model(), against=_old_rows(), noise=0.0005)


def _old_rows() -> Checkpoint:
    """Before: other rows too, so that only the biases of B are those of this checkpoint."""

    def rows(weight: np.ndarray, layer: int) -> np.ndarray:
        noise = np.random.default_rng([8, layer]).standard_normal(weight.shape)
        return weight + 0.1 * noise / np.sqrt(weight.shape[1])

    return plain_model().edited("weight", rows)


BIAS_FROZEN = Disagreement(
    "bias_frozen",
    ("PrimeIntellect-ai/prime-rl#2953",),
    "The rows were sent after every step and the biases only once; the first checkpoint is named "
    "with --checkpoint-b.",
    (
        Pair("biases moved by 0.01", _frozen(0.01), "bias stale", "text/0"),
        Pair("biases moved by 0.1", _frozen(0.1), "bias stale", "text/0"),
    ),
    (
        Pair(
            "both sent",
            lambda: TwoRuns(biases(0.1, 1), against=_old_rows(), noise=0.001, tokens=4096),
            "arithmetic noise only",
        ),
    ),
)


def _zeros() -> TwoRuns:
    return TwoRuns(biases(0.05, 2), engine=Engine(bias=np.zeros_like), noise=0.0005)


BIAS_LEFT_OUT = Disagreement(
    "bias_never_reached_the_engine",
    ("AI-Hypercomputer/maxtext#2494",),
    "The bias that balances the load was zeros on one side: never updated, never converted, or not "
    "loaded.",
    (Pair("biases that spread 0.05", _zeros, "bias missing", "text/0"),),
    (Pair("loaded", lambda: TwoRuns(biases(0.05, 2)), "no disagreement"),),
)


def _weighed(engine: Engine, scale: float) -> Callable[[], TwoRuns]:
    return lambda: TwoRuns(biases(scale, 3), engine=engine, keeps="weights")


BIAS_LEAKS = Disagreement(
    "bias_leaks_into_routing_weights",
    ("vllm-project/vllm#12002",),
    "The bias that should only select was left in the scores that weights are made of: the same "
    "experts, with other weights.",
    (
        Pair(
            "biases that spread 0.1",
            _weighed(Engine(leaks_bias=True), 0.1),
            "bias in routing weights",
            "text/0",
        ),
        Pair(
            "biases that spread 0.5",
            _weighed(Engine(leaks_bias=True), 0.5),
            "bias in routing weights",
            "text/0",
        ),
    ),
    (Pair("weights of the scores alone", _weighed(Engine(), 0.5), "no disagreement"),),
    "choices and routing weights of both runs",
)


def _groups(engine: Engine, noise: float, tokens: int) -> Callable[[], TwoRuns]:
    return lambda: TwoRuns(sigmoid_model(layers=2), engine=engine, noise=noise, tokens=tokens)


GROUPS_IGNORED = Disagreement(
    "groups_ignored",
    (),
    "The engine chooses from all groups of experts.",
    (
        Pair(
            "1 of 2 groups",
            _groups(Engine(ignores_groups=True), 0.0005, 1024),
            "rule differs",
            "text/0",
        ),
    ),
    (Pair("groups kept", _groups(Engine(), 0.002, 2048), "arithmetic noise only"),),
)

DISAGREEMENTS = (BIAS_CAST, SUM_ROUNDED, BIAS_FROZEN, BIAS_LEFT_OUT, BIAS_LEAKS, GROUPS_IGNORED)
