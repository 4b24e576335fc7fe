"""A dense model becomes a Mixture of Experts, and that a checkpoint which others load."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moegeom.core.errors import UsageError
from moegeom.core.extras import refuse_absent
from moegeom.core.router import parse_layers
from moegeom.core.shapes import Float, Int

# ---------------------------------------------------------------------------------------- upcycling
#: Children of a feed-forward block: the first matrix or matrices, and the last.
_SPELLINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)

#: ``...layers.3.mlp``: the layer, and the block in it.
_BLOCK = re.compile(r"(?:.*\.)?(\d+)\.[^.\d][^.]*")

#: Standard deviation of router weights where the model's config names none.
_ROUTER_DEVIATION = 0.02

#: What a router gives: logits, weights and experts, each by token.
Routed = tuple[
    Float[torch.Tensor, "tokens experts"],
    Float[torch.Tensor, "tokens slots"],
    Int[torch.Tensor, "tokens slots"],
]


class SoftmaxGate(nn.Module):
    """Softmax over all experts, of which the ``top_k`` largest are kept and divided by their sum.

    Logits are computed in the dtype of the input, the softmax in float32 at least, as Mixtral does.
    """

    def __init__(self, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight: nn.Parameter = nn.Parameter(torch.zeros(num_experts, hidden))

    def forward(self, tokens: Float[torch.Tensor, "tokens hidden"]) -> Routed:
        logits = nn.functional.linear(tokens, self.weight)
        weights, chosen = _wide(logits).softmax(-1).topk(self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


class UpcycledBlock(nn.Module):
    r"""A block of experts that are copies of one feed-forward block f.

    .. math:: y = c \sum_{i \in S} \frac{g_i}{\sum_S g} E_i(x) + (1 - c) f(x)

    c = 1 without a shared expert, else 1/2, so that y = f(x) while all experts are f. A token whose
    weights are all 0 gets nothing from its experts. ``gate`` maps tokens [tokens, hidden] to
    logits, weights and experts.
    """

    def __init__(
        self, gate: nn.Module, experts: Iterable[nn.Module], shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts: nn.ModuleList = nn.ModuleList(experts)
        self.shared_expert = shared

    @property
    def routed_share(self) -> float:
        """The part c of the output that comes from chosen experts."""
        return 1.0 if self.shared_expert is None else 0.5

    def forward(
        self, hidden: Float[torch.Tensor, "*batch hidden"]
    ) -> Float[torch.Tensor, "*batch hidden"]:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        _, weights, chosen = self.gate(tokens)
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total == 0.0, torch.ones_like(total), total)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            part = expert(tokens[token]) * weights[token, slot, None]
            out = out.index_add(0, token, part.to(out.dtype))
        if self.shared_expert is not None:
            share = self.routed_share
            out = share * out + (1.0 - share) * self.shared_expert(tokens)
        return out.reshape(hidden.shape)


#: A router for a layer: by name, a module that each layer gets a copy of, or what makes one.
RouterOf = str | nn.Module | Callable[[int], nn.Module]


@dataclass(frozen=True)
class _Place:
    """A feed-forward block: where it hangs, and its matrices."""

    layer: int
    parent: nn.Module
    name: str
    first: tuple[str, ...]
    last: str

    @property
    def block(self) -> nn.Module:
        return getattr(self.parent, self.name)


def upcycle(
    model: nn.Module,
    layers: str | Iterable[int] | None = None,
    num_experts: int = 8,
    top_k: int = 2,
    router: RouterOf = "top_k",
    noise: float = 0.01,
    *,
    relative: bool = False,
    shared: int = 0,
    freeze_shared: bool = True,
    drop: float = 0.0,
    seed: int = 0,
) -> nn.Module:
    r"""Turns feed-forward blocks of ``model`` into :class:`UpcycledBlock`; changes and returns it.

    Every expert is a copy of the block of its layer plus normal noise of standard deviation
    ``noise`` on each parameter, or of ``noise`` times the root mean square of that parameter where
    it is ``relative`` (an absolute 0.01 is larger than small weights). At noise 0 and drop 0 the
    model computes what it did, up to rounding.

    Parameters
    ----------
    layers
        As ``"0,3-7"`` or numbers; None takes all layers with a feed-forward block.
    router
        ``"top_k"`` for :class:`SoftmaxGate`, with normal weights of the config's
        ``initializer_range``; a module, of which each layer gets a copy, or a function from the
        layer to one. It maps tokens to logits, weights and experts.
    shared
        1 adds a copy of the block that runs for every token and has half of the output;
        ``freeze_shared`` excludes it from training.
    drop
        Share of the neurons of each expert that are drawn anew, each expert's own: rows of the
        first matrices and columns of the last, with the mean and deviation of their matrix.

    Raises
    ------
    UsageError
        If a number is out of its range, a layer has no feed-forward block that is known, or two.
    """
    _refuse(num_experts, top_k, router, noise, shared, drop)
    places = _places(model, layers)
    for place in places:
        block = place.block
        sample = next(block.parameters())
        experts = [
            _expert(place, noise, relative, drop, _generator(seed, place.layer, number))
            for number in range(num_experts)
        ]
        gate = _gate(model, place, num_experts, top_k, router, seed)
        always = copy.deepcopy(block) if shared else None
        if always is not None and freeze_shared:
            always.requires_grad_(False)
        new = UpcycledBlock(gate.to(sample.device, sample.dtype), experts, always)
        setattr(place.parent, place.name, new.train(block.training))
    return model


def _refuse(
    num_experts: int, top_k: int, router: RouterOf, noise: float, shared: int, drop: float
) -> None:
    wrong = {
        f"num_experts={num_experts}: expected 1 or more": num_experts < 1,
        f"top_k={top_k}: expected 1 to num_experts={num_experts}": not 1 <= top_k <= num_experts,
        f"router={router!r}: expected 'top_k' or a module": (
            isinstance(router, str) and router != "top_k"
        ),
        f"noise={noise}: expected a number of 0 or more": not 0.0 <= noise < float("inf"),
        f"shared={shared}: expected 0 or 1": shared not in (0, 1),
        f"drop={drop}: expected a share from 0 to 1": not 0.0 <= drop <= 1.0,
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise UsageError(f"upcycle: {text}.")


def _places(model: nn.Module, layers: str | Iterable[int] | None) -> list[_Place]:
    """The feed-forward blocks of these layers, in their order."""
    by_layer: dict[int, list[_Place]] = {}
    for place in _feed_forwards(model):
        by_layer.setdefault(place.layer, []).append(place)
    numbers = parse_layers(layers) if isinstance(layers, str) else layers
    numbers = sorted(by_layer if numbers is None else set(numbers))
    absent = [layer for layer in numbers if layer not in by_layer]
    if absent or not numbers:
        names = ", ".join("/".join((*first, last)) for first, last in _SPELLINGS)
        raise UsageError(
            f"upcycle: {type(model).__name__} has no feed-forward block in "
            f"{f'layer {absent[0]}' if absent else 'any layer'}; expected a module with {names}.",
            f"Layers that have one: {', '.join(map(str, sorted(by_layer)))}." if by_layer else "",
        )
    twice = [layer for layer in numbers if len(by_layer[layer]) > 1]
    if twice:
        raise UsageError(
            f"upcycle: layer {twice[0]} of {type(model).__name__} has {len(by_layer[twice[0]])} "
            "feed-forward blocks; expected one.",
            "Pass the part of the model with one stack of layers.",
        )
    return [by_layer[layer][0] for layer in numbers]


def _feed_forwards(model: nn.Module) -> Iterator[_Place]:
    for path, module in model.named_modules():
        match = _BLOCK.fullmatch(path)
        if match is None or not _takes_one(module):
            continue
        children = dict(module.named_children())
        for first, last in _SPELLINGS:
            if {*first, last} <= children.keys():
                parent, _, name = path.rpartition(".")
                yield _Place(int(match[1]), model.get_submodule(parent), name, first, last)
                break


def _takes_one(module: nn.Module) -> bool:
    """Whether the module is called with the hidden states alone."""
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(one.default is one.empty and one.kind not in kinds for one in parameters) == 1


def _generator(seed: int, layer: int, number: int) -> torch.Generator:
    """A stream of its own for each expert: one more expert leaves the others as they were."""
    state = np.random.SeedSequence([seed, layer, number]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> 1))


def _expert(
    place: _Place, noise: float, relative: bool, drop: float, random: torch.Generator
) -> nn.Module:
    expert = copy.deepcopy(place.block)
    with torch.no_grad():
        if drop:
            _draw_anew(expert, place, drop, random)
        for value in expert.parameters() if noise else ():
            size = float(_wide(value).square().mean().sqrt()) if relative else 1.0
            shift = noise * size * torch.randn(value.shape, generator=random)
            value.copy_(_wide(value) + shift.to(value.device))
    return expert


def _draw_anew(expert: nn.Module, place: _Place, drop: float, random: torch.Generator) -> None:
    """Draws some neurons anew, with the mean and deviation of each of their matrices."""
    values: list[tuple[torch.Tensor, int]] = []
    for name in (*place.first, place.last):
        is_first, matrix = name != place.last, expert.get_submodule(name)
        values.append((matrix.get_parameter("weight"), _axis(matrix, is_first)))
        if is_first and isinstance(getattr(matrix, "bias", None), nn.Parameter):
            values.append((matrix.get_parameter("bias"), 0))
    first, axis = values[0]
    width = first.shape[axis]
    some = torch.randperm(width, generator=random)[: round(drop * width)]
    for value, axis in values:
        shape = list(value.shape)
        shape[axis] = len(some)
        whole = _wide(value)
        noise = torch.randn(shape, generator=random).to(value.device)
        noise = whole.mean() + whole.std(correction=0) * noise
        value.index_copy_(axis, some.to(value.device), noise.to(value.dtype))


def _wide(values: torch.Tensor) -> torch.Tensor:
    """The same numbers in float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _axis(module: nn.Module, is_first: bool) -> int:
    """The axis of neurons: outputs of the first matrices, inputs of the last."""
    is_linear = isinstance(module, nn.Linear)  # others, as GPT-2 has, are (inputs, outputs)
    return 0 if is_first == is_linear else 1


def _gate(
    model: nn.Module, place: _Place, num_experts: int, top_k: int, router: RouterOf, seed: int
) -> nn.Module:
    if isinstance(router, nn.Module):
        return copy.deepcopy(router)
    if not isinstance(router, str):
        return router(place.layer)
    config: Any = getattr(model, "config", None)
    deviation = getattr(config, "initializer_range", _ROUTER_DEVIATION)
    matrix: Any = place.block.get_submodule(place.first[0])
    hidden = matrix.weight.shape[1 - _axis(matrix, True)]
    gate = SoftmaxGate(hidden, num_experts, top_k)
    random = _generator(seed, place.layer, num_experts)
    with torch.no_grad():
        gate.weight.copy_(deviation * torch.randn(gate.weight.shape, generator=random))
    return gate


# ------------------------------------------------------------------------------------------- export
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
