"""Blocks behind routers, by names and shapes: experts that are missing, parts that are lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moegeom.checks.baseline import modules_of, tables_of
from moegeom.checks.check import OLDER, Limit, Limits, Unknown, check
from moegeom.checks.measured import NO_FLOATS, Measured, place_of
from moegeom.core.finding import Finding
from moegeom.core.text import listed, number_of


def _too_little(measured: Measured) -> str:
    blocks = measured.run.get("blocks")
    if blocks is None:
        return OLDER
    return "" if blocks["has_experts"] else "the file holds no experts"


def _flaws(measured: Measured, *kinds: str) -> Iterator[Mapping[str, Any]]:
    flaws = [one for one in measured.run.get("blocks", {}).get("flaws", ()) if one["kind"] in kinds]
    yield from sorted(flaws, key=lambda one: (kinds.index(one["kind"]), -len(one["routers"])))


@check("MGI118", "experts and rows do not match", "error", too_little=_too_little)
def experts_counted(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Every block holds one expert for each row of its router.

    Looked for: experts by number in the names of tensors, the first axis of tensors that hold all
    of them in headers that are open anyway, and blocks without any beside others that have some.
    Experts that copy their input need no tensors where the family says so.

    A finding means: a shard or a slice of experts is not in the file, or experts were pruned and
    rows were not, or the reverse. Tokens are sent to experts that are not there.

    What to do: look whether all shards are in the folder and in its index; prune rows and biases
    with the experts, and set the number of experts in the config.
    """
    for flaw in _flaws(measured, "none", "missing", "surplus"):
        num, count = flaw["num_experts"], flaw["count"]
        rows = f"the router has {number_of(num, 'row')} for experts with weights"
        which = f": {flaw['experts']}" if flaw["experts"] else ""
        where = f" in '{flaw['module']}'" if flaw["module"] else ""
        title = {
            "none": f"none of {number_of(num, 'expert')} is in the file; other layers have theirs.",
            "missing": f"{count} of {number_of(num, 'expert')} are not in the file{which}{where}.",
            "surplus": f"{number_of(count, 'expert')} more than rows{which}{where}.",
        }[flaw["kind"]]
        yield experts_counted.finding(tuple(flaw["routers"]), title, f"{rows.capitalize()}.")


@check("MGI119", "a part of a block is lost", "error", too_little=_too_little)
def parts_there(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Every block has the parts that its family, its config and its other layers say.

    Looked for: in names, and in headers that are open anyway, matrices, biases and scales that
    another expert or layer has, matrices that belong to those that are there (a gate, where the
    family has one), biases of families that have them, shared experts that the config counts, the
    gate of shared experts, modules that most blocks of the stack have; and experts of another
    shape than most.

    A finding means: whatever loads the model fills the part in, with zeros or at random, or leaves
    it out: an expert gives nothing, packed numbers count without their scale.

    What to do: compare the names with those of the source; a conversion dropped or renamed them.
    """
    for flaw in _flaws(measured, "lost", "differ"):
        which = f" of {_experts(flaw)}" if flaw["experts"] else ""
        word = {
            "lost": "is not in the file",
            "differ": "has another shape than that of most experts",
        }[flaw["kind"]]
        yield parts_there.finding(tuple(flaw["routers"]), f"part '{_module(flaw)}'{which} {word}.")


@check("MGI120", "a tensor stands in few blocks", "warning", too_little=_too_little)
def parts_alike(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """No block has a module that most blocks of its stack lack.

    Looked for: modules by name, in stacks of at least three blocks with experts.

    A finding means: a loader that goes by the other layers leaves the tensor out, or a tensor of
    another layer or model got in. Models whose layers are built apart have it by design.

    What to do: compare with the source; accept the code in a profile where it is by design.
    """
    for flaw in _flaws(measured, "alone"):
        yield parts_alike.finding(
            tuple(flaw["routers"]), f"part '{_module(flaw)}' stands here and in no other layer."
        )


def _no_modules(measured: Measured) -> str:
    if measured.baseline and measured.baseline.tables:
        return ""
    before = [measured.before(row["router"]) for row in measured.layers]
    if any(one is not None and one.modules is not None for one in before):
        return ""
    return "the baseline holds no inventory of the blocks: --update-baseline writes one"


@check(
    "MGI130",
    "a block is not that of the baseline",
    "error",
    inputs="baseline",
    too_little=_no_modules,
)
def block_as_before(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """Every block has the modules and the experts that it had when the baseline was made.

    Looked for: modules of a block by name, the numbers of its experts, and the experts of each
    token id, in any order, where a layer has a table of them.

    A finding means: what is lost in every layer alike, which no other layer tells: shared experts,
    their gate, a matrix of the experts, half of the experts; or something came in.

    What to do: compare with the source; write a new baseline (--update-baseline) where a prune or
    another layout is meant.
    """
    modules, tables = modules_of(measured.run), tables_of(measured.run)
    for router, old in measured.baseline.tables.items() if measured.baseline else ():
        if tables.get(router, "") != old:
            title = "its table sends token ids to other experts than that of the baseline."
            yield block_as_before.finding(router, title)
    for row in measured.layers:
        router, before = row["router"], measured.before(row["router"])
        if before is None or not before.modules:
            continue
        old, now = before.modules, modules.get(router, {})
        if now and old and not now.keys() & old.keys():
            yield Unknown(router, "no module has the name that it has in the baseline")
            continue
        lost, new = sorted(old.keys() - now.keys()), sorted(now.keys() - old.keys())
        others = [module for module in old if module in now and old[module] != now[module]]
        if lost:
            yield block_as_before.finding(router, f"{_quoted(lost)} of the baseline not there.")
        if new:
            yield block_as_before.finding(router, f"{_quoted(new)} not in the baseline.")
        for numbers in sorted({(old[module], now[module]) for module in others}):
            title = f"the file holds experts {numbers[1]}; the baseline {numbers[0]}."
            yield block_as_before.finding(router, title)


def _quoted(modules: Sequence[str]) -> str:
    """``part 'mlp.shared_expert_gate'``, the first four of them."""
    names = ", ".join(f"'{module}'" for module in modules[:4])
    more = f" and {len(modules) - 4} more" if len(modules) > 4 else ""
    return f"part{'s' * (len(modules) > 1)} {names}{more}"


def _no_parts(measured: Measured) -> str:
    routers = measured.run.get("routers", ())
    if any("parts" not in one for one in routers):
        return OLDER
    return "" if any(one["parts"] for one in routers) else "routers have no part of the kind"


@check("MGI123", "a part beside the rows holds nothing", "error", too_little=_no_parts)
def parts_hold(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Scales of experts, the gate of shared experts and its kin hold trained numbers.

    Looked for: values that are not finite, parts that are 0 everywhere, or 1, which is a warning,
    and experts whose scale is 0. A bias of a norm may be zero.

    A finding means: a gate of zeros lets half of the shared experts through for every token, a
    scale of zeros switches experts off; 1 everywhere is what a model starts from, or what a
    conversion filled in for a tensor that it did not find.

    What to do: take the tensor from the source again.
    """
    routers_by_flaw: dict[tuple[str, str], list[str]] = {}
    for one in measured.run.get("routers", ()):
        for name, state in one["parts"].items():
            if state and (name, state) != ("bias of the norm in front", "0 everywhere"):
                routers_by_flaw.setdefault((name, state), []).append(one["name"])
    for (name, state), routers in routers_by_flaw.items():
        finding = parts_hold.finding(tuple(routers), f"the {name} is {state}.")
        is_broken = state == "not finite" or state.startswith("0 ")
        yield finding if is_broken else dataclasses.replace(finding, severity="warning")


def _module(flaw: Mapping[str, Any]) -> str:
    """The name as files have it, with the number of the only expert or a star for several."""
    return flaw["module"].replace("{}", flaw["experts"] if flaw["count"] == 1 else "*")


def _experts(flaw: Mapping[str, Any]) -> str:
    noun = "expert" if flaw["count"] == 1 else "experts"
    return f"{noun} {flaw['experts']} ({flaw['count']} of {flaw['num_experts']})"


# ---------------------------------------------------------------------------------- read on request
def _samples(measured: Measured) -> Sequence[Mapping[str, Any]]:
    """Facts of the samples of each router whose experts could be read."""
    return measured.run["expert_values"]["samples"]


def _no_samples(measured: Measured) -> str:
    """Why nothing is judged: no experts, or none that are stored in a way that is known."""
    facts = measured.run["expert_values"]
    if facts["samples"] or any(not one["is_kind"] for one in facts["left_out"]):
        return ""
    reasons = [one["reason"] for one in facts["left_out"]]
    return reasons[0] if reasons else "it has no router whose experts could be read"


def _unread(measured: Measured) -> Iterator[Unknown]:
    """The routers whose experts could not be read."""
    for one in measured.run["expert_values"]["left_out"]:
        yield Unknown(one["router"], one["reason"], outside=one["is_kind"])


def _numbers(experts: Sequence[int], of: int) -> str:
    """``experts 1, 3 and 5 more (7 of 16)``."""
    return f"{number_of(len(experts), 'expert')} of {of} ({listed(experts, 4)})"


def _listed(groups: Sequence[Sequence[int]]) -> str:
    """``1, 5; 2, 3, 7; and 4 groups more``."""
    more = f"; and {len(groups) - 3} groups more" if len(groups) > 3 else ""
    return "; ".join(listed(group, 4) for group in groups[:3]) + more


@check(
    "MGI125",
    "experts are the same, zero or broken",
    "error",
    inputs="experts",
    too_little=_no_samples,
)
def experts_hold(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """Every expert holds numbers of its own.

    Looked for: with --experts, the first 4 kB of each stored tensor of each expert, as stored:
    samples of a matrix that are the same bytes in two experts of a layer or of two, samples of a
    matrix that are all 0, and values, scales and biases that are not finite; zeros and values that
    are not finite in shared experts too. Numbers behind the samples are not looked at.

    A finding means: a conversion wrote one expert over others or filled them in, an upcycled model
    was never trained, or a weight broke in training. Tokens get an output twice, none, or NaN.

    What to do: compare these experts with those of the source.
    """
    yield from _unread(measured)
    for one in _samples(measured):
        num, router = one["num_experts"], one["router"]
        groups, of = one["equal"], f"In {one['bytes_each']:,} bytes of each."
        if groups:
            count = sum(map(len, groups))
            yield experts_hold.finding(
                router,
                f"{count} of {number_of(num, 'expert')} are the same as another: "
                f"{_listed(groups)}.",
                of,
            )
        for matrix, alike in one["alike"].items():
            yield experts_hold.finding(
                router,
                f"{sum(map(len, alike))} of {number_of(num, 'expert')} share their {matrix} matrix "
                f"with another: {_listed(alike)}.",
                of,
            )
        if one["zero"]:
            has = "has" if len(one["zero"]) == 1 else "have"
            title = f"{_numbers(one['zero'], num)} {has} a matrix that is all 0."
            yield experts_hold.finding(router, title, of)
        if one["not_finite"]:
            holds = "holds" if len(one["not_finite"]) == 1 else "hold"
            some = _numbers(one["not_finite"], num)
            yield experts_hold.finding(router, f"{some} {holds} values that are not finite.", of)
        for key, word in (("shared_zero", "all 0"), ("shared_not_finite", "not finite")):
            if names := one[key]:
                more = f" and {len(names) - 1} more tensors" * (len(names) > 1)
                title = f"shared experts: '{names[0]}'{more} {word}."
                yield experts_hold.finding(router, title)
    for pair in measured.run["expert_values"]["across"]:
        num = number_of(pair["count"], "expert")
        yield experts_hold.finding(
            tuple(pair["routers"]),
            f"{num} of {place_of(pair['routers'][1])} have the {' and '.join(pair['matrices'])} "
            f"{'matrix' if len(pair['matrices']) == 1 else 'matrices'} of experts of "
            f"{place_of(pair['routers'][0])}.",
        )


@check(
    "MGI126",
    "scales of experts were never calibrated",
    "error",
    inputs="experts",
    too_little=_no_samples,
)
def experts_calibrated(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """Every expert that is quantised with its inputs has a scale that calibration wrote.

    Looked for: with --experts, scales of inputs (``input_scale`` and its kin) that are not finite,
    0, or exactly 1 while other experts of the layer have another.

    A finding means: no token of the calibration text reached these experts. Engines divide their
    inputs by NaN, or cut them off where others are scaled: what such an expert gives is wrong from
    the first token that is sent there.

    What to do: calibrate with more text, or with every token sent through every expert.
    """
    yield from _unread(measured)
    for one in _samples(measured):
        if one["uncalibrated"]:
            yield experts_calibrated.finding(
                one["router"],
                f"{_numbers(one['uncalibrated'], one['num_experts'])} have a scale of inputs that "
                "no token calibrated.",
            )


@check(
    "MGG209",
    "experts are as an initialisation draws them",
    "warning",
    inputs="experts",
    too_little=_no_samples,
    severities={"release": "error", "training": "note"},
)
def experts_trained(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """The experts of no layer are all as an initialisation draws them.

    Looked for: with --experts, the beginnings of all matrices that are stored as floats. Normal or
    uniform numbers, independent and of one size, whatever it is, have a known kurtosis, rows and
    columns of like energy, and no direction in common: within four standard errors in each matrix.

    A finding means: the experts of this layer are what a model starts from. Weights were never
    loaded, or training never reached them. Packed integers are not judged.

    What to do: where this is a model before its training, nothing. Else look whether the loader
    knew the names of the experts, and whether gradients reach them.
    """
    yield from _unread(measured)
    for one in _samples(measured):
        if one["drawn"]:
            yield experts_trained.finding(
                one["router"],
                f"{number_of(one['num_experts'], 'expert')} are as drawn at random, in "
                f"{' and '.join(one['drawn'])}.",
                f"In {one['bytes_each']:,} bytes of each.",
            )
        elif not one["is_drawn_judged"]:
            yield Unknown(one["router"], f"its experts are {NO_FLOATS}", outside=True)


@check(
    "MGG208",
    "experts differ by no more than noise",
    "warning",
    limits=(Limit("correlation", 0.3, "least correlation that joins experts to a group"),),
    inputs="experts",
    too_little=_no_samples,
    severities={"release": "error", "training": "note"},
)
def experts_apart(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """Experts differ by more than noise around a common start.

    Looked for: with --experts, the beginnings of all matrices, as floats or as the numbers that are
    packed. Experts are joined to pairs and groups where all their matrices correlate; a group is
    found where what lies between its experts is independent normal numbers of one variance
    (``drawn_errors``, within four standard errors), or below the digits of storage. What all
    experts have in common, as after training from one block, is no finding; the same bytes are
    MGI125.

    A finding means: these experts are copies of one plus noise, or up to the last digits of their
    storage: whom the router chooses among them hardly matters. Growth below some size is taken for
    noise, and so is growth without a pattern. Missed are noise in proportion to each weight,
    neurons drawn anew (drop-upcycling), packed numbers whose noise is beyond their step, and
    columns in an order of their own (GPTQ).

    What to do: where this is a model before its training, nothing. Else train on, with a higher
    rate or more noise at the start, and look whether gradients reach the experts;
    docs/upcycling.md.
    """
    yield from _unread(measured)
    for one in _samples(measured):
        num, router = one["num_experts"], one["router"]
        groups = [g for g in one["copies"] if g["correlation"] >= limits("correlation", router)]
        if groups:
            noise = any(group["is_resolved"] for group in groups)
            by = "noise alone" if noise else "the last digits of their storage"
            worst = max(groups, key=lambda group: group["correlation"])
            yield experts_apart.finding(
                router,
                f"{sum(len(group['experts']) for group in groups)} of {number_of(num, 'expert')} "
                f"differ by {by}: {_listed([group['experts'] for group in groups])}.",
                f"Correlation up to {worst['correlation']:.4f} in every matrix; "
                f"{100.0 * worst['deviation']:.3g} % of the weights lie between two, in "
                f"{one['bytes_each']:,} bytes of each.",
            )
        elif one["not_compared"]:
            yield Unknown(router, one["not_compared"], outside=True)
