"""A byte language model whose parameters carry the names that OLMoE gives them.

Plain torch, so that every block can have any router; with a top-k router it is an
``OlmoeForCausalLM``, which a test holds against transformers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.trained.smear import SMEAR
from moegeom.trainable.router import Routed, RouterModule
from moegeom.trainable.top_k import entropy_loss

if TYPE_CHECKING:
    from benchmarks.trained.settings import Settings

VOCABULARY = 256
ROPE_THETA = 10000.0
NORM_EPS = 1e-5
INIT_STD = 0.02


class Experts(nn.Module):
    """SwiGLU experts, as OLMoE stores them."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, tokens: Tensor, routed: Routed) -> Tensor:
        """Weighted sum over the slots of each token; only what was chosen is computed."""
        token, slot = (routed.chosen >= 0).nonzero(as_tuple=True)
        expert, order = routed.chosen[token, slot].sort(stable=True)
        counts = torch.bincount(expert, minlength=len(self.down_proj)).tolist()
        token, slot = token[order], slot[order]
        parts = tokens[token].split(counts)
        outputs = torch.cat([self.one(e, part) for e, part in enumerate(parts)])
        outputs = outputs * routed.weights[token, slot].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, token, outputs)

    def one(self, expert: int, tokens: Tensor) -> Tensor:
        """Output of one expert on every token given."""
        return swiglu(tokens, self.gate_up_proj[expert], self.down_proj[expert])


def swiglu(tokens: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``down (silu(gate x) * (up x))`` with gate and up stored in one."""
    gate, up = functional.linear(tokens, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)


class Dense(nn.Module):
    """A SwiGLU block that every token goes through."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.expert = Expert(hidden, width)

    def width(self, _: float) -> float:
        """Hidden units that a token goes through."""
        return float(self.expert.down_proj.shape[1])

    def router_macs(self, _: int) -> float:
        """None: nothing is chosen."""
        return 0.0

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return self.expert(hidden), None


class MoE(nn.Module):
    """Routed experts, and those that every token goes through."""

    def __init__(self, settings: Settings, router: RouterModule) -> None:
        super().__init__()
        hidden, width = settings.hidden, settings.width
        self.router = router
        self.experts = Experts(settings.experts, hidden, width)
        self.shared = Dense(hidden, settings.shared * width) if settings.shared else None
        self.temperature, self.entropy = settings.temperature, settings.entropy

    def width(self, experts_per_token: float) -> float:
        """Hidden units that a token goes through, in the experts that it has and the shared."""
        shared = self.shared.width(0.0) if self.shared is not None else 0.0
        return experts_per_token * self.experts.down_proj.shape[2] + shared

    def router_macs(self, _: int) -> float:
        """Multiply-adds of the router for a token."""
        return float(self.router.macs_per_token)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routed]:
        tokens = hidden.flatten(0, -2)
        routed = self.router.choose(self.router.scored(tokens) / self.temperature)
        if self.entropy:
            spread = self.entropy * entropy_loss(routed.logits.softmax(dim=1))
            routed = replace(routed, losses={**routed.losses, "entropy": spread})
        out = self.experts(tokens, routed).view_as(hidden)
        if self.shared is not None:
            out = out + self.shared(hidden)[0]
        return out, routed


class Merged(nn.Module):
    """One expert merged for each prefix: as wide as the chosen experts, as many weights as all."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        hidden, width = settings.hidden, settings.top_k * settings.width
        experts = [Expert(hidden, width) for _ in range(settings.experts // settings.top_k)]
        self.mix = SMEAR(experts, hidden, causal=True)
        self.merged_width = width

    def width(self, _: float) -> float:
        """Hidden units that a token goes through."""
        return float(self.merged_width)

    def router_macs(self, length: int) -> float:
        """Multiply-adds of logits and of merging an expert, for a token of such a sequence."""
        return self.mix.macs(length) / length

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return self.mix(hidden), None


class Expert(nn.Module):
    """One SwiGLU expert as a module of its own."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(hidden, width))

    def forward(self, hidden: Tensor) -> Tensor:
        return swiglu(hidden, self.gate_up_proj, self.down_proj)


class Attention(nn.Module):
    """Causal attention with rotary positions and norms of queries and keys."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        hidden = settings.hidden
        self.heads = settings.heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(hidden, hidden, bias=False))
        self.q_norm = nn.RMSNorm(hidden, NORM_EPS)
        self.k_norm = nn.RMSNorm(hidden, NORM_EPS)
        self.register_buffer("turns", rotary(settings.length, hidden // self.heads), False)

    def forward(self, hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:2], self.heads, -1)
        q, k = self.q_norm(self.q_proj(hidden)), self.k_norm(self.k_proj(hidden))
        q, k, v = (x.view(shape).transpose(1, 2) for x in (q, k, self.v_proj(hidden)))
        q, k = (turned(x, self.turns[:, : hidden.shape[1]]) for x in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def rotary(length: int, width: int) -> Tensor:
    """Cosines and sines [2, length, width] of rotary positions, halves alike."""
    rates = ROPE_THETA ** (-torch.arange(0, width, 2).float() / width)
    angle = torch.arange(length).float()[:, None] * rates.repeat(2)
    return torch.stack([angle.cos(), angle.sin()])


def turned(values: Tensor, turns: Tensor) -> Tensor:
    """Values with each half-pair of coordinates turned by the angle of its position."""
    first, second = values.chunk(2, dim=-1)
    return values * turns[0] + torch.cat([-second, first], dim=-1) * turns[1]


class Layer(nn.Module):
    """Attention and a feed-forward block, each behind a norm and beside the residual stream."""

    def __init__(self, settings: Settings, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = Attention(settings)
        self.mlp = mlp
        self.input_layernorm = nn.RMSNorm(settings.hidden, NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(settings.hidden, NORM_EPS)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routed | None]:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        out, routed = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + out, routed


class ByteModel(nn.Module):
    """Logits of the next byte, and what every routed block did."""

    def __init__(self, settings: Settings, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, settings.hidden)
        self.layers = nn.ModuleList(
            Layer(settings, block(number)) for number in range(settings.layers)
        )
        self.norm = nn.RMSNorm(settings.hidden, NORM_EPS)
        self.lm_head = nn.Linear(settings.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routed]]:
        hidden, done = self.embed_tokens(tokens), []
        for layer in self.layers:
            hidden, routed = layer(hidden)
            if routed is not None:
                done.append(routed)
        return self.lm_head(self.norm(hidden)), done


def next_byte_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def initialise(model: nn.Module, seed: int) -> None:
    """Normal values for every matrix, by the seed and its name alone.

    Models that share a parameter's name and shape so share its values, whatever else they have.
    Vectors and routers keep what their modules gave them.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not is_of_router(name):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            with torch.no_grad():
                parameter.normal_(0.0, INIT_STD, generator=generator)


def is_of_router(name: str) -> bool:
    """Whether a parameter of that name belongs to a router."""
    return ".router." in name or name.endswith(".mix.weight")
