"""The record of an enumeration: for each router its slice, its cells, and what tokens say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moegeom.core.finding import EXIT_INCONCLUSIVE, EXIT_OK
from moegeom.routing_cells.facet_graph import Visited

#: Cells listed; every set a cell, said and not listed; more vertices than asked for; arcs of a
#: circle; pixels of a plane.
Outcome = Literal["cells", "all subsets", "unfinished", "arcs", "pixels"]


@dataclass(frozen=True)
class Cells:
    """Cells and facets that were listed.

    ``road`` is the one that was taken, ``gap`` how many error bounds the nearest sign that float64
    proved is from a tie. Degrees are facets of a cell; ``diameter`` the most facets between two
    cells of one piece, a lower bound unless it ``is_diameter_exact``. ``num_bounded`` is None of
    arcs and pixels; ``proved_share`` is that of arcs, or of pixels that one
    set is proved for; ``num_open`` pixels are undecided, the others crossed by a facet. In
    ``num_rational`` cells no float64 point was found: their witnesses are fractions. ``num_tied``
    counts the regions that are in no cell, as equal experts tie all over them for the last place;
    None where they were not counted. At ``num_concurrent`` points more experts tie for the last
    place than general position lets (d + 1, d on charts), and ``num_parallel`` boundaries have one
    beside them that they never meet; None where no walk of the slice says it.
    """

    num_cells: int
    road: str
    num_bounded: int | None = None
    num_facets: int | None = None
    num_components: int | None = None
    degrees: tuple[int, float, int] | None = None
    diameter: int | None = None
    is_diameter_exact: bool = True
    num_vertices: int = 0
    num_exact: int = 0
    num_concurrent: int | None = None
    num_parallel: int | None = None
    gap: float | None = None
    proved_share: float | None = None
    num_open: int | None = None
    num_rational: int = 0
    num_tied: int | None = None


@dataclass(frozen=True)
class Between:
    """Facets that are crossed on straight ways between pairs of tokens."""

    num_segments: int
    mean_crossings: float
    per_length: float
    per_length_se: float
    num_exact: int


@dataclass(frozen=True)
class RandomRouterCells:
    """Cells of random routers with the same row norms, biases and rule on the same slice."""

    num_routers: int
    mean: float
    sd: float


@dataclass(frozen=True)
class CutShort:
    """A walk that ended at its limit of ``most`` vertices.

    ``enough`` is a limit that should do, twice what a random router has or ten times this one; None
    where no more are kept.
    """

    most: int
    enough: int | None


@dataclass(frozen=True)
class RouterCells:
    """One router on one slice.

    ``most_cells`` is the bound of docs/theory.md B4 for any router there, ``expected_vertices``
    what a random router has. ``seconds`` are those of finding cells with their proofs, without
    those in which kernels were compiled. Of ``num_tokens`` projected onto the slice ``num_own``
    choose what the slice chooses at their place; ``num_cells_with_tokens`` hold one. ``left_out``
    tokens are not finite. ``num_equal`` experts are equal to another one on the slice, unless ties
    are broken; ``num_on_ties`` tokens are drawn where that leaves no cell. ``num_checked``
    witnesses were checked again in integers (None: that was not asked for).
    """

    router: str
    num_experts: int
    top_k: int
    subspace: str
    domain: str
    dims: int
    outcome: Outcome
    cells: Cells | None
    num_possible: int
    most_cells: int | None
    expected_vertices: float | None
    seconds: float
    variance_share: float | None = None
    num_tokens: int | None = None
    num_own: int | None = None
    num_cells_with_tokens: int | None = None
    left_out: int = 0
    between: Between | None = None
    visited: Visited | None = None
    random: RandomRouterCells | None = None
    num_equal: int = 0
    num_on_ties: int | None = None
    num_checked: int | None = None
    cut_short: CutShort | None = None


@dataclass(frozen=True)
class Answer:
    """Whether one set of experts is a cell: with the point, or the proof that there is none.

    ``margin`` is the least logit of the set less the largest of the others at the point.
    ``weights`` are experts of the set, and others, with the weights of two mixtures that agree in
    every direction while the bias of the second is no smaller. ``certificate`` is the same in
    rational numbers, as text; ``is_checked`` after an independent exact check.
    """

    router: str
    expert_set: tuple[int, ...]
    subspace: str
    is_cell: bool
    margin: float | None
    weights: tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]] | None
    certificate: Mapping[str, Any]
    is_checked: bool
    seconds: float


@dataclass(frozen=True)
class Enumerations:
    """All routers that were looked at. ``run`` is None for a bare matrix, called ``name``."""

    name: str
    run: Mapping[str, Any] | None
    routers: tuple[RouterCells, ...]
    answers: tuple[Answer, ...]
    left_out: tuple[tuple[str, str], ...]
    seed: int
    written: str | None = None
    files: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Inconclusive where a walk was not finished."""
        is_unfinished = any(router.outcome == "unfinished" for router in self.routers)
        return EXIT_INCONCLUSIVE if is_unfinished else EXIT_OK
