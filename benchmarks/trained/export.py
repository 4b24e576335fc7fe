"""A trained top-k model as a checkpoint of transformers, which moegeom reads like any other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.trained.model import NORM_EPS, ROPE_THETA, VOCABULARY, ByteModel
from benchmarks.trained.settings import Settings

if TYPE_CHECKING:
    from transformers import OlmoeForCausalLM


def as_olmoe(model: ByteModel, settings: Settings) -> OlmoeForCausalLM:
    """The same function in OLMoE's class: names differ in the router's and the stem's alone.

    Raises
    ------
    ValueError
        For what OLMoE has not: shared experts, dense layers, a temperature.
    """
    from transformers import OlmoeConfig, OlmoeForCausalLM

    if settings.shared or settings.first_dense or settings.temperature != 1.0:
        raise ValueError("OLMoE has neither shared experts, dense layers nor a temperature")
    config = OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=settings.width,
        num_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
        norm_topk_prob=settings.renormalise,
        max_position_embeddings=settings.length,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    exported = OlmoeForCausalLM(config)
    exported.load_state_dict({_olmoe_name(n): v for n, v in model.state_dict().items()})
    return exported.eval()


def _olmoe_name(name: str) -> str:
    stem = "" if name.startswith("lm_head.") else "model."
    return stem + name.replace(".mlp.router.", ".mlp.gate.")
