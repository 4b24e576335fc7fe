"""Routers that are scanned in step, since one file holds the choices of all of them side by side.

A recording keeps each router apart, so that one is read after the other. A trace is read whole for
the first of its routers: the others take their part of each piece while it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moegeom.core.router import Router
from moegeom.core.tokens import TokenSource
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.reductions.sketches import CAPACITY
from moegeom.tokens.traces.source import TraceSource

#: Bytes of the sums of the routers that are in step.
_MOST_BYTES = 1 << 30


def in_step(
    routers: Sequence[Router], sources: Sequence[TokenSource | None]
) -> Iterator[tuple[Router, ...]]:
    """The routers in their order, in groups that read the tokens of the sources together; one group
    where there are none to read.
    """
    group: list[Router] = []
    for router in routers:
        if group and not _fits(router, group, sources):
            yield tuple(group)
            group = []
        group.append(router)
    if group:
        yield tuple(group)


def _fits(router: Router, group: Sequence[Router], sources: Sequence[TokenSource | None]) -> bool:
    """Whether some source is a trace of the group and of the router, and their sums have room."""
    members = (*group, router)
    if sources[0] is None:
        return True
    if not any(isinstance(source, TraceSource) for source in sources):
        return False
    heard = [source.facts for source in sources if source is not None]
    if any(one.name not in facts.routers for facts in heard for one in members):
        return False
    return sum(_state_bytes(one, heard[0].num_tokens) for one in members) <= _MOST_BYTES


def _state_bytes(router: Router, num_tokens: int) -> int:
    """What the largest sums of a router take at most: pairs of experts, sets of them, and a bit for
    each token that flips.

    Sets are an entry of key, count and members each; as many again wait to be sorted in.
    """
    pairs = 8 * NUM_BLOCKS * router.num_experts**2
    sets = 2 * min(num_tokens, CAPACITY) * (16 + 2 * router.rule.top_k)
    return pairs + sets + num_tokens // 8
