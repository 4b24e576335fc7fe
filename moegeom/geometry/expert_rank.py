"""The number of directions of the data that an expert responds to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float, Float32, Float64, Integer
from moegeom.geometry.gram import row_spectrum
from moegeom.geometry.space import distinct_rows


@dataclass(frozen=True, eq=False)
class DataDirections:
    """Orthonormal ``axes`` of the data and the standard deviation along each, descending."""

    axes: Float64[np.ndarray, "hidden dims"]
    deviations: Float64[np.ndarray, "dims"]


def data_directions(
    rows: Float[np.ndarray, "tokens hidden"], share: float = 0.99, most: int | None = None
) -> DataDirections:
    """The least principal directions that hold a ``share`` of the variance, ``most`` of them.

    None of them where all rows are equal. Oracle in tests: covariances that are known.
    """
    from sklearn.decomposition import PCA

    values = rows.astype(np.float64)
    if not np.ptp(values, axis=0).any():
        return DataDirections(np.zeros((rows.shape[1], 0)), np.zeros(0))
    fit = PCA(svd_solver="full").fit(values)
    number = int(np.searchsorted(np.cumsum(fit.explained_variance_ratio_), share) + 1)
    number = min(number, len(fit.singular_values_) if most is None else most)
    deviations = fit.singular_values_[:number] / math.sqrt(len(rows))
    return DataDirections(np.asarray(fit.components_)[:number].T, deviations)


def ranks_on_data(
    weight: Float[np.ndarray, "neurons hidden"], data: Sequence[DataDirections]
) -> list[tuple[int, float]]:
    r"""Rank and effective rank of :math:`A V \mathrm{diag}(\sigma)`, A the rows of an expert.

    For each of ``data``, V its directions and :math:`\sigma` their deviations. The rank counts
    singular values s above 1e-7 of the largest, the effective rank is :math:`\exp(-\sum p \ln p)`,
    :math:`p = s / \sum s`: at most the rank, and equal to it where all are equal. Both 0 where the
    rows see nothing of the data. Source: Roy and Vetterli 2007. Oracle in tests: diagonal cases.
    """
    ends = np.cumsum([0, *(len(one.deviations) for one in data)])
    axes = np.hstack([one.axes * one.deviations for one in data])
    seen = weight.astype(np.float64) @ axes
    return [_rank(seen[:, start:stop]) for start, stop in itertools.pairwise(ends)]


def _rank(seen: Float64[np.ndarray, "neurons dims"]) -> tuple[int, float]:
    spectrum = row_spectrum(seen.T @ seen, len(seen), False)
    return spectrum.rank, spectrum.effective_rank if spectrum.rank else 0.0


#: Tokens whose surroundings are looked at, and neighbours of each.
_PLACES, _NEIGHBOURS = 64, 32

#: Inputs among which neighbours are looked for.
_AMONG = 2048

#: Random matrices that stand beside the experts.
_RANDOM = 3


@dataclass(frozen=True)
class ExpertRanks:
    """Neurons of the experts on the ``dims`` directions that hold 99 % of the inputs' variance.

    Ranks and effective ranks of the gate matrices there, over experts; ``effective_random`` is that
    of random matrices of their shape. The local figures are medians around 64 tokens, on as many
    directions as the inputs have dimensions; None where those are not known.
    ``width_over_dimension`` is neurons over the larger end of the dimension.
    """

    width: int
    dims: int
    rank_min: int
    rank_median: float
    effective_min: float
    effective_median: float
    effective_random: float
    local_dims: int | None
    local_median: float | None
    local_random: float | None
    width_over_dimension: float | None

    @property
    def is_narrow(self) -> bool:
        """Whether an expert has fewer neurons than the data dimensions."""
        return self.width_over_dimension is not None and self.width_over_dimension < 1.0


def expert_ranks(
    gates: Iterable[Float[np.ndarray, "neurons hidden"]],
    inputs: Float[np.ndarray, "tokens hidden"],
    dimension: tuple[float, float] | None,
    seed: int,
) -> ExpertRanks | None:
    """Ranks of all gate matrices on the widest directions, and where 64 of the tokens are.

    ``dimension`` is the range of the intrinsic dimension of the inputs. None where these do not
    differ.
    """
    whole = data_directions(inputs)
    if not len(whole.deviations):
        return None
    random = np.random.default_rng(seed)
    local = [*_local(inputs, dimension, random)]
    ranks, width = [], 0
    for weight in gates:
        ranks.append(_of_gate(weight, whole, local))
        width = len(weight)
    shape = (width, inputs.shape[1])
    by_chance = [_of_gate(random.standard_normal(shape), whole, local) for _ in range(_RANDOM)]
    rank, effective, around = (np.array(values) for values in zip(*ranks, strict=True))
    _, effective_random, around_random = np.mean(by_chance, axis=0)
    return ExpertRanks(
        width=width,
        dims=len(whole.deviations),
        rank_min=int(rank.min()),
        rank_median=float(np.median(rank)),
        effective_min=float(effective.min()),
        effective_median=float(np.median(effective)),
        effective_random=float(effective_random),
        local_dims=len(local[0].deviations) if local else None,
        local_median=float(np.median(around)) if local else None,
        local_random=float(around_random) if local else None,
        width_over_dimension=None if dimension is None else width / dimension[1],
    )


def _of_gate(
    weight: Float[np.ndarray, "neurons hidden"], whole: DataDirections, local: list[DataDirections]
) -> tuple[float, float, float]:
    """Rank and effective rank on all data, and the median effective rank around tokens."""
    (rank, effective), *around = ranks_on_data(weight, [whole, *local])
    return float(rank), effective, float(np.median([e for _, e in around])) if around else math.nan


def _local(
    inputs: Float[np.ndarray, "tokens hidden"],
    dimension: tuple[float, float] | None,
    random: np.random.Generator,
) -> Iterator[DataDirections]:
    """As many directions around each of some tokens as the data have dimensions."""
    if dimension is None:
        return
    from sklearn.neighbors import NearestNeighbors

    rows = inputs[np.sort(random.permutation(len(inputs))[:_AMONG])].astype(np.float64)
    rows = rows[distinct_rows(rows)]
    dims = min(math.ceil(dimension[1]), _NEIGHBOURS - 1, rows.shape[1])
    places = random.permutation(len(rows))[:_PLACES]
    near = NearestNeighbors(n_neighbors=min(_NEIGHBOURS + 1, len(rows)), algorithm="brute")
    for neighbours in near.fit(rows).kneighbors(rows[places], return_distance=False):
        yield data_directions(rows[neighbours], 1.0, dims)


# ------------------------------------------------------------------------------------------ overlap
def mean_pair_cosine(
    outputs: Float[np.ndarray, "tokens slots width"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Mean cosine of two outputs of one token, over its pairs.

    Of m outputs with unit vectors u: :math:`(|\sum u|^2 - m) / (m (m - 1))`, -1/(m-1) to 1. Outputs
    of 0 have no direction and are left out; nan where fewer than two are left.
    Oracle in tests: sklearn.metrics.pairwise.cosine_similarity.
    """
    cosines = np.full(len(outputs), np.nan)
    for token, rows in enumerate(outputs):
        rows = rows.astype(np.float64)
        length = np.sqrt((rows**2).sum(axis=1))
        rows = rows[length > 0.0] / length[length > 0.0, None]
        if (m := len(rows)) > 1:
            cosines[token] = (float((rows.sum(axis=0) ** 2).sum()) - m) / (m * (m - 1))
    return cosines


def centred_by_expert(
    outputs: Float32[np.ndarray, "tokens slots width"],
    experts: Integer[np.ndarray, "tokens slots"],
) -> Float32[np.ndarray, "tokens slots width"]:
    """Outputs less the mean output of the same expert over its tokens; 0 for its only one.

    Oracle in tests: a loop over experts.
    """
    left = np.zeros_like(outputs)
    for expert in np.unique(experts):
        token, slot = np.nonzero(experts == expert)
        rows = outputs[token, slot]
        if len(rows) > 1:
            left[token, slot] = rows - rows.mean(axis=0, dtype=np.float64)
    return left


def adding_up(
    contributions: Float[np.ndarray, "tokens slots width"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Length of the sum over the sum of the lengths, :math:`|\sum c_i| / \sum |c_i|`.

    1 where all point the same way, :math:`k^{-1/2}` for k orthogonal ones of one length, 0 where
    they cancel; nan where all are 0. Oracle in tests: vectors worked out by hand.
    """
    total = np.linalg.norm(contributions.sum(axis=1, dtype=np.float64), axis=1)
    lengths = np.linalg.norm(contributions.astype(np.float64), axis=2).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return total / lengths
