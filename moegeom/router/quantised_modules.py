"""Which modules the ``quantization_config`` of a checkpoint covers, by the lists that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

from moegeom.core.text import quoted

#: Where configs hold it.
_PLACES = ("", "text_config", "llm_config", "language_config")
#: By which names; engines read the second, of older compressed-tensors, where the first is absent.
_NAMES = ("quantization_config", "compression_config")

#: Under these keys quantisers list modules that they leave alone (compressed-tensors, transformers,
#: vLLM, ModelOpt, Quark, HQQ, bitsandbytes).
_EXCLUSIONS = (
    "ignore",
    "modules_to_not_convert",
    "ignored_layers",
    "exclude_modules",
    "exclude",
    "skip_modules",
    "llm_int8_skip_modules",
)

#: More entries than any list has: one for each module of the largest model.
_MOST_ENTRIES = 100_000

#: A pattern beyond these is not evaluated: it may take for ever.
_LONGEST, _MOST_REPEATS = 200, 5
_REPEAT = re.compile(r"(?<!\\)[*+?{]")
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")


@dataclass(frozen=True)
class Quantisation:
    """What a config asks to be quantised.

    ``targets`` are kinds or names of modules, "Linear" for all linear ones; ``excluded`` names,
    globs, or regular expressions behind ``re:``. ``key`` is the list that was read, or the one that
    is usual.
    """

    method: str
    key: str
    targets: tuple[str, ...]
    excluded: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Quantisation | None:
        """That of a config; None where it asks for none."""
        tables = (config.get(place) if place else config for place in _PLACES)
        named = ((n, t.get(n)) for t in tables if isinstance(t, Mapping) for n in _NAMES)
        name, table = next(((n, t) for n, t in named if isinstance(t, Mapping) and t), ("", None))
        if table is None:
            return None
        keys = [key for key in _EXCLUSIONS if isinstance(table.get(key), Sequence)]
        listed = (entry for key in keys for entry in table[key])
        excluded = [*islice(listed, _MOST_ENTRIES), *_left_alone(table)]
        return cls(
            method=quoted(str(table.get("quant_method", "?")), 40),
            key=f"{name}.{keys[0] if keys else _EXCLUSIONS[1]}",
            targets=tuple(_targets(table)) or ("Linear",),
            excluded=tuple(entry for entry in excluded if isinstance(entry, str) and entry),
        )

    def covers(self, module: str) -> bool:
        """True when a linear module of this name is to be quantised."""
        if any(_names(entry, module) for entry in self.excluded):
            return False
        return "Linear" in self.targets or any(_names(entry, module) for entry in self.targets)


def _targets(table: Mapping[str, Any]) -> Iterator[str]:
    """Targets of all groups, as compressed-tensors writes them."""
    groups = table.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        for target in targets if isinstance(targets, list) else ():
            if isinstance(target, str):
                yield target


def _left_alone(table: Mapping[str, Any]) -> Iterator[str]:
    """Modules that a table by name leaves in 16 bits (AutoRound) or takes out (GPTQModel)."""
    extra, dynamic = table.get("extra_config"), table.get("dynamic")
    for name, entry in extra.items() if isinstance(extra, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("bits") in (16, 32):
            yield name
    for name in dynamic if isinstance(dynamic, Mapping) else ():
        if str(name).startswith("-:"):
            yield f"re:{name.removeprefix('-:')}"


def _names(entry: str, module: str) -> bool:
    """True when an entry of a list means this module; also where that cannot be told."""
    if entry.startswith("re:"):
        return _fits(entry.removeprefix("re:"), module)
    if "*" in entry:
        return fnmatchcase(module, entry) or fnmatchcase(module, f"*.{entry}")
    return f".{entry}." in f".{module}." or entry.endswith(f".{module}")


def _fits(pattern: str, module: str) -> bool:
    repeats = len(_REPEAT.findall(pattern))
    if len(pattern) > _LONGEST or repeats > _MOST_REPEATS or _REPEATED_GROUP.search(pattern):
        return True
    try:
        return re.match(pattern, module) is not None
    except re.error:
        return True
