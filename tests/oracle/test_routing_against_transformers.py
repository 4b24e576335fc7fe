"""Oracle: the router modules of transformers, run in float64 with random weights.

Chosen sets must be equal wherever the margin is above rounding, routing weights within 1e-5.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.geometry.selection import route

HIDDEN, EXPERTS, TOP_K, TOKENS = 24, 16, 4, 400

CONFIG = SimpleNamespace(
    hidden_size=HIDDEN,
    num_experts=EXPERTS,
    num_local_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    norm_topk_prob=True,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    topk_method="group_limited_greedy",
)

V3_GROUPS = GroupMask(4, 2, "top2_sum", -np.inf)
V2_GROUPS = GroupMask(4, 2, "max", 0.0)


def _case(module, name, rule, **changes):
    return pytest.param(
        module, name, rule, changes, id=f"{module}-{'-'.join(map(str, changes.values()))}"
    )


CASES = [
    _case(
        "olmoe", "OlmoeTopKRouter", Rule(TOP_K, "softmax", Weights("scores")), norm_topk_prob=False
    ),
    _case("olmoe", "OlmoeTopKRouter", Rule(TOP_K, "softmax", Weights("scores", True))),
    _case("qwen3_moe", "Qwen3MoeTopKRouter", Rule(TOP_K, "softmax", Weights("scores", True))),
    _case("mixtral", "MixtralTopKRouter", Rule(TOP_K, "softmax", Weights("scores", True))),
    _case(
        "gpt_oss",
        "GptOssTopKRouter",
        Rule(TOP_K, "identity", Weights("softmax_of_selected_logits"), has_logit_bias=True),
    ),
    _case(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        Rule(TOP_K, "sigmoid", Weights("scores", True, 1e-20, 2.5), True, groups=V3_GROUPS),
    ),
    _case(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        Rule(TOP_K, "sigmoid", Weights("scores", False, 0.0, 2.5), True, groups=V3_GROUPS),
        norm_topk_prob=False,
    ),
    _case(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        Rule(TOP_K, "softmax", Weights("scores", scale=2.5), groups=V2_GROUPS),
    ),
]


def built(module: str, name: str, changes) -> torch.nn.Module:
    """The router itself, without a model around it, with random parameters and buffers."""
    found = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    router = getattr(found, name)(SimpleNamespace(**{**vars(CONFIG), **changes}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            # biases as large as the differences between scores, some of them negative
            tensor.normal_(0.0, 0.3, generator=generator)
    return router.eval()


@pytest.mark.parametrize(("module", "name", "rule", "changes"), CASES)
def test_the_rule_is_the_models_own(module, name, rule, changes):
    router = built(module, name, changes)
    y = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        logits, weights, index = router(y)
    bias = getattr(router, "e_score_correction_bias", None)
    found = route(logits.numpy(), rule, None if bias is None else bias.numpy())

    clear = np.minimum(found.margin, found.group_margin) > 1e-6
    np.testing.assert_array_less(0.99, clear.mean())
    np.testing.assert_array_equal(
        np.sort(found.chosen, axis=1)[clear], np.sort(index.numpy(), axis=1)[clear]
    )
    dense = np.zeros((TOKENS, EXPERTS))
    np.put_along_axis(dense, found.chosen.astype(np.int64), found.weights, axis=1)
    theirs = np.zeros((TOKENS, EXPERTS))
    np.put_along_axis(theirs, index.numpy(), weights.numpy().astype(np.float64), axis=1)
    np.testing.assert_allclose(dense[clear], theirs[clear], rtol=1e-5, atol=1e-7)


def test_with_negative_scores_the_fill_of_the_mask_decides():
    """The V3 router fills with -inf: a rule that fills with 0.0 must be caught."""
    router = built("deepseek_v3", "DeepseekV3TopkRouter", {})
    with torch.no_grad():
        router.e_score_correction_bias -= 1.0
    y = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        logits, _, index = router(y)
    same = {}
    for fill in (0.0, -np.inf):
        groups = GroupMask(4, 2, "top2_sum", fill)
        rule = Rule(TOP_K, "sigmoid", Weights("scores"), True, groups=groups)
        found = route(logits.numpy(), rule, router.e_score_correction_bias.numpy()).chosen
        same[fill] = (np.sort(found, axis=1) == np.sort(index.numpy(), axis=1)).all(axis=1).mean()
    np.testing.assert_array_equal([same[0.0] < 0.1, same[-np.inf] == 1.0], [True, True])
