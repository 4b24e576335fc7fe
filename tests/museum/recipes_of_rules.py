"""Recipes of engines that compute scores, choices or weights by another rule."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from moegeom.core.tokens import TokenColumns
from moegeom.studies.explain.record import Cause
from tests.generator.scoring import HEALTHY
from tests.museum.checkpoint import BF16, Checkpoint, name_of
from tests.museum.disagreements import bf16, biases, model, plain_model
from tests.museum.healthy import glm_model, sigmoid_model
from tests.museum.questions import Explained
from tests.museum.recipe import Needs, Planted, Recipe
from tests.museum.two_runs import Array, Engine, Runs, Step, TwoRuns

_FINE = tuple(sorted(HEALTHY))


def damage(text: str, runs: Runs, cause: Cause, told: str = "") -> Planted:
    """Two runs and the cause that should be named, with what its sentences should tell."""
    return Planted(text, lambda: Explained(runs()), (cause,), told)


def twin(text: str, runs: Runs, *right: Cause) -> Planted:
    """Two runs of which nothing should be named but what is truly the case."""
    return Planted(text, lambda: Explained(runs()), (*_FINE, *right))


def of_runs(
    name: str,
    threads: tuple[str, ...],
    story: str,
    planting: str,
    answer: str,
    cause: Cause,
    sizes: Mapping[str, Runs],
    twins: Mapping[str, Runs],
    also: tuple[Planted, ...] = (),
    told: str = "",
    needs: Needs = "choices of both runs",
) -> Recipe:
    """A recipe of two runs whose sizes have one right answer, and twins none but those of ``also``."""
    planted = tuple(damage(text, runs, cause, told) for text, runs in sizes.items())
    healthy = tuple(twin(text, runs) for text, runs in twins.items()) + also
    return Recipe(name, threads, story, planting, answer, "explain", needs, planted, healthy)


# ------------------------------------------------------------------------------------------ numbers
def misread_bias(bias: Array, _: int = 0) -> Array:
    """The first bytes of the float32 numbers, taken as bfloat16; what is no number becomes 0."""
    taken = bias.astype(np.float32).view(BF16)[: bias.size].astype(np.float32)
    return np.where(np.isfinite(taken), taken, np.float32(0.0))


def _bias_misread(layers: tuple[int, ...], noise: float = 0.0) -> Runs:
    def runs() -> TwoRuns:
        a = biases(0.05, 2)
        return TwoRuns(a, a.edited("bias", misread_bias, layers), noise=noise)

    return runs


BIAS_MISREAD = of_runs(
    "bias_bytes_misread",
    ("vllm-project/vllm#38989", "vllm-project/vllm#38931", "vllm-project/vllm#39179"),
    "A kernel was written for a bfloat16 bias and was handed float32: it read the bytes of half of "
    "the numbers as those of all, and next to no question of a benchmark was answered any more.",
    "The float32 bytes of B's bias are viewed as bfloat16, as many as there are experts.",
    "B's bias is another one: bytes that were read as another dtype.",
    "bias differs",
    {
        "the second of two layers": _bias_misread((1,)),
        "both layers": _bias_misread((0, 1)),
        "both, with noise of 0.2 %": _bias_misread((0, 1), 0.002),
    },
    {"read as what it is": lambda: TwoRuns(biases(0.05, 2), noise=0.002)},
    also=(
        twin(
            "converted to bfloat16 instead",
            lambda: TwoRuns(biases(0.05, 2), engine=Engine(bias=bf16)),
            "bias rounded",
        ),
    ),
    told="bf16|bfloat16",
)


def misread_logits(rows: int) -> Step:
    """Batches of so many rows of bfloat16 logits, their bytes taken as float32, zeros behind."""

    def misread(logits: Array) -> Array:
        out = np.zeros_like(logits)
        for first in range(0, len(logits), rows):
            batch = logits[first : first + rows]
            bytes_of = np.concatenate([batch.astype(BF16).ravel(), np.zeros(batch.size, BF16)])
            values = bytes_of.view(np.float32)[: batch.size].reshape(batch.shape)
            out[first : first + rows] = np.where(np.isfinite(values), values, np.float32(0.0))
        return out

    return misread


def _logits_misread(checkpoint: Callable[[], Checkpoint], rows: int) -> Runs:
    return lambda: TwoRuns(checkpoint(), engine=Engine(logits=misread_logits(rows)))


_MISREAD = "bf16|bfloat16|float32|bytes"

LOGITS_MISREAD = of_runs(
    "logits_bytes_misread",
    ("flashinfer-ai/flashinfer#2889",),
    "A launcher passed bfloat16 logits on to a kernel that reads float32, without a word.",
    "B's logits are rounded to bfloat16, and two of them at a time are taken as one float32.",
    "B's logits are bytes that were read as another dtype.",
    "rule differs",
    {
        "all tokens in one batch": _logits_misread(model, 2048),
        "a batch for each document": _logits_misread(model, 128),
        "256 experts, in one batch": _logits_misread(lambda: glm_model(0.0), 2048),
    },
    {},
    also=(
        twin(
            "rounded to bfloat16 and read as such",
            lambda: TwoRuns(model(), engine=Engine(logits=bf16)),
            "logits rounded",
        ),
    ),
    told=_MISREAD,
)

#: The input that is the same for every token, so that a column of the router lowers all logits.
_CONSTANT = np.float32(3.0)


def _one_constant(unit: Array, _: TokenColumns) -> Array:
    unit[:, 0] = _CONSTANT
    return unit


def lowered(by: float) -> Checkpoint:
    """The model with every logit lowered by as much, where the first input is the constant."""

    def column(weight: Array, layer: int) -> Array:
        gain = float(model().tensors[name_of("gain", layer)][0])
        weight[:, 0] = -by / (float(_CONSTANT) * gain)
        return weight

    return model().edited("weight", column)


def _positive(logits: Array) -> Array:
    return np.maximum(logits, np.float32(0.0))


def _negative_lost(by: float) -> Runs:
    engine = Engine(logits=_positive)
    return lambda: TwoRuns(lowered(by), before=_one_constant, engine=engine)


NEGATIVE_LOST = of_runs(
    "negative_logits_lost",
    ("vllm-project/vllm#37605", "vllm-project/vllm#37591", "flashinfer-ai/flashinfer#2822"),
    "A fused kernel searched for the largest logits among a padding of zeros: where fewer than k "
    "logits were positive, experts were taken by their number.",
    "An input is 3 for every token and its column lowers all logits, which changes no softmax; B "
    "chooses the largest of max(logit, 0), the lowest number among equals.",
    "B takes negative logits for 0.",
    "rule differs",
    {
        "another set for one token in twenty": _negative_lost(0.75),
        "for one in three": _negative_lost(1.1),
        "for five of six": _negative_lost(1.5),
    },
    {
        "the same router, negative logits compared": lambda: TwoRuns(
            lowered(1.5), before=_one_constant, noise=0.002
        )
    },
    told="negative",
)


def _leaning(step: float, tokens: int) -> Runs:
    def lean(scores: Array) -> Array:
        return scores - np.float32(step) * np.arange(scores.shape[1], dtype=np.float32)

    return lambda: TwoRuns(glm_model(0.0), engine=Engine(selection=lean), tokens=tokens)


LEANING = of_runs(
    "tie_break_outgrew_the_ties",
    ("sgl-project/sglang#31768",),
    "Equal scores were told apart by taking a small multiple of the expert's number away from each "
    "score; scores that were not equal changed places too, always for a lower number.",
    "B's scores are lowered by a step times the number of the expert, of 256.",
    "B's scores lean to low numbers of experts.",
    "ties broken by number",
    {
        "step 3e-7": _leaning(3e-7, 16_384),
        "step 1e-5": _leaning(1e-5, 2048),
        "step 1e-4": _leaning(1e-4, 2048),
    },
    {"noise of 0.6 % on the inputs instead": lambda: TwoRuns(glm_model(0.0), noise=0.006)},
)


# ------------------------------------------------------------------------------------------- groups
def _eight_groups() -> Checkpoint:
    return sigmoid_model(layers=2).changed(config={"n_group": 8, "topk_group": 4})


def _by_best(checkpoint: Callable[[], Checkpoint], noise: float, group_best: int = 1) -> Runs:
    return lambda: TwoRuns(checkpoint(), engine=Engine(group_best=group_best), noise=noise)


GROUP_BY_BEST = of_runs(
    "group_scored_by_its_best",
    ("vllm-project/vllm#13474", "NVIDIA/Megatron-LM#1378", "EricLBuehler/mistral.rs#1278"),
    "Groups of experts were ranked by their best expert, where the model was trained with the sum "
    "of the two best.",
    "B ranks groups by the largest score in each.",
    "B scores groups otherwise.",
    "rule differs",
    {
        "4 of 8 groups": _by_best(_eight_groups, 0.0),
        "1 of 2 groups": _by_best(lambda: sigmoid_model(layers=2), 0.0),
        "4 of 8 groups, with noise of 0.5 %": _by_best(_eight_groups, 0.005),
    },
    {"by the two best, with noise of 0.2 %": _by_best(_eight_groups, 0.002, 2)},
    told="group",
)


# ------------------------------------------------------------------------------------------- scores
def live_biases(spread: float) -> Checkpoint:
    def drawn(bias: Array, layer: int) -> Array:
        return spread * np.random.default_rng([1226, layer]).standard_normal(bias.size)

    return plain_model().edited("bias", drawn)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, dim=-1)


def _guessed(spread: float, noise: float = 0.0, weighs: bool = False) -> Runs:
    engine = Engine(score=_softmax, leaks_bias=weighs, scales=not weighs)
    keeps = "weights" if weighs else "ids"
    return lambda: TwoRuns(live_biases(spread), engine=engine, noise=noise, keeps=keeps)


GATING_GUESSED = of_runs(
    "gating_function_guessed",
    ("ikawrakow/ik_llama.cpp#1174", "ggml-org/llama.cpp#18980", "ggml-org/llama.cpp#19613"),
    "The file did not name the gating function, and the engine took softmax for sigmoid: the bias, "
    "made for scores near one half, decided nearly alone.",
    "B adds the bias to softmax scores.",
    "B has another gating function.",
    "rule differs",
    {
        "biases that spread 0.003": _guessed(0.003),
        "biases that spread 0.01": _guessed(0.01),
        "0.1, with noise of 0.5 %": _guessed(0.1, 0.005),
    },
    {"sigmoid on both sides": lambda: TwoRuns(live_biases(0.1), noise=0.002)},
    told="softmax",
)

RULE_OF_ANOTHER_FAMILY = of_runs(
    "rule_of_another_family",
    ("ml-explore/mlx-lm#1883",),
    "A port routed by the rule of an older family: softmax for sigmoid, the bias left in the "
    "weights, and no scaling. Half of the tokens met other experts, and the text still read well.",
    "B adds the bias to softmax scores, weighs by the sums and does not scale.",
    "B has another gating function.",
    "rule differs",
    {
        "biases that spread 0.003": _guessed(0.003, 0.0, weighs=True),
        "biases that spread 0.01": _guessed(0.01, 0.0, weighs=True),
    },
    {"the family's own rule": lambda: TwoRuns(live_biases(0.1), noise=0.002, keeps="weights")},
    told="softmax",
    needs="choices and routing weights of both runs",
)


# ------------------------------------------------------------------------------------------ weights
def _weighed(checkpoint: Callable[[], Checkpoint], engine: Engine, noise: float = 0.0) -> Runs:
    return lambda: TwoRuns(checkpoint(), engine=engine, keeps="weights", noise=noise)


_AS_THEY_ARE = Engine(renormalises=False)

NOT_RENORMALISED = of_runs(
    "weights_not_renormalised",
    ("pytorch/torchtitan#1448", "pytorch/torchtitan#1418", "lablup/mlxcel#391"),
    "The weights of the chosen experts were left as they came out of the scores, where the model "
    "divides them by their sum.",
    "B does not renormalise.",
    "B's weights are not renormalised.",
    "routing weights differ",
    {
        "sigmoid scores": _weighed(plain_model, _AS_THEY_ARE),
        "softmax scores": _weighed(model, _AS_THEY_ARE),
        "softmax scores, with noise of 0.2 %": _weighed(model, _AS_THEY_ARE, 0.002),
    },
    {"renormalised on both sides": _weighed(model, Engine(), 0.002)},
    told="renormal",
    needs="choices and routing weights of both runs",
)

NOT_SCALED = of_runs(
    "scaling_factor_dropped",
    ("sgl-project/sglang-jax#1282", "sgl-project/sglang#31449"),
    "The scaling factor of the weights was applied in the branch that renormalises alone, and got "
    "lost in the other.",
    "B does not scale its weights, of a model that scales by 2.5.",
    "B's weights lack the scaling factor.",
    "routing weights differ",
    {
        "no noise": _weighed(plain_model, Engine(scales=False)),
        "with noise of 0.2 %": _weighed(plain_model, Engine(scales=False), 0.002),
    },
    {"scaled on both sides": _weighed(plain_model, Engine(), 0.002)},
    told="scal",
    needs="choices and routing weights of both runs",
)
