"""All faults by operator, and how one is drawn for a model and a text."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool

from tests.generator import (
    faults_of_columns,
    faults_of_stages,
    faults_of_steps,
    faults_of_threads,
    faults_of_weights,
)
from tests.generator.engine import Fault, Reach, Schedule
from tests.generator.kinds import EXPERTS, LAYERS, TOKENS, Draw, Ground, Kind, draw_part, draw_scope
from tests.generator.model import Text

#: Kinds on which explain was tuned, those that were added when it stood, and those that people have
#: reported of engines and trainers.
OLD: Mapping[str, Kind] = {**faults_of_weights.KINDS, **faults_of_stages.KINDS}
NEW: Mapping[str, Kind] = {**faults_of_columns.KINDS, **faults_of_steps.KINDS}
THREADS: Mapping[str, Kind] = faults_of_threads.KINDS
KINDS: Mapping[str, Kind] = {**OLD, **NEW, **THREADS}


@dataclass(frozen=True, eq=False)
class Injected:
    operator: str
    scope: str
    fault: Fault


def _one_scope(rng: np.random.Generator, kind: Kind, layers: int) -> str:
    """All, layers, experts and tokens are equally likely where they are possible."""
    possible = [one for one in kind.scopes if layers > 2 or one != "layer_interval"]
    families = [
        [one for one in possible if one == "all"],
        [one for one in possible if one in LAYERS],
        [one for one in possible if one in EXPERTS],
        [one for one in possible if one in TOKENS],
    ]
    there = [family for family in families if family]
    family = there[int(rng.integers(len(there)))]
    return family[int(rng.integers(len(family)))]


def _starts(ground: Ground, reach: Reach, kind: Kind, scope: str) -> Reach:
    """The reach of a fault of the cache: the positions at which a step begins, within it."""
    position = ground.text.position
    if kind.starts == "requests":
        # the first batch finds slots that nobody has used
        later = np.isin(np.arange(len(position)), np.concatenate(ground.schedule.batches[1:]))
        return Reach(reach.layers, reach.tokens & (position == 0) & later[:, None])
    steps = step_starts(ground.schedule, position.shape[1])
    if scope == "positions_from":
        first = int(np.argwhere(reach.tokens.any(axis=0)).min())
        steps = steps[steps >= first][:1]
    return Reach(reach.layers, reach.tokens & np.isin(position, steps))


def step_starts(schedule: Schedule, length: int) -> np.ndarray:
    """Where later chunks of a prefill begin, and the decoding."""
    starts = [start for start, _ in schedule.steps(length)]
    return np.array([start for start in starts if 0 < start <= schedule.decode_from], dtype=int)


def draw_fault(operator: str, ground: Ground, of: Injected | None = None) -> Injected:
    """With ``of`` at the layers and tokens of another fault."""
    kind = KINDS[operator]
    if of is None:
        scope = _one_scope(ground.rng, kind, ground.model.shape.layers)
        name, reach = draw_scope(scope, ground, kind.lowest)
    else:
        scope = name = "all" if of.fault.reach.experts is not None else of.scope
        reach = replace(of.fault.reach, experts=None)
    if kind.starts:
        reach = _starts(ground, reach, kind, scope)
    if kind.in_part:
        reach = replace(reach, experts=draw_part(ground))
    seed = int(ground.rng.integers(2**31))
    return Injected(operator, name, Fault(kind.stage, reach, kind.make(Draw(ground, reach, seed))))


# --------------------------------------------------------------------------------- what it reaches
def acts_on(fault: Fault, text: Text) -> Bool[np.ndarray, "documents length"]:
    """The tokens at which a fault acts: of a cache all that are served from it since."""
    tokens = fault.reach.tokens
    if fault.stage in ("cache", "memory"):
        tokens = np.logical_or.accumulate(tokens, axis=1)
    return tokens & text.is_token


def may_differ(
    fault: Fault, text: Text, layers: int
) -> Bool[np.ndarray, "layers documents length"]:
    """Where it acts, and in higher layers at later tokens; what a writer does goes nowhere."""
    acting = acts_on(fault, text)
    behind = np.logical_or.accumulate(acting, axis=1)
    possible = np.zeros((layers, *acting.shape), bool)
    for layer in sorted(fault.reach.layers):
        possible[layer] |= acting
        if fault.stage != "write":
            possible[layer + 1 :] |= behind
    return possible
