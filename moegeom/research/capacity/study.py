"""``research capacity``: from sizes, or from a checkpoint that has them (docs/capacity.md)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.router import Router, format_layers
from moegeom.core.text import number_of
from moegeom.engine.parameters import option_of, shared_fields
from moegeom.geometry import capacity as formulas
from moegeom.research.capacity.record import (
    AtDimension,
    Capacity,
    CapacityRequest,
    LayerCapacity,
    LayerSizes,
    SplitExperts,
    SplitGain,
)

if TYPE_CHECKING:
    from moegeom.core.tokens import SourceFacts
    from moegeom.engine.session import Session
    from moegeom.pipeline import Watch
    from moegeom.router.expert_samples import ExpertShape

#: Splits and dimensions that one run takes.
_MOST_ENTRIES = 100


def capacity(request: CapacityRequest, watch: Watch | None = None) -> Capacity:
    """Counts and bounds of each kind of layer.

    The sizes are those of ``checkpoint``, of which no expert is read, or ``experts``, ``top_k``,
    ``width`` (of one expert) and ``hidden``. The dimension of ``tokens`` is estimated.

    Raises
    ------
    UsageError
        When the options cannot be meant.
    RouterError
        When a checkpoint does not say how wide its experts are, or contradicts itself.
    RecordingError
        When the tokens hold no router inputs, or too few to estimate their dimension.

    Examples
    --------
    >>> import moegeom as mg
    >>> report = mg.capacity(experts=64, top_k=8, width=1024, hidden=2048, data_dims=(2, 4))
    >>> [(at.dims, at.most_cells) for at in report.value.layers[0].at]
    [(2, 43557), (4, 8303321)]
    """
    _check(request)
    return _of_checkpoint(request, watch) if request.checkpoint else _of_sizes(request)


def _of_sizes(request: CapacityRequest) -> Capacity:
    assert request.experts is not None
    assert request.width is not None
    assert request.hidden is not None
    assert request.requested_family.top_k is not None
    sizes = LayerSizes(
        request.experts,
        request.requested_family.top_k,
        request.width,
        request.hidden,
        request.shared * request.width,
        request.gated,
    )
    name = f"{number_of(sizes.num_experts, 'expert')}, top-{sizes.top_k}"
    return Capacity(name, (requested_layer(request, sizes),))


# --------------------------------------------------------------------------------- of a checkpoint
def _of_checkpoint(request: CapacityRequest, watch: Watch | None) -> Capacity:
    """The capacity of each group of layers of the same sizes; no expert weight is read."""
    # what opens checkpoints takes longer to load than counting takes
    from moegeom.engine.session import Session
    from moegeom.router.expert_names import layer_names
    from moegeom.router.expert_samples import expert_shape, open_headers
    from moegeom.router.plain_names import with_plain_names

    opened = Session.open(request)
    routers = opened.recorded
    store = with_plain_names(opened.store)
    names = layer_names(store.names())
    open_headers(store, routers, names)
    members: dict[tuple[LayerSizes, bool], list[tuple[Router, ExpertShape]]] = {}
    for router in routers:
        shape = expert_shape(store, router, names, request.width)
        is_gated = request.gated if shape.is_gated is None else shape.is_gated
        sizes = LayerSizes(
            router.num_experts,
            router.rule.top_k,
            shape.width,
            router.hidden_size,
            shape.shared_width,
            is_gated,
        )
        members.setdefault((sizes, router.rule.is_affine), []).append((router, shape))
    for sizes, _ in members:  # what cannot be meant is said before tokens are read
        refuse_unfit(sizes, request.data_dims, request.splits)
    ranges, parts = {}, {}
    if opened.source is not None:
        ranges, parts = _dimensions(opened, routers, request, watch)
    layers = []
    for (sizes, is_linear), those in members.items():
        names = [router.name for router, _ in those]
        dims, text = _of_data([ranges[name] for name in names if name in ranges])
        layers.append(
            dataclasses.replace(
                requested_layer(request, sizes, dims),
                routers=_named([router for router, _ in those]),
                is_linear=is_linear,
                width_origin=those[0][1].origin,
                dims_origin=text,
            )
        )
    return Capacity(
        opened.store.label, tuple(layers), opened.left_out, opened.facts(routers) | {"parts": parts}
    )


def _dimensions(
    opened: Session, routers: Sequence[Router], request: CapacityRequest, watch: Watch | None
) -> tuple[dict[str, tuple[float, float]], dict[str, Mapping[str, Any]]]:
    """The range of the intrinsic dimension of what each router reads, and facts of its tokens."""
    from moegeom.engine.request import ComputeOptions, MeasureOptions
    from moegeom.measure.passes import RouterRun, measure_router
    from moegeom.metrics import METRICS
    from moegeom.tokens.stages import INPUT_STAGES

    source = opened.source
    assert source is not None
    if source.facts.stage not in INPUT_STAGES:
        raise _unknown_dimension(source.facts, routers[0].name)
    if watch:
        watch.start(len(routers) * source.facts.num_tokens)
    ranges, parts = {}, {}
    for router in routers:
        if watch:
            watch.begin(router.name)
        run = RouterRun(
            router,
            source,
            [METRICS["intrinsic_dimension"]],
            MeasureOptions(**{f: getattr(request, f) for f in shared_fields(ComputeOptions)}),
            advanced=watch.advance if watch else None,
        )
        measured = measure_router(run)
        rows, parts[router.name] = measured.rows.get("layers", ()), measured.facts
        ends = [
            (row["intrinsic_dimension_low"], row["intrinsic_dimension_high"])
            for row in rows
            if row.get("intrinsic_dimension_low") is not None
        ]
        if not ends:
            raise _unknown_dimension(source.facts, router.name)
        ranges[router.name] = ends[0]
    return ranges, parts


def _unknown_dimension(facts: SourceFacts, router: str) -> RecordingError:
    return RecordingError(
        f"{facts.name}: the dimension of the inputs of router {router} cannot be estimated: that "
        "takes router inputs of 100 different tokens or more.",
        "moegeom capture --keep hidden records them; without --tokens, say it: --data-dim D.",
    )


def _of_data(ranges: Sequence[tuple[float, float]]) -> tuple[tuple[int, ...], str]:
    """Both ends in whole dimensions, rounded up, and the sentence about them."""
    if not ranges:
        return (), ""
    low, high = min(ends[0] for ends in ranges), max(ends[1] for ends in ranges)
    text = f"intrinsic dimension of the tokens: {low:.1f} to {high:.1f}"
    return (max(1, math.ceil(low)), max(1, math.ceil(high))), text


def _named(routers: Sequence[Router]) -> str:
    """``text/0-2``."""
    layers: dict[tuple[str, str], set[int]] = {}
    for router in routers:
        layers.setdefault((router.stack, router.slot), set()).add(router.layer)
    return ", ".join(
        "/".join(filter(None, (stack, format_layers(those), slot)))
        for (stack, slot), those in layers.items()
    )


# ------------------------------------------------------------------------------------------ request


def _check(request: CapacityRequest) -> None:
    """Raises UsageError for what cannot be meant, before anything is read."""
    if request.checkpoint:
        typed = [name for name in ("experts", "hidden", "shared") if getattr(request, name)]
        if typed:
            raise UsageError(f"{option_of(typed[0])} goes without --from: the checkpoint says it.")
    else:
        sizes = {name: getattr(request, name) for name in ("experts", "width", "hidden")}
        missing = [
            name
            for name, size in {**sizes, "top_k": request.requested_family.top_k}.items()
            if size is None
        ]
        if missing:
            raise UsageError(
                f"{', '.join(map(option_of, missing))}: not given; expected every size, or a "
                "checkpoint.",
                "For example --experts 64 --top-k 8 --width 1024 --hidden 2048, or --from CKPT.",
            )
        late = [name for name in ("tokens", "layers") if getattr(request, name) is not None]
        if late:
            raise UsageError(f"{option_of(late[0])} goes with --from CKPT.")
    for name, most in MOST.items():
        value = getattr(request, name)
        if value is not None and value > most:
            least = int(name != "shared")
            raise UsageError(f"{option_of(name)} {value}: expected {least} to {most:,}.")
    for name, most in (("data_dims", 2**15), ("splits", 64)):
        values = getattr(request, name)
        if len(values) > _MOST_ENTRIES or not all(1 <= value <= most for value in values):
            raise UsageError(
                f"{option_of(name)}: expected numbers from 1 to {most:,}, at most {_MOST_ENTRIES}."
            )


# ---------------------------------------------------------------------------------------- one layer
#: Dimensions of the data where nothing else is asked; the whole input comes last.
_DATA_DIMS = (1, 2, 5, 10, 20, 50)

#: Default split factors of experts.
_SPLITS = (1, 2, 4, 8)

#: The largest of what may be asked: integers grow with all of them.
MOST: Mapping[str, int] = {"experts": 4096, "width": 2**17, "hidden": 2**14, "shared": 4096}

#: Dimensions up to which the mean of Gaussian routers is an integral of a fraction of a second.
_MOST_EXPECTED_DIMS = 64

#: Terms of the bound of regions times experts, which is how long their factors are, up to which
#: it is a matter of a second.
_MOST_WORK = 2**25


def requested_layer(
    request: CapacityRequest, sizes: LayerSizes, of_data: Sequence[int] = ()
) -> LayerCapacity:
    """Counts and bounds on the requested dimensions, else on those of the data or the
    defaults and D.

    Raises
    ------
    UsageError
        As ``refuse_unfit``.
    """
    dims = request.data_dims or of_data or [d for d in _DATA_DIMS if d < sizes.hidden]
    splits = request.splits or [split for split in _SPLITS if sizes.width % split == 0]
    refuse_unfit(sizes, request.data_dims, splits)
    whole = [] if request.data_dims else [sizes.hidden]
    num_experts, k, hidden = sizes.num_experts, sizes.top_k, sizes.hidden
    at = tuple(_at(sizes, d) for d in sorted({*dims, *whole}))
    neurons = k * sizes.width + sizes.shared_width
    return LayerCapacity(
        sizes=sizes,
        num_sets=math.comb(num_experts, k),
        num_edges=formulas.num_edges(k, num_experts),
        num_facets=formulas.num_facets(k, num_experts),
        free_from=formulas.first_free_dimension(num_experts, k),
        at=at,
        splits=tuple(_split(sizes, split, at) for split in sorted(set(splits))),
        parameters=formulas.layer_parameters(
            num_experts, k, hidden, sizes.width, sizes.shared_width, sizes.is_gated
        ),
        published_parameters=formulas.published_parameters(num_experts, k, sizes.width, hidden),
        expert_macs=formulas.expert_parameters(hidden, neurons, sizes.is_gated),
    )


def refuse_unfit(sizes: LayerSizes, dims: Sequence[int], splits: Sequence[int]) -> None:
    """Raises UsageError for sizes that are too large, and for what does not go with them."""
    ends = {"experts": sizes.num_experts, "width": sizes.width, "hidden": sizes.hidden}
    for name, value in ends.items():
        if value > MOST[name]:
            raise UsageError(f"{value:,} ({name}): counts are for at most {MOST[name]:,}.")
    if sizes.top_k > sizes.num_experts:
        raise UsageError(
            f"--top-k {sizes.top_k}: expected 1 to {sizes.num_experts}, the number of experts."
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


def _at(sizes: LayerSizes, dims: int) -> AtDimension:
    num_experts, k, width = sizes.num_experts, sizes.top_k, sizes.width
    return AtDimension(
        dims=dims,
        most_cells=formulas.most_cells(num_experts, k, dims, is_central=False),
        expected_cells=_expected(num_experts, k, dims),
        published=formulas.published_regions(num_experts, k, width, dims),
        regions=_regions(num_experts, k, width, dims),
    )


def _expected(num_experts: int, k: int, dims: int) -> float | None:
    """Expected cells; None if too slow to compute or outside the range of float64."""
    if dims >= num_experts - 1:
        count = math.comb(num_experts, k)
        return float(count) if count.bit_length() < 1024 else None
    if dims > _MOST_EXPECTED_DIMS:
        return None
    cells = formulas.expected_diagram(num_experts, k, dims, is_central=False).cells
    return cells if math.isfinite(cells) else None


def _regions(num_experts: int, k: int, width: int, dims: int) -> int | None:
    """The bound on regions; None where the sum would take seconds."""
    if k * min(dims, k) * num_experts > _MOST_WORK:
        return None
    return formulas.most_regions(num_experts, k, width, dims)


def _split(sizes: LayerSizes, split: int, at: Sequence[AtDimension]) -> SplitExperts:
    num_experts, k, width = split * sizes.num_experts, split * sizes.top_k, sizes.width // split
    gains = []
    for there in at:
        cells, regions, more = there.most_cells, there.regions, None
        if split > 1:
            cells = formulas.most_cells(num_experts, k, there.dims, is_central=False)
            regions = _regions(num_experts, k, width, there.dims)
        if regions is not None and there.regions is not None:
            more = formulas.log10_count(regions) - formulas.log10_count(there.regions)
        published = formulas.published_split_log10(
            sizes.num_experts, sizes.top_k, split, there.dims
        )
        gain = formulas.log10_count(cells) - formulas.log10_count(there.most_cells)
        gains.append(SplitGain(there.dims, published, cells=gain, regions=more))
    sets = formulas.split_sets_log10(sizes.num_experts, sizes.top_k, split)
    return SplitExperts(split, num_experts, k, width, sets, tuple(gains))
