"""CUDA sources with their constants filled in, and how experts are spread over a warp."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from moegeom.geometry.histogram import FIRST_CODE, NUM_BINS
from moegeom.kernels.batch import NUM_BLOCKS

#: No fused multiply-add but where the source asks for one: quantities are rounded as in the
#: reference.
OPTIONS = ("-std=c++17", "--fmad=false")


@dataclass(frozen=True)
class Program:
    """The kernel ``entry``: the files ``parts`` of ``source/``, behind ``defines``.

    Equal programs are compiled once.
    """

    entry: str
    parts: tuple[str, ...]
    defines: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """One self-contained source: nothing is included, so no header need be found."""
        folder = files("moegeom.kernels.cuda") / "source"
        lines = [f"#define {name} {value}" for name, value in self.defines]
        return "\n".join([*lines, *((folder / part).read_text("utf-8") for part in self.parts)])


# -------------------------------------------------------------------------------------------- lanes
#: Experts that a lane holds, where that many lanes are to be had: enough to sort in registers.
_WANTED = 8

#: Shared memory of a block without asking for more, in bytes.
_SHARED_BYTES = 48 * 1024

#: Most experts and slots that the kernels are compiled for.
MAX_EXPERTS = 1024
MAX_TOP_K = 64


@dataclass(frozen=True)
class LaneLayout:
    """``lanes`` lanes a token with ``per`` experts each, both powers of two."""

    experts: int
    top_k: int
    lanes: int
    per: int

    @property
    def tokens_in_warp(self) -> int:
        return 32 // self.lanes

    def defines(self, warps: int) -> tuple[tuple[str, str], ...]:
        """What ``lanes.cuh`` and ``selection.cuh`` expect."""
        named = {
            "EXPERTS": self.experts,
            "TOP_K": self.top_k,
            "LANES": self.lanes,
            "PER": self.per,
            "WARPS": warps,
        }
        return tuple((name, str(value)) for name, value in named.items())

    def warps(self, fixed_bytes: int, warp_bytes: int) -> int:
        """Warps of a block whose shared memory fits: 8, 4, 2 or 1."""
        for warps in (8, 4, 2):
            if fixed_bytes + warps * warp_bytes <= _SHARED_BYTES:
                return warps
        return 1


def layout_of(experts: int, top_k: int) -> LaneLayout:
    """Lanes for this many experts: 1 for up to 8, 8 for 64, the whole warp from 256 on."""
    lanes = 1
    while lanes < 32 and lanes * _WANTED < experts:
        lanes *= 2
    per = 1
    while lanes * per < experts:
        per *= 2
    return LaneLayout(experts, top_k, lanes, per)


# ---------------------------------------------------------------------------------------- constants
SCORE_KINDS = {"identity": 0, "softmax": 1, "sigmoid": 2, "sqrt_softplus": 3}


#: Label of a token that is not counted.
NOT_COUNTED = 0xFFFF

TALLY_DEFINES = (
    ("NUM_BINS", str(NUM_BINS)),
    ("FIRST_CODE", str(FIRST_CODE)),
    ("NUM_BLOCKS", str(NUM_BLOCKS)),
    ("NOT_COUNTED", str(NOT_COUNTED)),
)
