"""Tokens that no file holds: arrays in memory, and a synthetic prior.

The prior is for questions of geometry: directions without preference, norms as after RMS. It
answers nothing about load or entropy, and it is named in every row that it produces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.digest import digest_of
from moegeom.core.errors import InternalError, RecordingError, UsageError
from moegeom.core.registry import unknown_name
from moegeom.core.shapes import Float32, Shaped
from moegeom.core.tokens import SourceFacts, TokenColumns, TokenSource, TopLogits, gpu_of
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
from moegeom.tokens.recording.columns import unknown_columns
from moegeom.tokens.rows import Rows, TensorRows, as_array, check_range, dtype_name
from moegeom.tokens.source import Request
from moegeom.tokens.stages import STAGE_TENSORS, check_output_kind, stage_of

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


#: Tokens drawn together. Not ``TILE``: the numbers must not change when the scan is tuned.
BLOCK = 256


class IsotropicRmsPrior:
    r"""Router inputs ``y = gain * u``, with u uniform on the sphere of radius ``sqrt(hidden)``.

    This is what an RMS norm gives when every direction of the residual stream is equally likely.

    Parameters
    ----------
    routers
        (name, gain of the norm in front or None, hidden size) of each router.
    seed
        Equal seeds give equal numbers. Each block of 256 tokens of each router has a counter-based
        stream of its own, so every range of tokens has the same bits however it is cut, and
        neither the other routers nor ``num_tokens`` matter.
    """

    name = "isotropic-rms"

    def __init__(
        self,
        routers: tuple[tuple[str, Float32[np.ndarray, "hidden"] | None, int], ...],
        num_tokens: int,
        seed: int,
    ) -> None:
        self._gains = {name: gain for name, gain, _ in routers}
        self._hidden = {name: hidden for name, _, hidden in routers}
        self._keys = {name: _philox_key(seed, name) for name in self._hidden}
        for name, gain in self._gains.items():
            if gain is not None and gain.shape != (self._hidden[name],):
                raise InternalError(
                    f"{name}: gain has shape {gain.shape}; expected ({self._hidden[name]},)."
                )
        self._facts = SourceFacts(
            name=f"prior {self.name}, seed {seed}",
            stage="router_input",
            num_tokens=num_tokens,
            routers=tuple(self._hidden),
            domains=(),
            has_documents=False,
            has_chosen=False,
            is_synthetic=True,
        )

    @property
    def facts(self) -> SourceFacts:
        return self._facts

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        check_range(self._facts, start, stop)
        return unknown_columns(stop - start)

    def read_values(
        self, router: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens width"]:
        if router not in self._hidden:
            error = unknown_name("router in the prior", router, self._hidden)
            raise RecordingError(error.message, error.hint)
        check_range(self._facts, start, stop)
        out = np.empty((stop - start, self._hidden[router]), np.float32)
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            first, last = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
            rows = self._block(router, block)
            out[first - start : last - start] = rows[first - block * BLOCK : last - block * BLOCK]
        return out

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        raise RecordingError(
            f"{self._facts.name}: top logits of {router}, tokens [{start}, {stop}), were asked "
            "for; a prior has router inputs only."
        )

    def read_chosen(self, router: str, start: int, stop: int) -> None:
        """None: nobody chose."""
        del router, start, stop

    def read_output(self, router: str, kind: str, start: int, stop: int) -> None:
        """None: no expert ran."""
        del router, start, stop
        check_output_kind(kind)

    def _block(self, router: str, block: int) -> Float32[np.ndarray, "block hidden"]:
        hidden, gain = self._hidden[router], self._gains[router]
        # The block is the second word of the counter: 2^64 draws lie between two blocks.
        stream = np.random.Philox(key=self._keys[router], counter=[0, block, 0, 0])
        rows = np.random.Generator(stream).standard_normal((BLOCK, hidden), dtype=np.float32)
        squares = np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True)
        rows *= np.sqrt(hidden / squares).astype(np.float32)
        return rows if gain is None else rows * gain.astype(np.float32)


def _philox_key(seed: int, router: str) -> np.ndarray:
    """128 bits from seed and router name, the same on every machine and Python."""
    digest = hashlib.sha256(f"{seed}:{router}".encode()).digest()
    return np.frombuffer(digest[:16], "<u8").astype(np.uint64)
