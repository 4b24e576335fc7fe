"""Facts of routers for ``run.json``: what a checkpoint says of them or leaves to engines (gating
function, exclusions, numbers beyond what is usual), rows that are as drawn, tables by token id.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, largest_size, upcast
from moegeom.checkpoint.store import TensorStore
from moegeom.core.digest import digest_of
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import TOKEN_TABLE_BYTES
from moegeom.core.router import EXACT_IN_BFLOAT16, Router, TableName, TokenTable, parse_layers
from moegeom.core.row_keys import layer_of
from moegeom.core.shapes import Bool, Float, Float64, Shaped
from moegeom.core.text import number_of, quoted
from moegeom.geometry.rows import drawn_errors
from moegeom.router.family import SIZE, SOME, Family, Range, Setting, StackSpec, TensorName
from moegeom.router.plain_names import with_plain_names
from moegeom.router.plan import VECTORS, Match, RouterPlan, Values
from moegeom.router.rule import dense_elsewhere
from moegeom.router.settings import Settings
from moegeom.router.storage import Quantisation, quantisation_tables

# ------------------------------------------------------------------------------------------- claims
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
            (name, "router rows", router.stored_numbers, SIZE),
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
    size = largest_size(numbers)
    return size if math.isfinite(size) else largest_size(numbers[np.isfinite(numbers)])


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
        disputed = [key for key in keys if family.engines_read.get(key, "?")]
        if disputed and not settings.under(spec.config_roots).has(Setting(keys)):
            taken = score.values.get(score.default, score.default).replace("_", "-")
            yield {
                "key": keys[0],
                "assumed": f"{taken}, the default of {source}",
                "others": "other engines have other defaults",
            }
    for key, taken in family.engines_read.items():
        if taken and not settings.has(Setting((key,))):
            yield {"key": key, "assumed": f"what {source} does", "others": taken}


def _quantisation(settings: Settings, plans: Sequence[RouterPlan]) -> Mapping[str, Any]:
    """Every router that is stored plain, its module, and whether any table covers it, and every
    other one, and whether any leaves it out; the first table that covers most stands for all.

    A module with a further parameter, such as a selection bias, is a class of its own: what
    quantises linear modules passes it over.
    """
    tables = quantisation_tables(settings.config, settings.roots)
    quantisations = [one for place, table in tables if (one := Quantisation.of(place, table))]
    plain = {
        plan.match.name: plan.match.stem.removesuffix(".")
        for plan in plans
        if plan.stored.scheme == "plain"
    }
    of_own_class = {
        plain[plan.match.name]
        for plan in plans
        for part, place in plan.match.parts.items()
        if plan.match.name in plain and part != "logit_bias"
        if place.name.startswith(plan.match.stem)
    }
    covered = [one.covers(list(plain.values()), of_own_class) for one in quantisations]
    if not quantisations:
        return {}
    packed = {
        plan.match.name: (plan.match.stem.removesuffix("."), plan.stored.scheme)
        for plan in plans
        if plan.stored.scheme != "plain"
    }
    modules = [module for module, _ in packed.values()]
    left_out = [one.covers(modules, are_packed=True) for one in quantisations]
    most = max(range(len(quantisations)), key=lambda place: (covered[place].count(True), -place))
    return {
        "method": quantisations[most].method,
        "key": quantisations[most].key,
        "by_path": quantisations[most].by_path,
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


# ------------------------------------------------------------------------------------ rows as drawn
#: Fewer rows are no group: single ones may have that length by chance.
_LEAST_ROWS = 4

#: With fewer columns a length tells nothing, and with fewer numbers a spread: of so many it is
#: known to one per cent.
_LEAST_COLUMNS, _LEAST_NUMBERS = 128, 4096

#: Directions that trained rows share, as many as are looked at.
_DIRECTIONS = 16

#: Standard errors within which figures of drawn numbers lie.
_ERRORS = 4.0


def drawn_row_facts(routers: Iterable[Router], sigma: float) -> list[dict[str, Any]]:
    """Facts for ``run.json``: by router the rows, some and not all, that are as drawn with
    ``sigma``. Rows behind a projection are no drawn numbers, and are left out.
    """
    facts = []
    for router in routers:
        with np.errstate(over="ignore"):
            norms = np.linalg.norm(router.weight, axis=1)
        count = int(_has_drawn_length(norms, sigma, router.hidden_size).sum())
        if router.projection is None and _LEAST_ROWS <= count < len(norms):
            rows = drawn_rows(router.weight.astype(np.float64), sigma)
            if rows:
                facts.append({"router": router.name, "num_rows": len(norms), "rows": rows})
    return facts


def drawn_rows(weight: Float64[np.ndarray, "experts hidden"], sigma: float) -> list[int]:
    r"""Rows that are as drawn from :math:`N(0, \sigma^2)`; none unless all of them together are.

    A row is one of them when its squared length is within four standard errors of
    :math:`D \sigma^2`, the kurtosis of its entries of 3, and its share in the r leading directions
    of rows of other lengths of :math:`r/D`, that of an independent row. Together they are, when
    the spread, mean and kurtosis of all entries, the spread of the lengths and the mean squared
    cosine, :math:`1/D` for independent rows, are too.
    """
    hidden = weight.shape[1]
    norms = np.linalg.norm(weight, axis=1)
    is_drawn = _has_drawn_length(norms, sigma, hidden)
    is_drawn &= np.abs(_kurtosis(weight)) <= _ERRORS * math.sqrt(24.0 / hidden)
    others = weight[~is_drawn & np.isfinite(norms)]
    if hidden < _LEAST_COLUMNS or not len(others):
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        is_drawn &= _alignment(weight / norms[:, None], others) <= _ERRORS
    if is_drawn.sum() < max(_LEAST_ROWS, _LEAST_NUMBERS / hidden):
        return []
    rows = weight[is_drawn] / sigma
    errors = ((rows.std() - 1.0) * math.sqrt(2.0 * rows.size), *drawn_errors(rows))
    return [] if max(map(abs, errors)) > _ERRORS else np.flatnonzero(is_drawn).tolist()


def _has_drawn_length(
    norms: Float[np.ndarray, "experts"], sigma: float, hidden: int
) -> Bool[np.ndarray, "experts"]:
    """Squared length over sigma squared: chi-squared of ``hidden`` degrees of freedom."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.abs((norms / sigma) ** 2 - hidden) <= _ERRORS * math.sqrt(2 * hidden))


def _alignment(
    unit: Float64[np.ndarray, "experts hidden"], others: Float64[np.ndarray, "others hidden"]
) -> Float64[np.ndarray, "experts"]:
    """How far the share of rows in the leading directions of others is above r/D, in errors."""
    hidden = unit.shape[1]
    count = max(1, min(len(others) // 2, _DIRECTIONS))
    _, vectors = np.linalg.eigh(others @ others.T)
    leading, _ = np.linalg.qr(others.T @ vectors[:, -count:])
    shares = ((unit @ leading) ** 2).sum(axis=1)
    return (shares * hidden - count) / math.sqrt(2.0 * count)


def _kurtosis(rows: Float64[np.ndarray, "rows hidden"]) -> Float64[np.ndarray, "rows"]:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        squares = rows**2
        return (squares**2).mean(axis=1) / squares.mean(axis=1) ** 2 - 3.0


# ------------------------------------------------------------------------------- tables by token id
#: The number of token ids.
_VOCABULARY = Setting(("vocab_size",), range=SOME)


def token_table_facts(store: TensorStore, tables: Sequence[TableName]) -> list[dict[str, Any]]:
    """What every table holds, for ``run.json``; a table that cannot be read says so."""
    plain, facts = with_plain_names(store), []
    settings = Settings(store.config, ("", "text_config"))
    num_ids = settings.integer(_VOCABULARY) if settings.has(_VOCABULARY) else 0
    for table in tables:
        one, stored = read_token_table(plain, table)
        one = one if stored is None else looked_up(one, stored)
        facts.append(asdict(one) | {"num_ids": num_ids, "weight_state": _weight(plain, table)})
    return facts


def _weight(store: TensorStore, table: TableName) -> str:
    """What is wrong with the rows beside a table, where they are plain floats."""
    try:
        if store.info(table.weight).dtype not in PLAIN_FLOATS:
            return ""
        rows = upcast(store.read(table.weight))
    except CheckpointError as error:
        return f"cannot be read ({error.message.removesuffix('.')})"
    if broken := int((~np.isfinite(rows)).any(axis=-1).sum()):
        return f"has {number_of(broken, 'row')} with values that are not finite"
    zero = int((~rows.any(axis=-1)).sum())
    return f"has {number_of(zero, 'row')} of zeros" if zero else ""


def read_token_table(
    store: TensorStore, table: TableName
) -> tuple[TokenTable, Shaped[np.ndarray, "tokens k"] | None]:
    """A table and its entries; None, and the reason, where they cannot be read.

    ``store`` has plain names.
    """
    token_table = TokenTable(table.router, table.tensor, "")
    try:
        info, experts = store.info(table.tensor), store.info(table.weight).shape[0]
        token_table = TokenTable(table.router, table.tensor, info.dtype, num_experts=experts)
        if len(info.shape) != 2 or info.size_bytes > TOKEN_TABLE_BYTES:
            reason = f"its shape is {' x '.join(map(str, info.shape))}"
            return replace(token_table, num_experts=0, reason=reason), None
        stored = store.read(table.tensor)
        return token_table, stored if stored.dtype.kind in "iu" else upcast(stored)
    except CheckpointError as error:
        return replace(token_table, reason=error.message.removesuffix(".")), None


def compared_tables(
    stores: Sequence[TensorStore], tables: Sequence[Sequence[TableName]], layers: str | None
) -> Iterator[tuple[str, bool]]:
    """What can be said of each table of two checkpoints, id by id, and whether they are equal.

    Of some ``layers`` where they are named. The order of the experts of an id does not count.
    """
    numbers = None if layers is None else parse_layers(layers)
    first, second = (
        {t.router: t for t in of_side if numbers is None or layer_of(t.router) in numbers}
        for of_side in tables
    )
    plain = [with_plain_names(store) for store in stores]
    for name in dict.fromkeys((*first, *second)):
        if name not in first or name not in second:
            yield f"{name} looks experts up by token id in {'AB'[name in second]} alone", False
            continue
        pair = (first[name], second[name])
        read = [read_token_table(store, one) for store, one in zip(plain, pair, strict=True)]
        a, b = (None if one is None else np.sort(one, axis=1) for _, one in read)
        if a is None or b is None:
            reason = next(table.reason for table, _ in read if table.reason)
            yield f"the table of {name} cannot be compared: {reason}", False
        elif a.shape != b.shape:
            sizes = [" x ".join(map(str, one.shape)) for one in (a, b)]
            yield f"the table of {name} is {sizes[0]} in A, {sizes[1]} in B", False
        else:
            others = np.flatnonzero((a != b).any(axis=1))
            at = f", first {others[0]}" if len(others) else ""
            text = f"{len(others):,} of {len(a):,} token ids of {name} go to other experts{at}"
            yield text, not len(others)


def looked_up(table: TokenTable, stored: Shaped[np.ndarray, "tokens k"]) -> TokenTable:
    """The table with what ``stored`` holds; entries that are no whole number are no expert."""
    values = stored if stored.dtype.kind in "iu" else upcast(stored)
    is_expert = (values >= 0) & (values < table.num_experts)
    if values.dtype.kind == "f":
        is_expert &= values == np.floor(values)
    ids = np.where(is_expert, values, -1).astype(np.int64)
    ordered = np.sort(ids, axis=1)
    repeats = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    # of ids that went too far up the parity is known as well
    is_large = (values > EXACT_IN_BFLOAT16) & (values < 2**31)
    large = values[is_large]
    return replace(
        table,
        num_tokens=len(values),
        top_k=values.shape[1],
        largest=float(values.max()) if values.size else 0.0,
        num_outside=int((~is_expert).sum()),
        num_repeated=int(repeats.any(axis=1).sum()),
        num_used=len(np.unique(ids[is_expert])),
        num_large=len(large),
        num_large_odd=int((large % 2 != 0).sum()),
        digest=digest_of(ordered.astype("<i8").tobytes()),
    )
