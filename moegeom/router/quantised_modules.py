"""Which modules engines quantise, by the lists in the config and in the files beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from itertools import islice
from typing import Any

from moegeom.checkpoint.shards import CONFIGS, FILES_BESIDE, QUANTISATION_PLACES, QuantisationPlace
from moegeom.core.limits import QUANTISED_MODULES, QUANTISER_PATTERN_LENGTH, QUANTISER_STEPS
from moegeom.core.text import quoted

#: Where configs hold a table, beside where the family has its settings.
_ROOTS = ("", "text_config", "llm_config", "language_config")

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

#: Every linear module, as compressed-tensors writes it; and what stands before an expression.
_LINEAR, _EXPRESSION = "Linear", "re:"

#: Of ModelOpt: each layer has a method of its own.
_MIXED = "MIXED_PRECISION"

_ESCAPED, _REPEAT = re.compile(r"\\.", re.DOTALL), re.compile(r"[*+?{]")

#: A group that is repeated, or one of a kind that may hide that it is: a comment, or flags.
_NOT_TRIED = re.compile(r"\)[*+{]|\(\?[^:=!<]")

#: Steps that a pattern takes to compile, and to be tried once.
_TO_COMPILE, _TO_TRY = 10_000, 50


def quantisation_tables(
    config: Mapping[str, Any], roots: Sequence[str] = ()
) -> Iterator[tuple[QuantisationPlace, Mapping[str, Any]]]:
    """Every table that an engine may read, the one that most prefer first.

    ``roots`` are the paths of the config where its family has its settings.
    """
    beside = config.get(FILES_BESIDE)
    files = beside if isinstance(beside, Mapping) else {}
    has_table: set[str] = set()
    for place in QUANTISATION_PLACES:
        inner = dict.fromkeys((*_ROOTS, *roots)) if place.file == CONFIGS[0] else ("",)
        holder = config if place.file == CONFIGS[0] else files.get(place.file)
        for root in inner:
            table = _at(holder, f"{root}.{place.path}".strip("."))
            # a file that holds a table further in is no table itself
            if isinstance(table, Mapping) and table and place.file not in has_table:
                yield place, table
                if place.file != CONFIGS[0]:
                    has_table.add(place.file)


def _at(holder: Any, path: str) -> Any:
    for key in filter(None, path.split(".")):
        holder = holder.get(key) if isinstance(holder, Mapping) else None
    return holder


@dataclass(frozen=True)
class Quantisation:
    """What a table asks to be quantised.

    ``targets`` are kinds or names of modules, "Linear" for all linear ones; ``excluded`` names,
    globs, or regular expressions behind ``re:``. ``key`` is the list that was read, or the one that
    is usual there.
    """

    method: str
    key: str
    targets: tuple[str, ...]
    excluded: tuple[str, ...]

    @classmethod
    def of(cls, place: QuantisationPlace, table: Mapping[str, Any]) -> Quantisation | None:
        """That of a table; None where it asks for none, as one of a cache alone."""
        if place.by_tensor:
            return cls(
                quoted(str(table.get("model_quant_type", "?")), 40),
                place.name,
                tuple(_described(table)),
                (),
            )
        method = table.get("quant_method") or table.get("quant_algo")
        if method is None and "quant_algo" in table:
            return None
        keys = [key for key in _EXCLUSIONS if isinstance(table.get(key), Sequence)]
        listed = (entry for key in keys for entry in table[key])
        excluded = [*islice(listed, QUANTISED_MODULES), *_left_alone(table)]
        key = keys[0] if keys else place.usual
        return cls(
            method=quoted(str(method or "?"), 40),
            key=f"{place.name}.{key}" if place.path else f"{place.name}: {key}",
            targets=tuple(_targets(table)) or (_LINEAR,),
            excluded=tuple(entry for entry in excluded if isinstance(entry, str) and entry),
        )

    def covers(self, modules: Sequence[str]) -> list[bool | None]:
        """For each linear module of these names, whether it is to be quantised; None where a
        pattern would have to be tried that may take for ever, or is none.
        """
        excluded = _matches(self.excluded, modules)
        is_target = _matches(self.targets, modules)
        everywhere = _LINEAR in self.targets
        return [
            None
            if excluded[name] is None
            else not excluded[name] and (everywhere or is_target[name])
            for name in modules
        ]


def _targets(table: Mapping[str, Any]) -> Iterator[str]:
    """Targets of all groups, as compressed-tensors writes them, or layers, as ModelOpt does."""
    groups = table.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        for target in targets if isinstance(targets, list) else ():
            if isinstance(target, str):
                yield target
    layers = table.get("quantized_layers")
    if str(table.get("quant_algo", _MIXED)).upper() == _MIXED and isinstance(layers, Mapping):
        yield from layers


def _described(table: Mapping[str, Any]) -> Iterator[str]:
    """Modules whose weight ModelSlim describes as quantised."""
    for name, kind in table.items():
        if isinstance(kind, str) and name.endswith(".weight") and kind.upper() != "FLOAT":
            yield name.removesuffix(".weight")


def _left_alone(table: Mapping[str, Any]) -> Iterator[str]:
    """Modules that a table by name leaves in 16 bits (AutoRound) or takes out (GPTQModel)."""
    extra, dynamic = table.get("extra_config"), table.get("dynamic")
    for name, entry in extra.items() if isinstance(extra, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("bits") in (16, 32):
            yield name
    for name in dynamic if isinstance(dynamic, Mapping) else ():
        if str(name).startswith("-:"):
            yield f"re:{name.removeprefix('-:')}"


def _matches(entries: Sequence[str], modules: Sequence[str]) -> dict[str, bool | None]:
    """Whether an entry of a list means each module; None where that cannot be told.

    A name means a module that has it anywhere between dots, or that it ends with.
    """
    patterns = [entry for entry in entries if entry.startswith(_EXPRESSION) or "*" in entry]
    names = set(entries) - set(patterns)
    lengths = sorted({len(module) for module in modules})
    ends = {entry[-n:] for entry in names for n in lengths if entry[-n - 1 : -n] == "."}
    matches = {m: m in ends or not names.isdisjoint(_parts(m)) for m in modules}
    steps, is_open = 0.0, False
    for pattern in patterns:
        left = [module for module in modules if not matches[module]]
        cost = _cost(pattern, left)
        is_dear = steps + cost > QUANTISER_STEPS
        expression = None if is_dear else _expression(pattern)
        is_open |= expression is None
        if is_dear and cost <= QUANTISER_STEPS:  # those before it were too many
            break
        if expression is not None:
            steps += cost
            matches.update((module, True) for module in left if expression.match(module))
    return {
        module: is_match or (None if is_open else False) for module, is_match in matches.items()
    }


def _parts(module: str) -> Iterator[str]:
    """Every run of the words between the dots of a name."""
    words = module.split(".")
    for first in range(len(words)):
        for last in range(first, len(words)):
            yield ".".join(words[first : last + 1])


def _cost(pattern: str, modules: Sequence[str]) -> float:
    """Steps of trying a pattern on modules, about: places of its repeats, and ways to choose."""
    if not pattern.startswith(_EXPRESSION):
        return _TO_COMPILE + _TO_TRY * len(modules) * (1 + pattern.count("*"))
    bare = _ESCAPED.sub("x", pattern)
    if len(pattern) > QUANTISER_PATTERN_LENGTH or _NOT_TRIED.search(bare):
        return math.inf
    repeats, choices = len(_REPEAT.findall(bare)), bare.count("|")
    longest = max(map(len, modules), default=1)
    ways = 2.0**choices * longest**repeats / math.factorial(repeats)
    return _TO_COMPILE + len(modules) * (_TO_TRY + ways)


def _expression(pattern: str) -> re.Pattern[str] | None:
    """A glob, anywhere behind a dot, or an expression; None for one that is broken."""
    if not pattern.startswith(_EXPRESSION):
        return re.compile(rf"(?:.*\.)?{translate(pattern)}", re.DOTALL)
    try:
        return re.compile(pattern.removeprefix(_EXPRESSION))
    except (re.error, OverflowError, RecursionError):
        return None
