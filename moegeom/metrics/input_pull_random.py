"""The pull of the mean input on a router of random directions, of rows of the same lengths.

Mean and standard deviation over all such routers, in closed form from the mean and the covariance
of the router inputs. What :doc:`input_pull` finds beyond it is the router's own doing; below it the
router has turned away from the mean, as routers do whose loads are even.

On the sample of about 2048 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.input_pull import pull_of_random_rows

_FORMULA = "input_pull"


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    sample = reductions["input_sample"]
    mean = deviation = None
    if len(sample.inputs) > 1 and facts.is_whole:
        lengths = np.linalg.norm(facts.router.weight.astype(np.float64), axis=1)
        ratio = sample.moments.participation_ratio
        mean, deviation = pull_of_random_rows(sample.inputs.astype(np.float64), ratio, lengths)
    return {"layers": {"input_pull_random": mean, "input_pull_random_sd": deviation}}


METRIC = Metric(
    name="input_pull_random",
    version=1,
    text="How much the mean input would pull routers of random directions, mean and spread.",
    scope="router",
    needs=("input_sample",),
    columns={
        "layers": (
            Column(
                "input_pull_random",
                "mean pull of the mean input over rows of the same lengths in random directions",
                formula=_FORMULA,
            ),
            Column("input_pull_random_sd", "its standard deviation", formula=_FORMULA),
        )
    },
    finish=_finish,
    invariances=("expert_relabelling", "positive_scaling"),
)
