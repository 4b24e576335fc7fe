"""One layer: outputs of its experts on a sample of tokens, and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, Int32, Int64

from moegeom.core.router import Router
from moegeom.geometry.expert_block import tokens_by_expert
from moegeom.geometry.expert_overlap import adding_up, centred_by_expert, mean_pair_cosine
from moegeom.geometry.space import energy_share, mean_energy_share
from moegeom.router.expert_functions import ExpertFunctions
from moegeom.router.shared_experts import SharedExperts
from moegeom.studies.outputs.record import ExpertOutput, RouterOutputs


@dataclass(frozen=True, eq=False)
class LayerTokens:
    """What one router reads of some tokens, and what it chooses; ``token`` are their numbers."""

    token: Int64[np.ndarray, "tokens"]
    inputs: Float32[np.ndarray, "tokens hidden"]
    chosen: Int32[np.ndarray, "tokens k"]
    weights: Float64[np.ndarray, "tokens k"]

    def at(self, token: Int64[np.ndarray, "some"]) -> LayerTokens:
        """Those of some of the tokens."""
        rows = np.searchsorted(self.token, token)
        return LayerTokens(*(values[rows] for values in vars(self).values()))


@dataclass(frozen=True, eq=False)
class LayerExperts:
    """The experts beside a router; ``no_shared`` says why shared experts are not computed."""

    functions: ExpertFunctions
    shared: SharedExperts | None
    no_shared: str

    def bytes_of(self, experts: set[int] | None) -> int:
        """What is read for these experts, of all for None, and for the shared ones."""
        shared = 0 if self.shared is None else self.shared.num_bytes
        return self.functions.bytes_of(experts) + shared


@dataclass(frozen=True, eq=False)
class LayerOutputs:
    """Outputs of one layer; ``every`` are those of each expert, None unless asked for."""

    routed: Float32[np.ndarray, "tokens hidden"]
    shared: Float32[np.ndarray, "tokens hidden"] | None
    every: Float32[np.ndarray, "tokens experts hidden"] | None


def layer_outputs(
    router: Router, layer: LayerExperts, tokens: LayerTokens, every_expert: bool
) -> tuple[RouterOutputs, LayerOutputs]:
    """What the experts of a layer give on the tokens; each expert is read once."""
    inputs, chosen = tokens.inputs, tokens.chosen
    slots = np.zeros((*chosen.shape, router.hidden_size), np.float32)
    contributions = np.zeros_like(slots)
    every = None
    if every_expert:
        every = np.empty((len(inputs), router.num_experts, router.hidden_size), np.float32)
    for expert, token, slot in _work(router, chosen, every_expert):
        if every is not None:
            every[:, expert] = layer.functions.apply(expert, inputs)
            slots[token, slot] = every[token, expert]
        elif len(token):
            slots[token, slot] = layer.functions.apply(expert, inputs[token])
        if len(token):
            weights = tokens.weights[token, slot]
            contributions[token, slot] = layer.functions.contribution(
                expert, inputs[token], weights
            )
    routed = contributions.sum(axis=1, dtype=np.float64)
    shared = None
    if layer.shared is not None:
        shared = layer.shared.apply(inputs)
    elif layer.no_shared == "none":
        shared = np.zeros_like(inputs)
    figures = RouterOutputs(
        router=router.name,
        num_experts=router.num_experts,
        top_k=chosen.shape[1],
        num_tokens=len(inputs),
        num_read=router.num_experts if every_expert else len(np.unique(chosen[chosen >= 0])),
        num_bytes=layer.bytes_of(None if every_expert else used_experts(chosen)),
        input_norm=_mean_norm(inputs),
        routed_norm=_mean_norm(routed),
        routed_mean_share=mean_energy_share(routed),
        shared=layer.no_shared or "computed",
        **_of_shared(routed, shared if layer.shared is not None else None),
        overlap=_mean(mean_pair_cosine(slots)),
        overlap_centred=_mean(mean_pair_cosine(centred_by_expert(slots, chosen))),
        **_of_every(every),
        adds_up=_mean(adding_up(contributions)),
        experts=tuple(_experts(router, tokens, slots, contributions)),
    )
    return figures, LayerOutputs(routed.astype(np.float32), shared, every)


def used_experts(chosen: Int32[np.ndarray, "tokens k"]) -> set[int]:
    """The experts that some token chose."""
    return {expert for expert in np.unique(chosen).tolist() if expert >= 0}


def _work(
    router: Router, chosen: Int32[np.ndarray, "tokens k"], every_expert: bool
) -> Iterator[tuple[int, Int64[np.ndarray, "some"], Int64[np.ndarray, "some"]]]:
    """The experts to compute, with tokens and slots that chose each."""
    by_expert = {expert: (token, slot) for expert, token, slot in tokens_by_expert(chosen)}
    nothing = np.empty(0, np.int64), np.empty(0, np.int64)
    for expert in range(router.num_experts) if every_expert else by_expert:
        yield (expert, *by_expert.get(expert, nothing))


def _of_shared(
    routed: Float64[np.ndarray, "tokens hidden"],
    shared: Float[np.ndarray, "tokens hidden"] | None,
) -> dict[str, float | None]:
    names = ("norm", "mean_share", "energy_share")
    if shared is None:
        return {
            **{f"shared_{n}": None for n in names},
            "total_norm": None,
            "total_mean_share": None,
        }
    part = shared.astype(np.float64)
    total = routed + part
    return {
        "shared_norm": _mean_norm(part),
        "shared_mean_share": mean_energy_share(part),
        "shared_energy_share": energy_share(part, total),
        "total_norm": _mean_norm(total),
        "total_mean_share": mean_energy_share(total),
    }


def _of_every(
    every: Float32[np.ndarray, "tokens experts hidden"] | None,
) -> dict[str, float | None]:
    if every is None:
        return {"overlap_every": None, "overlap_every_centred": None}
    return {
        "overlap_every": _mean(mean_pair_cosine(every)),
        "overlap_every_centred": _mean(
            mean_pair_cosine(every - every.mean(axis=0, dtype=np.float64).astype(np.float32))
        ),
    }


def _experts(
    router: Router,
    tokens: LayerTokens,
    outputs: Float32[np.ndarray, "tokens k hidden"],
    contributions: Float32[np.ndarray, "tokens k hidden"],
) -> Iterator[ExpertOutput]:
    lengths = np.linalg.norm(outputs.astype(np.float64), axis=2)
    added = np.linalg.norm(contributions.astype(np.float64), axis=2)
    energy = float((added**2).sum())
    for expert in range(router.num_experts):
        token, slot = np.nonzero(tokens.chosen == expert)
        by = added[token, slot]
        yield ExpertOutput(
            expert=expert,
            num_tokens=len(token),
            weight=float(tokens.weights[token, slot].mean()) if len(token) else None,
            output_norm=float(lengths[token, slot].mean()) if len(token) else None,
            contribution_norm=float(by.mean()) if len(token) else None,
            energy_share=float((by**2).sum()) / energy if energy else 0.0,
        )


def _mean_norm(values: Float[np.ndarray, "tokens width"]) -> float:
    return float(np.linalg.norm(values.astype(np.float64), axis=1).mean())


def _mean(values: Float64[np.ndarray, "tokens"]) -> float:
    """Over the tokens that have one; nan for none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
