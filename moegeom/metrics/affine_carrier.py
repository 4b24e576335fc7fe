"""Whether the shared experts carry the affine part of the layer, from recorded outputs.

On tokens with recorded outputs Y_sh of the shared and Y_ro of the routed experts, Y their sum: the
energy share mean |Y_sh|^2 / mean |Y|^2; the mean-energy share |mean Y|^2 / mean |Y|^2 of each part;
the cosine of the mean outputs; and R^2 of an affine map from the router input to each output, on
documents that the fit has not seen. A shared expert that carries the common part has a large
mean-energy share and the routed ones a small one. None of it tells what training would do without
shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.space import (
    affine_r2,
    energy_share,
    mean_direction_cosine,
    mean_energy_share,
    residual_r2,
)

#: Blocks of documents that the affine map is fitted on; the others test it.
TRAIN_BLOCKS = 12

_PARTS = ("shared", "routed", "total")


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    sample = reductions["block_outputs"]
    if len(sample["input"]) < 2:
        return {"layers": {}}
    inputs, shared, routed = (
        sample[name].astype(np.float64) for name in ("input", "shared", "routed")
    )
    outputs = {"shared": shared, "routed": routed, "total": shared + routed}
    train = sample["block"] < TRAIN_BLOCKS
    layers = {
        "shared_energy_share": energy_share(shared, outputs["total"]),
        "routed_energy_share": energy_share(routed, outputs["total"]),
        "shared_mean_cosine": mean_direction_cosine(shared, outputs["total"]),
    }
    layers |= {f"{part}_mean_energy_share": mean_energy_share(outputs[part]) for part in _PARTS}
    layers |= {f"{part}_affine_r2": affine_r2(inputs, outputs[part], train) for part in _PARTS}
    layers["routed_residual_r2"] = residual_r2(inputs, routed, outputs["total"], train)
    return {"layers": layers}


def _of_parts(suffix: str, text: str, has_se: bool) -> tuple[Column, ...]:
    words = {"shared": "shared experts", "routed": "routed experts", "total": "their sum"}
    return tuple(
        Column(f"{part}_{suffix}", text.format(words[part]), "1", "float", "affine_carrier", has_se)
        for part in _PARTS
    )


METRIC = Metric(
    name="affine_carrier",
    version=1,
    text="Shares of energy and affine predictability of recorded shared and routed outputs.",
    scope="router",
    needs=("block_outputs",),
    columns={
        "layers": (
            *(
                Column(
                    f"{part}_energy_share",
                    f"mean squared output of the {part} experts over that of the sum",
                    formula="affine_carrier",
                    has_se=True,
                )
                for part in ("shared", "routed")
            ),
            Column(
                "shared_mean_cosine",
                "cosine of the mean shared output and the mean output",
                formula="affine_carrier",
                has_se=True,
            ),
            *_of_parts("mean_energy_share", "squared mean over mean square, output of {}", True),
            *_of_parts("affine_r2", "R^2 of an affine map from the input, unseen, {}", False),
            Column(
                "routed_residual_r2",
                "share of the output that is not affine in the input which the routed experts give",
                formula="affine_carrier",
            ),
        )
    },
    finish=_finish,
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling"),
)
