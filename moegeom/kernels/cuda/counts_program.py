"""The program of the kernels that only count."""

from __future__ import annotations

from moegeom.kernels.cuda.layout import layout_of
from moegeom.kernels.cuda.program import Program
from moegeom.kernels.cuda.tally_facts import TALLY_DEFINES


def counts_program(entry: str) -> Program:
    """``entry`` of ``counts.cu``; the layout of its headers is not used."""
    defines = (*layout_of(1, 1).defines(1), *TALLY_DEFINES)
    return Program(entry, ("lanes.cuh", "tally.cuh", "counts.cu"), defines)
