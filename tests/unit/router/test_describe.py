"""What is said of a router in words is what its rule does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moegeom.core.router import Provenance, Router, RouterSet, Rule, Weights
from moegeom.router.describe import describe_routers, rule_in_words, rule_origin

ROUTER = Router(
    name="text/0",
    stack="text",
    layer=0,
    weight=np.eye(4, 8, dtype=np.float32),
    rule=Rule(2, "softmax", Weights("scores")),
    provenance=Provenance("mixtral", ("gate.weight",), "model.safetensors", "F32"),
)
ROUTERS = RouterSet((ROUTER,), "model", "mixtral", "softmax, top 2 of 4", "sha256:0")

IN_WORDS = {
    "softmax, top 2": Weights("scores"),
    "softmax, top 2, weights sum to 1": Weights("scores", renormalise=True),
    "softmax, top 2, softmax over the chosen": Weights(
        "softmax_of_selected_logits", renormalise=True
    ),
    "softmax, top 2, sigmoid of each chosen": Weights("sigmoid_of_selected_logits"),
    "softmax, top 2, sigmoid of each chosen, weights sum to 1, x 2": Weights(
        "sigmoid_of_selected_logits", renormalise=True, scale=2.0
    ),
}


def test_division_by_the_sum_is_told_where_it_changes_weights_and_a_choice_of_all():
    for words, weights in IN_WORDS.items():
        assert rule_in_words(replace(ROUTER, rule=replace(ROUTER.rule, weights=weights))) == words
    assert rule_in_words(replace(ROUTER, rule=replace(ROUTER.rule, top_k=4))) == "softmax, all 4"


@pytest.mark.parametrize(
    ("family", "origin"),
    [("mixtral", "config"), ("described", "options"), ("my_own", "the family file")],
)
def test_a_rule_is_assumed_from_config_options_or_a_file(family, origin):
    assert rule_origin(family) == origin
    described = describe_routers(replace(ROUTERS, family=family))
    assert (described["rule_origin"], described["rule_status"]) == (origin, "assumed")
