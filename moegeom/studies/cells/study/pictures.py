"""``--plot``: the picture of one router on its slice, and the numbers behind it as CSV."""

from __future__ import annotations

import numpy as np

from moegeom import __version__
from moegeom.core.errors import UsageError
from moegeom.core.files import write_whole
from moegeom.studies.cells.graph.facet_graph import swaps
from moegeom.studies.cells.pictures import (
    CircleCells,
    PlaneCells,
    RasterCells,
    SliceCaption,
    SlicePicture,
    SpaceCells,
    TokenMarks,
    figure_csv,
    write_picture,
)
from moegeom.studies.cells.plane.polygons import polygons
from moegeom.studies.cells.plane.raster_frame import PixelState
from moegeom.studies.cells.study.found import FoundCells
from moegeom.studies.cells.study.request import CellsRequest
from moegeom.studies.cells.study.router import Looked, equal_experts
from moegeom.studies.cells.study.slices import frame_of


def draw(looked: Looked, model: str, request: CellsRequest) -> tuple[str, ...]:
    """Writes the picture, and one CSV file beside it for each of its tables; their names.

    Raises
    ------
    UsageError
        When the slice has neither two nor three dimensions, or the file cannot be written.
    """
    assert request.plot is not None
    picture = _picture(looked, model, request)
    write_picture(
        picture,
        request.plot,
        view=request.view,
        expert=request.expert,
        band=request.band,
        with_caption=request.caption,
        width=request.width,
        dpi=request.dpi,
    )
    names = [request.plot.name]
    for name, text in figure_csv(picture).items():
        path = request.plot.with_name(f"{request.plot.stem}.{name}.csv")
        write_whole(path, text)
        names.append(path.name)
    return tuple(names)


def _picture(looked: Looked, model: str, request: CellsRequest) -> SlicePicture:
    caption = _caption(looked, model, request)
    if looked.arcs is not None:
        return _circle(looked, caption)
    if looked.pixels is not None:
        return _pixels(looked, caption)
    found = looked.found[0] if len(looked.found) == 1 else None
    dims = looked.record.dims
    if found is None or not found.is_whole or dims not in (2, 3):
        raise UsageError(
            f"--plot: a slice of 2 or 3 dimensions is drawn; this one is {looked.asked.text} with "
            f"{dims:,}.",
            "Add --subspace pca:2, random:2 or plane:A,B,C.",
        )
    if not len(found.expert_set) or not np.isfinite(found.witness).all():
        raise UsageError(f"--plot: {looked.asked.text} has no cell that could be drawn.")
    if dims == 3:
        return _space(looked, found, caption)
    return _plane(looked, found, caption, request)


def _caption(looked: Looked, model: str, request: CellsRequest) -> SliceCaption:
    record, share, count = looked.record, None, None
    if looked.placed is not None and looked.sample is not None:
        is_own = looked.placed.is_own[_drawn_rows(looked)]
        count, share = len(is_own), float(is_own.mean())
    is_certified = looked.arcs is None or bool(looked.arcs.is_proved.all())
    if looked.pixels is not None:
        is_certified = looked.pixels.count(PixelState.OPEN) == 0
    return SliceCaption(
        model=model,
        router=record.router,
        top_k=record.top_k,
        num_experts=record.num_experts,
        subspace=record.subspace,
        variance_share=record.variance_share,
        own_cell_share=share,
        num_tokens=count,
        seed=request.seed,
        version=__version__,
        is_certified=is_certified,
        remark=_TIED if record.cells is not None and record.cells.num_tied else "",
    )


#: What is blank in a picture of a router with equal experts.
_TIED = "Where nothing is drawn equal experts tie for the last place: that is in no cell."


def _plane(
    looked: Looked, found: FoundCells, caption: SliceCaption, request: CellsRequest
) -> PlaneCells:
    assert looked.weight is not None
    weight = looked.weight
    bias = np.zeros(len(weight)) if looked.bias is None else looked.bias
    points = None if looked.placed is None else looked.placed.place
    frame = frame_of(points, looked.asked, looked.sample, request, _spread(found))
    equal = equal_experts(weight, bias, request)
    drawn = polygons(weight, bias, found.expert_set, found.facets, frame, equal)
    inside = ~np.isnan(drawn.facet_ends[:, 0, 0])
    out, into = swaps(found.expert_set, found.facets[inside]).first
    chosen = found.expert_set.astype(np.int64)
    return PlaneCells(
        caption=caption,
        frame=frame,
        expert_sets=tuple(map(tuple, found.expert_set.tolist())),
        polygons=drawn.corners,
        gradient=weight[chosen].sum(axis=1),
        offset=bias[chosen].sum(axis=1),
        facet_ends=drawn.facet_ends[inside],
        facet_cells=found.facets[inside],
        facet_out=out,
        facet_into=into,
        tokens=_marks(looked),
    )


def _spread(found: FoundCells) -> float:
    """Half the side of a frame that holds most of the bounded cells."""
    if not len(found.witness):
        return 1.0
    return float(np.quantile(np.abs(found.witness).max(axis=1), 0.8)) or 1.0


def _marks(looked: Looked) -> TokenMarks | None:
    """All tokens; on a plane through three of them those three, which lie on it."""
    if looked.placed is None or looked.sample is None:
        return None
    rows = _drawn_rows(looked)
    distance = looked.sample.distance
    return TokenMarks(
        place=looked.placed.place[rows],
        is_own=looked.placed.is_own[rows],
        distance=None if distance is None else distance[rows],
        number=looked.sample.token[rows],
    )


def _drawn_rows(looked: Looked) -> np.ndarray:
    assert looked.sample is not None
    if looked.asked.at:
        return looked.sample.rows_of(looked.asked.at, "--subspace")
    return np.arange(len(looked.sample.token))


def _space(looked: Looked, found: FoundCells, caption: SliceCaption) -> SpaceCells:
    out, into = swaps(found.expert_set, found.facets).first
    inside = None
    if looked.placed is not None:
        cell = looked.placed.cell
        inside = np.bincount(cell[cell >= 0], minlength=len(found.expert_set)).astype(np.int64)
    return SpaceCells(
        caption=caption,
        place=found.witness,
        expert_sets=tuple(map(tuple, found.expert_set.tolist())),
        facets=found.facets,
        out=out,
        into=into,
        tokens_inside=inside,
    )


def _pixels(looked: Looked, caption: SliceCaption) -> RasterCells:
    assert looked.pixels is not None
    assert looked.frame is not None
    # the order in which a picture counts states
    order = (PixelState.CONSTANT, PixelState.CROSSED, PixelState.OPEN)
    state = np.zeros(looked.pixels.state.shape, np.uint8)
    for number, known in enumerate(order):
        state[looked.pixels.state == known] = number
    return RasterCells(
        caption=caption,
        frame=looked.frame,
        label=looked.pixels.label,
        state=state,
        expert_sets=looked.pixels.expert_sets,
        tokens=_marks(looked),
    )


def _circle(looked: Looked, caption: SliceCaption) -> CircleCells:
    assert looked.arcs is not None
    arcs, asked, sample = looked.arcs, looked.asked, looked.sample
    angle, is_own = None, None
    if sample is not None and asked.circle is not None and asked.centre is not None:
        rows = sample.rows_of(asked.at, "--subspace")
        steps = (sample.inputs[rows].astype(np.float64) - asked.centre) @ np.linalg.pinv(
            asked.circle
        ).T
        angle = np.mod(np.arctan2(steps[:, 1], steps[:, 0]), 2.0 * np.pi)
        turned = np.where(angle < arcs.start[0], angle + 2.0 * np.pi, angle)
        arc = np.searchsorted(arcs.start, turned, side="right") - 1
        is_own = (arcs.expert_set[arc] == np.sort(sample.chosen[rows], axis=1)).all(axis=1)
    return CircleCells(
        caption=caption,
        expert_sets=tuple(map(tuple, arcs.expert_set.tolist())),
        start=arcs.start,
        stop=arcs.stop,
        token_angle=angle,
        is_own=is_own,
    )
