"""Tiny random models of every family whose attention has gates or learned sinks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import transformers

from tests.families.tiny_configs import SIZES
from tests.families.tiny_models import build, repeatable

#: Families with experts, by the attention family: their tiny models are those of the routers.
WITH_EXPERTS: Mapping[str, str] = {
    "afmoe": "afmoe",
    "axk2": "axk2",
    "bailing_hybrid": "bailing_hybrid",
    "beam": "beam",
    "deepseek_v4": "deepseek_v4",
    "dots3_note": "dots3_note",
    "flint": "flint",
    "gpt_oss": "gpt_oss",
    "granitemoe_swa": "granitemoe_swa",
    "hy_v4": "hy_v4",
    "inkling2": "inkling2_text",
    "laguna": "laguna",
    "mimo_v2_flash": "mimo_v2_flash",
    "muse_spark": "muse_spark",
    "openai_privacy_filter": "openai_privacy_filter",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_next": "qwen3_next",
    "qwen4_exp": "qwen4_exp",
    "step3p7": "step3p7",
}

#: Families without experts, or that have them only sometimes: class and own settings.
DENSE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "granite_swa": ("GraniteSWAForCausalLM", {}),
    "hrm_text": ("HrmTextForCausalLM", {"num_layers_per_stack": 2}),
    "lfm3": ("Lfm3ForCausalLM", {}),
    "muse_glimmer": ("MuseGlimmerForCausalLM", {}),
    "qwen3_5": ("Qwen3_5ForCausalLM", {}),
}


def attention_model(family: str) -> transformers.PreTrainedModel:
    """A model in float32, the same at every call; sinks and biases of gates are random."""
    model = build(WITH_EXPERTS[family]) if family in WITH_EXPERTS else _dense(family)
    model.set_attn_implementation("eager")
    with repeatable(family):
        for path, parameter in model.named_parameters():
            if path.endswith(("sinks", "gate_bias")):
                parameter.normal_()
    return model


def _dense(family: str) -> transformers.PreTrainedModel:
    name, own = DENSE[family]
    kind = getattr(transformers, name)
    with repeatable(family):
        fields = kind.config_class.__dataclass_fields__
        sizes = {key: value for key, value in SIZES.items() if key in fields}
        return kind(kind.config_class(**copy.deepcopy(sizes), **own)).eval()


