"""Which axis of a trace is what: layers, slots, and whether the numbers can name the experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Integer

from moegeom.core.errors import RecordingError
from moegeom.core.text import number_of
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.trace import RequestTrace, Trace

#: Even load would put as many ids above 255 before their absence is taken for wrapping.
_EXPECTED_ABOVE = 200

_ENGINE_HINT = "Is the trace of another model?"


@dataclass(frozen=True)
class Axes:
    """The index on the layer axis of each router, and what is to be said about it."""

    routers: tuple[KnownRouter, ...]
    columns: tuple[int, ...]
    notes: tuple[str, ...] = ()


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


def shaped_requests(
    trace: Trace, routers: Sequence[KnownRouter]
) -> tuple[tuple[RequestTrace, ...], Axes]:
    """Every request with ids of (rows, layers, k), and the meaning of the layer axis.

    Flat ids are given every shape that the checkpoint allows, and keep the first that fits.

    Raises
    ------
    RecordingError
        When an axis, or the dtype, does not fit the checkpoint; with the numbers of both.
    """
    _check_dtypes(trace, routers)
    if any(request.ids.ndim == 1 for request in trace.requests):
        return _unflattened(trace, routers)
    return _with_axes(trace, trace.requests, routers)


def _with_axes(
    trace: Trace, requests: tuple[RequestTrace, ...], routers: Sequence[KnownRouter]
) -> tuple[tuple[RequestTrace, ...], Axes]:
    shapes = sorted({request.ids.shape[1:] for request in requests})
    if len(shapes) > 1 or len(shapes[0]) != 2:
        raise RecordingError(
            f"{trace.where}: rows have the shapes {_listed(shapes)}; expected one shape, "
            "(layers, slots), for all requests."
        )
    requests, note = _cut_slots(trace, requests, routers)
    axes = _layer_axis(trace, requests, routers)
    return requests, replace(axes, notes=(*note, *axes.notes))


def _unflattened(
    trace: Trace, routers: Sequence[KnownRouter]
) -> tuple[tuple[RequestTrace, ...], Axes]:
    top_k, refusal = routers[0].top_k, None
    for num_layers in _layer_counts(trace, routers):
        size = num_layers * top_k
        uneven = [request for request in trace.requests if request.ids.size % size]
        if uneven:
            refusal = refusal or RecordingError(
                f"{trace.where}: request {uneven[0].name} holds {uneven[0].ids.size} numbers "
                f"without a shape, no multiple of {num_layers} layers x {top_k} experts.",
                _ENGINE_HINT,
            )
            continue
        reshaped = tuple(
            replace(request, ids=request.ids.reshape(-1, num_layers, top_k))
            for request in trace.requests
        )
        try:
            return _with_axes(trace, reshaped, routers)
        except RecordingError as error:
            refusal = refusal or error
    assert refusal is not None, "there is at least one shape to try"
    raise refusal


def _layer_counts(trace: Trace, routers: Sequence[KnownRouter]) -> list[int]:
    """Numbers of layers that flat ids may have: as told by tokens, all layers, routers alone."""
    told = []
    for request in trace.requests:
        tokens = request.num_tokens if request.token_ids is None else len(request.token_ids)
        rows = 0 if tokens is None else tokens - 1 - (request.start or 0)
        if rows > 0 and request.ids.size % (rows * routers[0].top_k) == 0:
            told.append(request.ids.size // (rows * routers[0].top_k))
    plausible = [n for n in told[:1] if len(routers) <= n <= 4 * (routers[-1].layer + 1)]
    return list(dict.fromkeys([*plausible, routers[-1].layer + 1, len(routers)]))


def _check_dtypes(trace: Trace, routers: Sequence[KnownRouter]) -> None:
    """The widest dtype of the file must name every expert; a writer may choose it by request."""
    dtypes = {request.ids.dtype for request in trace.requests}
    widest = max(dtypes, key=lambda dtype: np.iinfo(dtype).max)
    num_experts = max(router.num_experts for router in routers)
    if np.iinfo(widest).max < num_experts - 1:
        raise RecordingError(
            f"{trace.where}: ids are {widest}, which cannot name {num_experts} experts.",
            "Ids above its range have wrapped and are lost; store them wider.",
        )
    # a copy through 8 bits keeps the range of 8 bits, whatever it is stored as afterwards
    largest = max(int(request.ids.max(initial=0)) for request in trace.requests)
    num_ids = sum(request.ids.size for request in trace.requests)
    expected = num_ids * max(0, num_experts - 256) / num_experts
    if largest <= 255 and expected >= _EXPECTED_ABOVE:
        raise RecordingError(
            f"{trace.where}: none of {num_ids:,} ids is above {largest}, and the checkpoint has "
            f"{num_experts} experts: they went through 8 bits and have wrapped.",
            "uint8 cannot name them; record with a version that stores 16 bits.",
        )


def _cut_slots(
    trace: Trace, requests: tuple[RequestTrace, ...], routers: Sequence[KnownRouter]
) -> tuple[tuple[RequestTrace, ...], tuple[str, ...]]:
    """Slots behind top_k that are constant and name no expert are cut."""
    found, top_k = requests[0].ids.shape[2], routers[0].top_k
    if found == top_k:
        return requests, ()
    num_experts = max(router.num_experts for router in routers)
    behind = [request.ids[:, :, top_k:] for request in requests] if found > top_k else []
    # a layer without a router has zeros in every slot
    values = np.unique(np.concatenate([np.unique(part) for part in behind])) if behind else []
    foreign = [int(value) for value in values if not 0 <= value < num_experts]
    inside = [int(value) for value in values if 0 <= value < num_experts]
    if not foreign or len(foreign) > found - top_k or inside not in ([], [0]):
        raise RecordingError(
            f"{trace.where}: {number_of(found, 'expert')} a token and layer; the routers of the "
            "checkpoint "
            f"choose {top_k}.",
            _ENGINE_HINT,
        )
    note = (
        f"{found - top_k} slots behind the {top_k} chosen experts hold {_listed(foreign)} and no "
        "expert (fused shared experts, or a fixed width): cut"
    )
    return tuple(replace(r, ids=r.ids[:, :, :top_k]) for r in requests), (note,)


def _layer_axis(
    trace: Trace, requests: tuple[RequestTrace, ...], routers: Sequence[KnownRouter]
) -> Axes:
    """All layers, or the routers in order; layers without a router must hold no choices."""
    length = requests[0].ids.shape[1]
    holds = _holds_choices(requests, length)
    if not holds.any():
        raise RecordingError(
            f"{trace.where}: nothing was captured: every row of all {length} layers repeats one "
            "number.",
            "Was capture on when the requests ran? Older vLLM wrote zeros whatever was asked.",
        )
    if trace.layers is not None:
        columns, notes = named_layers(trace.where, trace.layers, routers)
    elif length == len(routers):
        columns, notes = tuple(range(length)), ()
    elif length > routers[-1].layer:
        columns, notes = tuple(router.layer for router in routers), ()
    else:
        raise RecordingError(
            f"{trace.where}: {number_of(length, 'layer')}; the checkpoint has "
            f"{number_of(len(routers), 'router')} in layers "
            f"{routers[0].layer} to {routers[-1].layer}.",
            _ENGINE_HINT,
        )
    _check_layers(trace, routers, columns, holds)
    others = [index for index in range(length) if index not in columns]
    said = f"layers without router, which hold no choices: {len(others)}"
    return Axes(tuple(routers), columns, (*notes, *((said,) if others else ())))


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
    trace: Trace,
    routers: Sequence[KnownRouter],
    columns: tuple[int, ...],
    holds: Bool[np.ndarray, "layers"],
) -> None:
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
    raise RecordingError(f"{trace.where}: {' and '.join(said)}.", hint)


def _holds_choices(requests: tuple[RequestTrace, ...], length: int) -> Bool[np.ndarray, "layers"]:
    """Layers in which some row names two experts; with one slot, anything but 0 and -1."""
    holds = np.zeros(length, bool)
    for request in requests:
        ids = request.ids
        if ids.shape[2] > 1:
            holds |= (ids != ids[:, :, :1]).any(axis=(0, 2))
        else:
            holds |= ((ids != 0) & (ids != unset_value(ids.dtype))).any(axis=(0, 2))
    return holds


def unset_value(dtype: np.dtype) -> int:
    """-1, as this dtype spells it."""
    return -1 if dtype.kind == "i" else int(np.iinfo(dtype).max)


def _listed(values: Sequence[object]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return shown + (f" and {len(values) - 8} more" if len(values) > 8 else "")


def stacked(ids: Integer[np.ndarray, "rows layers slots"], axes: Axes) -> np.ndarray:
    """The layers that have routers, in their order; a view where nothing is left out."""
    if axes.columns == tuple(range(ids.shape[1])):
        return ids
    return ids[:, list(axes.columns)]
