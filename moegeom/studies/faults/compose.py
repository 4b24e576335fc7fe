"""Up to three faults on different tokens, found greedily: each saves bits of the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from moegeom.core.shapes import Bool, Float64
from moegeom.studies.faults.scope import TokenRegion, Where, best_region, found_by_chance
from moegeom.studies.faults.score import (
    LEAST_BITS,
    OPERATOR_BITS,
    REPAIRS,
    Fault,
    SiteScores,
    equal_sets,
    mended,
)

#: Faults in one composition, and those that save most alone, of which the others are taken.
_MOST, _TRIED = 3, 12


def with_composed(pool: Sequence[Fault], sites: Sequence[SiteScores], where: Where) -> list[Fault]:
    """The faults, and one composed of the leading and others on other tokens, if it saves bits."""
    first = next((one for one in pool if one.bits >= LEAST_BITS and one.repaired >= REPAIRS), None)
    if first is None:
        return list(pool)
    parts = [first]
    while len(parts) < _MOST:
        taken = np.any([part.region.is_inside for part in parts], axis=0)
        more = [
            part
            for fault in pool[:_TRIED]
            if fault.name not in {one.name for one in parts}
            and (part := _rest(fault, ~taken, sites, where)) is not None
        ]
        if not more:
            break
        parts.append(max(more, key=lambda part: part.bits))
    if len(parts) == 1:
        return list(pool)
    whole = _whole(parts, sites)
    return sorted([*pool, whole], key=lambda fault: -fault.bits)


def _rest(
    fault: Fault, is_left: Bool[np.ndarray, "tokens"], sites: Sequence[SiteScores], where: Where
) -> Fault | None:
    """The fault on tokens that are left; None where it is not worth its bits, or repairs little."""
    having = [site for site in sites if site.router in fault.routers]
    saved = [np.where(is_left, site.scored[fault.name].saved[fault.way], 0.0) for site in having]
    of_all = np.sum(saved, axis=0)
    region = best_region(of_all, where)
    inside = region.is_inside & is_left
    own = [site.scored[fault.name].candidate.own_bits for site in having]
    bits = _sum(saved, inside) - region.bits - OPERATOR_BITS
    bits -= having[0].scored[fault.name].candidate.bits + sum(own)
    if bits >= LEAST_BITS and region.text:
        bits -= found_by_chance(of_all, where)
    if bits < LEAST_BITS:
        return None
    met, before = equal_sets(fault.name, having, inside)
    part = dataclasses.replace(
        fault,
        region=TokenRegion(inside, region.text or "all others", region.bits),
        bits=bits,
        reproduced=met,
        before=before,
        mended=0.0,
    )
    return part if part.repaired >= REPAIRS else None


def _sum(saved: Sequence[Float64[np.ndarray, "tokens"]], inside: np.ndarray) -> float:
    return float(sum(one[inside].sum() for one in saved))


def _whole(parts: Sequence[Fault], sites: Sequence[SiteScores]) -> Fault:
    """All parts as one fault, named by the part that saves most."""
    inside = np.any([part.region.is_inside for part in parts], axis=0)
    having = [site for site in sites if any(site.router in part.routers for part in parts)]
    met = {site.router: met_under(parts, site) for site in having}
    first = having[0]
    there = [(first.scored[p.name], p) for p in parts if first.router in p.routers]
    base = min(scored.as_is[part.way] for scored, part in there)
    own = [float(scored.of_sets[part.way][part.region.is_inside].sum()) for scored, part in there]
    most = max(parts, key=lambda part: part.bits)
    scopes = " and ".join(part.region.text or "all" for part in parts)
    return dataclasses.replace(
        most,
        name="+".join(part.name for part in parts),
        text=" and ".join(part.text for part in parts),
        region=TokenRegion(inside, f"{scopes} respectively", sum(p.region.bits for p in parts)),
        routers=tuple(site.router for site in having),
        bits=sum(part.bits for part in parts),
        explained=sum(own) / base if base > 0.0 else 0.0,
        reproduced={site.router: float(met[site.router][inside].mean()) for site in having},
        before={site.router: float(site.is_met[inside].mean()) for site in having},
        mended=mended(first.is_met, met[first.router]),
        of_other=any(part.of_other for part in parts),
        is_fitted=any(part.is_fitted for part in parts),
        inherits=any(part.inherits for part in parts),
        parts=tuple(parts),
    )


def met_under(parts: Sequence[Fault], site: SiteScores) -> Bool[np.ndarray, "tokens"]:
    """Whether each set is reproduced: by the fault of its token, else by A's router."""
    is_met = site.is_met
    for part in parts:
        if site.router in part.routers:
            is_met = np.where(part.region.is_inside, site.scored[part.name].is_met, is_met)
    return is_met
