"""Which folders in a folder hold a checkpoint: trainers write one for each of their saves."""

from __future__ import annotations

import re
from collections.abc import Callable

from moegeom.checkpoint.folder import Folder
from moegeom.core.errors import CheckpointError

#: What only a folder with weights holds.
_MARKS = (
    ".metadata",
    "model_and_optim/.metadata",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "mp_rank_00_model_states.pt",
)

#: Files that say which folder is the newest (Megatron-LM, DeepSpeed), and how its name is made of
#: what they hold.
_POINTERS: dict[str, Callable[[str], str]] = {
    "latest_checkpointed_iteration.txt": lambda text: (
        f"iter_{text:0>7}" if text.isdecimal() else text
    ),
    "latest": lambda text: text,
}

_POINTER_BYTES = 200

#: Folders that are looked into; a run keeps some hundreds of saves.
_MOST_FOLDERS = 2000


def inner_hint(folder: Folder) -> str:
    """A sentence that names the folder to pass; empty when no folder in this one is known to."""
    if folder.num_parallel > 1:  # on a server, each look is a request
        return ""
    names = [name for name in folder.files() if not name.startswith(".")]
    newest = next((name for name in map(_pointed(folder), _POINTERS) if name in names), None)
    if newest is not None:
        return f"Pass the folder {newest!r} in it, which is the newest save."
    held = [n for n in names[:_MOST_FOLDERS] if any(folder.has(f"{n}/{mark}") for mark in _MARKS)]
    if not held:
        return ""
    last = max(held, key=_natural)
    if len(held) == 1:
        return f"Pass the folder {last!r} in it, which holds a checkpoint."
    return f"Pass one of the {len(held)} folders in it that hold a checkpoint, such as {last!r}."


def _pointed(folder: Folder) -> Callable[[str], str | None]:
    def read(pointer: str) -> str | None:
        if not folder.has(pointer):
            return None
        try:
            text = folder.file(pointer).read_all(_POINTER_BYTES).decode("ascii").strip()
        except (CheckpointError, UnicodeDecodeError):  # a folder, or a file of another kind
            return None
        return _POINTERS[pointer](text)

    return read


def _natural(name: str) -> list[tuple[str, int]]:
    """Sorts step10 behind step9."""
    return [(text, int(n or 0)) for text, n in re.findall(r"(\D*)(\d{0,18})", name)]
