"""Tiny random models of every family whose attention has gates or learned sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from tests.families.tiny_configs import settings_of
from tests.families.tiny_models import build, repeatable

#: Families with experts, by the attention family: their tiny models are those of the routers.
WITH_EXPERTS: Mapping[str, str] = {
    "afmoe": "afmoe",
    "axk2": "axk2",
    "beam": "beam",
    "deepseek_v4": "deepseek_v4",
    "dots3_note": "dots3_note",
    "flint": "flint",
    "gpt_oss": "gpt_oss",
    "granitemoe_swa": "granitemoe_swa",
    "hy_v4": "hy_v4",
    "inkling2": "inkling2_text",
    "laguna": "laguna",
    "muse_spark": "muse_spark",
    "openai_privacy_filter": "openai_privacy_filter",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_next": "qwen3_next",
    "qwen4_exp": "qwen4_exp",
    "step3p7": "step3p7",
}

LAYERS = {
    "bailing_hybrid": ["linear_attention", "full_attention"] * 2,
    "mimo_v2_flash": ["full_attention", "sliding_attention"] * 2,
}

#: The others, and variants (two underscores) of both: class and own settings.
OTHERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bailing_hybrid": ("BailingHybridForCausalLM", {"layer_types": LAYERS["bailing_hybrid"]}),
    "granite_swa": ("GraniteSWAForCausalLM", {}),
    "hrm_text": ("HrmTextForCausalLM", {"num_layers_per_stack": 2}),
    "inkling2__widths": ("Inkling2ForCausalLM", {"swa_head_dim": 8}),
    "laguna__channels": ("LagunaForCausalLM", {"gating": "per-element"}),
    "lfm3": ("Lfm3ForCausalLM", {}),
    "lfm3__without": ("Lfm3ForCausalLM", {"use_attention_gate": False}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {"layer_types": LAYERS["mimo_v2_flash"]}),
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
