"""Names for the tensors of a nested checkpoint: the keys on the way to them, joined by dots.

The same names as torch.distributed.checkpoint gives: ``{"model": {"a.b": tensor}}`` holds
``model.a.b``, and the second item of a list ``l`` is ``l.1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.checkpoint.formats._pytorch_globals import StoredTensor, UnreadableTensor
from moegeom.core.errors import CheckpointError

Tensor = StoredTensor | UnreadableTensor

#: Characters of all names, and items looked at: one dict may be reached on a million ways, and a
#: list may hold itself. The largest public checkpoint needs a tenth.
_WORK = 30_000_000
_WORK_PER_NAME = 100


def flatten(root: Any, where: str) -> Mapping[str, Tensor]:
    """The tensors of whatever was saved, in its order, by name; all else is left out.

    Raises
    ------
    CheckpointError
        If ``root`` is no dict or list, two tensors have one name, or there is no end of them.
    """
    if isinstance(root, Tensor):
        raise CheckpointError(
            f"{where}: holds a single tensor without a name, expected a state dict.",
            "Save a dict: torch.save({'name': tensor}, file).",
        )
    if not isinstance(root, dict | list | tuple):
        raise CheckpointError(f"{where}: holds a {type(root).__name__}, expected a state dict.")
    found: dict[str, Tensor] = {}
    waiting: list[tuple[str, Any]] = [("", root)]
    left = _WORK
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Tensor):
            name = path[1:]
            if name in found:
                raise CheckpointError(f"{where}: holds two tensors named {name!r}.")
            found[name] = value
            continue
        inner = _items(value)
        left -= len(value) + len(inner) * (_WORK_PER_NAME + len(path))
        left -= sum(len(str(key)) for key, _ in inner)
        if left < 0:
            raise CheckpointError(f"{where}: holds too many tensors, or dicts inside themselves.")
        waiting.extend((f"{path}.{key}", item) for key, item in reversed(inner))
    return found


def _items(value: Any) -> list[tuple[str | int, Any]]:
    """Items that are tensors or may hold some, under keys that can be part of a name."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    kinds = (StoredTensor, UnreadableTensor, dict, list, tuple)
    return [
        (key, item) for key, item in pairs if isinstance(item, kinds) and isinstance(key, str | int)
    ]
