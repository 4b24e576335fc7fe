"""Breadth-first searches of a graph, 64 at a time, compiled."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.cpu import kernel


@kernel()
def searched(starts, neighbour, sources, reach, most, bits, wider, is_left):
    """Searches from up to 64 cells at once, a bit each, of ``most`` steps at most.

    How far the farthest cell of each is, and the steps that were made: one more where the last one
    reached no further cell. Cells that are ``reach`` or fewer steps from a source are taken out of
    ``is_left``.
    """
    one, zero = np.uint64(1), np.uint64(0)
    farthest = np.zeros(len(sources), np.int64)
    everyone, steps = zero, 0
    bits[:] = zero
    for n in range(len(sources)):
        everyone |= one << np.uint64(n)
        bits[sources[n]] |= one << np.uint64(n)
    while True:
        ending, gained = zero, zero
        for n in range(len(sources)):
            if reach[n] == steps:
                ending |= one << np.uint64(n)
        for cell in range(len(bits)):
            own = bits[cell]
            if own & ending:
                is_left[cell] = False
            if own != everyone and steps < most:
                for place in range(starts[cell], starts[cell + 1]):
                    own |= bits[neighbour[place]]
                gained |= own ^ bits[cell]
            wider[cell] = own
        steps += 1
        for n in range(len(sources)):
            if gained >> np.uint64(n) & one:
                farthest[n] = steps
        if steps > most or not gained:
            return farthest, steps
        bits, wider = wider, bits
