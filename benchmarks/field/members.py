"""Full-size checkpoints as their headers say: names, shapes and dtypes of tensors, and configs.

No weight of a real model is here. Names, widths, numbers of layers, of experts and of chosen ones,
and of files, are those of the models; ``small`` leaves the first layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Name, dtype as safetensors spells it, shape.
Tensor = tuple[str, str, tuple[int, ...]]

#: Bytes of one number.
SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}

#: Layers with routers that a small member has.
SMALL_LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Member:
    """One model: its config, and the tensors of a layer by the layer's number.

    ``share`` of the rows of each matrix of an expert are there; the others are holes, which read as
    zeros. ``num_tokens`` are recorded at one router.
    """

    name: str
    config: Mapping[str, Any]
    layer: Callable[[Member, int], Iterator[Tensor]]
    head_bias: bool = False
    router: str = "mlp.gate"
    num_files: int
    first_file: int = 1
    share: float = 1.0
    num_tokens: int = 100_000

    @property
    def hidden(self) -> int:
        return self.config["hidden_size"]

    @property
    def num_layers(self) -> int:
        return self.config["num_hidden_layers"]

    @property
    def num_experts(self) -> int:
        keys = ("num_experts", "n_routed_experts", "num_local_experts")
        return next(self.config[key] for key in keys if key in self.config)

    @property
    def top_k(self) -> int:
        return self.config["num_experts_per_tok"]

    @property
    def num_predicting(self) -> int:
        """Layers behind the last that predict further tokens."""
        return self.config.get("num_nextn_predict_layers", 0)

    @property
    def with_routers(self) -> range:
        """The layers that have one."""
        first = self.config.get("first_k_dense_replace", 0)
        return range(first, self.num_layers + self.num_predicting)

    @property
    def recorded(self) -> int:
        """The layer whose router has a recording, and whose experts are there."""
        return self.with_routers[(self.num_layers - self.with_routers[0]) // 2]

    @property
    def collapsed(self) -> int:
        """The layer whose rows all point one way, two of them being equal."""
        return self.with_routers[1]

    @property
    def changed(self) -> int:
        """The layer whose router is another in checkpoint B."""
        return self.with_routers[self.num_layers - self.with_routers[0] - 1]

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor, in the order of files."""
        table = (self.config["vocab_size"], self.hidden)
        yield "model.embed_tokens.weight", "BF16", table
        for layer in range(self.num_layers + self.num_predicting):
            yield from self.layer(self, layer)
        yield "model.norm.weight", "BF16", (self.hidden,)
        yield "lm_head.weight", "BF16", table

    def files(self) -> dict[str, list[Tensor]]:
        """Tensors by file, as evenly as their order lets them be."""
        tensors = list(self.tensors())
        per_file = sum(size_of(one) for one in tensors) / self.num_files
        contents: list[list[Tensor]] = [[]]
        filled = 0
        for tensor in tensors:
            if filled >= per_file * len(contents):
                contents.append([])
            contents[-1].append(tensor)
            filled += size_of(tensor)
        last = self.first_file + len(contents) - 1
        return {
            f"model-{number:05d}-of-{last:05d}.safetensors": content
            for number, content in enumerate(contents, start=self.first_file)
        }

    def small(self) -> Member:
        """The first layers alone, a sixteenth of their experts' rows, and fewer tokens."""
        first = self.config.get("first_k_dense_replace", 0)
        cut = {"num_hidden_layers": first + SMALL_LAYERS}
        if "layer_types" in self.config:
            cut["layer_types"] = self.config["layer_types"][: first + SMALL_LAYERS]
        return dataclasses.replace(
            self, config={**self.config, **cut}, num_files=2, share=1 / 16, num_tokens=4096
        )


def size_of(tensor: Tensor) -> int:
    """Its bytes."""
    _, dtype, shape = tensor
    size = SIZES[dtype]
    for length in shape:
        size *= length
    return size


#: The number of an expert in the name of a tensor.
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Iterator[Tensor]:
    yield f"{name}.weight", "BF16", (rows, columns)
    if bias:
        yield f"{name}.bias", "BF16", (rows,)


def _fp8(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))


def _gated(name: str, hidden: int, width: int, matrix: Any = _linear) -> Iterator[Tensor]:
    yield from matrix(f"{name}.gate_proj", width, hidden)
    yield from matrix(f"{name}.up_proj", width, hidden)
    yield from matrix(f"{name}.down_proj", hidden, width)


def _norms(member: Member, layer: int) -> Iterator[Tensor]:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"model.layers.{layer}.{norm}.weight", "BF16", (member.hidden,)


def _heads(member: Member, layer: int) -> Iterator[Tensor]:
    """Queries, keys, values and output of attention with grouped heads."""
    config, hidden = member.config, member.hidden
    heads = config["num_attention_heads"]
    size = config.get("head_dim", hidden // heads)
    pairs = config["num_key_value_heads"] * size
    prefix = f"model.layers.{layer}.self_attn"
    has_bias = config.get("attention_bias", False)
    yield from _linear(f"{prefix}.q_proj", heads * size, hidden, has_bias)
    yield from _linear(f"{prefix}.k_proj", pairs, hidden, has_bias)
    yield from _linear(f"{prefix}.v_proj", pairs, hidden, has_bias)
    yield from _linear(f"{prefix}.o_proj", hidden, heads * size, member.head_bias)


def _head_norms(layer: int, queries: int, keys: int) -> Iterator[Tensor]:
    for name, size in (("q_norm", queries), ("k_norm", keys)):
        yield f"model.layers.{layer}.self_attn.{name}.weight", "BF16", (size,)


def _experts(member: Member, layer: int, width: int, matrix: Any = _linear) -> Iterator[Tensor]:
    for expert in range(member.num_experts):
        name = f"model.layers.{layer}.mlp.experts.{expert}"
        yield from _gated(name, member.hidden, width, matrix)


def _gate(member: Member, layer: int) -> Tensor:
    shape = (member.num_experts, member.hidden)
    return f"model.layers.{layer}.{member.router}.weight", "BF16", shape


def _qwen3(member: Member, layer: int) -> Iterator[Tensor]:
    yield from _norms(member, layer)
    yield from _heads(member, layer)
    yield from _head_norms(layer, 128, 128)
    yield _gate(member, layer)
    yield from _experts(member, layer, member.config["moe_intermediate_size"])


def _olmoe(member: Member, layer: int) -> Iterator[Tensor]:
    yield from _norms(member, layer)
    yield from _heads(member, layer)
    yield from _head_norms(layer, member.hidden, member.hidden)
    yield _gate(member, layer)
    yield from _experts(member, layer, member.config["intermediate_size"])


def _mixtral(member: Member, layer: int) -> Iterator[Tensor]:
    yield from _norms(member, layer)
    yield from _heads(member, layer)
    yield _gate(member, layer)
    width = member.config["intermediate_size"]
    for expert in range(member.num_experts):
        name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        yield from _linear(f"{name}.w1", width, member.hidden)
        yield from _linear(f"{name}.w2", member.hidden, width)
        yield from _linear(f"{name}.w3", width, member.hidden)


def _biased_gate(member: Member, layer: int) -> Iterator[Tensor]:
    yield _gate(member, layer)
    prefix = f"model.layers.{layer}.mlp"
    yield f"{prefix}.gate.e_score_correction_bias", "F32", (member.num_experts,)


def _predicting(member: Member, layer: int) -> Iterator[Tensor]:
    """What a layer that predicts further tokens has beside a layer's own."""
    prefix, hidden = f"model.layers.{layer}", member.hidden
    table = (member.config["vocab_size"], hidden)
    yield f"{prefix}.embed_tokens.weight", "BF16", table
    yield f"{prefix}.enorm.weight", "BF16", (hidden,)
    yield f"{prefix}.hnorm.weight", "BF16", (hidden,)
    yield f"{prefix}.eh_proj.weight", "BF16", (hidden, 2 * hidden)
    yield f"{prefix}.shared_head.norm.weight", "BF16", (hidden,)
    yield f"{prefix}.shared_head.head.weight", "BF16", table


def _glm(member: Member, layer: int) -> Iterator[Tensor]:
    config, prefix = member.config, f"model.layers.{layer}"
    yield from _norms(member, layer)
    yield from _heads(member, layer)
    yield from _head_norms(layer, 128, 128)
    if layer < config["first_k_dense_replace"]:
        yield from _gated(f"{prefix}.mlp", member.hidden, config["intermediate_size"])
        return
    width = config["moe_intermediate_size"]
    yield from _biased_gate(member, layer)
    yield from _gated(f"{prefix}.mlp.shared_experts", member.hidden, width)
    yield from _experts(member, layer, width)
    if layer >= member.num_layers:
        yield from _predicting(member, layer)


def _deepseek(member: Member, layer: int) -> Iterator[Tensor]:
    config, hidden, prefix = member.config, member.hidden, f"model.layers.{layer}"
    yield from _norms(member, layer)
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    queries, turned = config["q_lora_rank"], config["qk_rope_head_dim"]
    plain, values = config["qk_nope_head_dim"], config["v_head_dim"]
    yield from _fp8(f"{prefix}.self_attn.q_a_proj", queries, hidden)
    yield f"{prefix}.self_attn.q_a_layernorm.weight", "BF16", (queries,)
    yield from _fp8(f"{prefix}.self_attn.q_b_proj", heads * (plain + turned), queries)
    yield from _fp8(f"{prefix}.self_attn.kv_a_proj_with_mqa", rank + turned, hidden)
    yield f"{prefix}.self_attn.kv_a_layernorm.weight", "BF16", (rank,)
    yield from _fp8(f"{prefix}.self_attn.kv_b_proj", heads * (plain + values), rank)
    yield from _fp8(f"{prefix}.self_attn.o_proj", hidden, heads * values)
    if layer < config["first_k_dense_replace"]:
        yield from _gated(f"{prefix}.mlp", hidden, config["intermediate_size"], _fp8)
        return
    width = config["moe_intermediate_size"]
    yield from _biased_gate(member, layer)
    yield from _gated(f"{prefix}.mlp.shared_experts", hidden, width, _fp8)
    yield from _experts(member, layer, width, _fp8)
    if layer >= member.num_layers:
        yield from _predicting(member, layer)


def _gpt_oss(member: Member, layer: int) -> Iterator[Tensor]:
    experts, hidden, prefix = member.num_experts, member.hidden, f"model.layers.{layer}"
    yield from _norms(member, layer)
    yield from _heads(member, layer)
    yield f"{prefix}.self_attn.sinks", "BF16", (member.config["num_attention_heads"],)
    yield _gate(member, layer)
    yield f"{prefix}.mlp.router.bias", "BF16", (experts,)
    width = member.config["intermediate_size"]
    for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        part = f"{prefix}.mlp.experts.{name}"
        yield f"{part}_bias", "BF16", (experts, rows)
        yield f"{part}_blocks", "U8", (experts, rows, columns // 32, 16)
        yield f"{part}_scales", "U8", (experts, rows, columns // 32)


QWEN3 = Member(
    name="Qwen3-30B-A3B",
    layer=_qwen3,
    num_files=16,
    config={
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
)

DEEPSEEK = Member(
    name="DeepSeek-V3",
    layer=_deepseek,
    num_files=163,
    share=0.25,
    num_tokens=20_000,
    config={
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 129280,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    },
)

GPT_OSS = Member(
    name="gpt-oss-120b",
    layer=_gpt_oss,
    router="mlp.router",
    head_bias=True,
    num_files=15,
    first_file=0,
    config={
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
    },
)

GLM = Member(
    name="GLM-4.5",
    layer=_glm,
    num_files=93,
    share=0.25,
    num_tokens=20_000,
    config={
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151552,
    },
)

OLMOE = Member(
    name="OLMoE-1B-7B",
    layer=_olmoe,
    num_files=3,
    config={
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "attention_bias": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 50304,
    },
)

MIXTRAL = Member(
    name="Mixtral-8x7B",
    layer=_mixtral,
    router="block_sparse_moe.gate",
    num_files=19,
    num_tokens=20_000,
    config={
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
)

MEMBERS = {one.name: one for one in (QWEN3, DEEPSEEK, GPT_OSS, GLM, OLMOE, MIXTRAL)}

#: Those that are made by day, small.
BY_DAY = (OLMOE.name, MIXTRAL.name)
