from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moegeom.core.errors import RouterError
from moegeom.core.router import RouterSet, Rule, Weights
from moegeom.router.family import load_family
from moegeom.router.rule import (
    build_rule,
    check_required,
    describe_routers,
    expected_layers,
    rule_in_words,
    rule_origin,
    rule_text,
)
from moegeom.router.settings import Settings
from tests.unit.scan.made import router_with

_DEEPSEEK = load_family("deepseek_v3")
_STACK = _DEEPSEEK.stacks[0]
_CONFIG: dict[str, Any] = {
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def _settings(**changes: Any) -> Settings:
    merged = {k: v for k, v in (_CONFIG | changes).items() if v is not ...}
    return Settings(merged, _DEEPSEEK.config_roots)


def _rule(**changes: Any) -> Rule:
    return build_rule(_STACK, _settings(**changes), 16, "r")


def test_groups_of_all_are_no_mask_and_a_nested_config_has_the_same_rule():
    for num_groups in (0, 1):
        rule = _rule(n_group=num_groups, topk_group=1)
        assert rule.groups is None
        text = rule_text(_DEEPSEEK, rule, 16, _STACK)
        assert text == "sigmoid + selection bias, top 4 of 16"
    assert _rule(topk_group=4).groups is None
    nested = Settings({"text_config": _CONFIG}, _DEEPSEEK.config_roots)
    assert build_rule(_STACK, nested, 16, "s") == _rule()


_WRONG = {
    "missing": ({"num_experts_per_tok": ...},
                "config.json: key 'num_experts_per_tok' is missing or null."),
    "null": ({"norm_topk_prob": None}, "config.json: key 'norm_topk_prob' is missing or null."),
    **{
        f"{key} of {value!r:.9}": (
            {key: value},
            f"config.json: '{key}' is {value!r} ({type(value).__name__}), expected {expected}.",
        )
        for key, values, expected in (
            ("num_experts_per_tok", ("4", 4.0, 0), "an integer from 1 to 1e+09"),
            ("topk_group", (True,), "an integer from 0 to 1e+09"),
            ("norm_topk_prob", (1,), "true or false"),
            ("routed_scaling_factor", (float("inf"), True, "2", 0, -1, 1e300),
             "a number from 1e-06 to 1e+06"),
        )
        for value in values
    },
    "more chosen than there are": ({"num_experts_per_tok": 17},
        "r: config.json says that 17 experts are chosen; the router has 16."),
    "uneven groups": ({"n_group": 3}, "r: 16 experts do not divide into 3 groups."),
    "none kept": ({"topk_group": 0}, "r: 0 of 4 groups cannot be kept."),
    "too many kept": ({"topk_group": 5}, "r: 5 of 4 groups cannot be kept."),
    "groups of one": ({"n_group": 16}, "r: groups of 1 have no sum of two largest scores."),
    "too few left": ({"topk_group": 1, "num_experts_per_tok": 5},
        "r: 1 group of 4 experts to be kept, fewer than the 5 experts to choose."),
}  # fmt: skip


@pytest.mark.parametrize("case", _WRONG)
def test_a_config_that_makes_no_rule_is_refused_by_key(case):
    changes, sentence = _WRONG[case]
    with pytest.raises(RouterError) as caught:
        _rule(**changes)
    assert caught.value.message == sentence
    with pytest.raises(RouterError, match="expected a number from"):
        _rule(routed_scaling_factor=10**400)


def test_aliases_may_agree_and_must_not_disagree_and_expected_layers_follow_their_keys():
    num_experts = _STACK.num_experts
    assert Settings({"num_local_experts": 8}).integer(num_experts) == 8
    assert Settings({"num_local_experts": 8, "n_routed_experts": 8}).integer(num_experts) == 8
    with pytest.raises(RouterError) as caught:
        Settings({"num_local_experts": 8, "n_routed_experts": 9}).integer(num_experts)
    assert caught.value.message == (
        "config.json: 'n_routed_experts' is 9 and 'num_local_experts' is 8, but they mean the same."
    )
    layers = load_family("qwen3_moe").stacks[0].layers
    config = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert expected_layers(layers, Settings(config)) == {1, 5}
    assert expected_layers(layers, Settings(config | {"mlp_only_layers": None})) == {1, 3, 5}
    assert expected_layers(layers, Settings({"decoder_sparse_step": 1})) is None
    first = {"num_hidden_layers": 5, "first_k_dense_replace": 3}
    assert expected_layers(_STACK.layers, Settings(first)) == {3, 4}


def test_another_rule_under_the_same_model_type_is_refused():
    check_required(_DEEPSEEK, _settings(scoring_func="sigmoid", topk_method="noaux_tc"))
    with pytest.raises(RouterError) as caught:
        check_required(_DEEPSEEK, _settings(scoring_func="softmax"))
    assert caught.value.message == (
        "config.json: 'scoring_func' is 'softmax'; the rule of family deepseek_v3 is known for "
        "'sigmoid'."
    )
    for family in ("deepseek_v2", "deepseek_ocr2", "unlimited_ocr"):
        for known in ("greedy", "group_limited_greedy"):
            check_required(load_family(family), Settings({"topk_method": known}))
        with pytest.raises(RouterError) as caught:
            check_required(load_family(family), Settings({"topk_method": "noaux_tc"}))
        assert caught.value.message == (
            f"config.json: 'topk_method' is 'noaux_tc'; the rule of family {family} is known for "
            "'greedy' or 'group_limited_greedy'."
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**12),
        ("decoder_sparse_step", 0),
        ("num_hidden_layers", -1),
        ("mlp_only_layers", "1"),
        ("mlp_only_layers", [True]),
    ],
)
def test_layer_keys_that_make_no_sense_are_refused(key, value):
    layers = load_family("qwen3_moe").stacks[0].layers
    config = {"num_hidden_layers": 6, "decoder_sparse_step": 1, key: value}
    with pytest.raises(RouterError, match=f"^config.json: '{key}' is "):
        expected_layers(layers, Settings(config))


@pytest.mark.parametrize("key", ["scoring_func", "score_function", "moe_router_activation_func"])
def test_a_fork_that_names_another_score_is_refused(key):
    family = load_family("glm4_moe")
    check_required(family, Settings({key: "sigmoid"}))
    check_required(family, Settings({key: "never heard of"}))
    with pytest.raises(RouterError, match="the rule of family glm4_moe scores by sigmoid"):
        check_required(family, Settings({key: "softmax"}))


ROUTER = router_with(np.eye(4, 8, dtype=np.float32), Rule(2, "softmax", Weights("scores")))
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


def test_words_of_a_rule_are_those_of_its_weights_and_of_where_it_comes_from():
    for words, weights in IN_WORDS.items():
        assert rule_in_words(replace(ROUTER, rule=replace(ROUTER.rule, weights=weights))) == words
    assert rule_in_words(replace(ROUTER, rule=replace(ROUTER.rule, top_k=4))) == "softmax, all 4"
    origins = {"mixtral": "config", "described": "options", "my_own": "the family file"}
    for family, origin in origins.items():
        assert rule_origin(family) == origin
        described = describe_routers(replace(ROUTERS, family=family))
        assert (described["rule_origin"], described["rule_status"]) == (origin, "assumed")
