"""Base of router modules: return type, precision, sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float, Int64


@dataclass(frozen=True, eq=False)
class Routed:
    """What a router made of some tokens, in the order of the inputs, leading axes flattened.

    ``chosen`` numbers the experts of each token, largest selection score first, -1 in slots that
    are empty; their ``weights`` are 0. ``losses`` are scalars with their coefficients in them.
    Weights, logits and losses are float32, or float64 where inputs or parameters are.
    """

    chosen: Int64[Tensor, "tokens slots"]
    weights: Float[Tensor, "tokens slots"]
    logits: Float[Tensor, "tokens experts"]
    losses: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> Float[Tensor, ""]:
        """The sum of all losses, to be added to that of the task; 0 without any."""
        return sum(self.losses.values(), self.logits.new_zeros(()))

    @property
    def num_chosen(self) -> Int64[Tensor, "tokens"]:
        """How many experts each token has."""
        return (self.chosen >= 0).sum(dim=1)

    @property
    def load(self) -> Int64[Tensor, "experts"]:
        """How many tokens each expert has."""
        num_experts = self.logits.shape[1]
        return torch.bincount(self.chosen[self.chosen >= 0], minlength=num_experts)

    def dense(self) -> Float[Tensor, "tokens experts"]:
        """The weight of every expert for every token, 0 where it was not chosen."""
        zeros = torch.zeros_like(self.logits)
        return zeros.scatter_add(1, self.chosen.clamp(min=0), self.weights)


class RouterModule(nn.Module):
    """A module from router inputs to :class:`Routed`.

    ``forward`` is ``choose(scored(inputs))``. Both run outside autocast, in float32 or in the wider
    of what inputs and parameters are, whatever the model around them runs in: in bfloat16 logits of
    different experts become equal. Buffers, which hold running means and biases, stay float32 when
    the model is cast to less, in which their small steps would be lost.
    """

    def __init__(self, num_experts: int, top_k: int, hidden: int) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise UsageError(
                f"{type(self).__name__}: top_k is {top_k}, expected 1 to {num_experts} experts."
            )
        if hidden < 1:
            raise UsageError(f"{type(self).__name__}: hidden is {hidden}, expected 1 or more.")
        self.num_experts = num_experts
        self.top_k = top_k
        self.hidden = hidden

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        """As ``to``, ``half`` and their kin, except for buffers that would become narrower."""
        before = {n: b for n, b in self._buffers.items() if b is not None and b.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if after is not None and after.dtype != at_least_float32(after):
                self._buffers[name] = buffer.to(after.device, at_least_float32(after))
        return self

    def forward(self, inputs: Float[Tensor, "*batch hidden"]) -> Routed:
        """Route the last axis of ``inputs``; every other axis counts tokens."""
        with torch.autocast(inputs.device.type, enabled=False):
            return self.choose(self.scored(inputs.to(at_least_float32(inputs))))

    @property
    def macs_per_token(self) -> int:
        """Multiply-accumulates of the matrix products that score one token."""
        raise NotImplementedError

    def scored(self, inputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "tokens experts"]:
        """Logits of every expert."""
        raise NotImplementedError

    def choose(self, logits: Float[Tensor, "tokens experts"]) -> Routed:
        """Experts, weights and losses that follow from logits."""
        raise NotImplementedError


def at_least_float32(values: Tensor) -> torch.dtype:
    """The dtype of the values, but no narrower than float32."""
    return torch.promote_types(values.dtype, torch.float32)


def product(
    inputs: Float[Tensor, "*batch columns"],
    rows: Float[Tensor, "rows columns"],
    bias: Float[Tensor, "rows"] | None = None,
) -> Float[Tensor, "*batch rows"]:
    """``inputs @ rows.T + bias`` in the wider dtype of the two, float32 at least."""
    dtype = torch.promote_types(at_least_float32(inputs), rows.dtype)
    return nn.functional.linear(
        inputs.to(dtype), rows.to(dtype), None if bias is None else bias.to(dtype)
    )


def descending(
    selection: Float[Tensor, "tokens experts"],
) -> tuple[Float[Tensor, "tokens experts"], Int64[Tensor, "tokens experts"]]:
    """Selection scores and experts, largest first; equal scores: the lower number.

    ``torch.topk`` promises no order among equals.
    """
    values, order = torch.sort(selection, dim=1, descending=True, stable=True)
    return values, order


def cosine(
    first: Float[Tensor, "tokens experts size"], second: Float[Tensor, "*tokens experts size"]
) -> Float[Tensor, "tokens experts"]:
    """Cosines of vectors, token by token and expert by expert; lengths count as 1e-12 at least."""
    unit = nn.functional.normalize(first, dim=-1, eps=1e-12)
    return (unit * nn.functional.normalize(second, dim=-1, eps=1e-12)).sum(dim=-1)
