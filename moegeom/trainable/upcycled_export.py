"""An upcycled model as a checkpoint of an architecture that others load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moegeom.core.errors import UsageError
from moegeom.core.extras import refuse_absent
from moegeom.trainable.upcycling import SoftmaxGate, UpcycledBlock

#: Neurons of the shared expert, all of them 0, where an architecture has one and the model none.
_EMPTY_WIDTH = 64

#: What a config says of itself, and not of the model.
_OWN = frozenset({"model_type", "architectures", "transformers_version", "layer_types"})


@dataclass(frozen=True)
class _Facts:
    """Facts of an upcycled model that the target architecture must express."""

    config: Any
    blocks: Mapping[int, UpcycledBlock]
    num_layers: int

    @property
    def first(self) -> UpcycledBlock:
        return next(iter(self.blocks.values()))

    @property
    def num_experts(self) -> int:
        return len(self.first.experts)

    @property
    def dense(self) -> list[int]:
        return [layer for layer in range(self.num_layers) if layer not in self.blocks]

    @property
    def has_shared(self) -> bool:
        return self.first.shared_expert is not None

    def says(self, name: str) -> Any:
        return getattr(self.config, name, None)


@dataclass(frozen=True)
class _Architecture:
    """An architecture with experts that has all that a dense one has.

    ``obstacles`` are reasons, in words, why this model is not one, ``settings`` what its config
    says of experts, and ``folder`` and ``leaves`` how its tensors are called. ``has_shared`` tells
    whether a shared expert stands beside the others.
    """

    of: frozenset[str]
    model_class: str
    folder: str
    leaves: Mapping[str, str]
    obstacles: Callable[[_Facts], Iterator[str]]
    settings: Callable[[_Facts], dict[str, Any]]
    has_shared: bool = False


def _plain_attention(facts: _Facts) -> Iterator[str]:
    """No biases but those of queries, keys and values that Qwen2 always has."""
    if facts.says("attention_bias"):
        yield "its attention has biases"
    if facts.says("mlp_bias"):
        yield "its feed-forward blocks have biases"


def _windows(facts: _Facts) -> Iterator[str]:
    kinds = facts.says("layer_types") or ()
    is_limited = facts.says("sliding_window") and facts.says("use_sliding_window") is not False
    if is_limited or any(kind != "full_attention" for kind in kinds):
        yield "its attention has a sliding window"


def _mixtral_obstacles(facts: _Facts) -> Iterator[str]:
    yield from _plain_attention(facts)
    if facts.dense:
        yield f"layer {facts.dense[0]} is dense"
    if facts.has_shared:
        yield "it has a shared expert"


def _qwen2_obstacles(facts: _Facts) -> Iterator[str]:
    yield from _plain_attention(facts)
    yield from _windows(facts)


def _qwen3_obstacles(facts: _Facts) -> Iterator[str]:
    yield from _qwen2_obstacles(facts)
    if facts.has_shared:
        yield "it has a shared expert"


def _mixtral_settings(facts: _Facts) -> dict[str, Any]:
    return {
        "num_local_experts": facts.num_experts,
        "num_experts_per_tok": facts.first.gate.top_k,
        "sliding_window": facts.says("sliding_window"),
    }


def _qwen_settings(facts: _Facts) -> dict[str, Any]:
    return {
        "num_experts": facts.num_experts,
        "num_experts_per_tok": facts.first.gate.top_k,
        "moe_intermediate_size": facts.config.intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": facts.dense,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _qwen2_settings(facts: _Facts) -> dict[str, Any]:
    width = facts.config.intermediate_size if facts.has_shared else _EMPTY_WIDTH
    return _qwen_settings(facts) | {
        "shared_expert_intermediate_size": width,
        "qkv_bias": facts.config.model_type == "qwen2",
    }


_QWEN_LEAVES = {name: name for name in ("gate_proj", "up_proj", "down_proj")}

#: By the name of the architecture; the first that has no obstacle is taken.
_ARCHITECTURES: dict[str, _Architecture] = {
    "mixtral": _Architecture(
        frozenset({"llama", "mistral"}),
        "MixtralForCausalLM",
        "block_sparse_moe",
        {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        _mixtral_obstacles,
        _mixtral_settings,
    ),
    "qwen3_moe": _Architecture(
        frozenset({"qwen3"}),
        "Qwen3MoeForCausalLM",
        "mlp",
        _QWEN_LEAVES,
        _qwen3_obstacles,
        _qwen_settings,
    ),
    "qwen2_moe": _Architecture(
        frozenset({"qwen2", "llama", "mistral"}),
        "Qwen2MoeForCausalLM",
        "mlp",
        _QWEN_LEAVES,
        _qwen2_obstacles,
        _qwen2_settings,
        has_shared=True,
    ),
}


def export_upcycled(model: nn.Module, folder: str | Path, architecture: str | None = None) -> Path:
    """Writes an upcycled model as a checkpoint of a known architecture; returns its folder.

    Llama and Mistral become ``mixtral``, or ``qwen2_moe`` where layers stay dense or a shared
    expert is there; Qwen2 becomes ``qwen2_moe`` and Qwen3 ``qwen3_moe``. ``architecture`` names
    one. The loaded checkpoint computes what the model does, up to rounding: where the shared expert
    has half of the output, last matrices of the others are halved, which is exact, and a
    ``qwen2_moe`` without one has a shared expert of zeros. The tokeniser is not the model's, and
    is not written.

    Raises
    ------
    UsageError
        If no known architecture computes the same, with the reason for each, the model is not
        upcycled, or the folder holds files already.
    """
    refuse_absent("transformers", "capture", "export")
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoConfig

    folder, facts = Path(folder), _facts(model)
    name = _chosen(facts, architecture)
    target = _ARCHITECTURES[name]
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder}: holds files already.", "Name a folder that is not there.")
    kind = type(AutoConfig.for_model(name))
    settings = kind().to_dict()
    shared = {k: v for k, v in facts.config.to_dict().items() if k in settings and k not in _OWN}
    if facts.says("head_dim"):
        shared["head_dim"] = facts.config.head_dim
    config = kind(**shared | target.settings(facts))
    config.architectures = [target.model_class]
    config.dtype = next(model.parameters()).dtype
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.save_pretrained(folder)
    save_torch_state_dict(dict(_tensors(model, facts, target)), str(folder))
    return folder


def _facts(model: nn.Module) -> _Facts:
    config = getattr(model, "config", None)
    blocks = {
        int(path.split(".")[-2]): module
        for path, module in model.named_modules()
        if isinstance(module, UpcycledBlock)
    }
    if not blocks:
        raise UsageError(
            f"export: {type(model).__name__} has no upcycled block.",
            "upcycle(model, ...) makes them; other models save themselves: save_pretrained.",
        )
    if config is None or not type(model).__name__.endswith("ForCausalLM"):
        raise UsageError(
            f"export: expected a language model of transformers (...ForCausalLM), not "
            f"{type(model).__name__}."
        )
    return _Facts(config, blocks, config.num_hidden_layers)


def _chosen(facts: _Facts, architecture: str | None) -> str:
    candidates = _ARCHITECTURES if architecture is None else (architecture,)
    if architecture is not None and architecture not in _ARCHITECTURES:
        raise UsageError(
            f"export: architecture {architecture!r} is not known.",
            f"Known: {', '.join(_ARCHITECTURES)}.",
        )
    reasons = {name: list(_reasons(facts, name)) for name in candidates}
    for name, causes in reasons.items():
        if not causes:
            return name
    refusals = "; ".join(f"not {name}: {', '.join(causes)}" for name, causes in reasons.items())
    raise UsageError(
        f"export: no known architecture computes what this model does ({refusals}).",
        "torch.save keeps it for moegeom.trainable itself.",
    )


def _reasons(facts: _Facts, name: str) -> Iterator[str]:
    target = _ARCHITECTURES[name]
    if facts.config.model_type not in target.of:
        yield f"{facts.config.model_type} is another attention"
        return
    yield from target.obstacles(facts)
    blocks: Sequence[UpcycledBlock] = list(facts.blocks.values())
    others = [type(b.gate).__name__ for b in blocks if not isinstance(b.gate, SoftmaxGate)]
    if others:
        yield f"its routers are {others[0]}, not SoftmaxGate"
    elif len({(len(b.experts), b.gate.top_k, b.shared_expert is None) for b in blocks}) > 1:
        yield "its layers have different numbers of experts"


def _tensors(
    model: nn.Module, facts: _Facts, target: _Architecture
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by their names on disk; tied weights once."""
    upcycled = {
        path: module for path, module in model.named_modules() if isinstance(module, UpcycledBlock)
    }
    inside = tuple(f"{path}." for path in upcycled)
    tied = {"lm_head.weight"} if facts.says("tie_word_embeddings") else set()
    for name, value in model.state_dict().items():
        if not name.startswith(inside) and name not in tied:
            yield name, value
    for path, block in upcycled.items():
        own = f"{path.rpartition('.')[0]}.{target.folder}"
        yield f"{own}.gate.weight", block.gate.get_parameter("weight").detach()
        for number, expert in enumerate(block.experts):
            for leaf, name in target.leaves.items():
                weight = expert.get_parameter(f"{leaf}.weight").detach()
                share = block.routed_share if leaf == "down_proj" else 1.0
                yield f"{own}.experts.{number}.{name}.weight", share * weight
        if target.has_shared:
            yield from _shared(own, block, block.gate.get_parameter("weight").detach())


def _shared(
    own: str, block: UpcycledBlock, gate: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """The shared expert behind a gate of logit 0, so that its weight is one half."""
    hidden = gate.shape[1]
    yield f"{own}.shared_expert_gate.weight", gate.new_zeros(1, hidden)
    for leaf in _QWEN_LEAVES:
        shape = (hidden, _EMPTY_WIDTH) if leaf == "down_proj" else (_EMPTY_WIDTH, hidden)
        shared = block.shared_expert
        weight = gate.new_zeros(shape) if shared is None else shared.get_parameter(f"{leaf}.weight")
        yield f"{own}.shared_expert.{leaf}.weight", weight.detach()
