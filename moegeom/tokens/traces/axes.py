"""Which axis of a trace is what: layers, slots, and whether the numbers can name the experts.

What decides about it is gathered request by request in a ``Survey``; surveys of the parts of a
trace add up to that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from jaxtyping import Bool, Integer

from moegeom.core.errors import RecordingError
from moegeom.core.text import all_of, number_of
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.trace import RequestTrace

#: Even load would put as many ids above 255 before their absence is taken for wrapping.
_EXPECTED_ABOVE = 200

#: Shapes, and values behind the chosen experts, that are kept: more of them are refused anyway.
_MOST_KEPT = 64

#: Rows in which most layers show that they hold choices.
_FIRST_ROWS = 64

_ENGINE_HINT = "Is the trace of another model?"


@dataclass(frozen=True)
class Axes:
    """The index on the layer axis of each router, and what is to be said about it.

    ``shape`` is (layers, slots) of the ids as they are read, ``top_k`` the slots that are kept.
    """

    routers: tuple[KnownRouter, ...]
    columns: tuple[int, ...]
    shape: tuple[int, int]
    top_k: int
    notes: tuple[str, ...] = ()

    def of(self, ids: Integer[np.ndarray, "..."]) -> Integer[np.ndarray, "rows routers top_k"]:
        """Ids of a request at the routers; a view where nothing is left out."""
        shaped = ids.reshape(-1, *self.shape)[:, :, : self.top_k]
        if self.columns == tuple(range(self.shape[0])):
            return shaped
        return shaped[:, list(self.columns)]


@dataclass(frozen=True)
class Reading:
    """Ids read as (layers, slots): the layers with choices, and what lies behind the chosen slots.

    ``num_requests`` counts those that have this shape, or can be given it.
    """

    holds: tuple[bool, ...]
    behind: frozenset[int] = frozenset()
    num_requests: int = 0

    def and_of(self, other: Reading) -> Reading:
        """That of the requests of both."""
        return Reading(
            tuple(a or b for a, b in zip(self.holds, other.holds, strict=True)),
            frozenset(sorted(self.behind | other.behind)[:_MOST_KEPT]),
            self.num_requests + other.num_requests,
        )


@dataclass(frozen=True)
class Survey:
    """What decides about the axes of some requests.

    ``shapes`` are those of one row; of flat ids it is (). ``told`` is the number of layers that
    the first request with flat ids and a count of tokens has. ``uneven`` names, by number of
    layers, the first request whose size is no multiple, with its size.
    """

    num_requests: int = 0
    dtypes: frozenset[str] = frozenset()
    largest: int = 0
    num_ids: int = 0
    shapes: frozenset[tuple[int, ...]] = frozenset()
    told: int | None = None
    uneven: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    readings: Mapping[tuple[int, int], Reading] = field(default_factory=dict)

    @property
    def is_flat(self) -> bool:
        """Whether some request has no shape."""
        return () in self.shapes

    def and_of(self, other: Survey) -> Survey:
        """That of these requests, and of the others behind them."""
        readings = dict(self.readings)
        for shape, reading in other.readings.items():
            readings[shape] = readings[shape].and_of(reading) if shape in readings else reading
        return Survey(
            self.num_requests + other.num_requests,
            self.dtypes | other.dtypes,
            max(self.largest, other.largest),
            self.num_ids + other.num_ids,
            frozenset(sorted(self.shapes | other.shapes)[:_MOST_KEPT]),
            other.told if self.told is None else self.told,
            {**other.uneven, **self.uneven},
            dict(list(readings.items())[:_MOST_KEPT]),
        )


def main_stack(known: Sequence[KnownRouter], where: str) -> tuple[KnownRouter, ...]:
    """The routers that a trace is about, by layer: those of the first stack.

    Raises
    ------
    RecordingError
        When a layer has several routers, or they choose different numbers of experts.
    """
    routers = tuple(
        sorted((r for r in known if r.stack == known[0].stack), key=lambda router: router.layer)
    )
    layers = [router.layer for router in routers]
    if len(set(layers)) < len(layers):
        raise RecordingError(
            f"{where}: the checkpoint has {number_of(len(layers), 'router')} in "
            f"{number_of(len(set(layers)), 'layer')}; a "
            "trace does not say which router of a layer it means.",
            "Record with moegeom capture.",
        )
    sizes = sorted({router.top_k for router in routers})
    if len(sizes) > 1:
        raise RecordingError(
            f"{where}: the routers of the checkpoint choose {_listed(sizes)} experts; a trace has "
            "one number of slots.",
            "Record with moegeom capture.",
        )
    return routers


def survey_of(
    requests: Sequence[RequestTrace], routers: Sequence[KnownRouter], before: Survey
) -> Survey:
    """What decides about the axes of ``requests``, which stand behind those of ``before``."""
    found = before.told
    top_k, told, surveyed = routers[0].top_k, None, Survey()
    for request in requests:
        if found is None and told is None and request.ids.ndim == 1:
            told = _told_layers(request, top_k)
    lengths = _layer_counts(told if found is None else found, routers)
    for run in _alike(requests):
        request = run[0]
        ids = request.ids if len(run) == 1 else np.concatenate([one.ids for one in run])
        number = sum(not one.first_row for one in run)
        readings: dict[tuple[int, int], Reading] = {}
        uneven: dict[int, tuple[str, int]] = {}
        if ids.ndim == 3:
            readings[(ids.shape[1], ids.shape[2])] = _reading(ids, top_k)
        elif ids.ndim == 1:
            for length in lengths:
                if ids.size % (length * top_k):
                    uneven[length] = (request.name, ids.size)
                else:
                    readings[(length, top_k)] = _reading(ids.reshape(-1, length, top_k), top_k)
        one = Survey(
            number,
            frozenset({ids.dtype.name}),
            int(ids.max(initial=0)),
            ids.size,
            frozenset({ids.shape[1:]}),
            told,
            uneven,
            {shape: replace(reading, num_requests=number) for shape, reading in readings.items()},
        )
        surveyed = surveyed.and_of(one)
    return surveyed


def _alike(requests: Sequence[RequestTrace]) -> Iterator[list[RequestTrace]]:
    """Neighbours of one dtype and shape together; those without a shape one by one."""
    for _, run in groupby(requests, lambda one: (one.ids.ndim, one.ids.dtype, one.ids.shape[1:])):
        alike = list(run)
        yield from [alike] if alike[0].ids.ndim == 3 else ([one] for one in alike)


def _reading(ids: Integer[np.ndarray, "rows layers slots"], top_k: int) -> Reading:
    behind = np.unique(ids[:, :, top_k:])[:_MOST_KEPT]
    return Reading(tuple(_holds_choices(ids).tolist()), frozenset(behind.tolist()))


def _told_layers(request: RequestTrace, top_k: int) -> int | None:
    """Layers that flat ids have by the count of tokens; None where that does not say it."""
    tokens = request.num_tokens if request.token_ids is None else len(request.token_ids)
    rows = 0 if tokens is None else tokens - 1 - (request.start or 0)
    if rows > 0 and request.ids.size % (rows * top_k) == 0:
        return request.ids.size // (rows * top_k)
    return None


def _layer_counts(told: int | None, routers: Sequence[KnownRouter]) -> list[int]:
    """Numbers of layers that flat ids may have: as told by tokens, all layers, routers alone."""
    last = routers[-1].layer
    plausible = [told] if told and len(routers) <= told <= 4 * (last + 1) else []
    return list(dict.fromkeys([*plausible, last + 1, len(routers)]))


def axes_of(
    survey: Survey,
    routers: Sequence[KnownRouter],
    layers: tuple[int, ...] | None,
    where: str,
    is_whole: bool = True,
) -> Axes:
    """The meaning of the axes of a trace; ``layers`` are what it calls its layers.

    Flat ids are given every shape that the checkpoint allows, and keep the first that fits: all of
    them, or those that were tried with it where they are not the whole trace.

    Raises
    ------
    RecordingError
        When an axis, or the dtype, does not fit the checkpoint; with the numbers of both.
    """
    _check_dtypes(survey, routers, where)
    if not survey.is_flat:
        return _axes_of_shape(survey, _one_shape(survey, where), routers, layers, where, is_whole)
    refusal = None
    for shape in _flat_shapes(survey, routers):
        try:
            return _axes_of_shape(survey, shape, routers, layers, where, is_whole)
        except RecordingError as error:
            refusal = refusal or error
    assert refusal is not None, "there is at least one shape to try"
    raise refusal


def expected_axes(
    survey: Survey, routers: Sequence[KnownRouter], layers: tuple[int, ...] | None, where: str
) -> Axes:
    """What the axes are unless requests behind those surveyed contradict.

    Raises
    ------
    RecordingError
        When nothing that follows could make them fit.
    """
    if not survey.is_flat:
        shape = _one_shape(survey, where)
        columns, _ = _columns(shape, routers, layers, where)
        return Axes(tuple(routers), columns, shape, routers[0].top_k)
    try:
        return replace(axes_of(survey, routers, layers, where, is_whole=False), notes=())
    except RecordingError as refusal:
        for shape in _flat_shapes(survey, routers):
            if shape[0] not in survey.uneven:
                columns, _ = _columns(shape, routers, layers, where)
                return Axes(tuple(routers), columns, shape, routers[0].top_k)
        raise refusal from None


def _one_shape(survey: Survey, where: str) -> tuple[int, int]:
    shapes = sorted(survey.shapes)
    if len(shapes) > 1 or len(shapes[0]) != 2:
        raise RecordingError(
            f"{where}: rows have the shapes {_listed(shapes)}; expected one shape, "
            "(layers, slots), for all requests."
        )
    return shapes[0][0], shapes[0][1]


def _flat_shapes(survey: Survey, routers: Sequence[KnownRouter]) -> list[tuple[int, int]]:
    return [(length, routers[0].top_k) for length in _layer_counts(survey.told, routers)]


def _axes_of_shape(
    survey: Survey,
    shape: tuple[int, int],
    routers: Sequence[KnownRouter],
    layers: tuple[int, ...] | None,
    where: str,
    is_whole: bool,
) -> Axes:
    if shape[0] in survey.uneven:
        name, size = survey.uneven[shape[0]]
        raise RecordingError(
            f"{where}: request {name} holds {size} numbers "
            f"without a shape, no multiple of {shape[0]} layers x {shape[1]} experts.",
            _ENGINE_HINT,
        )
    reading = survey.readings.get(shape, Reading((False,) * shape[0]))
    if is_whole and reading.num_requests < survey.num_requests:
        raise RecordingError(
            f"{where}: rows have the shapes {_listed(sorted(survey.shapes))}; expected one shape, "
            "(layers, slots), for all requests."
        )
    cut = _slots_note(reading, shape, routers, where)
    if not any(reading.holds):
        raise RecordingError(
            f"{where}: nothing was captured: every row of {all_of(shape[0], 'layer')} repeats one "
            "number.",
            "Was capture on when the requests ran? Older vLLM wrote zeros whatever was asked.",
        )
    columns, notes = _columns(shape, routers, layers, where)
    _check_layers(routers, columns, reading.holds, where)
    others = [index for index in range(shape[0]) if index not in columns]
    said = f"layers without router, which hold no choices: {len(others)}"
    notes = (*cut, *notes, *((said,) if others else ()))
    return Axes(tuple(routers), columns, shape, routers[0].top_k, notes)


def _check_dtypes(survey: Survey, routers: Sequence[KnownRouter], where: str) -> None:
    """The widest dtype of the file must name every expert; a writer may choose it by request."""
    widest = max(sorted(survey.dtypes), key=lambda dtype: np.iinfo(dtype).max)
    num_experts = max(router.num_experts for router in routers)
    if np.iinfo(widest).max < num_experts - 1:
        raise RecordingError(
            f"{where}: ids are {widest}, which cannot name {num_experts} experts.",
            "Ids above its range have wrapped and are lost; store them wider.",
        )
    # a copy through 8 bits keeps the range of 8 bits, whatever it is stored as afterwards
    expected = survey.num_ids * max(0, num_experts - 256) / num_experts
    if survey.largest <= 255 and expected >= _EXPECTED_ABOVE:
        raise RecordingError(
            f"{where}: none of {survey.num_ids:,} ids is above {survey.largest}, and the "
            f"checkpoint has {num_experts} experts: they went through 8 bits and have wrapped.",
            "uint8 cannot name them; record with a version that stores 16 bits.",
        )


def _slots_note(
    reading: Reading, shape: tuple[int, int], routers: Sequence[KnownRouter], where: str
) -> tuple[str, ...]:
    """What is said of slots behind top_k, which are constant and name no expert."""
    found, top_k = shape[1], routers[0].top_k
    if found == top_k:
        return ()
    num_experts = max(router.num_experts for router in routers)
    # a layer without a router has zeros in every slot
    foreign = sorted(value for value in reading.behind if not 0 <= value < num_experts)
    inside = sorted(value for value in reading.behind if 0 <= value < num_experts)
    if not foreign or len(foreign) > found - top_k or inside not in ([], [0]):
        raise RecordingError(
            f"{where}: {number_of(found, 'expert')} a token and layer; the routers of the "
            f"checkpoint choose {top_k}.",
            _ENGINE_HINT,
        )
    note = (
        f"{found - top_k} slots behind the {top_k} chosen experts hold {_listed(foreign)} and no "
        "expert (fused shared experts, or a fixed width): cut"
    )
    return (note,)


def _columns(
    shape: tuple[int, int],
    routers: Sequence[KnownRouter],
    layers: tuple[int, ...] | None,
    where: str,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The index of each router on an axis of all layers, or of the routers in order."""
    length = shape[0]
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
    where: str, named: tuple[int, ...], routers: Sequence[KnownRouter]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The index of each router's layer among the layers that the file names."""
    wanted = tuple(router.layer for router in routers)
    order = tuple(int(index) for index in np.argsort(named))
    found = tuple(sorted(named))
    if found == wanted:
        return order, ()
    if found == tuple(layer + 1 for layer in wanted):
        return order, ("layers are counted from 1",)
    if found in (tuple(range(len(wanted))), tuple(range(1, len(wanted) + 1))):
        return order, ("layers are counted among layers with routers",)
    raise RecordingError(
        f"{where}: names the layers {_listed(found)}; the routers of the checkpoint are in "
        f"layers {_listed(wanted)}.",
        "Ranks of a pipeline count their own layers: give the files of one whole copy.",
    )


def _check_layers(
    routers: Sequence[KnownRouter], columns: tuple[int, ...], holds: tuple[bool, ...], where: str
) -> None:
    """Layers without a router must hold no choices, and the others some."""
    empty = [r.layer for r, c in zip(routers, columns, strict=True) if not holds[c]]
    extra = [index for index in np.flatnonzero(holds).tolist() if index not in columns]
    if not empty and not extra:
        return
    said = []
    if extra:
        said.append(f"holds choices in layers {_listed(extra)}, which have no router")
    if empty:
        said.append(f"holds none in layers {_listed(empty)}, which have one")
    shifted = [
        shift
        for shift in (-1, 1)
        if set(np.flatnonzero(holds).tolist()) == {column + shift for column in columns}
    ]
    hint = (
        f"It fits when layers are shifted by {shifted[0]:+d}: is one embedding counted as a layer?"
        if shifted
        else "A pipeline stage whose layers were not gathered leaves them empty."
    )
    raise RecordingError(f"{where}: {' and '.join(said)}.", hint)


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


def _listed(values: Sequence[object]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return shown + (f" and {len(values) - 8} more" if len(values) > 8 else "")
