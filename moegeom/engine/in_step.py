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


def in_step(routers: Sequence[Router], source: TokenSource | None) -> Iterator[tuple[Router, ...]]:
    """The routers in their order, in groups that read the tokens together."""
    group: list[Router] = []
    for router in routers:
        if group and not _fits(router, group, source):
            yield tuple(group)
            group = []
        group.append(router)
    if group:
        yield tuple(group)


def _fits(router: Router, group: Sequence[Router], source: TokenSource | None) -> bool:
    """Whether the tokens of the group are those of the router, and there is room for its sums."""
    if not isinstance(source, TraceSource):
        return False
    members = (*group, router)
    if any(one.name not in source.facts.routers for one in members):
        return False
    return sum(_state_bytes(one, source.facts.num_tokens) for one in members) <= _MOST_BYTES


def _state_bytes(router: Router, num_tokens: int) -> int:
    """What the largest sums of a router take at most: pairs of experts, and sets of them.

    Sets are an entry of key, count and members each; as many again wait to be sorted in.
    """
    pairs = 8 * NUM_BLOCKS * router.num_experts**2
    return pairs + 2 * min(num_tokens, CAPACITY) * (16 + 2 * router.rule.top_k)
