"""All routers of a checkpoint, reading nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS, largest_size, upcast
from moegeom.checkpoint.ranks import copies_differ, difference_of
from moegeom.checkpoint.store import TensorInfo, TensorStore
from moegeom.core.digest import digest_of
from moegeom.core.errors import UsageError
from moegeom.core.router import (
    RECORDED,
    Projection,
    Provenance,
    Router,
    RouterSet,
    Rule,
    StoredRows,
    Weights,
    format_layers,
    parse_layers,
)
from moegeom.core.shapes import Float, Shaped
from moegeom.geometry.rows import composed_rows
from moegeom.router.facts import claims_of
from moegeom.router.family import Family
from moegeom.router.inventory import RouterPlace, blocks_of
from moegeom.router.plain_names import plain_name, with_plain_names, without_model, wrapped_names
from moegeom.router.plan import (
    Listed,
    Match,
    Matches,
    RouterPlan,
    match_routers,
    plan_router,
    with_mtp_modules,
    without_absent_biases,
)
from moegeom.router.recognise import (
    check_choice_biases,
    expert_counts,
    no_routers,
    placed_family,
    propose_routers,
    recognise_family,
    recognition_notes,
)
from moegeom.router.requested_family import NOTHING_ASKED, RequestedFamily
from moegeom.router.rule import assumed_values, check_required, expected_layers, rule_text
from moegeom.router.settings import Settings

#: Plain floats that take fewer bytes as they are stored than as float32.
_NARROW = frozenset({"BF16", "F16"})

#: e to the power of more is no float64.
_LARGEST_EXPONENT = 709.0

Values = Mapping[str, Shaped[np.ndarray, "*shape"]]


@dataclass(frozen=True)
class PlannedRouters:
    """The routers of the layers in ``layer_set`` (None: all), with what they were found by.

    ``store`` has plain names. ``plans`` belong to ``matches``, in the same order; ``listed`` are
    routers whose choice does not follow from their input; ``hits`` holds those of other layers
    too.
    """

    store: TensorStore
    family: Family
    settings: Settings
    layer_set: frozenset[int] | None
    hits: Matches
    matches: tuple[Match, ...]
    listed: tuple[Listed, ...]
    plans: tuple[RouterPlan, ...]


def plan_routers(
    store: TensorStore,
    layers: str | None = None,
    request: RequestedFamily = NOTHING_ASKED,
    with_listed: bool = False,
) -> PlannedRouters:
    """The plans of all routers in natural order; reads the config and headers, and no tensor but of
    routers that are stored twice.

    Raises
    ------
    RouterError
        If there is no router, or one that cannot be interpreted.
    UsageError
        If no router is in ``layers``.
    """
    layer_set = None if layers is None else parse_layers(layers)
    family = request.family(store.names())
    family = placed_family(family, store.config) if family else recognise_family(store)
    # patterns on the command line are for names as they stand
    store = store if request.pattern else with_plain_names(store)
    family = with_mtp_modules(without_absent_biases(family, store.names()))
    settings = Settings(store.config, family.config_roots)
    check_required(family, settings)
    hits = match_routers(request.names(store.names()), family, settings)
    listed = hits.listed if with_listed else ()
    if not hits.routers and not listed:
        raise no_routers(store, family, hits.skipped if hits.listed else ())
    _check_layers(layer_set, {r.layer for r in (*hits.routers, *listed)})
    matches = tuple(m for m in hits.routers if layer_set is None or m.layer in layer_set)
    listed = tuple(r for r in listed if layer_set is None or r.layer in layer_set)
    store.prepare(name for match in matches for name in match.names())
    plans = tuple(plan_router(match, store, settings) for match in matches)
    check_choice_biases(store, matches, [plan.num_experts for plan in plans])
    _check_copies(store, hits.copies, layer_set)
    _check_spellings(store, plans)
    return PlannedRouters(store, family, settings, layer_set, hits, matches, listed, plans)


def load_routers(
    store: TensorStore,
    layers: str | None = None,
    requested_family: RequestedFamily = NOTHING_ASKED,
    with_listed: bool = False,
) -> RouterSet:
    """All routers of a checkpoint in natural order, in memory.

    Parameters
    ----------
    store
        Only the config, the router tensors, the norm gains in front of them and the headers of
        the shards that hold these are read.
    layers
        Layers to load, such as ``"0,3-7"`` (of every stack); all when None. The fingerprint and
        ``num_expected`` are those of the loaded layers.
    requested_family
        What somebody says about the family; the config decides where they say nothing.
    with_listed
        Routers whose choice does not follow from router and input are there too, behind the
        others and without weights: recorded choices can be counted.

    Raises
    ------
    RouterError
        If there is no router, or one that cannot be interpreted.
    CheckpointError
        If a file cannot be read.
    UsageError
        If no router is in ``layers``.
    """
    started = time.perf_counter()
    planned = plan_routers(store, layers, requested_family, with_listed)
    store, family, settings = planned.store, planned.family, planned.settings
    hits, matches, layer_set = planned.hits, planned.matches, planned.layer_set
    listed, plans = planned.listed, planned.plans
    values, fingerprint = _read(store, plans)
    blocks = blocks_of(store, list(_places(planned)), settings)
    routers = tuple(
        _build(plan, values, family.name, _gate(store, blocks.gates.get(plan.match.name), plan))
        for plan in plans
    )
    chosen_elsewhere = tuple(_listed(router, settings, store, family.name) for router in listed)
    if not routers:  # no tensor was read: what there is tells the checkpoint
        digests = (
            tensor_digest(store.info(name), store.read(name))
            for router in chosen_elsewhere
            for name in router.provenance.tensors
        )
        fingerprint = router_fingerprint(digests)

    places = {router.place for router in hits.listed}
    num_expected, notes = count_expected(family, matches, places, settings, layer_set)
    num_expected = None if num_expected is None else num_expected + len(listed)
    layer_notes = tuple(notes)
    notes += (
        []
        if requested_family.file or requested_family.pattern
        else recognition_notes(store.config, family)
    )
    notes += assumption_notes(matches, family, settings)
    notes += asked_notes(store, routers) if requested_family.pattern else []
    notes += [note for router in routers for note in non_finite_notes(router)]
    routers += chosen_elsewhere
    first = routers[0]
    text = (
        rule_text(family, first.rule, first.num_experts, matches[0].spec)
        if matches
        else f"{first.rule.top_k} of {first.num_experts} experts, counted from recorded choices"
    )
    return RouterSet(
        routers=routers,
        checkpoint=store.label,
        family=family.name,
        family_text=text,
        fingerprint=fingerprint,
        skipped=hits.skipped,
        tables=hits.tables,
        initializer_range=_initializer_range(store.config, family.config_roots),
        claims={
            **claims_of(family, settings, matches, plans, routers[: len(plans)], values),
            "blocks": blocks.facts(),
        },
        num_expected=num_expected,
        bytes_read=store.bytes_read,
        bytes_total=store.bytes_total,
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
        layer_notes=layer_notes,
        revision=store.revision,
    )


def _places(planned: PlannedRouters) -> Iterator[RouterPlace]:
    """The routers whose blocks are looked at, those that are only listed among them."""
    for match, plan in zip(planned.matches, planned.plans, strict=True):
        path = f"{match.stem}{'' if match.leaf == 'weight' else match.leaf}".rstrip(".")
        tensors = frozenset(match.names())
        yield RouterPlace(match.name, plan.num_experts, match.spec, path, tensors, match.layer)
    for one in planned.hits.listed:
        if planned.layer_set is None or one.layer in planned.layer_set:
            own = planned.settings.under(one.spec.config_roots).at(one.layer)
            name, num = f"{one.spec.name}/{one.layer}", own.integer(one.spec.num_experts)
            path = one.tensor.removesuffix(".weight")
            yield RouterPlace(name, num, one.spec, path, frozenset({one.tensor}), one.layer)


def _gate(
    store: TensorStore, name: str | None, plan: RouterPlan
) -> Float[np.ndarray, "hidden"] | None:
    """The gate of shared experts; None where there is none, it is not stored as it is, or is no
    single row of the inputs.
    """
    info = None if name is None else store.info(name)
    is_row = info and info.dtype in PLAIN_FLOATS and math.prod(info.shape) == plan.width
    return upcast(store.read(info.name)).reshape(-1) if info and is_row else None


def _initializer_range(config: Mapping[str, Any], roots: Sequence[str]) -> float | None:
    """Standard deviation that weights were drawn with; None where no config says it."""
    parts = (config.get(root, {}) if root else config for root in roots)
    values = (part.get("initializer_range") for part in parts if isinstance(part, Mapping))
    return next((v for v in values if isinstance(v, float) and 0.0 < v < math.inf), None)


def _check_copies(
    store: TensorStore, copies: Iterable[tuple[Match, Match]], layers: frozenset[int] | None
) -> None:
    """Raises RouterError where a router is stored twice, with other numbers."""
    for one, other in copies:
        if layers is not None and one.layer not in layers:
            continue
        pairs = list(zip_longest(one.names(), other.names()))
        where = f"router {one.name} is stored twice, as '{one.tensors[0]}' and '{other.tensors[0]}'"
        for first, second in pairs:
            if first is None or second is None:
                raise copies_differ(where, "with other parts")
            if difference := difference_of(store.read(first), store.read(second)):
                raise copies_differ(where, difference)


def _check_spellings(store: TensorStore, plans: Iterable[RouterPlan]) -> None:
    """Raises RouterError where a tensor is stored with and without ``model.`` in front, or what a
    wrapper puts there, with other numbers: loaders take both for one parameter.
    """
    names = store.names()
    wrapped = wrapped_names(names)
    for name in (info.name for plan in plans for info in plan.tensors()):
        bare = without_model(name)
        for other in sorted({bare, f"model.{bare}", *wrapped.get(bare, ())} - {name}):
            if other in names and (
                difference := difference_of(store.read(name), store.read(other))
            ):
                raise copies_differ(f"tensor {name!r} is also there as {other!r}", difference)


def _check_layers(layers: frozenset[int] | None, there: set[int]) -> None:
    if layers is not None and not layers & there:
        raise UsageError(
            f"Layers {format_layers(layers)}: no router is there.",
            f"Layers with routers: {format_layers(there)}.",
        )


def _listed(router: Listed, settings: Settings, store: TensorStore, family: str) -> Router:
    """A router of which the number of experts and of chosen ones are known, and nothing else."""
    own = settings.under(router.spec.config_roots).at(router.layer)
    experts, top_k = own.integer(router.spec.num_experts), own.integer(router.spec.top_k)
    info = store.info(router.tensor)
    slot = f"/{router.spec.slot}" if router.spec.slot else ""
    return Router(
        name=f"{router.spec.name}/{router.layer}{slot}",
        stack=router.spec.name,
        layer=router.layer,
        slot=router.spec.slot,
        weight=np.empty((experts, 0), np.float32),
        rule=Rule(top_k, RECORDED, Weights("scores")),
        provenance=Provenance(family, (router.tensor,), info.file, info.dtype),
        listed=router.reason,
    )


def _read(store: TensorStore, plans: Sequence[RouterPlan]) -> tuple[Values, str]:
    """Every tensor once, in the order of the files, hashed as it passes.

    Rows keep their dtype, which a decoder needs or in which they are held; other parts become
    floats at once.
    """
    infos: dict[str, TensorInfo] = {i.name: i for plan in plans for i in plan.tensors()}
    of_rows = {info.name for plan in plans for info in plan.stored.tensors}
    values: dict[str, Shaped[np.ndarray, "*shape"]] = {}
    digests = []
    for name, stored in store.read_many(infos):
        digests.append(tensor_digest(infos[name], stored))
        values[name] = stored if name in of_rows else upcast(stored)
    return values, router_fingerprint(digests)


def _rows_as_stored(plan: RouterPlan, values: Values) -> Any:
    """The rows of a router that are plain narrow floats, and nothing else has a part in.

    They are ``StoredRows`` and no array, which is for the record alone to know.
    """
    name = plan.stored.tensors[0].name
    shape, is_finite = (plan.num_experts, plan.width), math.isfinite(largest_size(values[name]))

    def floats_of(stored: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(plan.weight({name: stored}))

    return StoredRows(values[name], shape, is_finite, floats_of)


def _build(
    plan: RouterPlan, values: Values, family: str, shared_gate: Float[np.ndarray, "..."] | None
) -> Router:
    match = plan.match
    vectors = {part: vector.values(values) for part, vector in plan.vectors.items()}
    logit_bias = vectors.get("logit_bias")
    projection = _projection(plan, vectors, values)
    is_narrow = plan.stored.scheme == "plain" and plan.stored.dtype in _NARROW
    shared_rows = None
    if is_narrow and projection is None and not plan.num_shared:
        weight = _rows_as_stored(plan, values)
    else:
        rows = plan.weight(values)
        if projection is not None:
            rows, logit_bias = composed_rows(rows, projection.weight, projection.bias)
        weight = np.ascontiguousarray(rows[: plan.num_experts])
        shared_rows = rows[plan.num_experts :] if plan.num_shared else None
    gain, scale = vectors.get("gain"), vectors.get("expert_scale")
    if gain is not None and plan.norm is not None:
        of_dtype = gain.dtype.type
        with np.errstate(invalid="ignore", over="ignore"):  # checks name gains that are not finite
            gain = of_dtype(plan.norm.gain_scale) * (gain + of_dtype(plan.norm.gain_offset))
    bias = plan.vectors.get("selection_bias")
    return Router(
        name=match.name,
        stack=match.stack,
        layer=match.layer,
        slot=match.spec.slot,
        weight=weight,
        rule=plan.rule,
        provenance=Provenance(
            family=family,
            tensors=tuple(info.name for info in plan.tensors()),
            file=plan.stored.tensors[0].file,
            stored_dtype=plan.stored.dtype,
            # A fork may keep the model type and change the rule: recorded choices verify it.
            bias_tensor=bias.info.name if bias else "",
            bias_dtype=bias.info.dtype if bias else "",
            kept_dtype=match.spec.keeps.weight,
            kept_bias_dtype=match.spec.keeps.selection_bias,
        ),
        logit_bias=logit_bias,
        selection_bias=vectors.get("selection_bias"),
        gain=gain,
        norm=plan.norm,
        norm_bias=vectors.get("norm_bias"),
        shared_rows=shared_rows,
        expert_scale=None if scale is None else np.broadcast_to(scale, plan.num_experts).copy(),
        projection=projection,
        shared_gate=shared_gate,
    )


def _projection(
    plan: RouterPlan, vectors: Mapping[str, Float[np.ndarray, "_"]], values: Values
) -> Projection | None:
    spec = plan.match.spec.projection
    if plan.projection is None or spec is None:
        return None
    scale = None
    if "log_scale" in vectors:
        scale = _scale(float(vectors["log_scale"][0]), spec.largest_scale)
    return Projection(upcast(values[plan.projection.name]), vectors.get("projection_bias"), scale)


def _scale(log_scale: float, largest: float) -> float:
    """e to the power of a number, at most ``largest``; NaN stays NaN."""
    limit = math.log(largest) if largest < math.inf else _LARGEST_EXPONENT
    return math.exp(min(log_scale, limit)) if log_scale == log_scale else math.nan


def tensor_digest(info: TensorInfo, values: Shaped[np.ndarray, "*shape"]) -> str:
    """SHA-256, in hex, of a tensor's name, dtype, shape and bytes as stored.

    The name counts without wrappers and with one ``model.`` in front, however many it has: that of
    a model in a dictionary ``{"model": ...}`` is that of the model.
    """
    name = "model." + without_model(plain_name(info.name))
    return digest_of(name, info.dtype, info.shape, values)


def router_fingerprint(digests: Iterable[str]) -> str:
    """``sha256:`` and the hash of all digests, in any order: routers, biases, scales and gains."""
    return f"sha256:{digest_of(sorted(digests))}"


def count_expected(
    family: Family,
    matches: Sequence[Match],
    listed: Set[tuple[str, int]],
    settings: Settings,
    layers: frozenset[int] | None,
) -> tuple[int | None, list[str]]:
    """The expected number of routers in ``layers`` (None: all), and a note for each surprise.

    ``listed`` routers are there and not loaded: none is expected in their place.
    None when the family or the config does not say. Routers of the stack ``mtp`` are often left
    out on purpose: those that are there count as expected.
    """
    total = sum(match.stack != match.spec.name for match in matches)
    notes: list[str] = []
    is_known = True
    for spec in family.stacks:
        expected = expected_layers(spec.layers, settings.under(spec.config_roots))
        if expected is None:
            is_known = False
            continue
        expected -= {layer for stack, layer in listed if stack == spec.name}
        expected = expected if layers is None else expected & layers
        with_router = {m.layer for m in matches if m.spec is spec and m.stack == spec.name}
        total += len(expected)
        notes += layer_notes(spec.name, with_router, expected)
    return (total if is_known else None), notes


#: Phrases of evidence, a name among them, that make a router likely.
_MUCH = 3


def asked_notes(store: TensorStore, routers: Sequence[Router]) -> Iterator[str]:
    """Sentences on routers that a pattern loaded: numbers of experts, and what it leaves out."""
    counts = expert_counts(store)
    odd = [router for router in routers if counts and router.num_experts not in counts]
    if odd:
        first = odd[0]
        listed = " or ".join(map(str, sorted(counts)[:3]))
        # a matrix that lies on its side has the number of experts as its width
        on_side = " (stored transposed?)" if first.hidden_size in counts else ""
        yield (
            f"{first.name}: {first.num_experts} rows count as experts, where config.json says "
            f"{listed}{on_side}"
        )
    loaded = {name for router in routers for name in router.provenance.tensors}
    counts |= {router.num_experts for router in routers}
    for candidate in propose_routers(store):
        left = [name for name in candidate.names if name not in loaded]
        is_likely = candidate.has_router_name and len(candidate.evidence) >= _MUCH
        if left and is_likely and min(candidate.shape) in counts:
            noun = "tensor" if len(left) == 1 else "tensors"
            yield f"not loaded: {len(left)} {noun} like '{left[0]}', which may be routers too"


# -------------------------------------------------------------------------------------------- notes
def non_finite_notes(router: Router) -> Iterator[str]:
    """One sentence for each part of a router that holds NaN or infinity."""
    rows = router.non_finite_rows
    if rows.size:
        verb = "row holds" if rows.size == 1 else "rows hold"
        yield f"{router.name}: {rows.size} {verb} non-finite values, first row {rows[0]}"
    vectors = {
        "the logit bias": router.logit_bias,
        "the selection bias": router.selection_bias,
        "the gain of the norm in front": router.gain,
    }
    for what, values in vectors.items():
        if values is None:
            continue
        places = np.flatnonzero(~np.isfinite(values))
        if places.size:
            noun = "value" if places.size == 1 else "values"
            yield (
                f"{router.name}: {what} holds {places.size} non-finite {noun}, "
                f"first at index {places[0]}"
            )


def layer_notes(stack: str, with_router: Set[int], expected: Set[int]) -> Iterator[str]:
    """Sentences about layers where names and config disagree on whether there is a router."""
    if missing := set(expected - with_router):
        yield f"{stack}: no router in {_layers_text(missing)}, where config.json implies one"
    if surplus := set(with_router - expected):
        yield f"{stack}: routers in {_layers_text(surplus)}, where config.json implies none"


def _layers_text(layers: Set[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {format_layers(set(layers))}"


def assumption_notes(matches: Sequence[Match], family: Family, settings: Settings) -> Iterator[str]:
    """What is said of a setting, and the values of each stack that the config does not give."""
    yield from (text for condition, text in family.notes_when.items() if settings.says(condition))
    specs = {(match.spec.name, match.spec.slot): match.spec for match in matches}
    for (stack, _), spec in specs.items():
        defaults = ", ".join(assumed_values(spec, settings.under(spec.config_roots)))
        if defaults:
            engine = " ".join(family.source.split()[:2])
            yield (
                f"{stack}: config.json does not say all of the rule; assumed are the defaults of "
                f"{engine}: {defaults}. Another engine may take others"
            )
