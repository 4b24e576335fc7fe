"""Incidents of configs: what they do not say, cannot mean, or ask of quantisers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.museum.checkpoint import Checkpoint
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import glm_model, sigmoid_model, softmax_model


def _without(*keys: str) -> Callable[[], Checkpoint]:
    def without() -> Checkpoint:
        model = sigmoid_model()
        config = {key: value for key, value in model.config.items() if key not in keys}
        return Checkpoint(config, model.tensors)

    return without


#: Where the config leaves the rule to a default, a warning; under the profile release an error.
_WARNED = (0, 1)

GATING_UNSAID = Incident(
    "gating_function_unsaid",
    ("ikawrakow/ik_llama.cpp#1174", "ggml-org/llama.cpp#18980"),
    "A conversion left out the key that names the gating function; engines took their default, "
    "softmax for sigmoid, and importance matrices were measured of that model.",
    "MGI113",
    (
        Case("no topk_method", _without("topk_method"), ("MGI113",), exits=_WARNED),
        Case("no scoring_func", _without("scoring_func"), ("MGI113",), exits=_WARNED),
        Case("neither", _without("topk_method", "scoring_func"), ("MGI113",), exits=_WARNED),
    ),
    (Case("both keys there", sigmoid_model),),
)


def _groups(count: int, kept: int, k: int = 4) -> Callable[[], Checkpoint]:
    said = {"n_group": count, "topk_group": kept, "num_experts_per_tok": k}
    return lambda: sigmoid_model().changed(config=said)


GROUPS_IMPOSSIBLE = Incident(
    "groups_impossible",
    ("huggingface/transformers#48647", "huggingface/transformers#48649"),
    "Groups of experts that cannot be: the sum of the two largest scores of groups of one expert "
    "crosses into the scores of another token.",
    "MGI105",
    (
        Case("9 of 8 groups are kept", _groups(8, 9), ("MGI105",)),
        Case("the groups that are kept hold 8 experts, of which 12 are chosen",
             _groups(8, 1, 12), ("MGI105",)),
        Case("64 groups of one expert", _groups(64, 8), ("MGI105",)),
    ),
    (Case("4 of 8 groups", _groups(8, 4)),),
)  # fmt: skip


def _quantised(**said: Any) -> Callable[[], Checkpoint]:
    table = {"quant_method": "compressed-tensors", **said}
    return lambda: softmax_model().changed(config={"quantization_config": table})


_ALL = ("text/0", "text/1", "text/2", "text/3")
_LINEAR = {"group_0": {"targets": ["Linear"]}}

ROUTERS_NOT_EXCLUDED = Incident(
    "routers_not_excluded",
    ("vllm-project/vllm#23031", "vllm-project/vllm#22881"),
    "The routers are stored plain, and the quantization_config says that every linear module is "
    "quantised: the engine made a quantised router and looked for scales.",
    "MGN119",
    (
        Case(
            "the list of exceptions lacks one layer of four",
            _quantised(ignore=["lm_head", *(f"model.layers.{n}.mlp.gate" for n in (0, 1, 3))]),
            ("MGN119",),
            ("text/2",),
        ),
        Case(
            "it names other modules, gate_proj among them",
            _quantised(config_groups=_LINEAR, ignore=["lm_head", "re:.*self_attn.*", "gate_proj"]),
            ("MGN119",),
            _ALL,
        ),
        Case("there is no list", _quantised(), ("MGN119",), _ALL),
    ),
    (
        Case("a regular expression", _quantised(ignore=["lm_head", "re:.*mlp.gate$"])),
        Case("a glob", _quantised(exclude_modules=["*mlp.gate*"])),
        Case("the end of the name", _quantised(modules_to_not_convert=["mlp.gate"])),
        Case(
            "experts alone are targets",
            _quantised(config_groups={"group_0": {"targets": ["re:.*experts.*proj$"]}}),
        ),
        Case("no quantisation", softmax_model),
    ),
)


def _negative(count: int, offset: float = 0.0) -> Callable[[], Checkpoint]:
    """Of each of the two groups so many biases 0.02 to 0.06 below 0, the others as much above."""

    def signed(_: np.ndarray, layer: int) -> np.ndarray:
        sizes = 0.04 + 0.02 * np.random.default_rng([741, layer]).uniform(-1.0, 1.0, 64)
        return np.where(np.arange(64) % 32 < count, -sizes, sizes) + offset

    return lambda: sigmoid_model().edited("bias", signed)


DROPPED_GROUPS_WIN = Incident(
    "dropped_groups_win",
    ("deepseek-ai/DeepSeek-V3#741", "sgl-project/sglang#3705", "huggingface/transformers#45440"),
    "Scores of dropped groups were filled with 0.0 instead of -inf: kept experts whose score and "
    "bias sum up to less than 0 lose against them.",
    "MGN120",
    (
        Case("29 of 32 biases of a group are below 0", _negative(29), ("MGN120",), _ALL),
        Case("31 of 32", _negative(31), ("MGN120",), _ALL),
        Case("all of them", _negative(32), ("MGN120",), _ALL),
    ),
    (
        Case("28 of 32: four are sure to beat 0.0", _negative(28)),
        Case("as trained", sigmoid_model),
    ),
)

_BIAS = ("MGN112", "MGN114", "MGN115")

SCORE_FROM_SUM = Incident(
    "score_taken_back_from_the_sum",
    ("flashinfer-ai/flashinfer#3875",),
    "A kernel kept the sum of score and bias and took the score back as the difference: beside a "
    "bias of 12 a small score is rounded away, and every weight is 0.",
    "MGN114",
    (
        Case("biases around 8.5", lambda: glm_model(8.5), _BIAS, ("text/0",)),
        Case("around 12", lambda: glm_model(12.0), _BIAS, ("text/0",)),
        Case("around 34.5", lambda: glm_model(34.5), _BIAS, ("text/0",)),
    ),
    (Case("around 0", lambda: glm_model(0.0)),),
)

INCIDENTS = (
    GATING_UNSAID, GROUPS_IMPOSSIBLE, ROUTERS_NOT_EXCLUDED, DROPPED_GROUPS_WIN, SCORE_FROM_SUM
)  # fmt: skip
