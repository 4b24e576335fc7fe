"""Breadth-first searches of a graph, 64 at a time, compiled."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.cpu import kernel


@kernel()
def searched(starts, neighbour, sources, reach, most, bits, fresh, wider, is_left):
    """Searches from up to 64 cells at once, a bit each, of ``most`` steps at most.

    How far the farthest cell of each is, and the steps that were made: one more where the last one
    reached no further cell. Cells that are ``reach`` or fewer steps from a source are taken out of
    ``is_left``. ``bits``, ``fresh`` and ``wider`` are room: which searches have reached a cell,
    which of them in the last step, and which reach it in the next one.
    """
    one, zero = np.uint64(1), np.uint64(0)
    farthest, steps = np.zeros(len(sources), np.int64), 0
    bits[:] = zero
    for n in range(len(sources)):
        bits[sources[n]] |= one << np.uint64(n)
    for cell in range(len(bits)):
        fresh[cell] = wider[cell] = bits[cell]
    while True:
        ending, gained = zero, zero
        for n in range(len(sources)):
            if reach[n] == steps:
                ending |= one << np.uint64(n)
        for cell in range(len(bits)):
            if bits[cell] & ending:
                is_left[cell] = False
            if fresh[cell] and steps < most:
                for place in range(starts[cell], starts[cell + 1]):
                    wider[neighbour[place]] |= fresh[cell]
        steps += 1
        for cell in range(len(bits)):
            fresh[cell] = wider[cell] ^ bits[cell]
            gained |= fresh[cell]
            bits[cell] = wider[cell]
        for n in range(len(sources)):
            if gained >> np.uint64(n) & one:
                farthest[n] = steps
        if steps > most or not gained:
            return farthest, steps
