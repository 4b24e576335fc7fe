"""What each sample model is: its configuration and how it is trained."""

from dataclasses import dataclass

import torch
from routers import router_layers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)


@dataclass(frozen=True)
class Recipe:
    """One sample model. Everything that decides the result is here, apart from the corpus."""

    name: str
    config: PreTrainedConfig
    kept_steps: tuple[int, ...]  # the last one is the length of the training
    sharded_step: int | None = None  # this one is stored in several files with an index
    seed: int = 0
    learning_rate: float = 3e-3
    router_learning_rate: float = 3e-3
    beta2: float = 0.95
    weight_decay: float = 0.1
    router_weight_decay: float = 0.1
    router_init_scale: float = 1.0  # factor on the initial router weights
    balancing_loss: float = 0.0  # weight of the load-balancing loss; 0 switches it off
    bias_rate: float = 0.0  # step of loss-free balancing; 0 switches it off

    @property
    def num_steps(self) -> int:
        return self.kept_steps[-1]


def build_model(recipe: Recipe) -> PreTrainedModel:
    """The untrained model, float32, its weights drawn from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    is_olmoe = isinstance(recipe.config, OlmoeConfig)
    model = (OlmoeForCausalLM if is_olmoe else DeepseekV3ForCausalLM)(recipe.config)
    # All experts in one grouped product: a fifth faster here than one product per expert.
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        for router in router_layers(model).values():
            router.weight.mul_(recipe.router_init_scale)
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
}

OLMOE_BALANCED = Recipe(
    name="olmoe-balanced",
    # output_router_logits makes the model compute the load-balancing loss.
    config=OlmoeConfig(
        **_OLMOE, norm_topk_prob=False, output_router_logits=True, router_aux_loss_coef=0.01
    ),
    kept_steps=(100, 300, 600, 1000, 1500),
    sharded_step=600,
)

OLMOE_COLLAPSED = Recipe(
    name="olmoe-collapsed",
    config=OlmoeConfig(
        **_OLMOE, norm_topk_prob=True, output_router_logits=False, router_aux_loss_coef=0.0
    ),
    kept_steps=(100, 600, 1500),
    router_learning_rate=3e-2,
    router_weight_decay=0.0,
    router_init_scale=10.0,
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
