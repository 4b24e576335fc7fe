"""Maps from physical places to experts, with which ids of a trace become those of the checkpoint.

An engine that balances experts over devices moves them, and may hold several copies of one: its
ids are places then. A map says for each layer which expert lies at which place, the places of the
devices one behind the other. It is a bijection, or a plan of replicas in which every expert stands
at least once; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.documents import DocumentError, json_value
from moegeom.core.errors import RecordingError
from moegeom.core.files import read_regular, reading
from moegeom.core.limits import MAP_BYTES, MAP_PLACES
from moegeom.core.shapes import Bool, Int64, Integer
from moegeom.core.text import number_of, quoted
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.axes import columns_of, num_routed_rows, refuse_narrow, unset_value
from moegeom.tokens.traces.cleaning import is_no_accident
from moegeom.tokens.traces.trace import Dialect, Pieces, Place, RequestTrace, Trace

#: Numbers that a message lists.
_LISTED = 8

_FORMS = "[[expert at each place] for each layer], or one such list for all layers"


@dataclass(frozen=True, eq=False)
class ExpertMap:
    """The expert at each place, by layer; a single layer stands for all where it is ``shared``."""

    where: str
    layers: tuple[Int64[np.ndarray, "_"], ...]
    shared: bool = False

    def of_routers(self, routers: Sequence[KnownRouter]) -> list[Int64[np.ndarray, "_"]]:
        """The layer of the map for each router, held against its number of experts.

        Raises
        ------
        RecordingError
            When layers do not fit the checkpoint, an expert stands nowhere, or one does not exist.
        """
        layers = [self.layers[number] for number in self._numbers(routers)]
        for router, places in zip(routers, layers, strict=True):
            self._check(router, places)
        return layers

    def _numbers(self, routers: Sequence[KnownRouter]) -> Sequence[int]:
        """Layers of the model where the map has so many, else layers with routers in order."""
        if self.shared:
            return [0] * len(routers)
        if len(self.layers) == len(routers):
            return range(len(routers))
        if len(self.layers) > routers[-1].layer:
            return [router.layer for router in routers]
        raise RecordingError(
            f"{self.where}: maps {number_of(len(self.layers), 'layer')}; the checkpoint has "
            f"{number_of(len(routers), 'router')} in layers {routers[0].layer} to "
            f"{routers[-1].layer}.",
            "It is the map of another model, or of one stage of a pipeline.",
        )

    def _check(self, router: KnownRouter, places: Int64[np.ndarray, "places"]) -> None:
        where = f"{self.where}: layer {router.layer}"
        outside = places[(places < 0) | (places >= router.num_experts)]
        if len(outside):
            raise RecordingError(
                f"{where}: expert {outside[0]} at place "
                f"{int(np.flatnonzero(places == outside[0])[0])}; the checkpoint has experts 0 to "
                f"{router.num_experts - 1}.",
                "It is the map of another model.",
            )
        missing = np.setdiff1d(np.arange(router.num_experts), places)
        if len(missing):
            listed = ", ".join(map(str, missing[:_LISTED].tolist()))
            raise RecordingError(
                f"{where}: {number_of(len(places), 'place')} for {router.num_experts} experts, of "
                f"which {len(missing)} stand nowhere ({listed}"
                f"{' and more' if len(missing) > _LISTED else ''}).",
                "Every expert has at least one place; is the map of one device alone?",
            )


def mapped(dialect: Dialect, expert_map: ExpertMap, routers: Sequence[KnownRouter]) -> Dialect:
    """The dialect, whose traces now name the experts of ``routers`` in place of places.

    Raises
    ------
    RecordingError
        When the map does not fit the routers.
    """
    tables = expert_map.of_routers(routers)

    def pieces(path: Path, place: Place) -> Pieces:
        for trace, following in dialect.pieces_from(path, place):
            yield in_experts(trace, expert_map, tables, routers), following

    return replace(dialect, pieces=pieces)


def in_experts(
    trace: Trace,
    expert_map: ExpertMap,
    tables: Sequence[Int64[np.ndarray, "_"]],
    routers: Sequence[KnownRouter],
) -> Trace:
    """The trace with experts for places, counts of copies added up.

    Rows that are no choices stay as they are for the cleaning: those that repeat one number, and
    padding that counts up in every layer.

    Raises
    ------
    RecordingError
        For a place that the map does not have, and for ids without a shape whose rows are not
        counted.
    """
    replicas = sum(
        len(table) - router.num_experts for table, router in zip(tables, routers, strict=True)
    )
    note = (
        f"ids are places: experts by {expert_map.where}"
        f"{f', which places {replicas:,} copies' if replicas else ''}"
    )
    if trace.counts is not None:
        counts = _counts(trace, tables, routers)
        return replace(trace, counts=counts, ids_are="logical", notes=(*trace.notes, note))
    dtypes = (r.ids.dtype.name for r in trace.requests if r.ids.dtype.kind in "iu")
    refuse_narrow(dtypes, max(len(table) for table in tables), "places", trace.where)
    requests = tuple(_request(request, trace, tables, routers) for request in trace.requests)
    return replace(trace, requests=requests, ids_are="logical", notes=(*trace.notes, note))


def _request(
    request: RequestTrace,
    trace: Trace,
    tables: Sequence[Int64[np.ndarray, "_"]],
    routers: Sequence[KnownRouter],
) -> RequestTrace:
    ids = _shaped(request, trace, routers)
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        return request  # refused by the cleaning, in its words
    columns, _ = columns_of(ids.shape[1], routers, trace.layers, trace.where)
    where = f"{trace.where}: request {request.name}"
    most = max(router.num_experts for router in routers) - 1
    experts = ids.astype(ids.dtype if np.iinfo(ids.dtype).max >= most else np.int32)
    is_padding = _is_padding(ids[:, list(columns)], routers)
    for column, table, router in zip(columns, tables, routers, strict=True):
        places = ids[:, column]
        is_chosen = _is_chosen(places) & ~is_padding
        used = places[is_chosen].astype(np.int64)
        if used.size and used.max() >= len(table):
            raise RecordingError(
                f"{where}, layer {router.layer}: place {used.max()}; the map has "
                f"{number_of(len(table), 'place')} there.",
                "The trace is of a run with another map.",
            )
        if used.size and used.min() >= 0:
            experts[is_chosen, column] = table[used]
    return replace(request, ids=experts)


def _shaped(
    request: RequestTrace, trace: Trace, routers: Sequence[KnownRouter]
) -> Integer[np.ndarray, "..."]:
    """Ids of three axes; those without a shape have as many rows as the reply counts tokens."""
    if request.ids.ndim != 1:
        return request.ids
    num_rows = num_routed_rows(request)
    width = num_rows * routers[0].top_k
    if not width or request.ids.size % width:
        rows = f"for {number_of(num_rows, 'row')}" if num_rows else "and no count of tokens"
        raise RecordingError(
            f"{trace.where}: request {request.name} holds {request.ids.size} places without a "
            f"shape, {rows}; expected a multiple of rows and slots.",
            "With --expert-map, keep the counts of tokens that the reply holds.",
        )
    return request.ids.reshape(num_rows, -1, routers[0].top_k)


def _is_chosen(places: Integer[np.ndarray, "rows slots"]) -> Bool[np.ndarray, "rows"]:
    if places.shape[1] > 1:
        return (places != places[:, :1]).any(axis=1)
    return (places != unset_value(places.dtype))[:, 0]


def _is_padding(
    ids: Integer[np.ndarray, "rows layers slots"], routers: Sequence[KnownRouter]
) -> Bool[np.ndarray, "rows"]:
    """Rows at either end that are 0, 1, .. k-1 in every layer, where that does not come by chance.

    The cleaning cuts or refuses them; the same row between others is a choice like any other.
    """
    is_padding = np.zeros(len(ids), bool)
    counts_up = (ids == np.arange(ids.shape[2])).all(axis=(1, 2)) & (ids.shape[2] > 1)
    for ahead, flags in ((counts_up, is_padding), (counts_up[::-1], is_padding[::-1])):
        run = len(ahead) if ahead.all() else int(np.argmin(ahead))
        flags[:run] |= is_no_accident(run, routers)
    return is_padding


def _counts(
    trace: Trace, tables: Sequence[Int64[np.ndarray, "_"]], routers: Sequence[KnownRouter]
) -> Int64[np.ndarray, "steps layers experts"]:
    assert trace.counts is not None, "a log of counts"
    counts = trace.counts
    columns, _ = columns_of(counts.shape[1], routers, trace.layers, trace.where)
    of_experts = np.zeros((*counts.shape[:2], max(r.num_experts for r in routers)), np.int64)
    for column, table, router in zip(columns, tables, routers, strict=True):
        places = counts[:, column]
        if places.shape[1] > len(table):
            raise RecordingError(
                f"{trace.where}: layer {router.layer} counts {places.shape[1]} places; the map "
                f"has {len(table)}.",
                "The counts are of a run with another map.",
            )
        np.add.at(of_experts[:, column].T, table[: places.shape[1]], places.T)
    return of_experts


# ---------------------------------------------------------------------------------------- reading


def read_expert_map(path: Path) -> ExpertMap:
    """The map in a file of JSON: a list of experts by place for all layers, or one for each.

    As vLLM takes it (``expert_map_path`` and ``initial_expert_map_path``, PRs 53022 and 49572).

    Raises
    ------
    RecordingError
        When it is not there, or none of these.
    """
    with reading(path, RecordingError):
        raw = read_regular(path, MAP_BYTES, follows=True)
    try:
        value = json_value(raw)
    except DocumentError as error:
        raise RecordingError(
            f"{path.name}: {error!s:.120}.", "Is it whole? Copy it again."
        ) from None
    if isinstance(value, list) and value:
        layers = value if all(isinstance(layer, list) for layer in value) else [value]
        places = tuple(_places(layer, path.name, n) for n, layer in enumerate(layers))
        return ExpertMap(path.name, places, shared=len(places) == 1)
    raise RecordingError(f"{path.name}: no map of experts; expected {_FORMS}.")


def _places(layer: Sequence[Any], name: str, number: int) -> Int64[np.ndarray, "places"]:
    if not 0 < len(layer) <= MAP_PLACES or not all(
        type(expert) is int and abs(expert) < 2**31 for expert in layer
    ):
        raise RecordingError(
            f"{name}: layer {number} holds {quoted(list(layer)[:_LISTED])}; expected 1 to "
            f"{MAP_PLACES:,} numbers of experts."
        )
    return np.array(layer, np.int64)
