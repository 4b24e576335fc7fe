"""Every MoE class of transformers: where its routers are and what a tiny model of it needs set.

The sizes that all families share are in ``tiny_configs.SIZES``. A name with two underscores is a
variant: the same class under another setting of its routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A class of transformers, its routers (stack, pattern of the module) and its own settings."""

    model: str
    routers: tuple[tuple[str, str], ...] = (("text", "model.layers.{i}.mlp.gate"),)
    config: Settings = field(default_factory=dict)
    language: str = ""
    """The family that is the language model, of a class that takes any."""

    def under(self, **settings: Any) -> Family:
        """The same class with other settings."""
        return replace(self, config={**self.config, **settings})


def text(model: str, router: str = "mlp.gate", **config: Any) -> Family:
    """A language model alone; the router is named inside its layer."""
    return Family(model, (("text", f"model.layers.{{i}}.{router}"),), config)


def composite(model: str, router: str = "mlp.gate", /, *, parts: Settings, **config: Any) -> Family:
    """A language model beside towers. ``config`` is of its text part, ``parts`` of the others."""
    routers = (("text", f"model.language_model.layers.{{i}}.{router}"),)
    return Family(model, routers, {"text_config": config, **parts})


def around(model: str, language: str) -> Family:
    """A class for images and text around the language model of another family."""
    parts = FAMILIES[language].routers
    routers = tuple((s, r.replace("model.", "model.language_model.", 1)) for s, r in parts)
    return Family(model, routers, language=language)


DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]
EVERY = ["sparse"] * 4
ALTERNATING = ["mamba", "moe", "attention", "moe"]


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

FAMILIES: dict[str, Family] = {
    "afmoe": text("AfmoeForCausalLM", "mlp.router", route_scale=2.0),
    "aria": composite("AriaForConditionalGeneration", "mlp.router", parts={}),
    "aria_text": text("AriaTextForCausalLM", "mlp.router"),
    "axk1": text("AXK1ForCausalLM", mlp_layer_types=DENSE_FIRST),
    "axk2": text("AXK2ForCausalLM", mlp_layer_types=DENSE_FIRST, n_group=None, topk_group=None),
    "axk2__groups": text("AXK2ForCausalLM", mlp_layer_types=DENSE_FIRST),
    "bailing_hybrid": text("BailingHybridForCausalLM", moe_renormalize=True),
    "beam": text("BeamForCausalLM", mlp_layer_types=DENSE_FIRST),
    "cohere2_moe": text(
        "Cohere2MoeForCausalLM",
        mlp_layer_types=EVERY,
        expert_selection_fn="softmax",
        num_shared_experts=0,
    ),
    "cohere2_moe__sigmoid": text(
        "Cohere2MoeForCausalLM",
        mlp_layer_types=EVERY,
        expert_selection_fn="sigmoid",
        num_shared_experts=1,
    ),
    "dbrx": Family(
        "DbrxForCausalLM",
        (("text", "transformer.blocks.{i}.ffn.router"),),
        {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    ),
    "deepseek_ocr2": composite(
        "DeepseekOcr2ForConditionalGeneration",
        parts={"vision_config": {"sam_config": SAM}},
        mlp_layer_types=DENSE_FIRST,
    ),
    "deepseek_v2": text("DeepseekV2ForCausalLM", topk_method="greedy"),
    "deepseek_v2__groups": text("DeepseekV2ForCausalLM", topk_method="group_limited_greedy"),
    "deepseek_v3": text("DeepseekV3ForCausalLM"),
    "deepseek_v3__mtp": text("DeepseekV3ForCausalLM", num_nextn_predict_layers=1),
    "deepseek_v3__negbias": text("DeepseekV3ForCausalLM"),
    "deepseek_v32": text("DeepseekV32ForCausalLM", mlp_layer_types=DENSE_FIRST),
    "deepseek_v4": text(
        "DeepseekV4ForCausalLM",
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        scoring_func="sqrtsoftplus",
    ),
    "diffusion_gemma": Family(
        "DiffusionGemmaForBlockDiffusion",
        (
            ("encoder", "model.encoder.language_model.layers.{i}.router"),
            ("decoder", "model.decoder.layers.{i}.router"),
        ),
        {"vision_config": {"position_embedding_size": 16}},
    ),
    "doge": text("DogeForCausalLM", "mlp", is_moe=True, num_experts=36),
    "dots1": text("Dots1ForCausalLM", n_shared_experts=1),
    "dots3_note": Family(
        "Dots3NoteForConditionalGeneration",
        (
            ("vision", "model.vision_tower.blocks.{i}.mlp.gate"),
            ("text", "model.language_model.layers.{i}.mlp.gate"),
        ),
        {
            "vision_config": {**PYRAMID, "num_experts_per_tok": 2, "router_scaling_factor": 1.3},
            "audio_config": {"adapter_input_size": 64},
            "text_config": {
                "mlp_layer_types": DENSE_FIRST,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 4,
                "swa_q_lora_rank": 16,
                "swa_kv_lora_rank": 16,
                "swa_head_dim": 16,
                "swa_qk_nope_head_dim": 8,
                "swa_v_head_dim": 16,
            },
        },
    ),
    "dots3_note_vision_encoder": Family(
        "Dots3NoteVisionModel",
        (("vision", "blocks.{i}.mlp.gate"),),
        {**PYRAMID, "num_experts_per_tok": 2, "router_scaling_factor": 1.3},
    ),
    "ernie4_5_moe": text("Ernie4_5_MoeForCausalLM"),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeForConditionalGeneration",
        (
            ("text", "model.language_model.layers.{i}.mlp.text_moe.gate"),
            ("vision", "model.language_model.layers.{i}.mlp.vision_moe.gate"),
        ),
        {"text_config": {"moe_intermediate_size": [24, 16], "rope_parameters": rope(2, 2, 4)}},
    ),
    "exaone_moe": text("ExaoneMoeForCausalLM", mlp_layer_types=DENSE_FIRST),
    "flex_olmo": text("FlexOlmoForCausalLM"),
    "flint": text("FlintForCausalLM", mlp_only_layers=[0, 1]),
    "gemma4": composite(
        "Gemma4ForConditionalGeneration", "router", parts={}, enable_moe_block=True
    ),
    "gemma4_text": text("Gemma4ForCausalLM", "router", enable_moe_block=True),
    "glm4_moe": text("Glm4MoeForCausalLM"),
    "glm4_moe_lite": text("Glm4MoeLiteForCausalLM", mlp_layer_types=DENSE_FIRST),
    "glm4v_moe": composite(
        "Glm4vMoeForConditionalGeneration",
        parts={},
        rope_parameters=rope(1, 1, 2, partial_rotary_factor=0.5),
    ),
    "glm5_next": composite(
        "Glm5NextForConditionalGeneration",
        parts={"vision_config": {"projection_intermediate_size": 32}},
        mlp_layer_types=DENSE_FIRST,
        qk_rope_head_dim=0,
        head_dim=0,
    ),
    "glm_moe_dsa": text("GlmMoeDsaForCausalLM", mlp_layer_types=DENSE_FIRST),
    "gpt_oss": text("GptOssForCausalLM", "mlp.router"),
    "granitemoe": text("GraniteMoeForCausalLM", "block_sparse_moe.router"),
    "granitemoe_swa": text("GraniteMoeSWAForCausalLM", "block_sparse_moe.router"),
    "granitemoehybrid": text("GraniteMoeHybridForCausalLM", "block_sparse_moe.router"),
    "granitemoeshared": text("GraniteMoeSharedForCausalLM", "block_sparse_moe.router"),
    "hunyuan_v1_moe": text("HunYuanMoEV1ForCausalLM", moe_topk=[2, 3, 4, 3]),
    "hy_v3": text("HYV3ForCausalLM", mlp_layer_types=DENSE_FIRST, router_scaling_factor=2.826),
    "hy_v4": text("HYV4ForCausalLM", mlp_layer_types=DENSE_FIRST),
    "inkling": composite(
        "InklingForConditionalGeneration",
        parts={
            "vision_config": {"patch_size": 4},
            "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 16},
        },
        mlp_layer_types=EVERY,
    ),
    "inkling_text": text("InklingForCausalLM", mlp_layer_types=EVERY),
    "inkling2": composite(
        "Inkling2ForConditionalGeneration", parts={"vision_config": {"projection_hidden_dim": 64}}
    ),
    "inkling2_text": text("Inkling2ForCausalLM"),
    "jamba": text(
        "JambaForCausalLM", "feed_forward.router", expert_layer_offset=1, expert_layer_period=2
    ),
    "jetmoe": Family(
        "JetMoeForCausalLM",
        (
            ("attention", "model.layers.{i}.self_attention.experts.router"),
            ("text", "model.layers.{i}.mlp.router"),
        ),
    ),
    "kimi_k25": composite("Kimi_K25ForConditionalGeneration", parts={}),
    "kimi_linear": text("KimiLinearForCausalLM", mlp_layer_types=DENSE_FIRST),
    "kolibri1": text("Kolibri1ForCausalLM"),
    "laguna": text(
        "LagunaForCausalLM", mlp_layer_types=DENSE_FIRST, moe_router_logit_softcapping=3.0
    ),
    "lfm2_moe": text(
        "Lfm2MoeForCausalLM",
        "feed_forward.gate",
        layer_types=["conv", "full_attention"] * 2,
        use_expert_bias=True,
    ),
    "lfm2_moe__nobias": text(
        "Lfm2MoeForCausalLM",
        "feed_forward.gate",
        layer_types=["conv", "full_attention"] * 2,
        use_expert_bias=False,
    ),
    "llama4": Family(
        "Llama4ForConditionalGeneration",
        (("text", "language_model.model.layers.{i}.feed_forward.router"),),
        {
            "text_config": {"interleave_moe_layer_step": 2},
            "vision_config": {
                "image_size": 28,
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
            },
        },
    ),
    "llama4_text": text("Llama4ForCausalLM", "feed_forward.router", interleave_moe_layer_step=1),
    "longcat_flash": text(
        "LongcatFlashForCausalLM",
        "mlp.router",
        num_layers=2,
        zero_expert_num=5,
        router_bias=True,
    ),
    "mellum": text("MellumForCausalLM", mlp_layer_types=EVERY),
    "mimo_v2_flash": text("MiMoV2FlashForCausalLM", mlp_layer_types=DENSE_FIRST),
    "minimax": text("MiniMaxForCausalLM"),
    "minimax_m2": text("MiniMaxM2ForCausalLM"),
    "minimax_m3_vl": composite(
        "MiniMaxM3SparseForConditionalGeneration",
        parts={"projector_hidden_size": 64},
        mlp_layer_types=EVERY,
    ),
    "minimax_m3_vl_text": text("MiniMaxM3VLForCausalLM", mlp_layer_types=EVERY),
    "mistral4": text("Mistral4ForCausalLM"),
    "mistral_large4": composite(
        "MistralLarge4ForConditionalGeneration", parts={}, mlp_layer_types=DENSE_FIRST
    ),
    "mixtral": text("MixtralForCausalLM"),
    "muse_spark": composite(
        "MuseSparkForConditionalGeneration",
        parts={
            "projector_hidden_size": 64,
            "audio_config": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
            "vision_config": {
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "max_position_embeddings": 16,
            },
        },
        mlp_layer_types=EVERY,
    ),
    "nemo_speechlm": composite(
        "Nemotron3_5TranscribeForConditionalGeneration",
        "mixer.gate",
        parts={"word_timestamp_config": {"blank_token_id": 159}},
        layers_block_type=ALTERNATING,
        n_shared_experts=1,
    ),
    "nemotron_h": text(
        "NemotronHForCausalLM", "mixer.gate", layers_block_type=ALTERNATING, n_shared_experts=1
    ),
    "nemotron_h__latent": text(
        "NemotronHForCausalLM",
        "mixer.gate",
        layers_block_type=ALTERNATING,
        n_shared_experts=1,
        moe_latent_size=32,
    ),
    "nemotron_h_omni": Family(
        "NemotronH_Omni_Reasoning_V3",
        (("text", "language_model.model.layers.{i}.mixer.gate"),),
        {
            "text_config": {"layers_block_type": ALTERNATING, "n_shared_experts": 1},
            "vision_config": {"video_temporal_patch_size": 2},
            "projector_hidden_size": 64,
            "vision_hidden_size": 64,
        },
    ),
    "nllb_moe": Family(
        "NllbMoeForConditionalGeneration",
        (
            ("encoder", "model.encoder.layers.{i}.ffn.router"),
            ("decoder", "model.decoder.layers.{i}.ffn.router"),
        ),
        {
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "router_bias": False,
            "moe_eval_capacity_token_fraction": 1.0,
        },
    ),
    "olmoe": text("OlmoeForCausalLM", norm_topk_prob=False),
    "openai_privacy_filter": Family(
        "OpenAIPrivacyFilterModel", (("text", "layers.{i}.mlp.router"),)
    ),
    "phimoe": text("PhimoeForCausalLM", "mlp.router", num_experts_per_tok=2),
    "qwen2_moe": text("Qwen2MoeForCausalLM", decoder_sparse_step=2),
    "qwen3_5_moe": composite("Qwen3_5MoeForConditionalGeneration", parts={}),
    "qwen3_5_moe_text": text("Qwen3_5MoeForCausalLM"),
    "qwen3_moe": text("Qwen3MoeForCausalLM", mlp_only_layers=[1]),
    "qwen3_next": text("Qwen3NextForCausalLM"),
    "qwen3_omni_moe": Family(
        "Qwen3OmniMoeForConditionalGeneration",
        (
            ("thinker", "thinker.model.language_model.layers.{i}.mlp.gate"),
            ("talker", "talker.model.layers.{i}.mlp.gate"),
        ),
        {
            "talker_config": {
                "text_config": {"shared_expert_intermediate_size": 24},
                "spatial_merge_size": 2,
            }
        },
    ),
    "qwen3_vl_moe": composite("Qwen3VLMoeForConditionalGeneration", parts={}),
    "qwen4_exp": composite(
        "Qwen4ExpForConditionalGeneration",
        parts={},
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=16,
        indexer_compress_ratio=4,
        hc_lowrank=8,
    ),
    "solar_open": text("SolarOpenForCausalLM"),
    "step3p7": composite(
        "Step3p7ForConditionalGeneration",
        parts={},
        mlp_layer_types=DENSE_FIRST,
        swiglu_limits=[None, 0.3, 0.0, 0.2],
        swiglu_limits_shared=[0.0, 0.1, 0.2, 0.1],
    ),
    "switch_transformers": Family(
        "SwitchTransformersForConditionalGeneration",
        (
            ("encoder", "encoder.block.{i}.layer.1.mlp.router"),
            ("decoder", "decoder.block.{i}.layer.2.mlp.router"),
        ),
        {
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 2,
            "expert_capacity": 14,
            "router_bias": False,
        },
    ),
    "unlimited_ocr": composite(
        "UnlimitedOcrForConditionalGeneration",
        parts={"vision_config": {"sam_config": SAM}},
        mlp_layer_types=DENSE_FIRST,
    ),
    "zaya": text("ZayaForCausalLM", num_experts_per_tok=1, router_hidden_size=32),
}
FAMILIES |= {
    "nllb_moe__bias_cap": FAMILIES["nllb_moe"].under(
        router_bias=True, moe_eval_capacity_token_fraction=0.12
    ),
    "switch_transformers__bias_nocap": FAMILIES["switch_transformers"].under(
        router_bias=True, expert_capacity=100_000
    ),
    "zaya__skip": FAMILIES["zaya"],
}
FAMILIES |= {
    f"{kind}__{language}": around(model, language)
    for kind, model, language in (
        ("aya_vision", "AyaVisionForConditionalGeneration", "cohere2_moe"),
        ("internvl", "InternVLForConditionalGeneration", "qwen3_moe"),
        ("lfm2_vl", "Lfm2VlForConditionalGeneration", "lfm2_moe"),
        ("llava", "LlavaForConditionalGeneration", "deepseek_v3"),
        ("llava", "LlavaForConditionalGeneration", "mixtral"),
        ("mistral3", "Mistral3ForConditionalGeneration", "mistral4"),
    )
}
