"""One constructed defect for each check: the smallest change that must make it fail."""

from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.synthetic import mean_direction
from tests.unit.check.conftest import (
    BIAS,
    GAIN,
    GATE,
    TABLE,
    Case,
    Spoil,
    Tensors,
    keep,
    with_token_table,
)

BF16 = ml_dtypes.bfloat16


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape)


def rows(change, layer: int = 1) -> Spoil:
    """Spoils the rows of one router, in float64; stored in bfloat16 again."""

    def spoil(tensors: Tensors, config: dict[str, Any]) -> None:
        name = GATE.format(layer)
        tensors[name] = change(tensors[name].astype(np.float64)).astype(BF16)

    return spoil


def row(expert: int, change, layer: int = 1) -> Spoil:
    """Spoils one row."""

    def one(values: np.ndarray) -> np.ndarray:
        values[expert] = change(values[expert])
        return values

    return rows(one, layer)


def tensor(pattern: str, change, layer: int = 1) -> Spoil:
    """Spoils one tensor as it is stored; None removes it."""

    def spoil(tensors: Tensors, config: dict[str, Any]) -> None:
        changed = change(tensors.pop(pattern.format(layer), None))
        if changed is not None:
            tensors[pattern.format(layer)] = changed

    return spoil


def copied(layer: int, onto: int) -> Spoil:
    """Writes the router of one layer over that of another."""

    def spoil(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[GATE.format(onto)] = tensors[GATE.format(layer)].copy()

    return spoil


def setting(**changes: Any) -> Spoil:
    return lambda tensors, config: config.update(changes)


def without(key: str) -> Spoil:
    return lambda tensors, config: config.pop(key, None)


def stored_twice(change, layer: int = 1) -> Spoil:
    """Stores a router, and what stands beside it, under a second name."""

    def spoil(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in (GATE.format(layer), GAIN.format(layer)):
            again = change(tensors[name]) if "gate" in name else tensors[name]
            tensors[f"language_model.{name}"] = np.asarray(again, tensors[name].dtype)

    return spoil


def together(*spoils: Spoil) -> Spoil:
    def spoil(tensors: Tensors, config: dict[str, Any]) -> None:
        for one in spoils:
            one(tensors, config)

    return spoil


#: What engines read of a config of deepseek_v3, beside what its own class reads.
SAID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def biases(values) -> Case:
    return Case(tensor(BIAS, lambda bias: np.asarray(values, bias.dtype)), "deepseek_v3")


def _set(values: np.ndarray, index, value: float) -> np.ndarray:
    values = values.copy()
    values[index] = value
    return values


def _int4(values: np.ndarray) -> np.ndarray:
    step = np.abs(values).max(axis=1, keepdims=True) / 7.0
    return np.rint(values / step) * step


def _two_crowds(values: np.ndarray) -> np.ndarray:
    centre = _random(2, values.shape[1]) / 8.0
    return centre[np.arange(len(values)) % 2] + 0.3 * values


def _towards_the_mean(values: np.ndarray) -> np.ndarray:
    """Every row with a part of its own size along the mean input, of either sign."""
    mean = mean_direction(Case().model).astype(np.float64)
    sign = np.where(np.arange(len(values)) % 2, 1.0, -1.0)
    return values + 2.0 * np.linalg.norm(values, axis=1, keepdims=True) * sign[:, None] * mean


def _blind(values: np.ndarray) -> np.ndarray:
    """Rows that read nothing of what the tokens lean to: small logits from long inputs."""
    direction = mean_direction(Case().model).astype(np.float64)
    return values - np.outer(values @ direction, direction)


EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"


def with_experts(tensors: Tensors, config: dict[str, Any]) -> None:
    """Adds 16 experts of 32 neurons, each drawn for itself."""
    random = np.random.default_rng(9)
    shapes = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    for layer in range(3):
        for expert in range(16):
            for leaf, shape in shapes.items():
                values = 0.02 * random.standard_normal(shape)
                tensors[EXPERT.format(layer, expert, leaf)] = values.astype(BF16)


def trained_experts(tensors: Tensors, config: dict[str, Any]) -> None:
    """Experts with heavy tails and sizes of their own, as training leaves them."""
    with_experts(tensors, config)
    random = np.random.default_rng(12)
    for name in [name for name in tensors if ".experts." in name]:
        values = random.standard_t(6, tensors[name].shape) * np.exp(0.2 * random.standard_normal())
        tensors[name] = (0.02 * values).astype(BF16)


def quantised_experts(tensors: Tensors, config: dict[str, Any]) -> None:
    """Experts in eight bits, with a scale of their own and one of their inputs."""
    trained_experts(tensors, config)
    config["quantization_config"] = {"quant_method": "fp8", "ignore": ["re:.*mlp.gate$"]}
    for number, name in enumerate([name for name in tensors if ".experts." in name]):
        values = tensors[name].astype(np.float32)
        scale = np.abs(values).max() / 448.0
        tensors[name] = (values / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale"] = np.array(scale, np.float32)
        stem = name.removesuffix("weight")
        tensors[f"{stem}input_scale"] = np.array(0.01 + 1e-4 * number, np.float32)


def in_pairs(tensors: Tensors, config: dict[str, Any]) -> None:
    for leaf in ("gate", "up", "down"):
        tensors[EXPERT.format(1, 9, leaf)] = tensors[EXPERT.format(1, 4, leaf)]


def upcycled(tensors: Tensors, config: dict[str, Any]) -> None:
    """Makes copies of the first expert of layer 1, plus noise."""
    random = np.random.default_rng(10)
    for leaf in ("gate", "up", "down"):
        first = tensors[EXPERT.format(1, 0, leaf)].astype(np.float64)
        for expert in range(16):
            noise = 0.01 * random.standard_normal(first.shape)
            tensors[EXPERT.format(1, expert, leaf)] = (first + noise).astype(BF16)


def without_tensors(part: str) -> Spoil:
    def spoil(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return spoil


SHARED_GATE = "model.layers.{}.mlp.shared_expert_gate.weight"


def gated(tensors: Tensors, config: dict[str, Any]) -> None:
    """A shared expert and its gate in every layer of a qwen2_moe."""
    config |= {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}
    for layer in range(3):
        tensors[SHARED_GATE.format(layer)] = _random(1, 64).astype(BF16)
        for leaf, shape in {"gate": (8, 64), "up": (8, 64), "down": (64, 8)}.items():
            name = f"model.layers.{layer}.mlp.shared_expert.{leaf}_proj.weight"
            tensors[name] = _random(*shape).astype(BF16)


OFFSET = 6.94 + 0.05 * _random(16)

#: Weights alone.
WEIGHTS: dict[str, Case] = {
    "MGI101": Case(rows(lambda w: _set(w, (2, 5), np.nan))),
    "MGI102": Case(tensor(GAIN, lambda g: _set(g, 3, np.inf))),
    "MGI103": Case(row(2, lambda w: 0.0 * w)),
    "MGI104": Case(rows(lambda w: _set(w, 5, w[1]))),
    "MGI105": Case(tensor(GATE, lambda w: w[:8])),
    "MGI106": Case(
        tensor("model.layers.{}.mlp.gate.weight_scale", lambda none: np.ones(16, np.float32))
    ),
    "MGI107": Case(tensor(BIAS, lambda bias: None), "deepseek_v3"),
    "MGI109": Case(setting(num_experts_per_tok=16)),
    "MGI110": biases(_set(0.02 * _random(16), 3, -3.0)),
    "MGI111": Case(
        tensor(TABLE, lambda ids: ids.astype(BF16).astype(np.int64)),
        "deepseek_v3",
        made=with_token_table,
    ),
    "MGI112": Case(copied(0, onto=2)),
    "MGI113": Case(without("scoring_func"), "deepseek_v3", made=setting(**SAID)),
    "MGI114": Case(stored_twice(lambda w: 2 * w), made=stored_twice(lambda w: w)),
    "MGI116": Case(tensor(GAIN, lambda gain: gain * 1e30)),
    "MGI118": Case(without_tensors("layers.1.mlp.experts.3."), made=with_experts),
    "MGI119": Case(without_tensors("layers.1.mlp.experts.3.up_proj"), made=with_experts),
    "MGI120": Case(
        tensor("model.layers.{}.mlp.old_gate.weight", lambda none: _random(16, 64)),
        made=with_experts,
    ),
    "MGI123": Case(tensor(SHARED_GATE, lambda gate: 0 * gate), made=gated),
    "MGN121": Case(
        setting(num_experts_per_tok=1, norm_topk_prob=True),
        made=setting(num_experts_per_tok=1, norm_topk_prob=False),
    ),
    "MGN119": Case(
        setting(quantization_config={"quant_method": "fp8", "ignore": ["lm_head"]}),
        made=setting(quantization_config={"quant_method": "fp8", "ignore": ["re:.*mlp.gate$"]}),
    ),
    "MGN120": Case(
        tensor(BIAS, lambda bias: -abs(bias)),
        "deepseek_v3",
        made=together(
            setting(n_group=4, topk_group=2), *(tensor(BIAS, abs, layer) for layer in range(3))
        ),
    ),
    "MGN111": biases(OFFSET.astype(BF16)),
    "MGN112": biases(OFFSET),
    "MGN113": Case(
        tensor(BIAS, lambda bias: (1.0 + 0.1 * _random(16)).astype(BF16)), "deepseek_v3"
    ),
    "MGN114": biases(34.5 + 0.14 * _random(16)),
    "MGN115": biases(0.5 + 0.01 * _random(16)),
    "MGN116": biases(np.zeros(16)),
    "MGN117": Case(tensor(BIAS, lambda bias: bias.astype(BF16)), "deepseek_v3"),
    "MGN118": Case(rows(_int4)),
    "MGG201": Case(rows(lambda w: _set(w, 5, 1.5 * w[1] + 0.01 * _random(64)))),
    "MGG202": Case(rows(lambda w: _random(16, 3) @ w[:3])),
    "MGG203": Case(row(5, lambda w: 10.0 * w)),
    "MGG204": Case(rows(_two_crowds)),
    "MGG205": Case(row(7, lambda w: w * (np.arange(len(w)) < 2))),
    "MGG207": Case(
        rows(lambda w: 0.02 * _random(*w.shape)),
        made=lambda tensors, config: config.update(initializer_range=0.02),
    ),
    "MGG206": Case(rows(lambda w: 3.0 * w, layer=5), layers=10),
}

#: Weights beside a baseline.
COMPARED: dict[str, Case] = {
    "MGI121": Case(rows(lambda w: w[[1, 0, *range(2, 16)]]), before=keep),
    "MGI122": Case(
        tensor(GAIN, lambda g: g * np.where(np.arange(64) % 2, 0.5, 1.0).astype(g.dtype)),
        before=keep,
    ),
    "MGN123": Case(rows(lambda w: w + 0.002 * _random(16, 64)), "deepseek_v3", before=keep),
    "MGI124": Case(setting(num_experts_per_tok=2), before=keep),
    "MGI130": Case(
        together(*(without_tensors(f"layers.{n}.mlp.experts.") for n in range(3))),
        made=with_experts,
        before=keep,
    ),
    "MGI128": Case(rows(lambda w: -w), before=keep),
    "MGN125": Case(tensor(BIAS, lambda bias: bias.astype(BF16)), "deepseek_v3", before=keep),
    "MGN126": Case(
        tensor(BIAS, lambda bias: bias + bias.std() * _random(16).astype(bias.dtype)),
        "deepseek_v3",
        before=keep,
    ),
    "MGG401": Case(rows(lambda w: w + 0.03 * _random(16, 64)), before=keep),
}

#: Tokens, alone or beside a baseline.
MEASURED: dict[str, Case] = {
    "MGI108": Case(tokens=2048, layers=1, fingerprint="sha256:0", request={"stale_inputs": True}),
    "MGI127": Case(tokens=300, layers=1, lean=1e4),
    "MGB201": Case(tokens=2048, layers=1, lean=2.0),
    "MGB204": Case(tokens=2048, layers=1, lean=2.0),
    "MGB202": Case(tokens=2048, layers=1, lean=3.0),
    "MGB203": Case(tokens=2048, layers=1, lean=2.0),
    "MGN301": Case(rows(_blind, layer=0), tokens=2048, layers=1, lean=8.0),
    "MGN302": Case(
        rows(lambda w: w + 30.0 * mean_direction(Case().model), layer=0),
        tokens=2048,
        layers=1,
        lean=1.0,
    ),
    "MGN122": Case(
        rows(lambda w: w - 60.0 * mean_direction(Case().model), layer=0),
        "deepseek_v3",
        tokens=2048,
        layers=1,
        lean=1.0,
    ),
    "MGG301": Case(tokens=2048, layers=1, lean=5.0),
    "MGG302": Case(rows(_towards_the_mean, layer=0), tokens=2048, layers=1, lean=1.0),
    "MGB401": Case(tokens=2048, layers=1, lean=1.0, before=keep),
    "MGB402": Case(tokens=2048, layers=1, lean=1.0, before=keep),
    "MGB403": Case(tokens=2048, layers=1, lean=1.0, before=keep),
    "MGN401": Case(rows(_blind, layer=0), tokens=2048, layers=1, lean=8.0, before=keep),
    "MGG402": Case(tokens=2048, layers=1, lean=1.0, before=keep),
}

#: A sample of each expert.
OF_EXPERTS: dict[str, Case] = {
    "MGG208": Case(upcycled, made=with_experts, request={"experts": True}),
    "MGG209": Case(with_experts, made=trained_experts, request={"experts": True}),
    "MGI125": Case(in_pairs, made=with_experts, request={"experts": True}),
    "MGI126": Case(
        tensor(EXPERT.format("{}", 3, "up")[:-6] + "input_scale", lambda scale: 0 * scale + np.nan),
        made=quantised_experts,
        request={"experts": True},
    ),
}

ATTENTION = "model.layers.{}.self_attn.{}_proj.weight"


def with_attention(tensors: Tensors, config: dict[str, Any]) -> None:
    """Attention of a qwen3_next beside every router: 4 heads of 8 channels, gates in q_proj."""
    random = np.random.default_rng(7)
    config |= {"model_type": "qwen3_next", "head_dim": 8, "num_attention_heads": 4}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {"q": (64, 64), "v": (16, 64), "o": (64, 32)}.items():
            values = random.standard_normal(shape).astype(BF16)
            tensors[ATTENTION.format(layer, name)] = values


def gates(change) -> Spoil:
    """Spoils the gate rows of the second head of a layer."""

    def spoil(tensors: Tensors, config: dict[str, Any]) -> None:
        change(tensors[ATTENTION.format(1, "q")].reshape(4, 16, -1)[1, 8:])

    return spoil


def _fewer_gates(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[ATTENTION.format(1, "q")] = tensors[ATTENTION.format(1, "q")][:40]


#: Gates of attention.
OF_ATTENTION: dict[str, Case] = {
    "MGA101": Case(
        gates(lambda rows: rows.fill(0.0)), made=with_attention, request={"attention": True}
    ),
    "MGA102": Case(
        gates(lambda rows: rows[3].fill(np.nan)), made=with_attention, request={"attention": True}
    ),
    "MGA103": Case(_fewer_gates, made=with_attention, request={"attention": True}),
}

DEFECTS = {**WEIGHTS, **COMPARED, **MEASURED, **OF_EXPERTS, **OF_ATTENTION}
