"""What a config says of its routers or leaves to engines: gating function, groups, exclusions.

Plans and the config alone: no tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moegeom.router.family import Setting
from moegeom.router.load import PlannedRouters
from moegeom.router.quantised_modules import Quantisation


def config_claims(planned: PlannedRouters) -> dict[str, Any]:
    """Facts for ``run.json``: ``gating``, ``group_masks`` and ``quantisation``.

    The last is missing where the config asks for no quantisation.
    """
    facts: dict[str, Any] = {
        "gating": {"unsaid": list(_unsaid(planned))},
        "group_masks": list(_group_masks(planned)),
    }
    quantisation = _quantisation(planned)
    return facts | ({"quantisation": quantisation} if quantisation else {})


def _unsaid(planned: PlannedRouters) -> Iterator[Mapping[str, str]]:
    """Keys that decide how experts are scored and that the config lacks, and who takes what."""
    family = planned.family
    source = " ".join(family.source.split()[:2])
    specs = {match.spec.score.keys: match.spec for match in planned.matches}
    for keys, spec in specs.items():
        settings, score = planned.settings.under(spec.config_roots), spec.score
        if keys and not settings.has(Setting(keys)):
            taken = score.values.get(score.default, score.default).replace("_", "-")
            yield {
                "key": keys[0],
                "assumed": f"{taken}, the default of {source}",
                "others": "other engines have other defaults",
            }
    for key, taken in family.engines_read.items():
        if not planned.settings.has(Setting((key,))):
            yield {"key": key, "assumed": f"what {source} does", "others": taken}


def _group_masks(planned: PlannedRouters) -> Iterator[Mapping[str, Any]]:
    for plan in planned.plans:
        if plan.rule.groups is not None:
            yield {
                "router": plan.match.name,
                "num_groups": plan.rule.groups.num_groups,
                "num_kept": plan.rule.groups.num_kept,
                "fill": str(plan.rule.groups.fill),
                "top_k": plan.rule.top_k,
                "score": plan.rule.score,
            }


def _quantisation(planned: PlannedRouters) -> Mapping[str, Any] | None:
    """Which plain routers the exclusions of the config do not name."""
    found = Quantisation.of(planned.store.config)
    if found is None:
        return None
    plain = {
        plan.match.name: plan.match.stem.removesuffix(".")
        for plan in planned.plans
        if plan.stored.scheme == "plain"
    }
    covered = [name for name, module in plain.items() if found.covers(module)]
    return {
        "method": found.method,
        "key": found.key,
        "num_plain": len(plain),
        "covered": covered,
        "module": plain[covered[0]] if covered else "",
    }
