"""Tiny random models of every family whose attention has gates or learned sinks."""

from collections.abc import Mapping
from typing import Any

import transformers

from tests.families.tiny_models import build, repeatable, settings_of

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
