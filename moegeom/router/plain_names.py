"""Names of tensors without what wrappers of a model put into them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moegeom.checkpoint.store import StoreOver, TensorInfo, TensorStore
from moegeom.core.shapes import Shaped

#: What FSDP, torch.compile and activation checkpoints put into a name, anywhere.
_INSIDE = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")

#: What data parallelism, adapters and dictionaries around a state put in front.
_IN_FRONT = ("module.", "base_model.model.", "state_dict.", "model_state_dict.")

#: Halves of a product that is added to a weight, and what else adapters are made of.
ADAPTER = re.compile(r"(?:^|[._])(?:lora|loha|lokr|hada|ia3|oft|vera)_")


#: What names of a model begin with: none of them is a container that somebody put around it.
_MODELS = frozenset({"model", "language_model", "transformer", "backbone", "decoder", "encoder",
                     "thinker", "llm", "layers", "blocks", "blk", "h"})  # fmt: skip


def _container(names: Collection[str]) -> str:
    """``app.`` where all names begin with it, and with a model behind it; else empty."""
    front = next(iter(names), "").partition(".")[0] + "."
    if front[:-1] in _MODELS or not all(name.startswith(front) for name in names):
        return ""
    inner = {name[len(front) :].partition(".")[0] for name in names}
    return front if inner & _MODELS else ""


def plain_name(name: str) -> str:
    """The name without wrappers; a plain name stays as it is."""
    if any(part in name for part in _INSIDE):
        name = ".".join(part for part in name.split(".") if part not in _INSIDE)
    while name.startswith(_IN_FRONT):
        name = next(name.removeprefix(p) for p in _IN_FRONT if name.startswith(p))
    return name


def without_model(prefix: str) -> str:
    """A name, or the beginning of one, without every ``model.`` in front.

    A module and a dictionary put it there, and nothing tells which: ``{"model": state}`` of a
    model that has none is named like the state of a model that has one.
    """
    while prefix.startswith("model."):
        prefix = prefix.removeprefix("model.")
    return prefix


def _has_wrappers(names: Collection[str]) -> bool:
    # a hundred thousand names that are plain are one text that holds no wrapper
    text = "\n".join(("", *names))
    return any(part in text for part in (*_INSIDE, *(f"\n{part}" for part in _IN_FRONT)))


def wrapped_names(names: Collection[str]) -> Mapping[str, Sequence[str]]:
    """Names with wrappers, by what is left without them and without ``model.``."""
    by_bare: dict[str, list[str]] = {}
    for name in names if _has_wrappers(names) else ():
        if (plain := plain_name(name)) != name:
            by_bare.setdefault(without_model(plain), []).append(name)
    return by_bare


def with_plain_names(store: TensorStore) -> TensorStore:
    """The same tensors by their plain names.

    Tensors that would share a name, such as a model and its average, keep their own.
    """
    if front := _container(store.names()):
        store = _Renamed(store, {name.removeprefix(front): name for name in store.names()})
    if not _has_wrappers(store.names()):
        return store
    raw: dict[str, str] = {}
    shared: set[str] = set()
    for name in store.names():
        plain = plain_name(name)
        shared |= {plain} if plain in raw else set()
        raw[plain] = name
    if shared:
        pairs = ((plain_name(name), name) for name in store.names())
        raw = {name if plain in shared else plain: name for plain, name in pairs}
    return _Renamed(store, raw)


@dataclass(frozen=True, eq=False)
class _Renamed(StoreOver):
    """A ``TensorStore`` by other names; ``raw`` gives the names in the files."""

    raw: Mapping[str, str]

    def names(self) -> Collection[str]:
        return self.raw.keys()

    def info(self, name: str) -> TensorInfo:
        return replace(self.store.info(self.raw.get(name, name)), name=name)

    def is_open(self, name: str) -> bool:
        return self.store.is_open(self.raw.get(name, name))

    def are_alike(self, names: Collection[str]) -> bool:
        return self.store.are_alike([self.raw.get(name, name) for name in names])

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        return self.store.read(self.raw.get(name, name))

    def prepare(self, names: Iterable[str]) -> None:
        self.store.prepare([self.raw.get(name, name) for name in names])

    def read_many(self, names: Iterable[str]) -> Iterator[tuple[str, Shaped[np.ndarray, "*shape"]]]:
        plain_of = {self.raw.get(name, name): name for name in names}
        for name, values in self.store.read_many(plain_of):
            yield plain_of[name], values

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        return self.store.read_bytes(self.raw.get(name, name), start, size)
