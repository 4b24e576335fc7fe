"""What ``tally.cuh`` has to know of labels and bins, from where it is known."""

from __future__ import annotations

from moegeom.geometry.arithmetic.float_bits import FIRST_CODE, NUM_BINS
from moegeom.kernels.batch import NUM_BLOCKS

#: Label of a token that is not counted.
NOT_COUNTED = 0xFFFF

TALLY_DEFINES = (
    ("NUM_BINS", str(NUM_BINS)),
    ("FIRST_CODE", str(FIRST_CODE)),
    ("NUM_BLOCKS", str(NUM_BLOCKS)),
    ("NOT_COUNTED", str(NOT_COUNTED)),
)
