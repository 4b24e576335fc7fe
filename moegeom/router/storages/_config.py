"""What ``config.json`` says about quantisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.checkpoint.shards import QUANTISATION_PLACES
from moegeom.core.errors import RouterError
from moegeom.core.limits import QUANTISER_GROUPS
from moegeom.router.family import Setting
from moegeom.router.integrity import STORAGE_UNKNOWN
from moegeom.router.quantised_modules import quantisation_tables
from moegeom.router.settings import Settings

#: What is named where there is no table.
_USUAL = QUANTISATION_PLACES[0]


def look_up(settings: Settings, *keys: str) -> tuple[str, Any]:
    """How to call the first of the keys that is given, and its value; None when none is. Of several
    tables the one that most engines prefer counts.
    """
    place, table = next(quantisation_tables(settings.config, settings.roots), (_USUAL, {}))
    # Its lists are not by layer.
    own = Settings(table)
    setting = Setting(keys)
    if not own.has(setting):
        return f"'{place.name}.{keys[0]}'", None
    name, value = own.get(setting)
    return f"'{place.name}.{name.strip(chr(39))}'", value


def integer(settings: Settings, *keys: str) -> int | None:
    """An integer that is -1 or positive; None when it is not given."""
    name, value = look_up(settings, *keys)
    if value is not None and (type(value) is not int or not (value == -1 or 0 < value < 2**31)):
        raise wrong(name, value, "a positive integer or -1")
    return value


def flag(settings: Settings, key: str) -> bool | None:
    """True or false; None when it is not given."""
    name, value = look_up(settings, key)
    if value is not None and not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def word(settings: Settings, *keys: str) -> str | None:
    """A name in small letters; None when it is not given."""
    name, value = look_up(settings, *keys)
    if value is not None and not isinstance(value, str):
        raise wrong(name, value, "a name")
    return value.lower() if value is not None else None


def pair(setting: tuple[str, Any]) -> tuple[int, int] | None:
    """Two positive integers; None when they are not given."""
    name, value = setting
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(n) is int and n > 0 for n in value):
        raise wrong(name, value, "two positive integers")
    return value[0], value[1]


def weight_recipes(settings: Settings) -> list[Mapping[str, Any]]:
    """How compressed-tensors quantised weights: the ``weights`` table of each config group."""
    name, groups = look_up(settings, "config_groups")
    if groups is None:
        return []
    if not isinstance(groups, Mapping) or len(groups) > QUANTISER_GROUPS:
        raise wrong(name, groups, f"a table of at most {QUANTISER_GROUPS} groups")
    tables = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    return [table for table in tables if isinstance(table, Mapping)]


def recipe_block(recipe: Mapping[str, Any], columns: int) -> tuple[int, int] | None:
    """Rows and columns that share a scale by a recipe; None where it is by row or by tensor."""
    structure = recipe.get("block_structure")
    if isinstance(structure, str) and len(structure) < 20:  # "128x128" in early files
        sides = structure.split("x")
        structure = [int(n) for n in sides if n.isascii() and n.isdigit()]
    block = pair(("'block_structure'", structure))
    size = recipe.get("group_size")
    if block is not None or size is None:
        return block
    if type(size) is not int or not (size == -1 or 0 < size < 2**31):
        raise wrong("'group_size'", size, "a positive integer or -1")
    return 1, columns if size == -1 else size


def wrong(name: str, value: Any, expected: str) -> RouterError:
    """The error for a value that makes no sense."""
    return RouterError(f"config.json: {name} is {str(value)[:60]}, expected {expected}.")


def not_decoded(name: str, value: Any, variant: str) -> RouterError:
    """The error for a value that makes sense and is not decoded."""
    return RouterError(
        f"config.json: {name} is {str(value)[:60]}; of such routers only {variant} is decoded.",
        "Use the original weights of this router.",
        code=STORAGE_UNKNOWN,
    )
