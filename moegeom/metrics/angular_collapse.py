"""Angular collapse: whether the router inputs lie in a narrow cone around their mean.

With mu the mean of the inputs and R the 99 % quantile of |y - mu|, the directions of those inputs
lie in the cap of half-angle theta = arcsin(R / |mu|) around mu, when R < |mu|. A small angle means
that routing sees little of the sphere. ``cap_area_log10`` is log10 of the share of the sphere that
the cap covers: in thousands of dimensions astronomically small for any cap, a curiosity, and not a
share of reachable expert sets.

On a sample of about 2048 tokens, outlier tokens left out. See also ``mean_resultant_length`` and
``mean_pairwise_cosine``, which need no quantile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.gram import cap_area_log10, cap_half_angle
from moegeom.kernels.reductions.samples import NUM_INPUTS

#: Share of the tokens that the cap is drawn around.
QUANTILE = 0.99


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    sample = reductions["input_sample"]
    names = ("cap_radius_over_mean", "cap_half_angle", "cap_area_log10")
    distance = np.sqrt(sample.moments.squared_distance)
    if len(distance) < 2:
        return {"layers": dict.fromkeys(names)}
    radius = float(np.quantile(distance, QUANTILE))
    length = float(np.linalg.norm(sample.moments.mean))
    if length == 0.0:
        return {"layers": dict.fromkeys(names)}
    is_cap = radius < length
    area = cap_area_log10(radius / length, facts.router.hidden_size) if is_cap else None
    angle = float(cap_half_angle(radius, length)) if is_cap else None
    return {"layers": dict(zip(names, (radius / length, angle, area), strict=True))}


METRIC = Metric(
    name="angular_collapse",
    version=1,
    text="Cap of directions that holds 99 % of the router inputs, on a sample of about "
    f"{NUM_INPUTS} tokens.",
    scope="router",
    needs=("input_sample",),
    columns={
        "layers": (
            Column(
                "cap_radius_over_mean",
                "99 % quantile of the distance to the mean input over the length of that mean",
                formula="angular_collapse",
                has_se=True,
            ),
            Column(
                "cap_half_angle",
                "half-angle of the cap; missing when the radius is not below the mean's length",
                "radian",
                formula="angular_collapse",
                has_se=True,
            ),
            Column(
                "cap_area_log10",
                "log10 of the share of the sphere that the cap covers; a curiosity",
                "log10",
                formula="angular_collapse",
            ),
        )
    },
    finish=_finish,
    invariances=("expert_relabelling", "common_row_shift"),
)
