"""Experts in another order: the parts of a checkpoint that move along, and those that do not."""

import re
from collections.abc import Sequence

import numpy as np

from tests.museum.checkpoint import Checkpoint

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
