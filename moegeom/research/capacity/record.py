"""What a router of given sizes could do at most: request and record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moegeom.core.option import option
from moegeom.engine.request import CHECKPOINT, TokensRequest
from moegeom.geometry import capacity as formulas


@dataclass(frozen=True)
class CapacityRequest(TokensRequest):
    """The options of ``capacity``, each with what it means."""

    checkpoint: str = option(f"Sizes of a checkpoint: {CHECKPOINT}.", "")
    _: dataclasses.KW_ONLY
    experts: int | None = option("Routed experts.", min=1)
    width: int | None = option("Neurons of one expert.", min=1)
    hidden: int | None = option("Numbers of a router input.", min=1)
    shared: int = option("Experts that run for every token.", 0, min=0)
    gated: bool = option("Experts have a gate (SwiGLU): three matrices.", False)
    data_dims: tuple[int, ...] = option(
        "Dimensions of the data, such as 1,2,5 [default: 1,2,5,10,20,50; of --tokens theirs].", ()
    )
    splits: tuple[int, ...] = option("Cut each expert into so many [default: 1,2,4,8].", ())


@dataclass(frozen=True)
class LayerSizes:
    """Experts, how many are chosen, their width, and the length of an input.

    ``shared_width`` are neurons of all shared experts together.
    """

    num_experts: int
    top_k: int
    width: int
    hidden: int
    shared_width: int
    is_gated: bool


@dataclass(frozen=True)
class AtDimension:
    """Counts and bounds on an affine set of ``dims`` dimensions; None where that takes too long.

    ``most_cells`` of top-k, ``expected_cells`` of a Gaussian router, ``regions`` the bound on
    expert sets with neuron patterns.
    """

    dims: int
    most_cells: int
    expected_cells: float | None
    published: formulas.PublishedRegions
    regions: int | None

    @property
    def exceeds(self) -> bool:
        """Whether the published number of top-k regions is more than there can be."""
        return self.regions is not None and self.published.top_k > self.regions


@dataclass(frozen=True)
class SplitGain:
    """log10 of what a split gains on ``dims`` dimensions: as printed, of cells, of regions."""

    dims: int
    published: float
    cells: float
    regions: float | None


@dataclass(frozen=True)
class SplitExperts:
    """Every expert cut into ``split``; ``sets`` is log10 of the gain in expert sets."""

    split: int
    num_experts: int
    top_k: int
    width: int
    sets: float
    gains: tuple[SplitGain, ...]


@dataclass(frozen=True)
class LayerCapacity:
    """Counts and bounds for layers of the same sizes.

    ``routers`` names them, "" for sizes that were typed. ``width_origin`` and ``dims_origin`` say
    where the width of experts and the dimensions of the data come from. ``free_from`` is the
    dimension from which on the bound allows every set. ``expert_macs`` of the chosen and
    shared experts per token.
    """

    sizes: LayerSizes
    num_sets: int
    num_edges: int
    num_facets: int
    free_from: int
    at: tuple[AtDimension, ...]
    splits: tuple[SplitExperts, ...]
    parameters: formulas.Parameters
    published_parameters: formulas.PublishedParameters
    expert_macs: int
    routers: str = ""
    is_linear: bool = True
    width_origin: str = ""
    dims_origin: str = ""


@dataclass(frozen=True)
class Capacity:
    """Each kind of layer, and the facts of the run where a checkpoint was opened.

    ``left_out`` are routers with the reason.
    """

    name: str
    layers: tuple[LayerCapacity, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    run: Mapping[str, Any] | None = None
