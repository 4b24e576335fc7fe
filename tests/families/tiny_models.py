"""Tiny random models of every MoE class of transformers: the oracle for what a family file says.

A configuration is the default one of its class with the sizes of ``SIZES``, in its parts (text,
vision, audio, ...) too, and with what its family needs beside them. A name with two underscores is
a variant: the same class under another setting of its routers. Weights, biases and norm gains are
random with a spread that matters, so that a bias left out, a norm forgotten or a group ignored
changes most choices.
"""

import copy
import dataclasses
import re
import zlib
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import RouterSet
from moegeom.router.family import Choice, Setting, family_of
from moegeom.router.load import load_routers
from tests.by_day import one_of_each
from tests.records import new_folder

#: By key, whatever the class. A key is set only where the class has it.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), 160),
    **dict.fromkeys(("hidden_size", "d_model", "text_hidden_size", "out_hidden_size"), 64),
    **dict.fromkeys(("adapter_out_dim", "output_dim", "audio_hidden_size"), 64),
    "thinker_hidden_size": 64,
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "kv_n_heads"), 2),
    **dict.fromkeys(("num_global_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "d_kv", "v_head_dim"), 16),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("index_head_dim", "index_n_heads", "index_topk", "kv_channels"), 16),
    "qk_rope_head_dim": 8,
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "share_expert_dim"), 24),
    "intermediate_size_mlp": 32,
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_hidden_size"), 24),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 12),
    "moe_num_experts": 12,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts"), 3),
    **dict.fromkeys(("moe_topk", "moe_top_k", "moe_k"), 3),
    **dict.fromkeys(("n_group", "num_expert_group"), 4),
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.75,
    **dict.fromkeys(("moe_routed_scaling_factor", "moe_router_scaling_factor"), 1.3),
    **dict.fromkeys(("swiglu_limit", "mlp_gate_softcap", "mlp_up_softcap"), 0.5),
    "swiglu_alpha": 1.3,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "moe_layer_start_index": 1,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("max_position_embeddings", "max_seq_len"), 256),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "rel_extent"), 32),
    **dict.fromkeys(("num_position_embeddings", "codebook_size", "feature_size"), 16),
    **dict.fromkeys(("downsample_hidden_size", "num_mel_bins"), 16),
    "decoder_dim": 32,
    "mamba_n_heads": 8,
    **dict.fromkeys(("mamba_num_heads", "n_groups", "mamba_n_groups"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 32),
}


def tiny_config(name: str) -> transformers.PreTrainedConfig:
    family = FAMILIES[name]
    config_class = getattr(transformers, family.model).config_class
    settings = copy.deepcopy(settings_of(config_class, family.config))
    if family.language:
        settings["text_config"] = tiny_config(family.language).to_dict()
    return config_class(**settings)


def settings_of(config_class: type, own: Mapping[str, Any]) -> dict[str, Any]:
    default = config_class()
    fields = config_class.__dataclass_fields__
    settings = {key: value for key, value in SIZES.items() if key in fields}
    if "qk_rope_head_dim" in fields:  # latent attention: every head has keys of its own
        settings["num_key_value_heads"] = 4
        settings["head_dim"] = settings["qk_rope_head_dim"]
    parts = {**config_class.sub_configs, **getattr(config_class, "sub_configs_defaults", {})}
    for part in parts:
        part_class = type(getattr(default, part))
        if part_class is not type(None):
            settings[part] = settings_of(part_class, own.get(part, {}))
            settings[part]["model_type"] = part_class.model_type
    return settings | {key: value for key, value in own.items() if key not in parts}


Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """Routers of a class of transformers (stack, pattern of the module), and its own settings."""

    routers: tuple[tuple[str, str], ...]
    config: Settings = field(default_factory=dict)
    model: str = ""
    """The class, where it is not that of a language model of this type, or of one that sees."""
    language: str = ""
    """The family that is the language model, of a class that takes any."""

    def under(self, **settings: Any) -> "Family":
        return replace(self, config={**self.config, **settings})


def text(router: str = "mlp.gate", **config: Any) -> Family:
    return Family((("text", f"model.layers.{{i}}.{router}"),), config)


def composite(router: str = "mlp.gate", /, parts: Settings | None = None, **config: Any) -> Family:
    """A language model beside towers. ``config`` is of its text part, ``parts`` of the others."""
    routers = (("text", f"model.language_model.layers.{{i}}.{router}"),)
    return Family(routers, {"text_config": config, **(parts or {})})


def stacks(config: Settings, model: str = "", **routers: str) -> Family:
    """Routers of several stacks, or of one that lies elsewhere than those of most models."""
    return Family(tuple(routers.items()), config, model)


def around(model: str, language: str) -> Family:
    """A class for images and text around the language model of another family."""
    parts = FAMILIES[language].routers
    routers = tuple((s, r.replace("model.", "model.language_model.", 1)) for s, r in parts)
    return Family(routers, model=f"{model}ForConditionalGeneration", language=language)


DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]
EVERY = ["sparse"] * 4
ALTERNATING = {"layers_block_type": ["mamba", "moe", "attention", "moe"], "n_shared_experts": 1}


def rope(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary embeddings whose sections (time, height, width) fit heads of 16 values."""
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}


#: An image encoder of one layer, as two document readers have it.
SAM = {
    "hidden_size": 16,
    "output_channels": 16,
    "downsample_channels": [16, 64],
    "image_size": 64,
    "window_size": 2,
    "global_attn_indexes": [1],
    "mlp_dim": 16,
    "num_hidden_layers": 1,
}
#: Experts by layer: -1 is a layer without.
PYRAMID = {"num_hidden_layers": 3, "adapter_in_dim": 64, "pyramid_num_routed": [-1, 8, 12]}

#: The vision tower of dots3_note.
TOWER = {**PYRAMID, "num_experts_per_tok": 2, "router_scaling_factor": 1.3}

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v3__negbias", "ernie4_5_moe", "flex_olmo"), text()),
    **dict.fromkeys(("glm4_moe", "inkling2_text", "kolibri1", "minimax", "minimax_m2"), text()),
    **dict.fromkeys(("mistral4", "mixtral", "qwen3_5_moe_text", "qwen3_next"), text()),
    "solar_open": text(),
    **dict.fromkeys(
        ("axk1", "axk2__groups", "beam", "deepseek_v32", "exaone_moe"),
        text(mlp_layer_types=DENSE_FIRST),
    ),
    **dict.fromkeys(
        ("glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_linear", "mimo_v2_flash"),
        text(mlp_layer_types=DENSE_FIRST),
    ),
    **dict.fromkeys(("inkling_text", "mellum", "minimax_m3_vl_text"), text(mlp_layer_types=EVERY)),
    **dict.fromkeys(
        ("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
        text("block_sparse_moe.router"),
    ),
    **dict.fromkeys(("aria_text", "gpt_oss"), text("mlp.router")),
    **dict.fromkeys(("kimi_k25", "qwen3_5_moe", "qwen3_vl_moe"), composite()),
    **dict.fromkeys(
        ("deepseek_ocr2", "unlimited_ocr"),
        composite(parts={"vision_config": {"sam_config": SAM}}, mlp_layer_types=DENSE_FIRST),
    ),
    "afmoe": text("mlp.router", route_scale=2.0),
    "aria": composite("mlp.router"),
    "axk2": text(mlp_layer_types=DENSE_FIRST, n_group=None, topk_group=None),
    "bailing_hybrid": text(moe_renormalize=True),
    "cohere2_moe": text(mlp_layer_types=EVERY, expert_selection_fn="softmax", num_shared_experts=0),
    "dbrx": stacks(
        {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
        text="transformer.blocks.{i}.ffn.router",
    ),
    "deepseek_v2": text(topk_method="greedy"),
    "deepseek_v3__mtp": text(num_nextn_predict_layers=1),
    "deepseek_v4": text(
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"], scoring_func="sqrtsoftplus"
    ),
    "diffusion_gemma": stacks(
        {"vision_config": {"position_embedding_size": 16}},
        encoder="model.encoder.language_model.layers.{i}.router",
        decoder="model.decoder.layers.{i}.router",
    ),
    "doge": text("mlp", is_moe=True, num_experts=36),
    "dots1": text(n_shared_experts=1),
    "dots3_note": stacks(
        {
            "vision_config": TOWER,
            "audio_config": {"adapter_input_size": 64},
            "text_config": {
                "mlp_layer_types": DENSE_FIRST,
                **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
                **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim"), 16),
                "swa_qk_nope_head_dim": 8,
                "swa_v_head_dim": 16,
            },
        },
        vision="model.vision_tower.blocks.{i}.mlp.gate",
        text="model.language_model.layers.{i}.mlp.gate",
    ),
    "dots3_note_vision_encoder": stacks(
        TOWER, "Dots3NoteVisionModel", vision="blocks.{i}.mlp.gate"
    ),
    "ernie4_5_vl_moe": stacks(
        {"text_config": {"moe_intermediate_size": [24, 16], "rope_parameters": rope(2, 2, 4)}},
        text="model.language_model.layers.{i}.mlp.text_moe.gate",
        vision="model.language_model.layers.{i}.mlp.vision_moe.gate",
    ),
    "flint": text(mlp_only_layers=[0, 1]),
    "gemma4": composite("router", enable_moe_block=True),
    "gemma4_text": text("router", enable_moe_block=True),
    "glm4v_moe": composite(rope_parameters=rope(1, 1, 2, partial_rotary_factor=0.5)),
    "glm5_next": composite(
        parts={"vision_config": {"projection_intermediate_size": 32}},
        mlp_layer_types=DENSE_FIRST,
        qk_rope_head_dim=0,
        head_dim=0,
    ),
    "hunyuan_v1_moe": text(moe_topk=[2, 3, 4, 3]),
    "hy_v3": text(mlp_layer_types=DENSE_FIRST, router_scaling_factor=2.826),
    "inkling": replace(
        composite(
            parts={
                "vision_config": {"patch_size": 4},
                "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 16},
            },
            mlp_layer_types=EVERY,
        ),
        model="InklingForConditionalGeneration",
    ),
    "inkling2": composite(parts={"vision_config": {"projection_hidden_dim": 64}}),
    "jamba": text("feed_forward.router", expert_layer_offset=1, expert_layer_period=2),
    "jetmoe": stacks(
        {},
        attention="model.layers.{i}.self_attention.experts.router",
        text="model.layers.{i}.mlp.router",
    ),
    "laguna": text(mlp_layer_types=DENSE_FIRST, moe_router_logit_softcapping=3.0),
    "lfm2_moe": text(
        "feed_forward.gate", layer_types=["conv", "full_attention"] * 2, use_expert_bias=True
    ),
    "llama4": stacks(
        {
            "text_config": {"interleave_moe_layer_step": 2},
            "vision_config": {
                "image_size": 28,
                **dict.fromkeys(("vision_output_dim", "projector_input_dim"), 64),
                "projector_output_dim": 64,
            },
        },
        text="language_model.model.layers.{i}.feed_forward.router",
    ),
    "llama4_text": text("feed_forward.router", interleave_moe_layer_step=1),
    "longcat_flash": text("mlp.router", num_layers=2, zero_expert_num=5, router_bias=True),
    "minimax_m3_vl": composite(parts={"projector_hidden_size": 64}, mlp_layer_types=EVERY),
    "mistral_large4": composite(mlp_layer_types=DENSE_FIRST),
    "muse_spark": composite(
        parts={
            "projector_hidden_size": 64,
            "audio_config": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
            "vision_config": {
                **dict.fromkeys(("pos_emb_height", "pos_emb_width"), 4),
                "max_position_embeddings": 16,
            },
        },
        mlp_layer_types=EVERY,
    ),
    "nemo_speechlm": replace(
        composite(
            "mixer.gate", parts={"word_timestamp_config": {"blank_token_id": 159}}, **ALTERNATING
        ),
        model="Nemotron3_5TranscribeForConditionalGeneration",
    ),
    "nemotron_h": text("mixer.gate", **ALTERNATING),
    "nemotron_h_omni": stacks(
        {
            "text_config": ALTERNATING,
            "vision_config": {"video_temporal_patch_size": 2},
            **dict.fromkeys(("projector_hidden_size", "vision_hidden_size"), 64),
        },
        text="language_model.model.layers.{i}.mixer.gate",
    ),
    "nllb_moe": stacks(
        {
            **dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), 2),
            "router_bias": False,
            "moe_eval_capacity_token_fraction": 1.0,
        },
        "NllbMoeForConditionalGeneration",
        encoder="model.encoder.layers.{i}.ffn.router",
        decoder="model.decoder.layers.{i}.ffn.router",
    ),
    "olmoe": text(norm_topk_prob=False),
    "openai_privacy_filter": stacks({}, "OpenAIPrivacyFilterModel", text="layers.{i}.mlp.router"),
    "phimoe": text("mlp.router", num_experts_per_tok=2),
    "qwen2_moe": text(decoder_sparse_step=2),
    "qwen3_moe": text(mlp_only_layers=[1]),
    "qwen3_omni_moe": stacks(
        {
            "talker_config": {
                "text_config": {"shared_expert_intermediate_size": 24},
                "spatial_merge_size": 2,
            }
        },
        "Qwen3OmniMoeForConditionalGeneration",
        thinker="thinker.model.language_model.layers.{i}.mlp.gate",
        talker="talker.model.layers.{i}.mlp.gate",
    ),
    "qwen4_exp": composite(
        **dict.fromkeys(("indexer_n_heads", "indexer_compress_ratio"), 4),
        **dict.fromkeys(("indexer_head_dim", "indexer_budget"), 16),
        indexer_kv_heads=1,
        hc_lowrank=8,
    ),
    "step3p7": composite(
        mlp_layer_types=DENSE_FIRST,
        swiglu_limits=[None, 0.3, 0.0, 0.2],
        swiglu_limits_shared=[0.0, 0.1, 0.2, 0.1],
    ),
    "switch_transformers": stacks(
        {
            **dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), 2),
            "expert_capacity": 14,
            "router_bias": False,
        },
        "SwitchTransformersForConditionalGeneration",
        encoder="encoder.block.{i}.layer.1.mlp.router",
        decoder="decoder.block.{i}.layer.2.mlp.router",
    ),
    **dict.fromkeys(("zaya", "zaya__skip"), text(num_experts_per_tok=1, router_hidden_size=32)),
}
#: The same class under another setting of its routers.
VARIANTS: dict[str, Settings] = {
    "cohere2_moe__sigmoid": {"expert_selection_fn": "sigmoid", "num_shared_experts": 1},
    "deepseek_v2__groups": {"topk_method": "group_limited_greedy"},
    "lfm2_moe__nobias": {"use_expert_bias": False},
    "nemotron_h__latent": {"moe_latent_size": 32},
    "nllb_moe__bias_cap": {"router_bias": True, "moe_eval_capacity_token_fraction": 0.12},
    "switch_transformers__bias_nocap": {"router_bias": True, "expert_capacity": 100_000},
}
FAMILIES |= {n: FAMILIES[n.partition("__")[0]].under(**own) for n, own in VARIANTS.items()}
FAMILIES |= {
    f"{kind}__{language}": around(model, language)
    for kind, model, language in (
        ("aya_vision", "AyaVision", "cohere2_moe"),
        ("internvl", "InternVL", "qwen3_moe"),
        ("lfm2_vl", "Lfm2Vl", "lfm2_moe"),
        ("llava", "Llava", "deepseek_v3"),
        ("llava", "Llava", "mixtral"),
        ("mistral3", "Mistral3", "mistral4"),
    )
}


def _class_of(name: str, family: Family) -> str:
    seeing, writing = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    classes = writing | seeing if "text_config" in family.config else seeing | writing
    return family.model or classes[name.partition("__")[0]]


FAMILIES = {name: replace(one, model=_class_of(name, one)) for name, one in FAMILIES.items()}


#: Every family and variant; those with towers, which take longer to build, at the end.
NAMES = tuple(sorted(FAMILIES, key=lambda n: ("language_model" in FAMILIES[n].routers[0][1], n)))

#: Routers whose choice does not follow from their input.
LISTED = {"doge", "zaya", "zaya__skip"}

#: Routers that read the residual stream and scale it themselves: what they received is not normed.
OWN_NORM = {"gemma4", "gemma4_text", "diffusion_gemma"}

LOADED = [name for name in NAMES if name not in LISTED]

#: What a family's file says of the steps of its rule and of its experts.
STEPS = ("score", "weights", "logit_bias", "selection_bias", "groups", "norm", "num_shared")
STEPS += ("multiplier", "soft_cap", "experts", "capacity", "token_table")


def mechanism(name: str) -> Hashable:
    """How a family routes, whatever its tensors and keys are called; variants are apart."""
    if FAMILIES[name].language:
        return "around the language model of another family"
    kind, *variant = name.split("__")
    family = family_of(kind)
    stacks = family.stacks if family else ()
    return repr((variant, [[_plain(getattr(s, step)) for step in STEPS] for s in stacks] or name))


def _plain(value: Any) -> Any:
    if isinstance(value, Setting):
        return [bool(v) if f != "value" else v for f, v in vars(value).items() if f != "default"]
    if isinstance(value, Choice):
        return value.steps
    if isinstance(value, tuple):
        return sorted({tensor.layout for tensor in value})
    if dataclasses.is_dataclass(value):
        parts = vars(value).items()
        return [_plain(part) for field, part in parts if field not in {"eps", "text", "when"}]
    return value


#: All families that are loaded; by day one for each mechanism.
BY_DAY = one_of_each(LOADED, mechanism)

#: Added to the scores for the choice alone, wherever a family keeps it.
SELECTION_BIAS = re.compile(r"(e_score_correction_bias|expert_bias|balancing_biases)$")

EXPERT_SPREAD, NORM_SPREAD, WEIGHT_SPREAD, LOGIT_BIAS_SPREAD = 0.05, 0.2, 0.3, 0.5

#: Beside scores between 0 and 1: enough to change most choices, too little to make them for good.
SELECTION_BIAS_SPREAD = 0.3

#: Where the scores are nearer to each other (a softmax, scaled logits) or farther (logits).
OWN_SPREAD = {
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe", "longcat_flash", "zaya"), 0.1),
    "deepseek_v4": 0.6,
    "kolibri1": 0.8,
    "muse_spark": 0.05,
}

#: Below zero, a group that is filled with 0 instead of minus infinity would win.
SHIFT_OF_BIAS = {"deepseek_v3__negbias": -2.0}


@dataclass(frozen=True)
class Router:
    stack: str
    layer: int
    name: str
    module: torch.nn.Module


@cache
def model_of(name: str) -> Any:
    """The tiny model, built once: nobody changes it."""
    return build(name)


@cache
def saved(name: str) -> Path:
    """A folder with the tiny model in the hub's layout: nobody changes it."""
    model_of(name).save_pretrained(folder := new_folder())
    return folder


@cache
def read(name: str) -> RouterSet:
    return load_routers(open_checkpoint(saved(name)))


def build(name: str) -> transformers.PreTrainedModel:
    """The model of a family in float32, the same at every call."""
    with repeatable(name):
        model = getattr(transformers, FAMILIES[name].model)(tiny_config(name)).eval()
        _randomise(model, name)
    return model


@contextmanager
def repeatable(name: str) -> Iterator[None]:
    """Random numbers of a family alone, sums in the order of one thread, and no gradients."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(zlib.crc32(name.encode()))
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def routers_of(model: transformers.PreTrainedModel, name: str) -> Iterator[Router]:
    """The routers of a model of this family, stack by stack, in the order of their layers."""
    for stack, pattern in FAMILIES[name].routers:
        wanted = re.compile(re.escape(pattern).replace(r"\{i\}", r"(\d+)"))
        for path, module in model.named_modules():
            if found := wanted.fullmatch(path):
                yield Router(stack, int(found[1]), path, module)


def _randomise(model: transformers.PreTrainedModel, name: str) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.weight.normal_()
        elif "Experts" in type(module).__name__:
            for matrix in module.parameters(recurse=False):
                matrix.normal_(std=EXPERT_SPREAD)  # one class of transformers leaves them unset
        elif "Norm" in type(module).__name__:
            for gain in module.parameters(recurse=False):
                _spread(gain, NORM_SPREAD)
    for router in routers_of(model, name):
        for path, parameter in router.module.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=WEIGHT_SPREAD)
            else:
                _spread(parameter, LOGIT_BIAS_SPREAD if path.endswith("bias") else NORM_SPREAD)
        for path, table in router.module.named_buffers():
            if path.endswith("tid2eid"):  # token by token, distinct experts
                experts = model.config.n_routed_experts
                table.copy_(torch.rand(len(table), experts).argsort()[:, : table.shape[1]])
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if SELECTION_BIAS.search(path):
            tensor.normal_(std=OWN_SPREAD.get(name, SELECTION_BIAS_SPREAD))
            tensor += SHIFT_OF_BIAS.get(name, 0.0)
            if name == "zaya":  # every loaded model has this one: the skip class is never chosen
                tensor[-1] = -1.0


def _spread(tensor: torch.Tensor, by: float) -> None:
    tensor += by * torch.randn(tensor.shape)


# ---------------------------------------------------------------------------------------- attention
#: Families with experts, by the attention family: their tiny models are those of the routers.
WITH_EXPERTS = {
    **{name: name for name in ("afmoe", "axk2", "beam", "deepseek_v4", "dots3_note", "flint")},
    **{name: name for name in ("gpt_oss", "granitemoe_swa", "hy_v4", "laguna", "muse_spark")},
    **{name: name for name in ("openai_privacy_filter", "qwen3_next", "qwen4_exp", "step3p7")},
    **{name: f"{name}_text" for name in ("inkling2", "qwen3_5_moe")},
}

HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"] * 2}

#: The others, and variants (two underscores) of both: class and own settings.
OTHERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bailing_hybrid": ("BailingHybridForCausalLM", HYBRID),
    "granite_swa": ("GraniteSWAForCausalLM", {}),
    "hrm_text": ("HrmTextForCausalLM", {"num_layers_per_stack": 2}),
    "inkling2__widths": ("Inkling2ForCausalLM", {"swa_head_dim": 8}),
    "laguna__channels": ("LagunaForCausalLM", {"gating": "per-element"}),
    "lfm3": ("Lfm3ForCausalLM", {}),
    "lfm3__without": ("Lfm3ForCausalLM", {"use_attention_gate": False}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", SLIDING),
    "muse_glimmer": ("MuseGlimmerForConditionalGeneration", {}),
    "qwen3_5": ("Qwen3_5ForCausalLM", {}),
    "qwen3_next__bias": ("Qwen3NextForCausalLM", {"attention_bias": True}),
}

#: Every family, and variants.
ATTENTION = tuple(sorted({*WITH_EXPERTS, *OTHERS}))


def attention_model(name: str) -> transformers.PreTrainedModel:
    """A model in float32, the same at every call; biases, sinks and gains are random."""
    model = build(WITH_EXPERTS[name]) if name in WITH_EXPERTS else _other(name)
    model.set_attn_implementation("eager")
    with repeatable(name):
        for path, parameter in model.named_parameters():
            if path.endswith(("sinks", "gate_bias", "_proj.bias")):
                parameter.normal_()
            elif path.endswith("kv_a_layernorm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model.requires_grad_(False)


def _other(name: str) -> transformers.PreTrainedModel:
    kind, own = OTHERS[name]
    model = getattr(transformers, kind)
    with repeatable(name):
        return model(model.config_class(**settings_of(model.config_class, own))).eval()
