"""MGT204: the load of no domain concentrates while the whole looks fine.

Looked for: the number of experts that the load of a domain lies on in effect (exp of its entropy).
It must fall to half of what it was (median before and after, heuristic), and to half of what it
does in the other domains (median), while that of all tokens keeps nine tenths; every later step
must be below every earlier one by more than chance (Student's t over blocks of documents, all steps
and domains counted). The tokens must be the same at every step.

A finding means: the router sends nearly all text of one kind to a few experts. The mean over all
domains hides it; these experts are overloaded wherever such text comes in batches.

What to do: look at the data of that domain from this step on (repeated documents, another
tokenizer), and at its MaxVio; balance within sequences or by domain. Specialisation that is meant
looks alike, so look at the loss of the domain as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moegeom.checks.check import Tested
from moegeom.core.row_keys import ALL, is_domain
from moegeom.core.text import percent
from moegeom.geometry.statistics import LEAST_STEPS, departures
from moegeom.studies.track.history import Concentration, History, RouterHistory
from moegeom.studies.track.series_check import SeriesCheck, same_onset, share

#: Part of the experts in use, and of what the other domains keep, up to which it is a fall.
_FALLS_TO = 0.5

#: Part of its experts that the whole must keep to look fine.
_WHOLE_KEEPS = 0.9


@dataclass(frozen=True)
class _Fall:
    """Of one domain, from step ``onset`` on: experts in use before and after, and the p-value."""

    domain: str
    onset: int
    p_value: float
    before: float
    after: float


def _judge(history: History) -> Iterator[Tested]:
    for router in history.routers:
        domains = [name for name in router.concentrations if is_domain(name)]
        if len(domains) < 2 or ALL not in router.concentrations:
            continue
        level = share(history) / len(domains)
        falls = [_fall(name, router.concentrations[name], level) for name in domains]
        told = [one for one in falls if _is_alone(one, router, domains)]
        if not told:
            yield Tested(router.name, None, 1.0)
            continue
        one = min(told, key=lambda one: one.p_value)
        whole = _kept(router.concentrations[ALL], one.onset)
        finding = CHECK.finding(
            router.name,
            f"from step {history.step(one.onset)} on the load of domain "
            f"{one.domain.removeprefix('domain=')} lies on few experts.",
            f"In effect on {one.after:.1f}, before on {one.before:.1f}; over all tokens "
            f"{percent(whole, '.0f')} of the experts in use stay. Look at the data of that domain.",
        )
        yield Tested(router.name, finding, min(1.0, one.p_value * len(domains)))


def _fall(name: str, found: Concentration, level: float) -> _Fall:
    """The earliest step from which on it is lower beyond ``level``, else the clearest."""
    values = np.log(found.effective)
    errors = found.errors / found.effective
    if (errors > 0.0).any():
        # every document alike leaves no error, which is no certainty
        errors = np.where(errors > 0.0, errors, errors.max())
    looks = len(values) - 1
    p_values = departures(values, errors, found.num_blocks - 1.0) * looks
    clear = np.flatnonzero(p_values <= level)
    onset = int(clear[0]) if len(clear) else 1 + int(p_values[1:].argmin())
    before, after = (float(np.median(part)) for part in np.split(found.effective, [onset]))
    return _Fall(name, onset, float(p_values[onset]), before, after)


def _is_alone(one: _Fall, router: RouterHistory, domains: list[str]) -> bool:
    """Whether the domain falls, and neither the whole nor the other domains with it."""
    kept = one.after / one.before
    others = [_kept(router.concentrations[d], one.onset) for d in domains if d != one.domain]
    is_fall = kept <= _FALLS_TO and kept <= _FALLS_TO * float(np.median(others))
    return is_fall and _kept(router.concentrations[ALL], one.onset) >= _WHOLE_KEEPS


def _kept(found: Concentration, onset: int) -> float:
    before, after = (float(np.median(part)) for part in np.split(found.effective, [onset]))
    return after / before


CHECK = SeriesCheck(
    "MGT204",
    "the load of a domain concentrates",
    "warning",
    _judge,
    inputs="series and domains",
    alike=same_onset,
    least_steps=lambda history: LEAST_STEPS,
    needs_one_text=True,
)
