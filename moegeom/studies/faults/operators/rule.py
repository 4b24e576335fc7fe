"""Another rule: other scores, other groups, no cap, lost negative logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from moegeom.core.router import LogitMap, Router, Rule
from moegeom.studies.faults.operator import Operator, Proposal, Site, routed

#: Soft caps c of logits, c tanh(x / c), that models have.
CAPS = (2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0)


def _rules(rule: Rule) -> Iterator[tuple[str, str, Rule]]:
    groups = rule.groups
    if groups is not None:
        yield "groups_ignored", "groups of experts ignored", dataclasses.replace(rule, groups=None)
        fill = 0.0 if np.isneginf(groups.fill) else -np.inf
        other = dataclasses.replace(groups, fill=fill)
        yield "other_fill", "dropped groups filled otherwise", _with_groups(rule, other)
        score = "max" if groups.score == "top2_sum" else "top2_sum"
        other = dataclasses.replace(groups, score=score)
        yield "other_group_score", "groups scored otherwise", _with_groups(rule, other)
        for number in (groups.num_groups // 2, groups.num_groups, groups.num_groups * 2):
            for num_kept in range(1, number):
                if (number, num_kept) == (groups.num_groups, groups.num_kept):
                    continue
                other = dataclasses.replace(groups, num_groups=number, num_kept=num_kept)
                text = f"{num_kept} of {number} groups kept"
                yield f"{num_kept}_of_{number}_groups", text, _with_groups(rule, other)
    swapped = {"sigmoid": "softmax", "softmax": "sigmoid"}.get(rule.score)
    if swapped is not None and not rule.is_affine:
        text = "sigmoid for softmax, or the reverse"
        yield "other_score", text, dataclasses.replace(rule, score=swapped)
    if rule.logit_map is None and not rule.is_affine:
        for cap in CAPS:
            capped = dataclasses.replace(rule, logit_map=LogitMap(soft_cap=cap))
            yield f"cap_{cap:g}", f"logits capped softly at {cap:g}", capped
    if rule.logit_map is not None:
        yield (
            "no_logit_map",
            "logits not capped or scaled",
            dataclasses.replace(rule, logit_map=None),
        )


def _with_groups(rule: Rule, groups: object) -> Rule:
    return dataclasses.replace(rule, groups=groups)


def _other_rule(site: Site) -> Iterator[Proposal]:
    router: Router = site.router
    for name, text, rule in _rules(router.rule):
        groups = rule.groups
        if groups is not None and router.num_experts % groups.num_groups:
            continue
        if (
            groups is not None
            and groups.num_kept * (router.num_experts // groups.num_groups) < rule.top_k
        ):
            continue
        edited = dataclasses.replace(router, rule=rule)
        yield from routed(site, name, text, "rule differs", edited, needs_inputs=False, bits=2.0)


RULE = Operator("rule", _other_rule)


def _clamped(site: Site) -> Iterator[Proposal]:
    """Negative logits replaced by the zeros of padding, so that they tie."""
    logits = site.logits
    few = (logits > 0.0).sum(axis=1) < site.theirs.shape[1]
    if not site.has_logits or site.router.rule.groups is not None or not few.any():
        return

    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        return np.maximum(there.logits[rows], 0.0)

    text = "negative logits lost (taken as 0)"
    yield Proposal("negative_lost", text, "rule differs", 2.0, scores=scores)


NEGATIVE_LOST = Operator("negative_lost", _clamped)


def _misread(site: Site) -> Iterator[Proposal]:
    """A buffer of bfloat16 logits read as float32: each value is two of theirs."""
    logits = site.logits
    if not site.has_logits or len(logits) < 2:
        return
    halves = (np.ascontiguousarray(logits, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    pairs = halves.ravel()[: halves.size - halves.size % 2].view(np.float32)
    numbers = np.zeros(logits.size, np.float32)
    numbers[: len(pairs)] = np.where(np.isfinite(pairs), pairs, 0.0)
    grid = numbers.reshape(logits.shape)

    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        return grid[rows]

    text = "bf16 logits, their bytes read as float32"
    yield Proposal("logits_misread", text, "rule differs", 2.0, scores=scores)


LOGITS_MISREAD = Operator("logits_misread", _misread)
