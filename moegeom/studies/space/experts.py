"""What experts can tell apart of the data: the rank of their neurons where tokens are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Float, Float32
from moegeom.engine.sample import Sample
from moegeom.geometry.expert_rank import DataDirections, data_directions, ranks_on_data
from moegeom.geometry.space import distinct_rows
from moegeom.router.expert_tensors import ExpertTensors
from moegeom.studies.space.record import ExpertRanks

#: Tokens whose surroundings are looked at, and neighbours of each.
_PLACES, _NEIGHBOURS = 64, 32

#: Inputs among which neighbours are looked for.
_AMONG = 2048

#: Random matrices that stand beside the experts.
_RANDOM = 3


def expert_ranks(
    tensors: ExpertTensors,
    sample: Sample,
    dimension: tuple[float, float] | None,
    seed: int,
) -> ExpertRanks | None:
    """Ranks of all experts on the widest directions, and where 64 of the tokens are.

    None without inputs, and where they do not differ.
    """
    if sample.input is None:
        return None
    whole = data_directions(sample.inputs)
    if not len(whole.deviations):
        return None
    random = np.random.default_rng(seed)
    local = [*_local(sample.inputs, dimension, random)]
    gates, found = tensors.num_experts, []
    for expert in range(gates):
        weight, _ = tensors.read_gate(expert)
        found.append(_of(weight, whole, local))
    shape = (tensors.width, tensors.hidden)
    drawn = [_of(random.standard_normal(shape), whole, local) for _ in range(_RANDOM)]
    rank, effective, around = (np.array(values) for values in zip(*found, strict=True))
    _, by_chance, around_by_chance = np.mean(drawn, axis=0)
    return ExpertRanks(
        width=tensors.width,
        dims=len(whole.deviations),
        rank_min=int(rank.min()),
        rank_median=float(np.median(rank)),
        effective_min=float(effective.min()),
        effective_median=float(np.median(effective)),
        effective_random=float(by_chance),
        local_dims=len(local[0].deviations) if local else None,
        local_median=float(np.median(around)) if local else None,
        local_random=float(around_by_chance) if local else None,
        width_over_dimension=None if dimension is None else tensors.width / dimension[1],
    )


def _of(
    weight: Float[np.ndarray, "neurons hidden"], whole: DataDirections, local: list[DataDirections]
) -> tuple[float, float, float]:
    """Rank and effective rank on all data, and the median effective rank around tokens."""
    (rank, effective), *around = ranks_on_data(weight, [whole, *local])
    return float(rank), effective, float(np.median([e for _, e in around])) if around else math.nan


def _local(
    inputs: Float32[np.ndarray, "tokens hidden"],
    dimension: tuple[float, float] | None,
    random: np.random.Generator,
) -> Iterator[DataDirections]:
    """As many directions around each of some tokens as the data have dimensions."""
    if dimension is None:
        return
    rows = inputs[np.sort(random.permutation(len(inputs))[:_AMONG])].astype(np.float64)
    rows = rows[distinct_rows(rows)]
    dims = min(math.ceil(dimension[1]), _NEIGHBOURS - 1, rows.shape[1])
    for place in random.permutation(len(rows))[:_PLACES]:
        away = ((rows - rows[place]) ** 2).sum(axis=1)
        near = rows[np.argsort(away, kind="stable")[: _NEIGHBOURS + 1]]
        yield data_directions(near, 1.0, dims)
