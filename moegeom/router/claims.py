"""What a config says of its routers or leaves to engines: gating function and exclusions.

Plans and the config alone: no tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moegeom.router.family import Family, Setting
from moegeom.router.match import Match
from moegeom.router.plan import RouterPlan
from moegeom.router.quantised_modules import Quantisation
from moegeom.router.settings import Settings


def config_claims(
    family: Family, settings: Settings, matches: Iterable[Match], plans: Iterable[RouterPlan]
) -> dict[str, Any]:
    """Facts for ``run.json``: ``gating`` and ``quantisation``; the latter is empty where the config
    asks for none.
    """
    return {
        "gating": {"unsaid": list(_unsaid(family, settings, matches))},
        "quantisation": _quantisation(settings, plans),
    }


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
    """Every router that is stored plain, its module, and whether an exclusion names it."""
    found = Quantisation.of(settings.config)
    if found is None:
        return {}
    plain = {
        plan.match.name: plan.match.stem.removesuffix(".")
        for plan in plans
        if plan.stored.scheme == "plain"
    }
    return {
        "method": found.method,
        "key": found.key,
        "plain": [
            {"router": name, "module": module, "is_covered": found.covers(module)}
            for name, module in plain.items()
        ],
    }
