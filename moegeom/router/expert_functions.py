"""The experts behind a router as functions of its inputs, read when they are asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Float64, Integer

from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import RouterError
from moegeom.core.router import Router
from moegeom.geometry.expert_block import (
    ACTIVATIONS,
    PRODUCTS,
    Neurons,
    expert_output,
    is_known,
    mixed_output,
)
from moegeom.router.expert_tensors import ExpertTensors, ExpertWeights, open_experts

#: Bytes of experts that are kept after they were used, at least one expert.
_MOST_HELD = 2**29


@dataclass(frozen=True, eq=False)
class ExpertFunctions:
    """The experts of one router. Inputs are those that the router reads, behind its norm.

    Outputs have the dtype of the inputs, float32 or float64. The experts that were used last stay
    in memory, up to 512 MB of them.
    """

    tensors: ExpertTensors
    neurons: Neurons
    _held: OrderedDict[int, ExpertWeights] = field(default_factory=OrderedDict, repr=False)

    @property
    def num_experts(self) -> int:
        return self.tensors.num_experts

    def bytes_of(self, experts: Iterable[int] | None = None) -> int:
        """What is read for these experts, of all for None, each of them once."""
        return self.tensors.bytes_of(experts)

    def apply(
        self, expert: int, inputs: Float[np.ndarray, "tokens hidden"]
    ) -> Float[np.ndarray, "tokens hidden"]:
        """What an expert gives on each token, without routing weight.

        Raises
        ------
        RouterError
            Where stored values are not finite.
        """
        one = self._weights(expert)
        return expert_output(
            inputs,
            one.gate,
            one.up,
            one.down,
            self.neurons,
            one.gate_bias,
            one.up_bias,
            one.down_bias,
        )

    def contribution(
        self,
        expert: int,
        inputs: Float[np.ndarray, "tokens hidden"],
        weights: Float[np.ndarray, "tokens"],
    ) -> Float[np.ndarray, "tokens hidden"]:
        """What an expert adds to the output of the block, with these routing weights.

        Raises as :meth:`apply`.
        """
        return self.apply(expert, inputs) * weights.astype(inputs.dtype)[:, None]

    def mixed(
        self,
        inputs: Float[np.ndarray, "tokens hidden"],
        chosen: Integer[np.ndarray, "tokens k"],
        weights: Float[np.ndarray, "tokens k"],
    ) -> Float64[np.ndarray, "tokens hidden"]:
        """The routed output of the block: the sum of the contributions of the chosen experts.

        Negative numbers are empty slots. Each expert is read at most once. Raises as :meth:`apply`.
        """
        return mixed_output(self.contribution, inputs, chosen, weights)

    def _weights(self, expert: int) -> ExpertWeights:
        held = self._held
        if expert in held:
            held.move_to_end(expert)
            return held[expert]
        found = held[expert] = self.tensors.read(expert)
        while len(held) > 1 and len(held) * _bytes(found) > _MOST_HELD:
            held.popitem(last=False)
        return found


@dataclass(frozen=True, eq=False)
class CountedExperts:
    """Experts as a mixture that remembers which of them it used."""

    functions: ExpertFunctions
    used: set[int] = field(default_factory=set)

    def mixed(
        self,
        inputs: Float[np.ndarray, "tokens hidden"],
        chosen: Integer[np.ndarray, "tokens k"],
        weights: Float[np.ndarray, "tokens k"],
    ) -> Float64[np.ndarray, "tokens hidden"]:
        """As :meth:`ExpertFunctions.mixed`."""
        self.used.update(np.unique(chosen[chosen >= 0]).tolist())
        return self.functions.mixed(inputs, chosen, weights)

    @property
    def facts(self) -> dict[str, int]:
        """How many experts were read, and how many bytes they have."""
        used = self.used
        return {"experts_read": len(used), "expert_bytes": self.functions.bytes_of(used)}


def _bytes(weights: ExpertWeights) -> int:
    return sum(part.nbytes for part in vars(weights).values() if part is not None)


def open_expert_functions(store: TensorStore, router: Router) -> ExpertFunctions:
    """The experts beside a router, with what they do to its inputs; reads no values of theirs.

    Raises
    ------
    RouterError
        As :func:`~moegeom.router.expert_tensors.open_experts`, and where the activation is not
        known.
    """
    tensors = open_experts(store, router)
    how = tensors.neurons
    if not is_known(how, tensors.is_gated):
        known = ", ".join(sorted({*ACTIVATIONS, *PRODUCTS}))
        raise RouterError(
            f"{store.label}: the activation of the experts of router {router.name} is "
            f"{how.activation or 'not given'!r}; known are {known}."
        )
    return ExpertFunctions(tensors, how)
