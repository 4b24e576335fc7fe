"""``research cells``: which sets of experts are cells of a slice, in tables and pictures too."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from moegeom import __version__
from moegeom.core.errors import InternalError, UsageError
from moegeom.core.files import move_folder, new_folder, refuse_existing, writing
from moegeom.core.parquet import write_table
from moegeom.core.router import Router
from moegeom.core.row_keys import slug
from moegeom.engine.plan import SAMPLE_TOKENS
from moegeom.engine.session import Session
from moegeom.results.schema import keyed, schema_of, sizes_of
from moegeom.routing_cells.exact.certificate import cell_certificate, check_witness
from moegeom.routing_cells.exact.certificate_check import CellPoint, Weights, check_certificate
from moegeom.routing_cells.facet_graph import swaps
from moegeom.routing_cells.pictures import page as pages
from moegeom.routing_cells.pictures.views import write_picture
from moegeom.routing_cells.plane.polygons import cell_sides, polygons
from moegeom.routing_cells.plane.raster import PixelState
from moegeom.routing_cells.plane.subspace import Arcs
from moegeom.routing_cells.record import Answer, Enumerations, RouterCells
from moegeom.routing_cells.request import CellsRequest, check_request
from moegeom.routing_cells.router import (
    CellsListener,
    SlicedRouter,
    equal_experts,
    instance_of,
    prediction,
    refuse_early,
    sliced_router,
)
from moegeom.routing_cells.slices import (
    RequestedSlice,
    dims_of,
    frame_of,
    matrix_router,
    requested_slice,
    token_sample,
)
from moegeom.routing_cells.walk.enumeration import Enumeration

if TYPE_CHECKING:
    from moegeom.pipeline import Watch


def cells(request: CellsRequest, watch: Watch | None = None) -> Enumerations:
    """Every router of the request on its slice, with tables and pictures where it names files.

    Raises
    ------
    UsageError
        When the request cannot be meant, or a picture or ``out`` cannot be written.
    RouterRuleError
        When cells of a curved or grouped router are to be listed.
    RecordingError
        When the recording does not hold what the slice is laid through.

    Examples
    --------
    >>> import moegeom as mg
    >>> ckpt, rec = (f"sample_ckpts/olmoe-balanced/{name}step_1500" for name in ("", "rec/"))
    >>> report = mg.cells(ckpt, rec, layers=0, subspace="pca:2")
    >>> report.value.routers[0].cells.num_cells > 10
    True
    """
    check_request(request)
    # numbers near the ends of float64 leave it on the way; what follows is proved or taken exactly
    with np.errstate(over="ignore", invalid="ignore"):
        return _cells(request, watch)


def _cells(request: CellsRequest, watch: Watch | None) -> Enumerations:
    run, source, left_out, family = None, None, (), ""
    if request.weights is not None:
        assert request.requested_family.top_k is not None
        name = request.weights.name
        routers = [matrix_router(request.weights, request.requested_family.top_k)]
    else:
        opened = Session.open(request)
        name, routers, source = opened.routers.checkpoint, opened.recorded, opened.source
        run, left_out = opened.facts(routers), opened.left_out
        family = f"{run['checkpoint']['family']} "
        del opened  # and with it routers that nobody looks at, of all layers
    if request.plot is not None and len(routers) > 1:
        raise UsageError(
            f"--plot draws one router, {len(routers)} were asked for.", "Add --layer L."
        )
    recording = "" if source is None else source.facts.name
    subspace = request.subspace
    if subspace is None:
        subspace = "full" if request.plot is None or source is None else "pca:2"
    records: list[RouterCells] = []
    answers: list[Answer] = []
    names: list[str] = []
    with nullcontext() if request.out is None else CellFiles(request) as files:
        for router in routers:
            dims = dims_of(subspace, router, source is not None)
            refuse_early(router, subspace, dims, request)
        listener = CellsListener(watch)
        for router in routers:
            sample = None
            if source is not None:
                listener.begin(router.name)
                advance = listener.part(min(source.facts.num_tokens, SAMPLE_TOKENS))
                sample = token_sample(router, source, request, advance)
            part = requested_slice(subspace, router, sample, recording, request.seed, listener.part)
            listener.begin(router.name, prediction(router, part, request))
            if request.expert_set is not None:
                answers.append(answer(router, part, request.expert_set, request))
                continue
            sliced = sliced_router(router, part, sample, request, listener)
            num_checked = None if files is None else files.add(sliced)
            records.append(replace(sliced.record, num_checked=num_checked))
            if request.plot is not None:
                names.append(draw(sliced, family + name))
        if files is not None:
            names = [*files.finish(), *names]
    return Enumerations(
        name=name,
        run=run,
        routers=tuple(records),
        answers=tuple(answers),
        left_out=left_out,
        seed=request.seed,
        written=None if request.out is None else str(request.out),
        files=tuple(names),
    )


def answer(
    router: Router, part: RequestedSlice, expert_set: tuple[int, ...], request: CellsRequest
) -> Answer:
    """A certificate for one set of experts on one slice, which
    :func:`~moegeom.routing_cells.router.refuse_early` lets pass.
    """
    started = time.perf_counter()
    k, experts, chosen = router.rule.top_k, router.num_experts, tuple(sorted(expert_set))
    weight, bias = instance_of(router, part)
    proof = cell_certificate(weight, bias, chosen)
    margin, weights = None, None
    if isinstance(proof, CellPoint):
        if not bias.any():
            proof = _of_usual_size(proof)
        point = np.array([float(value) for value in proof.point])
        logits = weight @ point + bias
        inside = np.isin(np.arange(experts), chosen)
        margin = float(logits[inside].min() - logits[~inside].max()) if k < experts else np.inf
    else:
        weights = _rounded(proof.inside), _rounded(proof.outside)
    if request.certify:
        check_certificate(weight, bias, chosen, proof)
    return Answer(
        router=router.name,
        expert_set=chosen,
        subspace=part.text,
        is_cell=isinstance(proof, CellPoint),
        margin=margin,
        weights=weights,
        certificate=proof.as_json(),
        is_checked=request.certify,
        seconds=time.perf_counter() - started,
    )


def _of_usual_size(cone: CellPoint) -> CellPoint:
    """A point of a cone, scaled by a power of two until its largest coordinate is near 1."""
    largest = max((abs(value) for value in cone.point), default=Fraction(0))
    if largest == 0:
        return cone
    away = largest.numerator.bit_length() - largest.denominator.bit_length()
    return CellPoint(tuple(value / Fraction(2) ** away for value in cone.point))


def _rounded(weights: Weights) -> tuple[tuple[int, float], ...]:
    return tuple((expert, float(share)) for expert, share in weights)


# -------------------------------------------------------------------------------------------- files
#: Numbers of witnesses in input coordinates that are written per router; beyond they are missing,
#: and follow from the slice.
_MOST_COORDINATES = 20_000_000

#: Columns whose values recur, as Parquet calls them: dictionaries of the others cost time and room.
_RECURRING = [
    "router",
    "expert_set.list.element",
    "experts_out.list.element",
    "experts_in.list.element",
]


class CellFiles:
    """The folder ``out``: written beside it, and moved there when it is whole."""

    def __init__(self, request: CellsRequest) -> None:
        assert request.out is not None
        self._out, self._request = request.out, request
        hint = "Choose another --out, or --overwrite."
        may_replace = (lambda at: (at / "cells.parquet").is_file()) if request.overwrite else None
        refuse_existing(self._out, hint, may_replace)
        self._work = new_folder(self._out)
        self._partial = self._work / "whole"  # with the rights of a folder that is made now
        self._partial.mkdir()
        self._tables: dict[str, list] = {name: [] for name in CELL_TABLES}
        self._routers: list[Router] = []

    def __enter__(self) -> CellFiles:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._work, ignore_errors=True)

    def add(self, sliced: SlicedRouter) -> int | None:
        """Rows of one router, and its slice as an npz file that --subspace reads.

        Returns how many witnesses were checked in integers; None without ``certify``.
        """
        num_checked = 0
        self._routers.append(sliced.router)
        cells = sliced.cells
        if cells is not None and cells.is_whole:
            self._tables["cells"].append(_cell_rows(sliced, cells))
            self._tables["facets"].append(_facet_rows(sliced, cells))
            num_checked = len(cells.expert_set)
        part = sliced.requested.part
        if part is not None and sliced.instance is not None:
            path = self._partial / "slices" / f"{slug(sliced.router.name)}.npz"
            weight, bias = sliced.instance
            with writing(self._out):
                path.parent.mkdir(exist_ok=True)
                np.savez(path, centre=part.centre, basis=part.basis, weight=weight, bias=bias)
        return num_checked if self._request.certify else None

    def finish(self) -> list[str]:
        """Writes the tables and moves everything to ``out``; the names there."""
        with writing(self._out):
            for name, parts in self._tables.items():
                empty = cell_table(name, {"router": []})
                table = keyed(pa.concat_tables([empty, *parts]), sizes_of(self._routers))
                write_table(table, self._partial / f"{name}.parquet", use_dictionary=_RECURRING)
        names = sorted(path.name for path in self._partial.iterdir())
        # what is there was seen to hold cells
        replaced = self._work / "replaced" if self._request.overwrite else None
        move_folder(self._partial, self._out, replaced)
        return names


def _cell_rows(sliced: SlicedRouter, cells: Enumeration) -> Any:
    request, count = sliced.request, len(cells.expert_set)
    columns: dict[str, Any] = {
        "router": pa.repeat(sliced.router.name, count),
        "cell": np.arange(count),
        "expert_set": _rows(cells.expert_set),
        "witness": _rows(cells.witness, np.isin(np.arange(count), list(cells.exact))),
        "witness_exact": _rational(cells),
        "witness_input": _inputs(sliced, cells.witness),
        "num_facets": np.bincount(cells.facets.ravel(), minlength=count),
        "is_bounded": cells.is_bounded,
    }
    if sliced.tokens is not None:
        inside = sliced.tokens.cell
        columns["num_tokens"] = np.bincount(inside[inside >= 0], minlength=count)
        own = inside[sliced.tokens.is_own & (inside >= 0)]
        columns["num_own_tokens"] = np.bincount(own, minlength=count)
    assert sliced.instance is not None
    weight, bias = sliced.instance
    if request.certify:
        _check(weight, bias, cells, request.tie_broken)
        columns["is_checked"] = pa.repeat(True, count)
    return cell_table("cells", columns)


def _facet_rows(sliced: SlicedRouter, cells: Enumeration) -> Any:
    count, swapped = len(cells.facets), swaps(cells.expert_set, cells.facets)
    ends = np.cumsum(swapped.num)
    columns = {
        "router": pa.repeat(sliced.router.name, count),
        "cell": cells.facets[:, 0],
        "other_cell": cells.facets[:, 1],
        "experts_out": _lists(swapped.out, ends),
        "experts_in": _lists(swapped.into, ends),
    }
    return cell_table("facets", columns)


def _inputs(sliced: SlicedRouter, witness: np.ndarray) -> pa.Array:
    if (
        sliced.requested.part is None
        or len(witness) * sliced.router.hidden_size > _MOST_COORDINATES
    ):
        return pa.nulls(len(witness))
    rows = sliced.requested.part.inputs(witness).astype(np.float32)
    return _rows(rows, np.logical_not(np.isfinite(rows).all(axis=1)))


def _rational(cells: Enumeration) -> pa.Array:
    """Certificates of the cells that have no float64 witness, as JSON."""
    texts = np.full(len(cells.expert_set), None, object)
    for n, point in cells.exact.items():
        texts[n] = json.dumps(point.as_json())
    return pa.array(texts, pa.string())


def _rows(values: np.ndarray, is_missing: np.ndarray | None = None) -> pa.ListArray:
    """A list for each row."""
    count, width = values.shape
    return _lists(values.ravel(), width * np.arange(1, count + 1), is_missing)


def _lists(
    values: np.ndarray, ends: np.ndarray, is_missing: np.ndarray | None = None
) -> pa.ListArray:
    """The values up to each of the ends as a list of their own."""
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.ListArray.from_arrays(
        offsets, pa.array(values), mask=None if is_missing is None else pa.array(is_missing)
    )


def _check(weight: np.ndarray, bias: np.ndarray, cells: Enumeration, tie_broken: bool) -> None:
    """Every witness in integers. Raises InternalError for one that lies in no cell of its own."""
    rows = zip(cells.expert_set.tolist(), cells.witness.tolist(), strict=True)
    for n, (row, point) in enumerate(rows):
        proof = cells.exact.get(n) or CellPoint(tuple(Fraction(value) for value in point))
        try:
            check_witness(weight, bias, row, proof, tie_broken)
        except ValueError as error:
            raise InternalError(f"the witness of cell {row} fails its check: {error}") from error


#: Columns of each table: name, type, unit, text.
CELL_TABLES: dict[str, tuple[tuple[str, pa.DataType, str, str], ...]] = {
    "cells": (
        ("router", pa.string(), "", "identity <stack>/<layer>[/slot]"),
        ("cell", pa.int64(), "", "number of the cell, from 0 at each router"),
        ("expert_set", pa.list_(pa.int32()), "", "experts that are chosen there, ascending"),
        ("witness", pa.list_(pa.float64()), "input", "a point inside, in coordinates of the slice"),
        ("witness_exact", pa.string(), "", "where no float64 point was found inside: a rational"),
        ("witness_input", pa.list_(pa.float32()), "input", "the same point as router input"),
        ("num_facets", pa.int64(), "", "facets of the cell"),
        ("is_bounded", pa.bool_(), "", "whether it ends in every direction"),
        ("is_checked", pa.bool_(), "", "the witness was verified in integers (--certify)"),
        ("num_tokens", pa.int64(), "tokens", "tokens drawn inside"),
        ("num_own_tokens", pa.int64(), "tokens", "of these, tokens whose own choice this is"),
    ),
    "facets": (
        ("router", pa.string(), "", "identity <stack>/<layer>[/slot]"),
        ("cell", pa.int64(), "", "the cell that comes first"),
        ("other_cell", pa.int64(), "", "the cell on the other side"),
        ("experts_out", pa.list_(pa.int32()), "", "experts that only the first cell has"),
        ("experts_in", pa.list_(pa.int32()), "", "experts that only the other cell has"),
    ),
}


def cell_table(name: str, columns: Mapping[str, Any]) -> pa.Table:
    """Columns as a table of :data:`CELL_TABLES`; values are null in those that are not there."""
    schema = schema_of(CELL_TABLES[name])
    arrays = []
    for field in schema:
        values = columns.get(field.name)
        if values is None:
            values = pa.nulls(len(columns["router"]), field.type)
        is_array = isinstance(values, pa.Array)
        arrays.append(values.cast(field.type) if is_array else pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


# ----------------------------------------------------------------------------------------- pictures
def draw(sliced: SlicedRouter, model: str) -> str:
    """Writes the picture; its name.

    Raises
    ------
    UsageError
        When the slice has neither two nor three dimensions, or the file cannot be written.
    """
    plot = sliced.request.plot
    assert plot is not None
    write_picture(_picture(sliced, model), sliced.request)
    return plot.name


def _picture(sliced: SlicedRouter, model: str) -> pages.SlicePicture:
    caption = _caption(sliced, model)
    if sliced.arcs is not None:
        return _circle(sliced, sliced.arcs, caption)
    if sliced.pixels is not None:
        assert sliced.frame is not None
        label, state, sets = sliced.pixels.label, sliced.pixels.state, sliced.pixels.expert_sets
        return pages.RasterCells(caption, sliced.frame, label, state, sets, _marks(sliced))
    cells, dims = sliced.cells, sliced.record.dims
    if cells is None or not cells.is_whole:
        raise UsageError(f"--plot: no list of all cells of {sliced.requested.text} to draw.")
    if not len(cells.expert_set) or not np.isfinite(cells.witness).all():
        raise UsageError(f"--plot: {sliced.requested.text} has no cell that could be drawn.")
    if dims == 2:
        return _plane(sliced, cells, caption)
    inside = None
    if sliced.tokens is not None:
        cell = sliced.tokens.cell
        inside = np.bincount(cell[cell >= 0], minlength=len(cells.expert_set)).astype(np.int64)
    expert_sets = tuple(map(tuple, cells.expert_set.tolist()))
    return pages.SpaceCells(caption, cells.witness, expert_sets, cells.facets, inside)


def _caption(sliced: SlicedRouter, model: str) -> pages.SliceCaption:
    record, is_own = sliced.record, None
    if sliced.tokens is not None:
        is_own = sliced.tokens.is_own[_drawn_rows(sliced)]
    tied = "Where nothing is drawn equal experts tie for the last place: that is in no cell."
    is_certified = sliced.arcs is None or bool(sliced.arcs.is_proved.all())
    if sliced.pixels is not None:
        is_certified = sliced.pixels.count(PixelState.OPEN) == 0
    return pages.SliceCaption(
        model=model,
        router=record.router,
        top_k=record.top_k,
        num_experts=record.num_experts,
        subspace=record.subspace,
        variance_share=record.variance_share,
        num_own=None if is_own is None else int(is_own.sum()),
        num_tokens=None if is_own is None else len(is_own),
        seed=sliced.request.seed,
        version=__version__,
        is_certified=is_certified,
        remark=tied if record.cells is not None and record.cells.num_tied else "",
    )


def _plane(
    sliced: SlicedRouter, cells: Enumeration, caption: pages.SliceCaption
) -> pages.PlaneCells:
    assert sliced.instance is not None
    weight, bias = sliced.instance
    points = None if sliced.tokens is None else sliced.tokens.place
    # without tokens a frame that holds most of the bounded cells
    reach = float(np.quantile(np.abs(cells.witness).max(axis=1), 0.8)) or 1.0
    frame = frame_of(points, sliced.requested, sliced.sample, sliced.request, reach)
    equal = equal_experts(weight, bias, sliced.request)
    outlines = polygons(cell_sides(weight, bias, cells, equal), cells.facets, frame)
    is_inside = ~np.isnan(outlines.facet_ends[:, 0, 0])
    out, into = (experts[is_inside] for experts in cells.exchanged)
    return pages.PlaneCells(
        caption=caption,
        frame=frame,
        expert_sets=tuple(map(tuple, cells.expert_set.tolist())),
        polygons=outlines.corners,
        facet_ends=outlines.facet_ends[is_inside],
        facet_cells=cells.facets[is_inside],
        facet_out=out,
        facet_into=into,
        tokens=_marks(sliced),
    )


def _marks(sliced: SlicedRouter) -> pages.TokenMarks | None:
    """All tokens; on a plane through three of them those three, which lie on it."""
    if sliced.tokens is None or sliced.sample is None:
        return None
    rows = _drawn_rows(sliced)
    return pages.TokenMarks(sliced.tokens.place[rows], sliced.tokens.is_own[rows])


def _drawn_rows(sliced: SlicedRouter) -> np.ndarray:
    assert sliced.sample is not None
    if sliced.requested.at:
        return sliced.sample.rows_of(sliced.requested.at, "--subspace")
    return np.arange(len(sliced.sample.token))


def _circle(sliced: SlicedRouter, arcs: Arcs, caption: pages.SliceCaption) -> pages.CircleCells:
    requested, sample = sliced.requested, sliced.sample
    angle, is_own = None, None
    if sample is not None and requested.circle is not None:
        rows = sample.rows_of(requested.at, "--subspace")
        steps = sample.inputs[rows].astype(np.float64) - requested.circle.centre
        cosine, sine = np.linalg.pinv(requested.circle.basis) @ steps.T
        angle = np.mod(np.arctan2(sine, cosine), 2.0 * np.pi)
        turned = np.where(angle < arcs.start[0], angle + 2.0 * np.pi, angle)
        arc = np.searchsorted(arcs.start, turned, side="right") - 1
        is_own = (arcs.expert_set[arc] == np.sort(sample.chosen[rows], axis=1)).all(axis=1)
        caption = replace(caption, num_own=int(is_own.sum()), num_tokens=len(is_own))
    expert_sets = tuple(map(tuple, arcs.expert_set.tolist()))
    return pages.CircleCells(caption, expert_sets, arcs.start, arcs.stop, angle, is_own)
