"""Load of groups of experts, for rules that keep some of the groups.

A group-limited rule keeps the best groups of a token and chooses among their experts; the load of a
group is what its devices carry. ``group_max_vio`` is the largest load of a group over the fair
share, minus 1. Missing for rules without groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.load import load_cv, max_vio


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    groups = facts.router.rule.groups
    counts = reductions["expert_counts"]
    if groups is None or not counts.any():
        return {"layers": {}}
    load = counts.reshape(groups.num_groups, -1).sum(axis=1)
    return {
        "layers": {
            "group_max_vio": float(max_vio(load)),
            "group_load_cv_ddof0": float(load_cv(load)),
            "busiest_group": int(np.argmax(load)),
        }
    }


METRIC = Metric(
    name="group_load",
    version=1,
    text="Load of the groups of a group-limited rule.",
    scope="router",
    needs=("expert_counts",),
    columns={
        "layers": (
            Column(
                "group_max_vio",
                "largest load of a group over the fair share, minus 1",
                formula="max_vio",
                has_se=True,
            ),
            Column(
                "group_load_cv_ddof0",
                "standard deviation over mean of the load of groups",
                formula="load_cv",
                has_se=True,
            ),
            Column("busiest_group", "group with the largest load", "group", "int"),
        )
    },
    finish=_finish,
    invariances=("token_permutation",),
)
