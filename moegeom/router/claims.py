"""What a checkpoint says of its routers or leaves to engines: gating function, exclusions, and
numbers beyond what is usual.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.core.text import quoted
from moegeom.router.family import SIZE, Family, Range, Setting, StackSpec, TensorName
from moegeom.router.match import Match
from moegeom.router.plan import VECTORS, RouterPlan, Values
from moegeom.router.quantised_modules import Quantisation, quantisation_tables
from moegeom.router.rule import dense_elsewhere
from moegeom.router.settings import Settings

#: Engines load what is larger as infinity: any of them, and those that load a model in the dtype
#: of its config. bfloat16 reaches as far as float32.
_FLOAT32 = float(np.finfo(np.float32).max)
_FLOAT16 = float(np.finfo(np.float16).max)


def claims_of(
    family: Family,
    settings: Settings,
    matches: Sequence[Match],
    plans: Sequence[RouterPlan],
    routers: Sequence[Router],
    values: Values,
) -> dict[str, Any]:
    """Facts for ``run.json``: ``gating``, ``quantisation``, which is empty where the config asks
    for none, and ``ranges``, what is beyond the usual range. ``dense_elsewhere``, where there is
    any, are routers in layers that an engine takes as dense.

    Raises
    ------
    RouterError
        Where the config says a number that no rule takes.
    """
    named = str(settings.config.get("dtype") or settings.config.get("torch_dtype"))
    is_half = named.removeprefix("torch.") in ("float16", "half")
    beyond = [
        *_unusual_settings(settings, plans),
        *_unusual_tensors(plans, routers, values, _FLOAT16 if is_half else _FLOAT32),
    ]
    dense = list(_dense_elsewhere(family, settings, matches))
    return {
        "gating": {"unsaid": list(_unsaid(family, settings, matches))},
        "quantisation": _quantisation(settings, plans),
        "ranges": {"beyond": beyond},
    } | ({"dense_elsewhere": dense} if dense else {})


def settings_of(record: Any, of_config: bool = True) -> Iterator[Setting]:
    """Every setting of a record, and of those in it, that is a number; those that the config holds,
    unless all are meant.
    """
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        if isinstance(value, Setting):
            yield from [value] * (value.range is not None and (bool(value.keys) or not of_config))
        elif dataclasses.is_dataclass(value) and not isinstance(value, TensorName):
            yield from settings_of(value, of_config)


def _unusual_settings(
    settings: Settings, plans: Sequence[RouterPlan]
) -> Iterator[Mapping[str, Any]]:
    """Numbers of the config beyond the usual range, each place once."""
    by_place: dict[str, Mapping[str, Any]] = {}
    for spec in {id(plan.match.spec): plan.match.spec for plan in plans}.values():
        own = settings.under(spec.config_roots)
        layers = [plan.match.layer for plan in plans if plan.match.spec is spec]
        for setting in filter(own.has, settings_of(spec)):
            is_listed = isinstance(own.get(setting)[1], list)
            for at in map(own.at, layers) if is_listed else (own,):
                place, value = at.get(setting)
                if value is not None and setting.range is not None:
                    number = (at.integer if setting.range.is_whole else at.number)(setting)
                    if number != setting.zero and not setting.range.is_usual(number):
                        by_place[place] = _beyond(f"config.json: {place} is", number, setting.range)
    yield from by_place.values()


def _unusual_tensors(
    plans: Sequence[RouterPlan], routers: Sequence[Router], values: Values, most: float
) -> Iterator[Mapping[str, Any]]:
    """Rows and vectors of routers whose largest entry is beyond the usual range.

    ``most`` is the largest number of the dtype that the config names; models keep the selection
    bias in float32.
    """
    for plan, router in zip(plans, routers, strict=True):
        name = plan.stored.tensors[0].name
        parts: list[tuple[str, str, np.ndarray | None, Range]] = [
            (name, "router rows", router.weight, SIZE),
            (name, "rows of shared experts", router.shared_rows, SIZE),
        ]
        for part, vector in plan.vectors.items():
            numbers = router.gain if part == "gain" else vector.values(values)
            parts.append((vector.info.name, VECTORS[part].what, numbers, VECTORS[part].range))
        for name, what, numbers, limits in parts:
            if numbers is not None and not limits.is_usual(size := _largest(numbers)):
                place = f"tensor '{name}' ({what}): its largest entry is"
                reach = _FLOAT32 if what == VECTORS["selection_bias"].what else most
                yield _beyond(place, size, limits, reach) | {"router": router.name}


def _largest(numbers: np.ndarray) -> float:
    """The largest size of an entry; those that are not finite are found by checks of their own."""
    with np.errstate(invalid="ignore"):
        size = float(max(numbers.max(), -numbers.min()))
    if math.isfinite(size):
        return size
    return float(np.abs(numbers).max(where=np.isfinite(numbers), initial=0.0))


def _beyond(place: str, number: float, limits: Range, most: float = _FLOAT32) -> dict[str, Any]:
    dtype = "" if number <= most else "float16" if number <= _FLOAT32 else "float32"
    is_legal = limits.holds(number) and not dtype
    kind, ends = "usual" if is_legal else "legal", limits.ends(is_usual=is_legal)
    limit = f"the largest of {dtype} is {most:g}" if dtype else f"{kind} is {ends}"
    text = f"{place} {number:g}, {limit}"
    return {"router": "", "text": text, "is_legal": is_legal, "beyond_dtype": dtype}


def _dense_elsewhere(
    family: Family, settings: Settings, matches: Sequence[Match]
) -> Iterator[Mapping[str, str]]:
    """Routers in layers that engines take as dense by a key that the family does not read, or in
    which they build nothing.
    """
    for spec in {id(match.spec): match.spec for match in matches}.values():
        own = {m.layer: m.name for m in matches if m.spec is spec and m.stack == spec.name}
        for layer, (key, value) in dense_elsewhere(family, spec, settings, list(own)).items():
            yield {"router": own[layer], "key": key, "value": value}
        more, end = _end_of_layers(spec, settings.under(spec.config_roots))
        for match in matches:
            if match.spec is spec and match.layer >= end:
                yield {"router": match.name, "key": _FURTHER.keys[0], "value": more}


#: How many layers for further tokens stand behind those of the model.
_FURTHER = Setting(("num_nextn_predict_layers",))


def _end_of_layers(spec: StackSpec, settings: Settings) -> tuple[str, float]:
    """How many layers for further tokens the config says there are, and the first layer behind
    them; infinity where it does not say.
    """
    if not spec.mtp_from or not spec.mtp_from.keys or not settings.has(_FURTHER):
        return "", math.inf
    more = settings.get(_FURTHER)[1]
    return quoted(more, 40), settings.integer(spec.mtp_from) + (more if type(more) is int else 0)


def _unsaid(
    family: Family, settings: Settings, matches: Iterable[Match]
) -> Iterator[Mapping[str, str]]:
    """Keys that decide how experts are scored and that the config lacks, and who takes what."""
    source = " ".join(family.source.split()[:2])
    specs = {match.spec.score.keys: match.spec for match in matches}
    for keys, spec in specs.items():
        score = spec.score
        if keys and not settings.under(spec.config_roots).has(Setting(keys)):
            taken = score.values.get(score.default, score.default).replace("_", "-")
            yield {
                "key": keys[0],
                "assumed": f"{taken}, the default of {source}",
                "others": "other engines have other defaults",
            }
    for key, taken in family.engines_read.items():
        if not settings.has(Setting((key,))):
            yield {"key": key, "assumed": f"what {source} does", "others": taken}


def _quantisation(settings: Settings, plans: Iterable[RouterPlan]) -> Mapping[str, Any]:
    """Every router that is stored plain, its module, and whether any table covers it, and every
    other one, and whether any leaves it out; the first table that covers most stands for all.
    """
    tables = quantisation_tables(settings.config, settings.roots)
    quantisations = [one for place, table in tables if (one := Quantisation.of(place, table))]
    plain = {
        plan.match.name: plan.match.stem.removesuffix(".")
        for plan in plans
        if plan.stored.scheme == "plain"
    }
    covered = [one.covers(list(plain.values())) for one in quantisations]
    if not quantisations:
        return {}
    packed = {
        plan.match.name: (plan.match.stem.removesuffix("."), plan.stored.scheme)
        for plan in plans
        if plan.stored.scheme != "plain"
    }
    left_out = [one.covers([module for module, _ in packed.values()]) for one in quantisations]
    most = max(range(len(quantisations)), key=lambda place: (covered[place].count(True), -place))
    return {
        "method": quantisations[most].method,
        "key": quantisations[most].key,
        "plain": [
            {"router": name, "module": module, "is_covered": True in of_tables}
            | ({"is_unknown": True} if True not in of_tables and None in of_tables else {})
            for (name, module), *of_tables in zip(plain.items(), *covered, strict=True)
        ],
        "packed": [
            {"router": name, "module": module, "scheme": scheme, "is_left_out": False in of_tables}
            for (name, (module, scheme)), *of_tables in zip(packed.items(), *left_out, strict=True)
        ],
    }
