"""What each sample model is: its configuration and how it is trained."""

from dataclasses import dataclass

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
)


@dataclass(frozen=True)
class Recipe:
    """One sample model. Everything that decides the result is here, apart from the corpus."""

    name: str
    config: OlmoeConfig | DeepseekV3Config
    kept_steps: tuple[int, ...]  # the last one is the length of the training
    sharded_step: int | None = None  # this one is stored in several files with an index
    seed: int = 0
    learning_rate: float = 3e-3
    router_learning_rate: float = 3e-3
    beta2: float = 0.95
    weight_decay: float = 0.1
    router_weight_decay: float = 0.1
    bias_rate: float = 0.0  # step of loss-free balancing; 0 switches it off

    @property
    def num_steps(self) -> int:
        return self.kept_steps[-1]


def build_model(recipe: Recipe) -> PreTrainedModel:
    """The untrained model, float32, its weights drawn from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    if isinstance(recipe.config, OlmoeConfig):
        model = OlmoeForCausalLM(recipe.config)
    else:
        model = DeepseekV3ForCausalLM(recipe.config)
    # All experts in one grouped product: a fifth faster here than one product per expert.
    model.set_experts_implementation("grouped_mm")
    return model


# Bytes need no special tokens; None also keeps transformers from adding any.
_BYTES = {
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_OLMOE = {
    **_BYTES,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
}

OLMOE_BALANCED = Recipe(
    name="olmoe-balanced",
    # output_router_logits switches the load-balancing loss on, router_aux_loss_coef weighs it.
    config=OlmoeConfig(**_OLMOE, output_router_logits=True, router_aux_loss_coef=0.02),
    kept_steps=(100, 300, 600, 1000, 1500),
    sharded_step=600,
)

# The same architecture, initial weights and batches, trained with ordinary mistakes: the balancing
# loss is missing, and the routers have five times the learning rate, without decay.
OLMOE_COLLAPSED = Recipe(
    name="olmoe-collapsed",
    config=OlmoeConfig(**_OLMOE, output_router_logits=False, router_aux_loss_coef=0.0),
    kept_steps=(100, 600, 1500),
    router_learning_rate=0.015,
    router_weight_decay=0.0,
    beta2=0.999,
)

DEEPSEEK_TINY = Recipe(
    name="deepseek-tiny",
    config=DeepseekV3Config(
        **_BYTES,
        hidden_size=64,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        intermediate_size=128,
        moe_intermediate_size=16,
        n_routed_experts=32,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_mtp_layers=0,  # the default announces a layer that this model does not have
    ),
    kept_steps=(1500,),
    bias_rate=5e-3,
)

RECIPES = {recipe.name: recipe for recipe in (OLMOE_BALANCED, OLMOE_COLLAPSED, DEEPSEEK_TINY)}
