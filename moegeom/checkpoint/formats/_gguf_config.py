"""The settings of a GGUF header in the form of a ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moegeom.core.errors import CheckpointError

_GENERAL = "general."
_ARCHITECTURE = "general.architecture"


def config_of(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the header says about the model.

    Returns
    -------
    dict
        ``model_type`` is ``"gguf"``; ``architecture`` is that of the file, whose settings stand
        beside it, without their prefix and as nested tables. ``general`` holds the settings of
        every model and is flat: ``license`` and ``license.name`` are both values.

    Raises
    ------
    CheckpointError
        If the architecture is not given, or a key is both a value and a table.
    """
    architecture = settings.get(_ARCHITECTURE)
    if not isinstance(architecture, str) or not architecture:
        found = "is not given" if architecture is None else f"is {architecture!r}"
        raise CheckpointError(f"{where}: {_ARCHITECTURE} {found}, expected a name.")
    config: dict[str, Any] = {
        "model_type": "gguf",
        "architecture": architecture,
        "general": dict(_below(settings, _GENERAL)),
    }
    prefix = f"{architecture}."
    for key, value in _below(settings, prefix):
        *path, last = key.split(".")
        table: Any = config
        for step in path:
            table = table.setdefault(step, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict) or last in table or path[:1] == ["general"]:
            raise CheckpointError(
                f"{where}: {prefix + key!r} contradicts another key, which is a value where this "
                "one needs a table, or a table where this one is a value."
            )
        table[last] = value
    return config


def _below(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    return (
        (key.removeprefix(prefix), value)
        for key, value in settings.items()
        if key.startswith(prefix)
    )
