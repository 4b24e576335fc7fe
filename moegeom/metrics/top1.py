"""First choices: the expert with the highest selection score of each token.

``first_choice_repeat`` is the share of neighbours of a document with equal first choice, P(top-1 of
t = top-1 of t + 1); two independent tokens agree with probability sum_e p_e^2, p the shares of
first choices. ``first_choice_entropy_normalised`` is the entropy of those shares over log E.

A router can be balanced over its k slots and lean on few experts first, who then get most of the
routing weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.load import load_entropy_nats


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    pairs, repeated, *counts = reductions["top1"].tolist()
    top1 = np.array(counts, dtype=np.int64)
    experts = facts.router.num_experts
    table = {"expert": np.arange(experts), "num_first": top1}
    if not top1.any():
        return {"layers": {}, "experts": table}
    share = top1 / top1.sum()
    entropy = float(load_entropy_nats(top1))
    return {
        "layers": {
            "first_choice_repeat": repeated / pairs if pairs else None,
            "first_choice_repeat_chance": float((share**2).sum()),
            "first_choice_entropy_normalised": entropy / math.log(experts) if experts > 1 else None,
        },
        "experts": table,
    }


METRIC = Metric(
    name="top1",
    version=1,
    text="First choices: how they are spread, and how often the next token repeats one.",
    scope="router",
    needs=("top1",),
    columns={
        "layers": (
            Column(
                "first_choice_repeat",
                "share of neighbouring tokens with equal first choice",
                formula="first_choice_repeat",
                has_se=True,
            ),
            Column(
                "first_choice_repeat_chance",
                "the same for two independent tokens",
                formula="first_choice_repeat",
                has_se=True,
            ),
            Column(
                "first_choice_entropy_normalised",
                "entropy of the shares of first choices over log E",
                formula="load_entropy",
                has_se=True,
            ),
        ),
        "experts": (
            Column("expert", "expert number", "expert", "int"),
            Column("num_first", "tokens whose first choice it is", "tokens", "int"),
        ),
    },
    finish=_finish,
    invariances=("expert_relabelling",),
)
