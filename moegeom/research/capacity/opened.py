"""The sizes of a checkpoint, and the dimension of tokens of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from moegeom.core.errors import RecordingError
from moegeom.core.router import Router, format_layers
from moegeom.core.tokens import SourceFacts
from moegeom.engine.parameters import shared_fields
from moegeom.engine.request import ComputeOptions, MeasureOptions
from moegeom.engine.session import Session
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.pipeline import Watch
from moegeom.research.capacity.record import Capacity, CapacityRequest, LayerSizes
from moegeom.research.capacity.study import refuse_unfit, requested_layer
from moegeom.router.expert_samples import ExpertShape, expert_shape, experts_by_folder, open_headers
from moegeom.router.plain_names import with_plain_names
from moegeom.tokens.stages import INPUT_STAGES


def of_checkpoint(request: CapacityRequest, watch: Watch | None) -> Capacity:
    """The capacity of each group of layers of the same sizes; no expert weight is read.

    Raises
    ------
    MoeGeomError
        As ``capacity``.
    """
    opened = Session.open(request)
    routers = opened.recorded
    store = with_plain_names(opened.store)
    by_folder = experts_by_folder(store)
    open_headers(store, routers, by_folder)
    members: dict[tuple[LayerSizes, bool], list[tuple[Router, ExpertShape]]] = {}
    for router in routers:
        shape = expert_shape(store, router, by_folder, request.width)
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
        opened.store.label,
        tuple(layers),
        request.router_dim,
        opened.left_out,
        opened.facts(routers) | {"parts": parts},
    )


def _dimensions(
    opened: Session, routers: Sequence[Router], request: CapacityRequest, watch: Watch | None
) -> tuple[dict[str, tuple[float, float]], dict[str, Mapping[str, Any]]]:
    """The range of the intrinsic dimension of what each router reads, and facts of its tokens."""
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
