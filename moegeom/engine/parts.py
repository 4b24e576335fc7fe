"""Parts of one stream that were folded apart: in other processes, or on other machines."""

from __future__ import annotations

from collections.abc import Sequence

from moegeom.engine.loop import NAMED, Progress
from moegeom.kernels.reduction import REDUCTIONS


def merged(progresses: Sequence[Progress]) -> Progress:
    """What one fold of all the tokens would have: the parts have no token in common.

    States are integers and sorted rows, so that neither the order of the parts nor how they are
    put together changes a bit. Each part has the reductions of the first; there is one at least.
    """
    first, *others = progresses
    states = dict(first.states)
    for other in others:
        states = {
            name: REDUCTIONS[name].merge(state, other.states[name])
            for name, state in states.items()
        }
    lost = sorted(token for part in progresses for token in part.non_finite)
    return Progress(
        next_tile=max(part.next_tile for part in progresses),
        num_tokens=sum(part.num_tokens for part in progresses),
        non_finite=tuple(lost[:NAMED]),
        num_non_finite=sum(part.num_non_finite for part in progresses),
        states=states,
    )
