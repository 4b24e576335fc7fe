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
FOUND = RouterSet((ROUTER,), "model", "mixtral", "softmax, top 2 of 4", "xxh128:0")


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (Weights("scores"), "softmax, top 2"),
        (Weights("scores", renormalise=True), "softmax, top 2, weights sum to 1"),
        (
            Weights("softmax_of_selected_logits", renormalise=True),
            "softmax, top 2, softmax over the chosen",
        ),
        (
            Weights("sigmoid_of_selected_logits"),
            "softmax, top 2, sigmoid of each chosen",
        ),
        (
            Weights("sigmoid_of_selected_logits", renormalise=True, scale=2.0),
            "softmax, top 2, sigmoid of each chosen, weights sum to 1, x 2",
        ),
    ],
)
def test_division_by_the_sum_is_told_where_it_changes_weights(weights, said):
    rule = replace(ROUTER.rule, weights=weights)
    assert rule_in_words(replace(ROUTER, rule=rule)) == said


def test_a_rule_that_chooses_every_expert_says_so():
    rule = replace(ROUTER.rule, top_k=4)
    assert rule_in_words(replace(ROUTER, rule=rule)) == "softmax, all 4"


@pytest.mark.parametrize(
    ("family", "origin"),
    [("mixtral", "config"), ("described", "options"), ("my_own", "the family file")],
)
def test_a_rule_comes_from_config_options_or_a_file(family, origin):
    assert rule_origin(family) == origin
    assert describe_routers(replace(FOUND, family=family))["rule_origin"] == origin


def test_plain_data_say_that_the_rule_is_assumed():
    assert describe_routers(FOUND)["rule_status"] == "assumed"
