"""Jumps at one router: of a sample of its tokens, and of those that each variant flips."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Int64
from threadpoolctl import threadpool_limits

from moegeom.core.tokens import TILE
from moegeom.engine.batch import LazyBatch
from moegeom.engine.jumps import token_jumps
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import drawn_tokens
from moegeom.engine.task import Task
from moegeom.geometry.jump import Mixture
from moegeom.geometry.rounding import bf16_noise_scale, flip_probability
from moegeom.kernels.batch import Jumps, TokenBatch
from moegeom.kernels.reduction import REDUCTIONS, Extent, State

#: Tokens whose jump is computed: of a sample, and of those that a variant flips. Experts are most
#: of what is read, and each is read once for all of them.
SAMPLED, FLIPPED = 1024, 512


def jump_states(
    task: Task, mixed: Mixture, flipped: Mapping[str, State]
) -> tuple[State, dict[str, State]]:
    """The state of ``jumps``, and that of ``flip_jumps`` for each variant.

    ``flipped`` are the bits of the tokens that each variant flips (``flip_bits``).
    """
    options = ComputeOptions(seed=task.seed, exclude_first=task.exclude_first)
    sample = drawn_tokens(task.source, options, SAMPLED)
    of_variant = {name: _drawn(_set_bits(bits), task) for name, bits in flipped.items()}
    wanted = np.unique(np.concatenate([sample, *of_variant.values()]))
    found = _measured(task, mixed, wanted)
    return (
        _state("jumps", task, found, sample),
        {name: _state("flip_jumps", task, found, own) for name, own in of_variant.items()},
    )


def _set_bits(bits: State) -> Int64[np.ndarray, "tokens"]:
    return np.flatnonzero(np.unpackbits(bits["flipped"], bitorder="little"))


def _drawn(token: Int64[np.ndarray, "tokens"], task: Task) -> Int64[np.ndarray, "drawn"]:
    """At most FLIPPED of the tokens, by the seed of the scan, ascending."""
    if len(token) <= FLIPPED:
        return token
    generator = np.random.default_rng([task.seed, len(token)])
    return np.sort(generator.choice(token, FLIPPED, replace=False))


def _measured(task: Task, mixed: Mixture, wanted: Int64[np.ndarray, "tokens"]) -> TokenBatch:
    """These tokens with their labels and jumps; those that are not finite are left out."""
    prepared, names = task.prepared, ("token", "population", "block", "chosen", "logits", "input")
    total, parts = task.source.facts.num_tokens, []
    with threadpool_limits(1, user_api="blas"):  # the arithmetic of the scan
        for tile in np.unique(wanted // TILE).tolist():
            batch = LazyBatch(task, tile * TILE, min((tile + 1) * TILE, total))
            row = np.flatnonzero(np.isin(batch.token, wanted))
            parts.append([getattr(batch, name)[row] for name in names])
    token, population, block, chosen, logits, inputs = map(np.concatenate, zip(*parts, strict=True))
    found = token_jumps(prepared, inputs, logits, chosen, task.kernels, mixed)
    length = np.sqrt((inputs.astype(np.float64) ** 2).sum(axis=1))
    chance = np.zeros(len(token))
    known = found.is_known
    noise = bf16_noise_scale(length[known], prepared.router.hidden_size)
    chance[known] = flip_probability(np.maximum(found.tie.distance[known], 0.0), noise)
    jumps = Jumps(found.height, found.relative, chance, found.pair)
    return TokenBatch(token=token, population=population, block=block, chosen=chosen, jumps=jumps)


def _state(name: str, task: Task, found: TokenBatch, token: Int64[np.ndarray, "tokens"]) -> State:
    """The reduction of that name over some of the tokens."""
    assert found.jumps is not None
    row = np.flatnonzero(np.isin(found.token, token))
    router = task.prepared.router
    names = task.populations.names
    extent = Extent(len(names), router.num_experts, router.rule.top_k, router.hidden_size)
    kept = REDUCTIONS[name].start(extent)
    some = Jumps(**{part: values[row] for part, values in vars(found.jumps).items()})
    labels = {part: getattr(found, part)[row] for part in ("token", "population", "block")}
    kept.fold(TokenBatch(**labels, jumps=some), task.kernels)
    return kept.state()
