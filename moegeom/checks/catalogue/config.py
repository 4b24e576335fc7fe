"""What the config says of routers, and what stands beside it in the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from moegeom.checks.check import OLDER, Limits, Unknown, check, same_sentence
from moegeom.checks.measured import Measured, knows_config, unseen_routers
from moegeom.core.finding import Finding
from moegeom.core.text import number_of


@check(
    "MGI105", "config and tensors contradict each other", "error", severities={"release": "error"}
)
def config_contradicted(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Config and tensors agree on routers and layers.

    Looked for: numbers of experts, groups, chosen experts and layers, and shapes of routers, biases
    and gains, in the config and in the tensors; and routers in layers that an engine takes as dense
    by a key that the family's own classes do not read (``moe_layer_freq`` and its kin). Widths of
    experts are not compared.

    A finding means: the config comes from another revision, a slice of a sharded save was taken for
    the whole tensor, or layers were lost on the way; whatever loads the model routes by one of the
    two. Where not every engine reads the key it is a warning, and an error in a release and where
    the baseline held no such layer.

    What to do: compare with the source of the checkpoint; for a sharded save, join the slices with
    the tool that wrote them.
    """
    yield from config_contradicted.refused(measured)
    checkpoint = measured.run.get("checkpoint", {})
    surprises = checkpoint.get("layer_notes", ())
    if surprises:
        routers, expected = checkpoint.get("num_routers"), checkpoint.get("num_expected")
        yield config_contradicted.finding(
            (),
            f"{number_of(routers, 'router was', 'routers were')} found where {expected} are "
            "expected.",
            f"{'; '.join(surprises)}.",
        )
    yield from _dense_elsewhere(measured)


def _dense_elsewhere(measured: Measured) -> Iterator[Finding]:
    """Layers that are dense to engines that read one more key, the same finding for each key."""
    routers_by_key: dict[tuple[str, str], list[str]] = {}
    for one in measured.run.get("dense_elsewhere", ()):
        routers_by_key.setdefault((one["key"], one["value"]), []).append(one["router"])
    before = measured.baseline and measured.baseline.dense_elsewhere
    new_first = sorted(
        (before is None or before.issuperset(routers), key, value, tuple(routers))
        for (key, value), routers in routers_by_key.items()
    )
    for is_warning, key, value, routers in new_first:
        count = number_of(len(routers), "router is", "routers are")
        finding = config_contradicted.finding(
            routers,
            f"{count} in layers where '{key}' lets an engine build none.",
            f"config.json: '{key}' is {value}. Engines that read it build no router there"
            f"{'' if is_warning else '; the baseline had no such layer'}.",
        )
        yield dataclasses.replace(finding, severity="warning") if is_warning else finding


@check("MGI106", "the storage of a router is not known", "error")
def storage_unknown(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """What every tensor beside a router means is known.

    Looked for: tensors in the router's own module that its family does not have, dtypes that are no
    floats, and scales whose shape fits no known storage.

    A finding means: the weight may have to be multiplied by something before it is a weight. Every
    figure about this router would be wrong, so nothing is read.

    What to do: check the original weights, or a checkpoint whose routers were left alone: put
    routers on the quantiser's list of modules to skip.
    """
    yield from storage_unknown.refused(measured)


@check("MGI107", "a part of a router is missing", "error")
def part_missing(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Every router has all its parts.

    Looked for: the selection bias or logit bias that the family adds, and the norm in front.

    A finding means: whatever loads the model anyway invents the missing part, mostly as zeros, and
    routes by another rule.

    What to do: compare the file with its source; a conversion may have dropped buffers.
    """
    yield from part_missing.refused(measured)


@check(
    "MGI113",
    "the config does not say how experts are scored",
    "error",
    alike=lambda finding: finding.title,
    too_little=lambda measured: "" if knows_config(measured.run) else OLDER,
    severities={"release": "error"},
)
def gating_unsaid(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The config says how experts are scored.

    Looked for: the key that names the gating function (``scoring_func``, ``expert_gating_func``),
    and other keys without which an engine that is known chooses by another rule.

    A finding means: engines guess, and not all the same: softmax for sigmoid, or the selection bias
    left out. The text stays plausible, half of the tokens go to other experts, and whatever is
    measured on the way (importance matrices, quantised weights) is measured of another model. Where
    the rule cannot be known at all this is an error, where a default is assumed a warning: an
    engine with the same default is right.

    What to do: write the keys into the config or the header, as the source of the checkpoint has
    them.
    """
    yield from gating_unsaid.refused(measured)
    for unsaid in measured.run.get("gating", {}).get("unsaid", ()):
        finding = gating_unsaid.finding(
            (),
            f"the config does not say '{unsaid['key']}': {unsaid['others']}.",
            f"Assumed is {unsaid['assumed']}.",
        )
        yield dataclasses.replace(finding, severity="warning")


def _no_weights(measured: Measured) -> str:
    routers = measured.run.get("routers", ())
    return OLDER if any("is_weight_one" not in one for one in routers) else ""


@check("MGN121", "routing weights are 1 whatever the scores are", "warning", too_little=_no_weights)
def weights_constant(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Routing weights follow the scores.

    Looked for: rules that choose one expert and divide its weight by itself: by renormalising, or
    in a softmax over the chosen.

    A finding means: every routing weight is 1, and the loss gives the router no gradient. It is
    trained by its balance loss alone, if by any. A finished model may have been trained so.

    What to do: leave the division out for one expert (norm_topk_prob false; softmax before top-k).
    """
    routers = [one for one in measured.run.get("routers", ()) if one["is_weight_one"]]
    if routers:
        yield weights_constant.finding(
            tuple(one["name"] for one in routers),
            "one expert is chosen and its weight divided by itself: it is always 1.",
            f"Weights come from {routers[0]['weights_from'].replace('_', ' ')}.",
        )


@check(
    "MGI116",
    "a number is out of its range",
    "error",
    alike=same_sentence,
    too_little=lambda measured: "" if {"ranges", "refused"} & measured.run.keys() else OLDER,
    severities={"release": "error"},
)
def out_of_range(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Every number of config and tensors that decides the routing is in its range.

    Looked for: numbers of the config that a rule or a norm takes (eps, factors, caps, counts), and
    the largest entry of rows, gains, biases and scales. A legal number is one that a rule can be
    computed with; a usual one is near what families have by default. An unusual one is a warning,
    and an error under the profile ``release``.

    A finding means: engines multiply, divide or cut by a number that no model was trained with:
    logits vanish, overflow, or turn round. What is beyond float32, or the dtype that the config
    names, is loaded as infinity. The file was edited, damaged, or written in other units.

    What to do: compare the config and the file with their source.
    """
    yield from out_of_range.refused(measured)
    beyond = measured.run.get("ranges", {}).get("beyond", ())
    for one in sorted(beyond, key=lambda one: one["is_legal"]):
        dtype = one["beyond_dtype"]
        detail = f"Beyond {dtype}: engines load it as infinity." if dtype else ""
        finding = out_of_range.finding(
            (one["router"],) if one["router"] else (), f"{one['text']}.", detail
        )
        yield dataclasses.replace(finding, severity="warning") if one["is_legal"] else finding


@check("MGI115", "routers were not looked at", "error", only_in=("release",))
def not_looked_at(measured: Measured, limits: Limits) -> Iterator[Unknown]:
    """Every router of the checkpoint was looked at.

    Looked for: routers that are found by name and not measured: skipped because their choice does
    not follow from router and input, under a prefix that is not known, or in layers that were not
    asked for. Judged under the profile ``release`` only; elsewhere the verdict line counts them.

    A finding means: none is made. Where a router was left out the check is inconclusive (exit code
    4), since nothing is known of it.

    What to do: ``moegeom list routers CKPT`` names what is skipped, with the reason. Layers that
    look their experts up by token id are judged by MGI111 and can be accepted here with a reason.
    """
    for left_out in unseen_routers(measured):
        yield Unknown("checkpoint", f"{left_out} were not looked at")
