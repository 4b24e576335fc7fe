"""Regions of a router and its experts between tokens and in a plane: request and record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moegeom.core.option import option
from moegeom.core.tokens import SampleCounts
from moegeom.engine.request import BudgetTerms, StudyRequest


@dataclass(frozen=True)
class RegionsRequest(BudgetTerms, StudyRequest):
    """The options of ``regions``, each with what it means."""

    PYTHON_ONLY: ClassVar[tuple[str, ...]] = (*StudyRequest.PYTHON_ONLY, "random_experts")

    segments: int | None = option(
        "Straight ways of each kind [default: 1,000, fewer where experts are wide].", min=2
    )
    subspace: str = option("The plane: pca:2, random:2, plane:A,B,C or an npz file.", "pca:2")
    against: str | None = option("Count the same in this checkpoint too: initialisation.")
    random_experts: int = option("Draws of experts with the same row lengths.", 3)
    yes: bool = option("Read more than 2 GB of experts.", False)
    out: Path | None = option("Write every count: FILE.parquet.")


@dataclass(frozen=True)
class SegmentRegions:
    """Means over straight ways, with standard errors over ways; rates per unit of length.

    ``all_neurons`` is how often neurons of all experts, chosen or not, change on a way, of some of
    the ways. ``unknown_share`` is the share of ways of which it is not proved that all changes were
    seen, 0 of linear rules.
    """

    way: str
    num_segments: int
    length: float
    router_changes: float
    router_changes_se: float
    neuron_changes: float
    neuron_changes_se: float
    regions: float
    regions_se: float
    all_neurons: float
    per_length: float
    per_length_se: float
    unknown_share: float = 0.0

    @property
    def routing_share(self) -> float:
        """Changes of the set among all changes; nan where nothing changes."""
        total = self.router_changes + self.neuron_changes
        return self.router_changes / total if total else float("nan")


@dataclass(frozen=True)
class PlaneRegions:
    """Regions in the frame of a plane, exact for the numbers rounded to it.

    ``of_cell`` are those of each cell of ``expert_sets``: of all ``num_cells`` that the frame
    meets, or of some that were drawn, from which ``regions`` follows with an error. ``bound`` is
    the most of any router and experts of this size (docs/theory.md B6), ``top_1`` and ``top_k``
    what is published; ``random`` has as many draws of experts with the same row lengths, in the
    same cells.
    """

    subspace: str
    variance_share: float | None
    expert_sets: tuple[tuple[int, ...], ...]
    of_cell: tuple[int, ...]
    bound: int
    top_1: int
    top_k: int
    random: tuple[int, ...]
    num_cells: int

    @property
    def regions(self) -> int:
        return self.total(sum(self.of_cell))

    def total(self, counted: int) -> int:
        """Of all cells, from what was counted in those that were drawn."""
        return round(counted * self.num_cells / max(len(self.of_cell), 1))

    @property
    def regions_se(self) -> float:
        """Standard error of the sample of cells; 0 where all are counted."""
        cells = len(self.of_cell)
        if cells == self.num_cells:
            return 0.0
        spread = statistics.stdev(self.of_cell) if cells > 1 else float("nan")
        left = 1.0 - cells / self.num_cells
        return self.num_cells * spread * (left / cells) ** 0.5


@dataclass(frozen=True)
class EarlierRegions:
    """The same ways and the same plane in the checkpoint ``against``."""

    ways: tuple[SegmentRegions, ...]
    plane: PlaneRegions | None


@dataclass(frozen=True)
class RouterRegions:
    """One router; ``counted`` says what its regions are: of ``num_counted`` of the ``width``
    neurons of each expert. No ``plane`` where cells are no polygons: of curved and grouped rules.
    """

    router: str
    num_experts: int
    top_k: int
    width: int
    num_counted: int
    activation: str
    counted: str
    num_bytes: int
    ways: tuple[SegmentRegions, ...]
    plane: PlaneRegions | None
    before: EarlierRegions | None = None


@dataclass(frozen=True)
class Regions:
    """Every router that could be looked at; ``left_out`` are the others, with the reason."""

    run: Mapping[str, Any]
    routers: tuple[RouterRegions, ...]
    left_out: tuple[tuple[str, str], ...]
    against: str | None
    sample: SampleCounts
    seed: int
    written: str | None = None
