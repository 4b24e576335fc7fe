"""What to read for one router, checked by headers and config alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.store import TensorInfo, TensorStore
from moegeom.core.errors import CONFIG_CONTRADICTED, RouterError
from moegeom.core.limits import ROUTER_COMPOSED_VALUES
from moegeom.core.router import Norm, Rule
from moegeom.core.text import number_of
from moegeom.router.family import BIAS, LOGARITHM, SIZE, Range
from moegeom.router.match import Match, TensorPlace
from moegeom.router.rule import build_norm, build_rule
from moegeom.router.settings import Settings
from moegeom.router.storage import Stored, check_plain, find_storage

Values = Mapping[str, np.ndarray]

_AGAIN = "Is the config from another revision, or the tensor a slice of a sharded save?"

_ON_ITS_SIDE = (
    'It may lie on its side: describe it in a --family FILE with layout = "transposed" (or '
    "without it, where the family has it)."
)


@dataclass(frozen=True)
class Vector:
    """A tensor that holds one number for each expert or each hidden dimension."""

    info: TensorInfo
    row: int | None

    def values(self, values: Values) -> np.ndarray:
        """The vector in float."""
        tensor = upcast(values[self.info.name])
        return tensor[self.row] if self.row is not None else tensor.reshape(-1)


@dataclass(frozen=True)
class _Size:
    """How many numbers a vector holds, what it is called, the sizes that its largest can have, and
    whether one may stand for all.
    """

    of: Literal["experts", "hidden", "width", "one"]
    what: str
    range: Range
    may_be_one: bool = False


#: Parts of a router that are vectors, by name.
VECTORS = {
    "logit_bias": _Size("experts", "logit bias", BIAS),
    "selection_bias": _Size("experts", "selection bias", BIAS),
    "gain": _Size("hidden", "gain of the norm in front", SIZE),
    "norm_bias": _Size("hidden", "bias of the norm in front", BIAS),
    "expert_scale": _Size("experts", "scale of its weights", SIZE, may_be_one=True),
    "projection_bias": _Size("width", "bias of the projection", BIAS),
    "log_scale": _Size("one", "logarithm of a scale", LOGARITHM, may_be_one=True),
}


@dataclass(frozen=True)
class RouterPlan:
    """One router before its values: tensors, rule and norm agree with each other.

    ``num_experts`` counts the rows that compete, ``num_shared`` those behind them that do not;
    ``width`` is the number of columns of the stored weight. ``projection`` takes the hidden size to
    it; ``vectors`` are the other parts, by name.
    """

    match: Match
    rule: Rule
    stored: Stored
    num_experts: int
    num_shared: int
    width: int
    vectors: Mapping[str, Vector]
    norm: Norm | None
    projection: TensorInfo | None

    def tensors(self) -> Iterator[TensorInfo]:
        """Every tensor to read, the weight first."""
        yield from self.stored.tensors
        if self.projection is not None:
            yield self.projection
        yield from (vector.info for vector in self.vectors.values())

    def weight(self, values: Values) -> np.ndarray:
        """The weight with one row per expert, shared ones last."""
        stem = self.match.stem
        named = {i.name.removeprefix(stem): values[i.name] for i in self.stored.tensors}
        matrix = self.stored.decode(named)
        return _LAYOUTS[self.match.weight.layout].rows(matrix, self.width)


@dataclass(frozen=True)
class _Layout:
    """How many rows and columns a stored shape has, and the way to them; ``text`` is the shape."""

    text: str
    shape: Callable[[tuple[int, ...], int], tuple[int, int] | None]
    rows: Callable[[np.ndarray, int], np.ndarray]


def _flat_shape(shape: tuple[int, ...], rows: int) -> tuple[int, int] | None:
    fits = len(shape) == 1 and rows > 0 and shape[0] % rows == 0
    return (rows, shape[0] // rows) if fits else None


_LAYOUTS: dict[str, _Layout] = {
    "rows": _Layout(
        "(experts, hidden)",
        lambda shape, _: (shape[0], shape[1]) if len(shape) == 2 else None,
        lambda values, _: values,
    ),
    "transposed": _Layout(
        "(hidden, experts)",
        lambda shape, _: (shape[1], shape[0]) if len(shape) == 2 else None,
        lambda values, _: np.ascontiguousarray(values.T),
    ),
    "flat": _Layout(
        "(experts * hidden,)", _flat_shape, lambda values, hidden: values.reshape(-1, hidden)
    ),
}


def plan_router(match: Match, store: TensorStore, settings: Settings) -> RouterPlan:
    """The plan of one router; reads headers, no tensor.

    Raises
    ------
    RouterError
        If shapes, dtypes and config contradict each other.
    """
    router = f"router {match.name}"
    infos = {name.removeprefix(match.stem): store.info(name) for name in match.tensors}
    stored = find_storage(
        infos, settings, router, match.leaf, lambda leaf: store.read(infos[leaf].name)
    )
    settings = settings.under(match.spec.config_roots).at(match.layer)
    num_shared = settings.integer(match.spec.num_shared)
    rows, width = _rows_and_width(stored, match, settings, num_shared)
    num_experts = rows - num_shared
    projection = _projection(store, match, settings, rows, width)
    hidden = projection.shape[1] if projection else width
    sizes = {"experts": num_experts, "hidden": hidden, "width": width, "one": 1}
    vectors = {
        part: _vector(store, match.parts[part], sizes[size.of], size)
        for part, size in VECTORS.items()
        if part in match.parts
    }
    named = {part: vector.info.name for part, vector in vectors.items()}
    norm, gain, norm_bias = match.spec.norm, named.get("gain"), named.get("norm_bias", "")
    return RouterPlan(
        match=match,
        rule=build_rule(match.spec, settings, num_experts, router),
        stored=stored,
        num_experts=num_experts,
        num_shared=num_shared,
        width=width,
        vectors=vectors,
        norm=build_norm(norm, settings, hidden, gain, norm_bias) if norm and gain else None,
        projection=projection,
    )


def _projection(
    store: TensorStore, match: Match, settings: Settings, rows: int, width: int
) -> TensorInfo | None:
    """The projection in front of a router, which takes the hidden size to the weight's columns."""
    if "projection" not in match.parts:
        return None
    info = store.info(match.parts["projection"].name)
    check_plain(info, "projection of the router input")
    shape = f"tensor '{info.name}' (projection of the router input) has shape {info.shape}"
    if len(info.shape) != 2 or info.shape[0] != width or 0 in info.shape:
        raise RouterError(
            f"{info.file}: {shape}; its router compares {width} projected dimensions, expected "
            f"({width}, hidden).",
            "Is one of the two a slice of a sharded save?",
            code=CONFIG_CONTRADICTED,
        )
    hidden = info.shape[1]
    if max(rows * hidden, rows * width, width * hidden) > ROUTER_COMPOSED_VALUES:
        raise RouterError(f"{info.file}: {shape}, too large for a router of {rows} experts.")
    _check_hidden(shape, info, match, settings, hidden)
    return info


def _rows_and_width(
    stored: Stored, match: Match, settings: Settings, num_shared: int
) -> tuple[int, int]:
    """Rows (shared experts included) and columns of a weight; config and shape agree."""
    info, spec = stored.tensors[0], match.spec
    layout = _LAYOUTS[match.weight.layout]
    has_count = settings.has(spec.num_experts)
    claimed = settings.integer(spec.num_experts) if has_count else 0
    sides = layout.shape(stored.shape, claimed + num_shared)
    shape = f"tensor '{info.name}' has shape {stored.shape}"
    if sides is None or 0 in sides:
        raise RouterError(
            f"{info.file}: {shape}, expected {layout.text}.", code=CONFIG_CONTRADICTED
        )
    rows, hidden = sides
    if has_count and claimed + num_shared != rows:
        shared = f" and {num_shared} that always run" if num_shared else ""
        raise RouterError(
            f"{info.file}: {shape}; config.json says {number_of(claimed, 'expert')}{shared}.",
            _ON_ITS_SIDE if hidden == claimed + num_shared else _AGAIN,
            code=CONFIG_CONTRADICTED,
        )
    if rows <= num_shared:
        raise RouterError(f"{info.file}: {shape}, {num_shared} of whose rows do not compete.")
    if spec.projection is None:
        _check_hidden(shape, info, match, settings, hidden)
    return rows, hidden


def _check_hidden(
    shape: str, info: TensorInfo, match: Match, settings: Settings, hidden: int
) -> None:
    """Raises RouterError where the config gives another hidden size."""
    claimed = match.spec.hidden_size
    if settings.has(claimed) and settings.integer(claimed) != hidden:
        raise RouterError(
            f"{info.file}: {shape}; config.json says hidden size {settings.integer(claimed)}.",
            _AGAIN,
            code=CONFIG_CONTRADICTED,
        )


def _vector(store: TensorStore, place: TensorPlace, length: int, size: _Size) -> Vector:
    """A plain float tensor of the given length, or a row of a matrix of such rows."""
    info, row = store.info(place.name), place.spec.row
    check_plain(info, size.what)
    shapes: list[Any] = [(length,), (1, length)]
    needed = f"({length},)"
    if row is not None:
        # the row of a vector would be one number
        shapes = [(max(info.shape[0], row + 1), length)] if info.shape else []
        needed = f"({row + 1} or more rows, {length})"
    if size.may_be_one:
        shapes += [(), (1,)]
    if info.shape not in shapes:
        raise RouterError(
            f"{info.file}: tensor '{place.name}' ({size.what}) has shape {info.shape}; "
            f"its router needs {needed}.",
            "Is one of the two a slice of a sharded save?",
            code=CONFIG_CONTRADICTED,
        )
    return Vector(info, row)
