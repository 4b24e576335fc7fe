"""Checkpoints in memory: read, changed tensor by tensor, renumbered, and written again."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from moegeom.checkpoint.open import open_checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)

Part = Literal["weight", "gain", "bias"]

#: Names of the parts of a router; the same in every family that the museum uses.
PARTS: Mapping[Part, str] = {
    "weight": "model.layers.{layer}.mlp.gate.weight",
    "gain": "model.layers.{layer}.post_attention_layernorm.weight",
    "bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
}

#: New values of one part of one layer, from its old values in float64.
Change = Callable[[np.ndarray, int], np.ndarray]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]

    @property
    def layers(self) -> list[int]:
        numbers = range(int(self.config["num_hidden_layers"]))
        return [layer for layer in numbers if name_of("weight", layer) in self.tensors]

    def changed(
        self,
        tensors: Mapping[str, np.ndarray | None] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> "Checkpoint":
        """With other tensors, None for one that goes, and other values in the config."""
        kept = {n: t for n, t in (self.tensors | (tensors or {})).items() if t is not None}
        return dataclasses.replace(self, config={**self.config, **(config or {})}, tensors=kept)

    def edited(
        self,
        part: Part,
        change: Change,
        layers: Iterable[int] | None = None,
        dtype: np.dtype | None = None,
    ) -> "Checkpoint":
        """With one part of every router, or of some, changed and rounded to its dtype."""
        new = {}
        for layer in self.layers if layers is None else layers:
            old = self.tensors[name_of(part, layer)]
            values = np.asarray(change(old.astype(np.float64), layer), dtype=np.float64)
            new[name_of(part, layer)] = np.ascontiguousarray(values.astype(dtype or old.dtype))
        return self.changed(new)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        save_file(dict(self.tensors), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(dict(self.config)), encoding="utf-8")
        return folder


Build = Callable[[], Checkpoint]


def edited(
    model: Build,
    part: Part,
    change: Change,
    layers: Iterable[int] | None = None,
    dtype: np.dtype | None = None,
) -> Build:
    return lambda: model().edited(part, change, layers, dtype)


def name_of(part: Part, layer: int) -> str:
    return PARTS[part].format(layer=layer)


def read_checkpoint(path: Path) -> Checkpoint:
    store = open_checkpoint(path)
    tensors = {name: np.array(store.read(name)) for name in store.names()}
    return Checkpoint(dict(store.config), tensors)


def rounded(values: np.ndarray, dtype: np.dtype = BF16) -> np.ndarray:
    return np.asarray(values).astype(dtype).astype(np.float64)


_EXPERT = re.compile(r"(model\.layers\.(\d+)\.mlp\.experts\.)(\d+)(\..+)")


def permuted(
    model: Checkpoint,
    order: Sequence[int],
    parts: Sequence[str],
    layers: Sequence[int] | None = None,
) -> Checkpoint:
    """Expert ``order[i]`` becomes expert i in the given parts: "weight", "bias", "experts"."""
    chosen = model.layers if layers is None else layers
    place = np.argsort(order)
    new = model
    for part in ("weight", "bias"):
        if part in parts:
            new = new.edited(part, lambda values, _: values[list(order)], chosen)
    if "experts" not in parts:
        return new
    kept, moved = {}, {}
    for name, tensor in new.tensors.items():
        match = _EXPERT.fullmatch(name)
        if match and int(match[2]) in chosen:
            moved[f"{match[1]}{place[int(match[3])]}{match[4]}"] = tensor
        else:
            kept[name] = tensor
    return Checkpoint(new.config, kept | moved)


def text_order(experts: int) -> list[int]:
    """0, 1, 10, 11, ..., 2, 20, ...: what sorting names as text makes of numbers."""
    return sorted(range(experts), key=str)


def swapped(experts: int) -> list[int]:
    order = list(range(experts))
    order[2], order[3] = 3, 2
    return order


def within_groups(experts: int, groups: int) -> list[int]:
    """The groups in another order, and each turned round: nothing leaves its group."""
    size = experts // groups
    return [g * size + e for g in reversed(range(groups)) for e in reversed(range(size))]
