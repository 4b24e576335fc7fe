"""Selection scores of curved rules."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.cuda.cupy_device import first_device
from moegeom.kernels.cuda.device import Device
from moegeom.kernels.cuda.layout import layout_of
from moegeom.kernels.cuda.part import WARPS, c_type, run_part
from moegeom.kernels.cuda.program import Program
from moegeom.kernels.cuda.score_kinds import SCORE_KINDS


def selection_scores(
    logits: np.ndarray, score: str, bias: np.ndarray, device: Device | None = None
) -> np.ndarray:
    """``score(logit) + bias`` in float64."""
    layout = layout_of(logits.shape[1], 1)
    defines = (*layout.defines(WARPS), ("LOGIT_TYPE", c_type(logits)))
    program = Program(
        "selection_scores", ("lanes.cuh", "scores.cuh", "selection_scores.cu"), defines
    )
    sizes, outputs = [np.int64(SCORE_KINDS[score])], [np.empty(logits.shape)]
    (scores,) = run_part(device or first_device(), program, layout, [logits, bias], outputs, sizes)
    assert scores is not None
    return scores
