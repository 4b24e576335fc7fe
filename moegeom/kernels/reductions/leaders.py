"""First choices: how often each expert is one, and how often the next token repeats it."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.reductions._counters import counters
from moegeom.kernels.reductions._neighbours import first_of_pairs


def _fold(counts: np.ndarray, quantities: Quantities, kernels: Kernels) -> None:
    leader = quantities.chosen[:, 0]
    np.add.at(counts, (quantities.population, quantities.block, 2 + leader), 1)
    first = first_of_pairs(quantities)
    repeated = leader[first] == leader[first + 1]
    at = (quantities.population[first], quantities.block[first])
    np.add.at(counts[..., 0], at, 1)
    np.add.at(counts[..., 1], at, repeated)


#: Last axis: pairs of neighbours, pairs with equal first choice, then tokens led by each expert.
#: A margin means that choices are in the order of their scores, which recorded ids need not be.
REDUCTION = counters(
    "leaders",
    ("chosen", "margin", "document", "position"),
    lambda extent: (2 + extent.num_experts,),
    _fold,
)
