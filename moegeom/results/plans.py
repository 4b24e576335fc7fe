"""Differences between the plans of two runs, and whether unfinished results hold work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: What is measured, and with what; by this file an unfinished run is known again.
PLAN_FILE = "plan.json"

#: What a first pass over the files of tokens found in each of them, made before the rest.
FILES_FOLDER = "files"

#: Parts of a plan whose names are not what a person would say.
_PARTS = {"checkpoint": "router weights", "token_files": "tokens"}


def differing_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the parts in which two plans differ; each option is a part."""
    parts = _differing(before, now)
    if "options" in parts:
        options = (before.get("options"), now.get("options"))
        one, other = (option if isinstance(option, Mapping) else {} for option in options)
        parts = [*(key for key in parts if key != "options"), *_differing(one, other)]
    return list(dict.fromkeys(_PARTS.get(part, part) for part in parts))


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*one, *other} if one.get(key) != other.get(key))


def is_begun(partial: Path) -> bool:
    """Whether unfinished results hold anything that a later run can go on with."""
    return any(any(partial.glob(f"{name}/*")) for name in ("parts", "snapshots", FILES_FOLDER))
