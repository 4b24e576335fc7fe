"""An adapter of PEFT over the checkpoint that it was trained on: what both are together.

:math:`W' = W + s B A`, s = alpha / r, or alpha / sqrt(r) (rsLoRA); under DoRA each row of it is
scaled to its magnitude, :math:`m W' / |W'|`. Modules that were saved whole replace their like.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, upcast
from moegeom.checkpoint.json_text import parse_object
from moegeom.checkpoint.reading import LocalFolder
from moegeom.checkpoint.store import StoreOver, TensorInfo, TensorStore
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import CONFIG_BYTES
from moegeom.core.shapes import Float32, Shaped

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

#: Settings under which a layer computes something else, or with another base.
_OTHERS = ("fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens",
           "arrow_config", "layer_replication", "monteclora_config", "kasa_config",
           "lora_ga_config", "velora_config")  # fmt: skip

#: Ways to begin that leave the base as it is.
_STARTS = (None, True, False, "true", "gaussian", "eva", "orthogonal")

_MERGE = "Merge it into its model (peft: merge_and_unload), and pass the result."

#: What PEFT puts in front of a name, and into it.
_WRAPPERS = re.compile(r"^base_model\.model\.|\.modules_to_save(?:\.default)?|\.base_layer")
_HALF = re.compile(
    r"(?P<module>.+)\.lora_(?P<half>A|B|magnitude_vector)(?:\.default)?(?:\.weight)?"
)

#: Modules that are routers by their name: one of an adapter that finds no tensor is an error.
_ROUTER = re.compile(r"(?:^|[._])(?:router|gate|wg|classifier)$")


@dataclass(frozen=True, eq=False)
class AdaptedStore(StoreOver):
    """The tensors of a base with an adapter over them.

    By name of the base, ``replaced`` are tensors of the adapter, ``updates`` halves of what is
    added, and its factor. ``left`` are modules of the adapter that are no tensor of the base by
    name, as experts in one tensor, and stay without it.
    """

    adapter: TensorStore
    folder: str
    replaced: Mapping[str, str]
    updates: Mapping[str, tuple[Mapping[str, str], float]]
    left: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.folder} over {self.store.label}"

    @property
    def bytes_read(self) -> int:
        return self.store.bytes_read + self.adapter.bytes_read

    @property
    def bytes_total(self) -> int:
        return self.store.bytes_total + self.adapter.bytes_total

    def info(self, name: str) -> TensorInfo:
        info = self.store.info(name)
        if name in self.replaced:
            own = self.adapter.info(self.replaced[name])
            if own.shape != info.shape:
                raise _refused(own.file, f"'{own.name}' is {own.shape}, its base {info.shape}")
            return replace(own, name=name)
        if name not in self.updates:
            return info
        if info.dtype not in PLAIN_FLOATS or len(info.shape) != 2:
            raise _refused(info.file, f"'{name}' ({info.dtype}) of its base is no matrix of floats")
        return replace(info, dtype="F32", size_bytes=4 * prod(info.shape))

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        if name in self.replaced:
            self.info(name)
            return self.adapter.read(self.replaced[name])
        return self._sum(name) if name in self.updates else self.store.read(name)

    def read_many(self, names: Iterable[str]) -> Iterator[tuple[str, Shaped[np.ndarray, "*shape"]]]:
        names = list(names)
        own = [name for name in names if name in self.replaced or name in self.updates]
        yield from ((name, self.read(name)) for name in own)
        yield from self.store.read_many([name for name in names if name not in own])

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        if name in self.replaced:
            return self.adapter.read_bytes(self.replaced[name], start, size)
        if name in self.updates:
            return self.read(name).tobytes()[start : start + size]
        return self.store.read_bytes(name, start, size)

    def _sum(self, name: str) -> Float32[np.ndarray, "rows columns"]:
        """In float64, rounded once."""
        shape, (halves, factor) = self.info(name).shape, self.updates[name]
        stored = {half: upcast(self.adapter.read(part)) for half, part in halves.items()}
        values = {half: one.astype(np.float64) for half, one in stored.items()}
        rank = len(values["A"])
        if (values["B"].shape, values["A"].shape) != ((shape[0], rank), (rank, shape[1])):
            raise _refused(self.adapter.label, f"'{halves['A']}' fits no weight {shape}")
        weight = upcast(self.store.read(name)).astype(np.float64)
        weight += factor * (values["B"] @ values["A"])
        if "magnitude_vector" in values:
            lengths = np.linalg.norm(weight, axis=1, keepdims=True)
            weight *= values["magnitude_vector"].reshape(-1, 1) / lengths
        return weight.astype(np.float32)


def open_adapter(folder: LocalFolder, opening: Callable[[Path], TensorStore],
                 weights: Callable[[str], TensorStore]) -> AdaptedStore:  # fmt: skip
    """The adapter in a folder over its base. Raises CheckpointError where it is no LoRA, is set to
    be another function, a router of it is none of its base, or that is not on this machine.
    """
    raw = folder.file(ADAPTER_CONFIG).read_all(CONFIG_BYTES)
    config = parse_object(raw, ADAPTER_CONFIG)
    file = next((name for name in ADAPTER_WEIGHTS if folder.has(name)), "")
    if not file:
        raise CheckpointError(f"{folder.label}: {ADAPTER_CONFIG} stands here without its weights.")
    if (kind := config.get("peft_type")) != "LORA":
        raise _refused(ADAPTER_CONFIG, f"it is of the kind {str(kind)[:40]!r}, and LORA is read")
    for key in _OTHERS:
        if config.get(key):
            raise _refused(ADAPTER_CONFIG, f"{key!r} is set")
    if (start := config.get("init_lora_weights")) not in _STARTS:
        raise _refused(ADAPTER_CONFIG, f"'init_lora_weights' {str(start)[:40]!r} changes its base")
    base, adapter = opening(_base(folder, config)), weights(file)
    return _over(base, adapter, config, folder.label)


def _base(folder: LocalFolder, config: Mapping[str, Any]) -> Path:
    named = str(config.get("base_model_name_or_path") or "")[:4096]
    hint = f"Put the base beside the adapter, or its path into {ADAPTER_CONFIG}. {_MERGE}"
    here = folder.path.resolve()
    places = (here / named, here.parent / named, here.parent / Path(named).name)
    with suppress(OSError, ValueError):  # too long for the file system, or no name of it
        for place in places:
            if named not in ("", ".", "..") and place.exists() and place.resolve() != here:
                return place
    raise CheckpointError(
        f"{folder.label}: an adapter, whose base {named[:200]!r} is not on this machine.", hint
    )


def _over(
    base: TensorStore, adapter: TensorStore, config: Mapping[str, Any], label: str
) -> AdaptedStore:
    halves: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for name in adapter.names():
        plain = _WRAPPERS.sub("", name)
        if match := _HALF.fullmatch(plain):
            halves.setdefault(match["module"], {})[match["half"]] = name
        elif ".lora_" in plain:
            raise _refused(adapter.label, f"'{name}' is no part of a linear LoRA")
        else:
            whole[plain] = name
    place = _placing(base.names(), [*(f"{module}.weight" for module in halves), *whole])
    places = {name: place(name) for name in whole}
    replaced = {at: whole[name] for name, at in places.items() if at}
    updates: dict[str, tuple[Mapping[str, str], float]] = {}
    left = {name.rpartition(".")[0] for name, at in places.items() if not at}
    needed = {"A", "B", *(["magnitude_vector"] if config.get("use_dora") else [])}
    for module, parts in halves.items():
        if not (at := place(f"{module}.weight")):
            left.add(module)
        elif lack := needed - parts.keys():
            raise _refused(adapter.label, f"{module} has no lora_{min(lack)}")
        else:
            updates[at] = parts, _factor(config, module, adapter.info(parts["A"]).shape[0])
    if routers := sorted(filter(_ROUTER.search, left)):
        raise _refused(adapter.label, f"'{routers[0]}' is no tensor of its base")
    return AdaptedStore(base, adapter, label, replaced, updates, tuple(sorted(left)))


def _factor(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Alpha over r or its root; patterns name modules whose numbers are others."""
    numbers: list[float] = []
    for key, pattern, default in (("r", "rank_pattern", 8), ("lora_alpha", "alpha_pattern", 8)):
        value = config.get(key, default)
        own = config.get(pattern) or {}
        for name, other in own.items() if isinstance(own, Mapping) else ():
            if not re.fullmatch(r"[\w.]+", name):
                raise _refused(ADAPTER_CONFIG, f"{pattern!r} has the expression {name[:60]!r}")
            if f".{module}".endswith(f".{name}"):
                value = other
                break
        if type(value) not in (int, float) or not 0 < value < 1e9:
            raise _refused(ADAPTER_CONFIG, f"{key!r} is {str(value)[:40]}")
        numbers.append(float(value))
    if numbers[0] != rank:
        raise _refused(ADAPTER_CONFIG, f"'r' is {numbers[0]:g}, and {module} has rank {rank}")
    return numbers[1] / (sqrt(rank) if config.get("use_rslora") else rank)


def _placing(names: Collection[str], targets: Collection[str]) -> Callable[[str], str]:
    """The tensor of the base that a name of the adapter means: of that name, or the only one of its
    layer that ends alike, for modules that a version of transformers calls otherwise.
    """

    def key(name: str) -> tuple[tuple[str, ...], ...]:
        words = name.split(".")
        return tuple(word for word in words if word.isdecimal()), tuple(words[-2:])

    keys = {key(name) for name in targets}
    by_key: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for name in names:
        if (own := key(name)) in keys:
            by_key.setdefault(own, []).append(name)

    def place(name: str) -> str:
        alike = by_key.get(key(name), [])
        return name if name in alike else alike[0] if len(alike) == 1 else ""

    return place


def _refused(where: str, why: str) -> CheckpointError:
    return CheckpointError(f"{where}: the adapter is not laid over its base: {why}.", _MERGE)
