"""The smallest configurations under which every MoE class of transformers keeps its routers.

A configuration is the default one of its class with the sizes of ``SIZES``, in its parts (text,
vision, audio, ...) too, and with what its family needs beside them.
"""

import copy
from collections.abc import Mapping
from typing import Any

import transformers

from tests.families.tiny_families import FAMILIES

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
