"""Values of ``config.json``, typed; a missing or wrong one is an error that names its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moegeom.core.documents import value_at
from moegeom.core.errors import GATING_UNSAID, OUT_OF_RANGE, InternalError, RouterError
from moegeom.router.family import COUNT, LAYERS, Choice, Range, Setting, Value


@dataclass(frozen=True)
class Settings:
    """A config read through the eyes of one family.

    A key is looked up in each of ``roots`` (nested tables, "" for the config itself); the first
    root that has one of the aliases counts.
    """

    config: Mapping[str, Any]
    roots: tuple[str, ...] = ("",)
    layer: int | None = None

    def at(self, layer: int) -> Settings:
        """The same config, of whose lists only the entry of one layer is seen."""
        return replace(self, layer=layer)

    def under(self, roots: tuple[str, ...]) -> Settings:
        """The same config with other roots; the same ones for none."""
        return replace(self, roots=roots) if roots else self

    def has(self, setting: Setting) -> bool:
        """True when the value is given, in the family file or in the config (null is not given)."""
        is_in_family = setting.value is not None or setting.default is not None
        return is_in_family or bool(self._found(setting))

    def is_default(self, setting: Setting) -> bool:
        """True when the config does not say it and the family file does."""
        return setting.value is None and setting.default is not None and not self._found(setting)

    def is_null(self, setting: Setting) -> bool:
        """True when the config says null, and nothing else."""
        return not self._found(setting) and any(
            _holds(self.config, f"{root}.{key}" if root else key)
            for root in self.roots
            for key in setting.keys
        )

    def get(self, setting: Setting) -> tuple[str, Any]:
        """What to call the setting in a message, and its value."""
        if setting.value is not None:
            return "the family's value", setting.value
        entries = self._found(setting)
        if not entries and setting.default is not None:
            default = setting.default
            return "the family's default", list(default) if isinstance(default, tuple) else default
        if not entries:
            aliases = " (also looked for: " + ", ".join(f"'{k}'" for k in setting.keys[1:]) + ")"
            raise RouterError(
                f"config.json: key '{setting.keys[0]}' is missing or null"
                f"{aliases if len(setting.keys) > 1 else ''}.",
                "The selection rule depends on it; is this the model's own config.json?",
            )
        (key, value), *others = entries.items()
        for other, differing in others:
            if differing != value:
                raise RouterError(
                    f"config.json: '{key}' is {_short(value)} and '{other}' is "
                    f"{_short(differing)}, but they mean the same."
                )
        if self.layer is not None and isinstance(value, list) and self.layer < len(value):
            return f"'{key}[{self.layer}]'", value[self.layer]
        if setting.values:
            return f"'{key}'", _meant(f"'{key}'", value, setting.values)
        return f"'{key}'", value

    def choose(self, choice: Choice) -> str:
        """The step that the config selects."""
        if choice.step:
            return choice.step
        entries = self._found(Setting(choice.keys))
        is_unset = bool(entries) and {str(value) for value in entries.values()} == {choice.unset}
        if is_unset or (not entries and not choice.default):
            state = f"{choice.unset}, which names no" if is_unset else "not given, which names the"
            raise RouterError(
                f"'{choice.keys[0]}' is {state} gating function; without it engines guess, and "
                "not all the same.",
                f"Write it into the file: {_listed(choice.values)}.",
                code=GATING_UNSAID,
            )
        key, value = self.get(Setting(choice.keys)) if entries else ("", choice.default)
        is_name = isinstance(value, str) or type(value) is int
        step = choice.values.get(str(value)) if is_name else None
        if step is None:
            raise _wrong(key or f"'{choice.keys[0]}'", value, " or ".join(map(repr, choice.values)))
        return step

    def text_is(self, key: str, allowed: tuple[str, ...]) -> bool:
        """True when the key is given and has one of the values."""
        entries = self._found(Setting((key,)))
        return any(value in allowed for value in entries.values())

    def says(self, condition: str) -> bool:
        """True for ``key=value`` of the config, and for a key alone that is true."""
        key, equals, value = condition.partition("=")
        if equals:
            return self.text_is(key, (value,))
        return self.flag(Setting((key,), default=False))

    def entries(self, setting: Setting) -> list[Any] | None:
        """A list with an entry for each layer; None when it is not given."""
        if not self.has(setting):
            return None
        key, value = self.get(setting)
        if not isinstance(value, list) or len(value) > LAYERS.most:
            raise _wrong(key, value, "a list with an entry for each layer")
        return value

    def integer(self, setting: Setting) -> int:
        """An integer of its range."""
        key, value = self.get(setting)
        if type(value) is not int or not _range(setting).holds(value):
            raise _out_of(_range(setting), key, value)
        for other, sign in ((setting.plus, 1), (setting.minus, -1)):
            part = Setting((other,), default=0, range=COUNT)
            value += sign * self.integer(part) if other else 0
        if not _range(setting).holds(value):
            taken = self.integer(Setting((setting.minus,), range=COUNT))
            most = value + taken - int(_range(setting).least)
            raise _wrong(
                f"'{setting.minus}'", taken, f"at most {most}, as {key} is {value + taken}"
            )
        return value

    def number(self, setting: Setting) -> float:
        """A number of its range."""
        key, value = self.get(setting)
        try:
            number = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if setting.zero is not None and number == 0.0:
            return setting.zero
        if setting.over and number != 0.0:
            number = setting.over / number
        if not _range(setting).holds(number):
            raise _out_of(_range(setting), key, value)
        return number

    def bound(self, setting: Setting) -> float:
        """A number of its range; inf where it is not given, and where a list by layer has null."""
        is_given = self.has(setting) and self.get(setting)[1] is not None
        return self.number(setting) if is_given else math.inf

    def flag(self, setting: Setting) -> bool:
        """True or false."""
        key, value = self.get(setting)
        if not isinstance(value, bool):
            raise _wrong(key, value, "true or false")
        return value

    def layer_list(self, setting: Setting) -> frozenset[int]:
        """A set of layers; empty when it is not given."""
        if not self.has(setting):
            return frozenset()
        key, value = self.get(setting)
        if not isinstance(value, list) or not all(type(v) is int for v in value):
            raise _wrong(key, value, "a list of layers")
        return frozenset(value)

    def _found(self, setting: Setting) -> dict[str, Any]:
        for root in self.roots:
            paths = [f"{root}.{key}" if root else key for key in setting.keys]
            values = {path: value_at(self.config, path) for path in paths}
            entries = {path: value for path, value in values.items() if value is not None}
            if entries:
                return entries
        return {}


def _holds(config: Any, path: str) -> bool:
    """True when there is a value at a dotted path, null included."""
    table, _, key = path.rpartition(".")
    holder = value_at(config, table) if table else config
    return isinstance(holder, Mapping) and key in holder


def _meant(key: str, value: Any, values: Mapping[str, Value]) -> Value:
    """What a value of the config stands for; true and false are spelled as in JSON."""
    spelled = str(value).lower() if isinstance(value, bool) else str(value)[:60]
    if spelled not in values:
        raise _wrong(key, value, " or ".join(values))
    return values[spelled]


def _listed(values: Mapping[str, str]) -> str:
    """``1 is softmax, 2 is sigmoid``."""
    return ", ".join(f"{value} is {step.replace('_', '-')}" for value, step in values.items())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _wrong(key: str, value: Any, expected: str, code: str = "") -> RouterError:
    return RouterError(
        f"config.json: {key} is {_short(value)} ({type(value).__name__}), expected {expected}.",
        code=code,
    )


def _out_of(limits: Range, key: str, value: Any) -> RouterError:
    return _wrong(key, value, limits.text, OUT_OF_RANGE)


def _range(setting: Setting) -> Range:
    if setting.range is None:
        raise InternalError(f"Setting {setting.keys} is read as a number and has no range.")
    return setting.range
