"""The kernel that adds up what most reductions make of a token whose choice is known.

The definition of each is its reduction's fold, a program over arrays, which this kernel replaces on
a device: it takes one launch where they take hundreds.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moegeom.core.router import Rule
from moegeom.core.tokens import TILE
from moegeom.geometry.rounding import FARTHEST_SIGMAS, ROUNDING_RMS, UNIT_BFLOAT16
from moegeom.kernels.batch import RUN_TOKENS, TokenBatch
from moegeom.kernels.cuda.device import DeviceArray, Queue
from moegeom.kernels.cuda.program import SCORE_KINDS, TALLY_DEFINES, Program, layout_of

#: Tokens of a block of threads, which share sums: a run, so that they share its label.
_BLOCK_TOKENS = RUN_TOKENS


@dataclass(frozen=True, eq=False)
class TallyCounters:
    """What the kernel adds to, by the name of the reduction whose counters these are."""

    routing_entropy: DeviceArray | None = None
    score_sums: DeviceArray | None = None
    log_sum_exp: DeviceArray | None = None
    neighbours: DeviceArray | None = None
    top1: DeviceArray | None = None
    bf16_flip: DeviceArray | None = None
    mask_fill: DeviceArray | None = None
    bracket_histogram: DeviceArray | None = None


#: Reductions whose counters the kernel adds to.
TALLIED = tuple(field.name for field in dataclasses.fields(TallyCounters))


@dataclass(frozen=True)
class TallyRule:
    """What the kernel is compiled for; ``subtracts`` a bias that only selects from the logits."""

    num_experts: int
    rule: Rule
    subtracts: bool

    @cached_property
    def warps(self) -> int:
        layout = layout_of(self.num_experts, self.rule.top_k)
        return layout.warps(
            8 * (2 * self.num_experts + 19), 4 * layout.tokens_in_warp * self.num_experts
        )

    @cached_property
    def program(self) -> Program:
        groups = self.rule.groups
        named = {
            "SCORE": SCORE_KINDS[self.rule.score],
            "SUBTRACTS": int(self.subtracts),
            "FILL_KIND": 0 if groups is None else 1 if np.isneginf(groups.fill) else 2,
            "BLOCK_TOKENS": _BLOCK_TOKENS,
            "TILE": TILE,
            "FARTHEST_SIGMAS": FARTHEST_SIGMAS,
        }
        layout = layout_of(self.num_experts, self.rule.top_k).defines(self.warps)
        defines = (*layout, *TALLY_DEFINES, *((name, str(value)) for name, value in named.items()))
        return Program("tally", ("lanes.cuh", "scores.cuh", "tally.cu"), defines)


def launch_tally(
    queue: Queue,
    rule: TallyRule,
    batch: TokenBatch,
    subtracted: DeviceArray | None,
    hidden_size: int,
    counters: TallyCounters,
) -> None:
    """Adds up the tokens of a batch that lies on the device; ``subtracted`` is in float32."""
    tokens = len(batch.token)
    if not tokens:
        return
    noise = np.float64(ROUNDING_RMS * UNIT_BFLOAT16), np.float64(np.sqrt(hidden_size))
    at_hand = vars(batch).get  # nothing is computed for sums that nobody asks for
    names = ("chosen", "last_score", "distance", "input_norm")
    names += ("token", "document", "position", "population", "block")
    arrays = (at_hand("logits"), subtracted, *map(at_hand, names), *vars(counters).values())
    grid = -(-tokens // _BLOCK_TOKENS)
    queue.launch(rule.program, grid, 32 * rule.warps, (np.int64(tokens), *noise, *arrays))
