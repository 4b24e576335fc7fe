"""Healthy checkpoints to damage: shapes of real families, of many drawn by number, and the three
that were trained.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.synthetic import SyntheticModel, write_checkpoint
from tests.museum.checkpoint import BF16, F32, Checkpoint, read_checkpoint

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"

#: Values that differ among the 256 selection biases of a layer of GLM-5.2.
GLM_DISTINCT = 238

#: What engines read of a config of deepseek_v3, beside what its own class reads.
SAID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@functools.cache
def softmax_model(layers: int = 4, experts: int = 32, hidden: int = 256) -> Checkpoint:
    """Softmax over all experts, keep 4; routers and gains in bfloat16."""
    return _synthetic(
        SyntheticModel("qwen3_moe", hidden=hidden, experts=experts, top_k=4, layers=layers)
    )


@functools.cache
def sigmoid_model(layers: int = 4, experts: int = 64, hidden: int = 256) -> Checkpoint:
    """Sigmoid scores, a float32 selection bias around 0, groups of 32 experts, keep 4."""
    shape = SyntheticModel("deepseek_v3", hidden=hidden, experts=experts, top_k=4, layers=layers)
    return _synthetic(shape).changed(config=SAID)


@functools.cache
def glm_model(offset: float) -> Checkpoint:
    """256 experts, keep 8, no groups; 238 different biases spread 0.246, as in GLM-5.2."""
    shape = SyntheticModel("deepseek_v3", hidden=512, experts=256, top_k=8, layers=1)
    plain = _synthetic(shape).changed(config={"n_group": 1, "topk_group": 1, **SAID})

    def biases(_: np.ndarray, layer: int) -> np.ndarray:
        generator = np.random.default_rng([37133, layer])
        inner = np.linspace(0.045, 0.24, GLM_DISTINCT - 2)
        values = np.concatenate([[0.0, 0.246], inner])
        again = generator.choice(inner, 256 - GLM_DISTINCT)
        return offset - 0.123 + generator.permutation(np.concatenate([values, again]))

    return plain.edited("bias", biases)


@functools.cache
def deep_model() -> Checkpoint:
    """Twelve layers whose routers grow with depth by a twentieth per layer."""
    return softmax_model(layers=12).edited("weight", lambda w, layer: w * 1.05**layer)


@functools.cache
def in_float32(model: Checkpoint) -> Checkpoint:
    def refined(weight: np.ndarray, layer: int) -> np.ndarray:
        return weight * (1.0 + 1e-3 * np.random.default_rng(layer).standard_normal(weight.shape))

    return model.edited("weight", refined, dtype=F32)


@functools.cache
def trained(name: str) -> Checkpoint:
    return read_checkpoint(SAMPLES / name)


@functools.cache
def trained_sigmoid() -> Checkpoint:
    return trained("deepseek-tiny/step_1500").changed(config=SAID)


def olmoe() -> Checkpoint:
    """A trained checkpoint with 16 experts in each of 3 layers, and rows of 64 entries."""
    return trained("olmoe-balanced/step_1500")


@functools.cache
def with_experts(model: Checkpoint) -> Checkpoint:
    """With small matrices of each expert, so that experts can be told apart."""
    experts = {}
    for layer in model.layers:
        count = len(model.tensors[f"model.layers.{layer}.mlp.gate.weight"])
        values = np.random.default_rng([7, layer]).standard_normal((count, 8, 16))
        for expert in range(count):
            for leaf in ("gate", "up", "down"):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{leaf}_proj.weight"
                experts[name] = values[expert].astype(BF16)
    return model.changed(experts)


def _synthetic(shape: SyntheticModel) -> Checkpoint:
    with tempfile.TemporaryDirectory() as folder:
        return read_checkpoint(write_checkpoint(Path(folder) / "model", shape))


#: Experts, chosen ones and inputs of a layer: from small models to DeepSeek's 256 experts. A bias
#: needs groups of 32.
_EXPERTS, _HIDDEN, _LAYERS = (8, 16, 32, 60, 64, 128, 160, 256), (64, 128, 256, 512), (1, 2, 3, 9)

#: The largest share of directions that rows have in common, spread of their lengths, spread of the
#: gain, and factor of its few outlying columns.
_SHARED, _LENGTHS, _GAIN, _OUTLIERS = 0.7, 0.4, 0.5, 4.0


def drawn_shape(number: int) -> Checkpoint:
    """The healthy model of that number, as different from others as trained ones are."""
    random = np.random.default_rng([400, number])
    has_bias = bool(random.integers(2))
    experts = int(random.choice([e for e in _EXPERTS if not has_bias or e % 32 == 0]))
    hidden, layers = int(random.choice(_HIDDEN)), int(random.choice(_LAYERS))
    make = sigmoid_model if has_bias else softmax_model
    model = make.__wrapped__(layers, experts, hidden)
    shared, lengths, gain = random.uniform(0.0, (_SHARED, _LENGTHS, _GAIN))
    outliers = random.uniform(1.0, _OUTLIERS)
    rank, tails = int(random.integers(4, 17)), random.uniform(6.0, 30.0)

    def rows(weight: np.ndarray, layer: int) -> np.ndarray:
        own = np.random.default_rng([401, number, layer])
        count = weight.shape[1]
        heavy = own.standard_t(tails, weight.shape) / np.sqrt(count * tails / (tails - 2.0))
        directions = own.standard_normal((rank, count)) / np.sqrt(count * rank)
        together = own.standard_normal((experts, rank)) @ directions
        together += own.standard_normal(count) / np.sqrt(count)
        mixed = np.sqrt(1.0 - shared**2) * heavy + shared * together
        return mixed * np.exp(own.normal(0.0, lengths, (experts, 1)) + 0.02 * layer)

    def gains(values: np.ndarray, layer: int) -> np.ndarray:
        of_all, own = (np.random.default_rng([402, number, *at]) for at in ((), (layer,)))
        found = np.exp(of_all.normal(0.0, gain, values.shape) + own.normal(0.0, 0.1, values.shape))
        found[of_all.choice(len(found), 2, replace=False)] *= outliers
        return found

    chosen = int(random.integers(1, min(experts // 2, 8) + 1))
    dtype = F32 if random.integers(2) else BF16
    said = {
        "num_experts_per_tok": chosen,
        "dtype": "float32" if dtype == F32 else "bfloat16",
        "initializer_range": 0.02,
    }
    shaped = model.changed(config=said).edited("weight", rows, dtype=dtype).edited("gain", gains)
    if not has_bias:
        return shaped
    spread = 10.0 ** random.uniform(-2.5, -1.0)
    return shaped.edited(
        "bias",
        lambda bias, layer: (
            spread * np.random.default_rng([403, number, layer]).standard_normal(bias.shape)
        ),
    )
