"""Which axis of a trace is what: layers, slots, and whether the numbers can name the experts.

What decides about it is collected request by request as ``AxisEvidence``; the evidence of the parts
of a trace adds up to that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.shapes import Bool, Integer
from moegeom.core.text import all_of, listed, number_of
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.trace import RequestTrace

#: Even load would put as many ids above 255 before their absence is taken for wrapping.
_EXPECTED_ABOVE = 200

#: Shapes, and values behind the chosen experts, that are recorded: more of them are refused anyway.
_FEW_VALUES = 64

#: Rows in which most layers show that they hold choices.
_FIRST_ROWS = 64

_ENGINE_HINT = "Is the trace of another model?"


@dataclass(frozen=True)
class Axes:
    """The index on the layer axis of each router, and the notes about it.

    ``shape`` is (layers, slots) of the ids as they are read, ``top_k`` the slots that hold choices.
    """

    routers: tuple[KnownRouter, ...]
    columns: tuple[int, ...]
    shape: tuple[int, int]
    top_k: int
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[tuple[int, int], tuple[int, ...]]:
        """The key that surveys of one trace share."""
        return self.shape, self.columns

    def of(self, ids: Integer[np.ndarray, "..."]) -> Integer[np.ndarray, "rows routers top_k"]:
        """Ids of a request at the routers; a view where nothing is left out."""
        shaped = ids.reshape(-1, *self.shape)[:, :, : self.top_k]
        if self.columns == tuple(range(self.shape[0])):
            return shaped
        return shaped[:, list(self.columns)]


@dataclass(frozen=True)
class Reading:
    """Ids read as ``shape``, (layers, slots).

    ``holds`` are the layers with choices, ``behind`` the values behind the chosen slots.
    ``num_requests`` counts those that have this shape, or can be given it.
    """

    shape: tuple[int, int]
    holds: tuple[bool, ...]
    behind: tuple[int, ...] = ()
    num_requests: int = 0

    def and_of(self, other: Reading) -> Reading:
        """The reading of the requests of both."""
        return Reading(
            self.shape,
            tuple(a or b for a, b in zip(self.holds, other.holds, strict=True)),
            tuple(sorted({*self.behind, *other.behind})[:_FEW_VALUES]),
            self.num_requests + other.num_requests,
        )


@dataclass(frozen=True)
class AxisEvidence:
    """Facts about some requests that decide what their axes are.

    ``shapes`` are those of one row; of flat ids it is (). ``declared_layers`` is the number of
    layers that follows from the first request with flat ids and a count of tokens. ``uneven`` names
    the first request whose size is no multiple of so many layers: (layers, request, size).
    """

    num_requests: int = 0
    dtypes: tuple[str, ...] = ()
    largest: int = 0
    num_ids: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    declared_layers: int | None = None
    uneven: tuple[tuple[int, str, int], ...] = ()
    readings: tuple[Reading, ...] = ()

    @property
    def is_flat(self) -> bool:
        """Whether some request has no shape."""
        return () in self.shapes

    def uneven_at(self, num_layers: int) -> tuple[str, int] | None:
        """The first request whose size is no multiple of so many layers, with its size."""
        return next(((name, size) for n, name, size in self.uneven if n == num_layers), None)

    def and_of(self, other: AxisEvidence) -> AxisEvidence:
        """The evidence of these requests followed by the others."""
        readings = {reading.shape: reading for reading in self.readings}
        for one in other.readings:
            readings[one.shape] = readings[one.shape].and_of(one) if one.shape in readings else one
        return AxisEvidence(
            self.num_requests + other.num_requests,
            tuple(sorted({*self.dtypes, *other.dtypes})),
            max(self.largest, other.largest),
            self.num_ids + other.num_ids,
            tuple(sorted({*self.shapes, *other.shapes})[:_FEW_VALUES]),
            other.declared_layers if self.declared_layers is None else self.declared_layers,
            (*self.uneven, *(one for one in other.uneven if self.uneven_at(one[0]) is None)),
            tuple(list(readings.values())[:_FEW_VALUES]),
        )


def main_stack(all_routers: Sequence[KnownRouter], where: str) -> tuple[KnownRouter, ...]:
    """The routers that a trace is about, by layer: those of the first stack.

    Raises
    ------
    RecordingError
        When a layer has several routers, or they choose different numbers of experts.
    """
    in_stack = (router for router in all_routers if router.stack == all_routers[0].stack)
    routers = tuple(sorted(in_stack, key=lambda router: router.layer))
    num_layers = len({router.layer for router in routers})
    if num_layers < len(routers):
        raise RecordingError(
            f"{where}: the checkpoint has {number_of(len(routers), 'router')} in "
            f"{number_of(num_layers, 'layer')}; a trace does not say which router of a layer it "
            "means.",
            "Record with moegeom capture.",
        )
    sizes = sorted({router.top_k for router in routers})
    if len(sizes) > 1:
        raise RecordingError(
            f"{where}: the routers of the checkpoint choose {listed(sizes)} experts; a trace has "
            "one number of slots.",
            "Record with moegeom capture.",
        )
    return routers


def evidence_of(
    requests: Sequence[RequestTrace],
    routers: Sequence[KnownRouter],
    declared_layers: int | None = None,
) -> AxisEvidence:
    """The facts about ``requests`` that decide what their axes are.

    Flat ids are read with ``declared_layers``, else with what the first request declares.
    """
    top_k = routers[0].top_k
    flat = [request for request in requests if request.ids.ndim == 1]
    declared = (_declared_layers(request, top_k) for request in flat)
    declared_layers = declared_layers or next(filter(None, declared), None)
    lengths = _layer_counts(declared_layers, routers)
    evidence = AxisEvidence(declared_layers=declared_layers)
    for run in _alike(requests):
        name, ids = run[0].name, run[0].ids
        if len(run) > 1:
            ids = np.concatenate([one.ids for one in run])
        number = sum(not one.first_row for one in run)
        widths = {length: length * top_k for length in lengths} if ids.ndim == 1 else {}
        shaped = [ids] if ids.ndim == 3 else []
        shaped += [ids.reshape(-1, n, top_k) for n, w in widths.items() if not ids.size % w]
        of_run = AxisEvidence(
            number,
            (ids.dtype.name,),
            int(ids.max(initial=0)),
            ids.size,
            (ids.shape[1:],),
            declared_layers,
            tuple((n, name, ids.size) for n, width in widths.items() if ids.size % width),
            tuple(_reading(one, top_k, number) for one in shaped),
        )
        evidence = evidence.and_of(of_run)
    return evidence


def _alike(requests: Sequence[RequestTrace]) -> Iterator[list[RequestTrace]]:
    """Runs of requests of one dtype and row shape; those without a shape one by one."""
    for _, run in groupby(requests, lambda one: (one.ids.ndim, one.ids.dtype, one.ids.shape[1:])):
        alike = list(run)
        yield from [alike] if alike[0].ids.ndim == 3 else ([one] for one in alike)


def _reading(
    ids: Integer[np.ndarray, "rows layers slots"], top_k: int, num_requests: int
) -> Reading:
    behind = np.unique(ids[:, :, top_k:])[:_FEW_VALUES]
    holds = _holds_choices(ids).tolist()
    return Reading(ids.shape[1:], tuple(holds), tuple(behind.tolist()), num_requests)


def num_routed_rows(request: RequestTrace) -> int:
    """Rows that a request has by its count of tokens; 0 where nothing counts them."""
    tokens = request.num_tokens if request.token_ids is None else len(request.token_ids)
    return 0 if tokens is None else max(0, tokens - 1 - (request.start or 0))


def _declared_layers(request: RequestTrace, top_k: int) -> int | None:
    """Layers that flat ids have by the count of tokens; None where that does not say it."""
    num_rows = num_routed_rows(request)
    if num_rows and request.ids.size % (num_rows * top_k) == 0:
        return request.ids.size // (num_rows * top_k)
    return None


def _layer_counts(declared: int | None, routers: Sequence[KnownRouter]) -> list[int]:
    """Numbers of layers that flat ids may have: as declared, all layers, routers alone."""
    last = routers[-1].layer
    plausible = [declared] if declared and len(routers) <= declared <= 4 * (last + 1) else []
    return list(dict.fromkeys([*plausible, last + 1, len(routers)]))


def axes_of(
    evidence: AxisEvidence,
    routers: Sequence[KnownRouter],
    layers: tuple[int, ...] | None,
    where: str,
    is_whole: bool = True,
) -> Axes:
    """The meaning of the axes of a trace; ``layers`` are what it calls its layers.

    Flat ids are given every shape that the checkpoint allows, and take the first that fits: all of
    them, or those that were tried with it where they are not the whole trace.

    Raises
    ------
    RecordingError
        When an axis, or the dtype, does not fit the checkpoint; with the numbers of both.
    """
    _check_dtypes(evidence, routers, where)
    refusal = None
    for shape in _shapes(evidence, routers, where):
        try:
            return _axes_of_shape(evidence, shape, routers, layers, where, is_whole)
        except RecordingError as error:
            refusal = refusal or error
    assert refusal is not None, "there is at least one shape to try"
    raise refusal


def expected_axes(
    evidence: AxisEvidence,
    routers: Sequence[KnownRouter],
    layers: tuple[int, ...] | None,
    where: str,
) -> Axes:
    """What the axes are unless requests behind those of the evidence contradict.

    Raises
    ------
    RecordingError
        When nothing that follows could make them fit.
    """
    refusal = None
    if evidence.is_flat:
        try:
            return replace(axes_of(evidence, routers, layers, where, is_whole=False), notes=())
        except RecordingError as error:
            refusal = error
    for shape in _shapes(evidence, routers, where):
        if evidence.uneven_at(shape[0]) is None:
            columns, _ = columns_of(shape[0], routers, layers, where)
            return Axes(tuple(routers), columns, shape, routers[0].top_k)
    assert refusal is not None, "only flat ids are uneven"
    raise refusal


def _shapes(
    evidence: AxisEvidence, routers: Sequence[KnownRouter], where: str
) -> list[tuple[int, int]]:
    """Shapes (layers, slots) that rows may have: one, or of flat ids those to try."""
    if evidence.is_flat:
        return [(n, routers[0].top_k) for n in _layer_counts(evidence.declared_layers, routers)]
    pairs = [(shape[0], shape[1]) for shape in evidence.shapes if len(shape) == 2]
    if len(evidence.shapes) > 1 or not pairs or 0 in pairs[0]:
        raise _several_shapes(evidence, where)
    return pairs


def _several_shapes(evidence: AxisEvidence, where: str) -> RecordingError:
    shapes = "the shapes" if len(evidence.shapes) > 1 else "the shape"
    return RecordingError(
        f"{where}: rows have {shapes} {listed(evidence.shapes)}; expected one shape, "
        "(layers, slots), for all requests, without 0."
    )


def _axes_of_shape(
    evidence: AxisEvidence,
    shape: tuple[int, int],
    routers: Sequence[KnownRouter],
    layers: tuple[int, ...] | None,
    where: str,
    is_whole: bool,
) -> Axes:
    uneven = evidence.uneven_at(shape[0])
    if uneven is not None:
        raise RecordingError(
            f"{where}: request {uneven[0]} holds {uneven[1]} numbers "
            f"without a shape, no multiple of {shape[0]} layers x {shape[1]} experts.",
            _ENGINE_HINT,
        )
    unread = Reading(shape, (False,) * shape[0])
    reading = next((one for one in evidence.readings if one.shape == shape), unread)
    if is_whole and reading.num_requests < evidence.num_requests:
        raise _several_shapes(evidence, where)
    slots = _slots_note(reading, routers, where)
    if not any(reading.holds):
        rows = f"every row of {all_of(shape[0], 'layer')} repeats one number"
        raise RecordingError(
            f"{where}: nothing was captured: {rows if evidence.num_ids else 'there are no rows'}.",
            "Was capture on when the requests ran? Older vLLM wrote zeros whatever was asked.",
        )
    columns, notes = columns_of(shape[0], routers, layers, where)
    _check_layers(routers, columns, reading.holds, where)
    num_others = shape[0] - len(set(columns))
    others = f"layers without router, which hold no choices: {num_others}"
    notes = (*slots, *notes, *((others,) if num_others else ()))
    return Axes(tuple(routers), columns, shape, routers[0].top_k, notes)


def _check_dtypes(evidence: AxisEvidence, routers: Sequence[KnownRouter], where: str) -> None:
    """The widest dtype of the file must name every expert; a writer may choose it by request."""
    num_experts = max(router.num_experts for router in routers)
    refuse_narrow(evidence.dtypes, num_experts, "experts", where)
    # a copy through 8 bits keeps the range of 8 bits, whatever it is stored as afterwards
    expected = evidence.num_ids * max(0, num_experts - 256) / num_experts
    if evidence.largest <= 255 and expected >= _EXPECTED_ABOVE:
        raise RecordingError(
            f"{where}: none of {evidence.num_ids:,} ids is above {evidence.largest}, and the "
            f"checkpoint has {num_experts} experts: they went through 8 bits and have wrapped.",
            "uint8 cannot name them; record with a version that stores 16 bits.",
        )


def refuse_narrow(dtypes: Iterable[str], number: int, noun: str, where: str) -> None:
    """Raises RecordingError where none of the dtypes could name the last of so many."""
    widest = max(dtypes, key=lambda dtype: np.iinfo(dtype).max, default="int64")
    if np.iinfo(widest).max < number - 1:
        raise RecordingError(
            f"{where}: ids are {widest}, which cannot name {number} {noun}.",
            "Ids above its range have wrapped and are lost; store them wider.",
        )


def _slots_note(reading: Reading, routers: Sequence[KnownRouter], where: str) -> tuple[str, ...]:
    """A note about slots behind top_k, which are constant and name no expert."""
    num_slots, top_k = reading.shape[1], routers[0].top_k
    if num_slots == top_k:
        return ()
    num_experts = max(router.num_experts for router in routers)
    # a layer without a router has zeros in every slot
    foreign = [value for value in reading.behind if not 0 <= value < num_experts]
    inside = [value for value in reading.behind if 0 <= value < num_experts]
    if not foreign or len(foreign) > num_slots - top_k or inside not in ([], [0]):
        raise RecordingError(
            f"{where}: {number_of(num_slots, 'expert')} a token and layer; the routers of the "
            f"checkpoint choose {top_k}.",
            _ENGINE_HINT,
        )
    note = (
        f"{num_slots - top_k} slots behind the {top_k} chosen experts hold {listed(foreign)} and "
        "no expert (fused shared experts, or a fixed width): cut"
    )
    return (note,)


def columns_of(
    length: int, routers: Sequence[KnownRouter], layers: tuple[int, ...] | None, where: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The index of each router on an axis of all layers, or of the routers in order; and notes."""
    if layers is not None:
        return named_layers(where, layers, routers)
    if length == len(routers):
        return tuple(range(length)), ()
    if length > routers[-1].layer:
        return tuple(router.layer for router in routers), ()
    raise RecordingError(
        f"{where}: {number_of(length, 'layer')}; the checkpoint has "
        f"{number_of(len(routers), 'router')} in layers {routers[0].layer} to {routers[-1].layer}.",
        _ENGINE_HINT,
    )


def named_layers(
    where: str, names: tuple[int, ...], routers: Sequence[KnownRouter]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The index of each router's layer among the layers that the file names."""
    layers = tuple(router.layer for router in routers)
    order = tuple(int(index) for index in np.argsort(names))
    ordered = tuple(sorted(names))
    if ordered == layers:
        return order, ()
    if ordered == tuple(layer + 1 for layer in layers):
        return order, ("layers are counted from 1",)
    if ordered in (tuple(range(len(layers))), tuple(range(1, len(layers) + 1))):
        return order, ("layers are counted among layers with routers",)
    raise RecordingError(
        f"{where}: names the layers {listed(ordered)}; the routers of the checkpoint are in "
        f"layers {listed(layers)}.",
        "Ranks of a pipeline count their own layers: give the files of one whole copy.",
    )


def _check_layers(
    routers: Sequence[KnownRouter], columns: tuple[int, ...], holds: tuple[bool, ...], where: str
) -> None:
    """Raises RecordingError unless exactly the layers with routers hold choices."""
    empty = [r.layer for r, c in zip(routers, columns, strict=True) if not holds[c]]
    filled = np.flatnonzero(holds).tolist()
    extra = [index for index in filled if index not in columns]
    if not empty and not extra:
        return
    faults = []
    if extra:
        have = "layer {}, which has" if len(extra) == 1 else "layers {}, which have"
        faults.append(f"holds choices in {have.format(listed(extra))} no router")
    if empty:
        have = "layer {}, which has" if len(empty) == 1 else "layers {}, which have"
        faults.append(f"holds none in {have.format(listed(empty))} one")
    shift = next((n for n in (-1, 1) if set(filled) == {column + n for column in columns}), None)
    hint = (
        "A pipeline stage whose layers were not gathered leaves them empty."
        if shift is None
        else f"It fits when layers are shifted by {shift:+d}: is one embedding counted as a layer?"
    )
    raise RecordingError(f"{where}: {' and '.join(faults)}.", hint)


def _holds_choices(ids: Integer[np.ndarray, "rows layers slots"]) -> Bool[np.ndarray, "layers"]:
    """Layers in which some row names two experts; with one slot, anything but 0 and -1."""
    if ids.shape[2] > 1:
        holds = (ids[:_FIRST_ROWS] != ids[:_FIRST_ROWS, :, :1]).any(axis=(0, 2))
        for layer in np.flatnonzero(~holds):
            holds[layer] = (ids[:, layer] != ids[:, layer, :1]).any()
        return np.asarray(holds)
    return np.asarray(((ids != 0) & (ids != unset_value(ids.dtype))).any(axis=(0, 2)))


def unset_value(dtype: np.dtype) -> int:
    """-1, as this dtype spells it."""
    return -1 if dtype.kind == "i" else int(np.iinfo(dtype).max)
