"""Every count, bound and cost of a layer of given sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moegeom.core.errors import UsageError
from moegeom.geometry.capacity import (
    expected_diagram,
    expert_parameters,
    face_count,
    first_free_dimension,
    is_every_set_possible,
    largest_split,
    layer_parameters,
    leading_regions,
    log10_count,
    log_leading_zaslavsky,
    most_cells,
    most_regions,
    num_edges,
    num_facets,
    published_macs,
    published_parameters,
    published_regions,
    published_split_log10,
    router_macs,
    split_sets_log10,
    total_cells,
    zonotope_vertices,
)
from moegeom.research.capacity.record import (
    AtDimension,
    LayerCapacity,
    LayerSizes,
    SplitExperts,
    SplitGain,
)
from moegeom.research.capacity.request import CapacityRequest

#: Dimensions of the data where nothing else is asked; the whole input comes last.
_DATA_DIMS = (1, 2, 5, 10, 20, 50)

#: Default split factors of experts.
_SPLITS = (1, 2, 4, 8)

#: The largest of what may be asked: integers grow with all of them.
MOST: Mapping[str, int] = {
    "experts": 4096,
    "width": 2**17,
    "hidden": 2**14,
    "shared": 4096,
    "router_dim": 2**15,
}

#: Ties of up to so many experts are counted.
_MOST_FACES = 65

#: Dimensions up to which the mean of Gaussian routers is an integral of a fraction of a second.
_MOST_EXPECTED_DIMS = 64

#: Terms of the bound of regions times experts, which is how long their factors are, up to which
#: it is a matter of a second.
_MOST_WORK = 2**25


@dataclass(frozen=True)
class Origin:
    """The routers with these sizes, and where the sizes come from (``LayerCapacity``)."""

    routers: str = ""
    is_linear: bool = True
    width_origin: str = ""
    dims_origin: str = ""


#: Sizes that were typed.
_TYPED = Origin()


def requested_layer(
    request: CapacityRequest,
    sizes: LayerSizes,
    of_data: Sequence[int] = (),
    origin: Origin = _TYPED,
) -> LayerCapacity:
    """The layer on the requested dimensions, else on those of the data or the defaults and D.

    Raises
    ------
    UsageError
        As ``refuse_unfit``.
    """
    dims = request.data_dims or of_data or [d for d in _DATA_DIMS if d < sizes.hidden]
    splits = request.splits or [split for split in _SPLITS if sizes.width % split == 0]
    refuse_unfit(sizes, request.data_dims, splits)
    whole = [] if request.data_dims else [sizes.hidden]
    chosen = sorted({int(d) for d in (*dims, *whole)})
    return layer_capacity(
        sizes, chosen, sorted({int(split) for split in splits}), request.router_dim, origin
    )


def refuse_unfit(sizes: LayerSizes, dims: Sequence[int], splits: Sequence[int]) -> None:
    """Raises UsageError for sizes that are too large, and for what does not go with them."""
    for name, value in (
        ("experts", sizes.num_experts),
        ("width", sizes.width),
        ("hidden", sizes.hidden),
    ):
        if value > MOST[name]:
            raise UsageError(f"{value:,} ({name}): counts are for at most {MOST[name]:,}.")
    if sizes.top_k > sizes.num_experts:
        raise UsageError(
            f"--top-k {sizes.top_k}: more than the {sizes.num_experts} experts that there are."
        )
    for split in splits:
        if sizes.width % split:
            raise UsageError(
                f"--split {split}: does not divide the width {sizes.width} of an expert.",
                "Leave --split out for those of 1, 2, 4 and 8 that do.",
            )
    for d in dims:
        if d > sizes.hidden:
            raise UsageError(
                f"--data-dim {d}: inputs have {sizes.hidden} numbers, data have no more dimensions."
            )


def layer_capacity(
    sizes: LayerSizes,
    dims: Sequence[int],
    splits: Sequence[int],
    router_dim: int,
    origin: Origin = _TYPED,
) -> LayerCapacity:
    """Counts, bounds and costs on these dimensions and splits; each split divides the width."""
    num_experts, k, hidden = sizes.num_experts, sizes.top_k, sizes.hidden
    at = tuple(_at(sizes, d) for d in dims)
    neurons = k * sizes.width + sizes.shared_width
    return LayerCapacity(
        **vars(origin),
        sizes=sizes,
        num_sets=math.comb(num_experts, k),
        num_edges=num_edges(k, num_experts),
        num_facets=num_facets(k, num_experts),
        faces=tuple(face_count(k, num_experts, n) for n in range(min(num_experts, _MOST_FACES))),
        free_from=first_free_dimension(num_experts, k),
        at=at,
        splits=tuple(_split(sizes, split, at) for split in splits),
        parameters=layer_parameters(
            num_experts, k, hidden, sizes.width, sizes.shared_width, sizes.is_gated
        ),
        published_parameters=published_parameters(num_experts, k, sizes.width, hidden),
        expert_macs=expert_parameters(hidden, neurons, sizes.is_gated),
        macs=router_macs(num_experts, hidden, router_dim),
        published_macs=published_macs(num_experts, k, hidden, router_dim),
    )


def _at(sizes: LayerSizes, dims: int) -> AtDimension:
    num_experts, k, width = sizes.num_experts, sizes.top_k, sizes.width
    active, regions = k * width, _regions(num_experts, k, width, dims)
    leading = None
    if dims <= _MOST_EXPECTED_DIMS:
        ratio = leading_regions(num_experts, k, width, dims)
        leading = log10_count(ratio.numerator) - log10_count(ratio.denominator)
    return AtDimension(
        dims=dims,
        most_cells=most_cells(num_experts, k, dims, is_central=False),
        all_orders=total_cells(num_experts, dims, is_central=False),
        expected_cells=_expected(num_experts, k, dims),
        is_every_set_possible=is_every_set_possible(num_experts, k, dims),
        published=published_regions(num_experts, k, width, dims),
        dense_leading=log_leading_zaslavsky(active, dims) / math.log(10.0),
        regions=regions,
        regions_leading=leading,
        zonotope_vertices=zonotope_vertices(active, dims),
    )


def _expected(num_experts: int, k: int, dims: int) -> float | None:
    """Expected cells; None if too slow to compute or outside the range of float64."""
    if dims >= num_experts - 1:
        count = math.comb(num_experts, k)
        return float(count) if count.bit_length() < 1024 else None
    if dims > _MOST_EXPECTED_DIMS:
        return None
    cells = expected_diagram(num_experts, k, dims, is_central=False).cells
    return cells if math.isfinite(cells) else None


def _regions(num_experts: int, k: int, width: int, dims: int) -> int | None:
    """The bound on regions; None where the sum would take seconds."""
    if k * min(dims, k) * num_experts > _MOST_WORK:
        return None
    return most_regions(num_experts, k, width, dims)


def _split(sizes: LayerSizes, split: int, at: Sequence[AtDimension]) -> SplitExperts:
    num_experts, k = split * sizes.num_experts, split * sizes.top_k
    width = sizes.width // split
    return SplitExperts(
        split=split,
        num_experts=num_experts,
        top_k=k,
        width=width,
        sets=split_sets_log10(sizes.num_experts, sizes.top_k, split),
        gains=tuple(_gains(sizes, split, at)),
    )


def _gains(sizes: LayerSizes, split: int, at: Sequence[AtDimension]) -> Iterator[SplitGain]:
    num_experts, k = split * sizes.num_experts, split * sizes.top_k
    for there in at:
        if split == 1:
            cells, regions = there.most_cells, there.regions
        else:
            cells = most_cells(num_experts, k, there.dims, is_central=False)
            regions = _regions(num_experts, k, sizes.width // split, there.dims)
        more = None
        if regions is not None and there.regions is not None:
            more = log10_count(regions) - log10_count(there.regions)
        yield SplitGain(
            dims=there.dims,
            published=published_split_log10(sizes.num_experts, sizes.top_k, split, there.dims),
            cells=log10_count(cells) - log10_count(there.most_cells),
            regions=more,
            largest_split=largest_split(sizes.width, there.dims),
        )
