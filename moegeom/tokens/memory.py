"""Tokens that no file holds: arrays in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.digest import digest_of
from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.shapes import Shaped
from moegeom.core.tokens import TokenSource, gpu_of
from moegeom.tokens.foreign.arrays import (
    BATCH,
    COLUMN_KEYS,
    MASK,
    TOKENS,
    Form,
    columns_of_batch,
    layers_in_memory,
    open_arrays,
    refuse_hidden_states,
    refuse_other_dtype,
    refuse_other_form,
)
from moegeom.tokens.rows import Rows, TensorRows, as_array, dtype_name
from moegeom.tokens.source import Request
from moegeom.tokens.stages import STAGE_TENSORS, stage_of

#: What messages call them.
NAME = Path("arrays in memory")

#: The key of the only array.
_ONLY = "array"


@dataclass(frozen=True, eq=False)
class TensorLayers:
    """Tensors [tokens, width] of a GPU, one for each layer; nothing of them is copied."""

    tensors: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """As of the array that they are together; of one layer without its axis."""
        shape = self.tensors[0].shape
        return (len(self.tensors), *shape) if len(self.tensors) > 1 else tuple(shape)

    @property
    def dtype(self) -> str:
        return dtype_name(self.tensors[0])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def digest(self) -> str:
        """A hash of the numbers; one layer at a time comes to the host."""
        return digest_of([digest_of(self.dtype, as_array(tensor)) for tensor in self.tensors])


@dataclass(frozen=True, eq=False)
class HeldArrays:
    """Arrays by key, as in an npz file; a request says which router each belongs to.

    Beside them ``document``, ``position`` and ``token_id`` of each token.
    """

    arrays: Mapping[str, Shaped[np.ndarray, "..."] | TensorLayers]

    @property
    def digest(self) -> str:
        """A hash of keys and numbers, which identifies the arrays in results."""
        return digest_of({key: getattr(one, "digest", one) for key, one in self.arrays.items()})

    def open(self, request: Request) -> TokenSource:
        """The token source of these arrays, with the routers of the request.

        Raises
        ------
        UsageError
            When the request does not say what the numbers are.
        RecordingError
            When they cannot be assigned to routers, or are no numbers of that kind.
        """
        if stage_of(request.stage) is None:
            raise UsageError(
                f"{NAME} do not say what their numbers are.",
                f"Add --stage, one of {', '.join(STAGE_TENSORS)}.",
            )
        keys = [key for key in self.arrays if key not in COLUMN_KEYS]
        if all(key.isdecimal() for key in keys) and not request.router_map:
            request = replace(request, router_map=_of_layers(keys, request))
        for key in keys:
            refuse_hidden_states(self.arrays[key].shape, f"{NAME}: {key}", request)
        size = sum(array.nbytes for array in self.arrays.values())
        return open_arrays(NAME, request, self.arrays, self._layers, size_bytes=size)

    def _layers(self, key: str, dtypes: Collection[np.dtype], form: Form) -> Sequence[Rows]:
        array, where = self.arrays[key], f"{NAME}: {key}"
        refuse_other_dtype(array.dtype, dtypes, where)
        refuse_other_form(array.shape, form, where)
        if isinstance(array, TensorLayers):
            return [TensorRows(tensor, where) for tensor in array.tensors]
        return layers_in_memory(array, where)


def _of_layers(keys: Sequence[str], request: Request) -> dict[str, str]:
    """Router by layer number, where one router alone has that layer."""
    names: dict[str, list[str]] = {}
    for one in request.checkpoint_routers:
        names.setdefault(str(one.layer), []).append(one.name)
    return {key: names[key][0] for key in keys if len(names.get(key, ())) == 1}


def hold(value: Any) -> HeldArrays:
    """Arrays or tensors of whatever library, one, several in the order of layers, or by name.

    An array [layers, tokens, width] is that of all routers. Keys are names of routers, as
    ``text/0`` or ``text.0``, numbers of layers, or any that ``router_map`` explains.

    Raises
    ------
    RecordingError
        When there is nothing in it, or layers have different numbers of tokens.
    """
    if isinstance(value, Mapping) and BATCH in value:
        return HeldArrays(_of_batch(value))
    if isinstance(value, Mapping):
        arrays = {str(key): _one(one) for key, one in value.items()}
        if not set(arrays) - set(COLUMN_KEYS):
            raise RecordingError(f"{NAME}: there is none.", "Name one for each router.")
        return HeldArrays(arrays)
    if isinstance(value, list | tuple) and value:
        if all(gpu_of(one) is not None and len(one.shape) == 2 for one in value):
            layers = TensorLayers(tuple(map(_detached, value)))
            if len({(one.shape, one.dtype) for one in layers.tensors}) == 1:
                return HeldArrays({_ONLY: layers})
        return HeldArrays({_ONLY: _stacked(value)})
    return HeldArrays({_ONLY: _one(value)})


def _one(value: Any) -> Shaped[np.ndarray, "..."] | TensorLayers:
    """One array or tensor; that of routers on a GPU stays where it is."""
    if gpu_of(value) is None or len(value.shape) not in (2, 3) or not value.shape[0]:
        return as_array(value)
    value = _detached(value)
    return TensorLayers((value,) if len(value.shape) == 2 else tuple(value))


def _detached(tensor: Any) -> Any:
    """Without its gradient, which DLPack exports none of."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


#: How a list of batches becomes one of layers.
_JOIN = "Of batches of layers: [np.concatenate(layer) for layer in zip(*batches)]."


def _stacked(items: Sequence[Any]) -> Shaped[np.ndarray, "..."]:
    """The items, one for each layer, of equal shape."""
    inner = items[0]
    if isinstance(inner, Mapping) or (
        isinstance(inner, list | tuple) and inner and hasattr(inner[0], "shape")
    ):
        raise RecordingError(f"{NAME}: a list of lists; expected an array for each layer.", _JOIN)
    layers = [as_array(one) for one in items]
    shapes = {layer.shape for layer in layers}
    if len(shapes) > 1:
        raise RecordingError(
            f"{NAME}: layers of the shapes {', '.join(map(str, sorted(shapes)))}; expected one.",
            _JOIN,
        )
    return np.stack(layers)


def _of_batch(value: Mapping[Any, Any]) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Logits of a model's output without the padding of the batch, whose sequences are documents.

    Raises
    ------
    RecordingError
        When mask or token ids are of another batch.
    """
    logits = value[BATCH]
    layers = _stacked(logits) if isinstance(logits, list | tuple) else as_array(logits)
    beside = {name: as_array(value[name]) for name in (MASK, TOKENS) if name in value}
    num_rows = layers.shape[-2] if layers.ndim > 1 else 0
    used, columns = columns_of_batch(beside, num_rows, NAME, "Give")
    return {BATCH: layers[..., used, :] if beside else layers, **columns}
