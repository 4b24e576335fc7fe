"""The tiny models are an oracle only if they are whole, repeatable, and hard to get right."""

import copy
import re
from types import SimpleNamespace

import numpy as np
import pytest

from tests.by_day import by_day
from tests.families.observed import observe
from tests.families.tiny_models import FAMILIES, NAMES, SELECTION_BIAS, model_of, routers_of

#: Tokens whose set of experts changes when the selection biases are left out.
MOST = 0.5
#: One expert of 13 per token has fewer ways to change.
TOP_ONE = {"zaya": 0.1, "zaya__skip": 0.1}


#: With biases and groups, a table of tokens, two stacks and a capacity, a state, and nothing.
KINDS = ["deepseek_v3", "deepseek_v4", "switch_transformers", "zaya", "qwen2_moe"]


@pytest.fixture(scope="module", params=by_day(NAMES, KINDS))
def tiny(request):
    model = model_of(request.param)
    return SimpleNamespace(name=request.param, model=model, seen=observe(model, request.param))


def sets_of(router):
    return np.sort(router.chosen, axis=1)


def selection_biases(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [tensor for path, tensor in tensors if SELECTION_BIAS.search(path)]


def test_every_stack_has_routers_that_give_tokens_many_sets_of_distinct_experts(tiny):
    assert {router.stack for router in tiny.seen} == {s for s, _ in FAMILIES[tiny.name].routers}
    assert len({(router.stack, router.layer) for router in tiny.seen}) == len(tiny.seen)
    for router in tiny.seen:
        assert re.search(rf"\.{router.layer}\.", f".{router.module}")
        tokens, k = router.chosen.shape
        assert router.inputs.shape[0] == tokens
        assert router.weights.shape == (tokens, k)
        for values in (router.inputs, router.weights):
            assert values.dtype == np.float32 and np.isfinite(values).all()
        np.testing.assert_array_equal(router.weights[router.chosen == -1], 0)
        ordered = sets_of(router)
        assert ((ordered[:, 1:] > ordered[:, :-1]) | (ordered[:, 1:] == -1)).all()
        assert ordered.min() >= -1
        assert k < ordered.max() + 1 < 40
        assert len(np.unique(ordered, axis=0)) >= (5 if k == 1 else 10)


def test_selection_biases_left_out_change_most_choices(tiny):
    """In the first layer of a stack that has one: its input does not depend on other biases."""
    model = copy.deepcopy(tiny.model)
    if not (biases := selection_biases(model)):
        buffers = [b for r in routers_of(model, tiny.name) for b, _ in r.module.named_buffers()]
        assert [buffer for buffer in buffers if "bias" in buffer] == []  # none of another name
        return
    for bias in biases:
        bias.data.zero_()
    first = {}
    for with_them, without in zip(tiny.seen, observe(model, tiny.name), strict=True):
        if with_them.token_ids is None:  # a table decides by token, without a bias
            first.setdefault(with_them.stack, (with_them, without))
    for with_them, without in first.values():
        changed = (sets_of(with_them) != sets_of(without)).any(axis=1).mean()
        assert changed > TOP_ONE.get(tiny.name, MOST)


def test_variants_drop_tokens_or_skip_experts_where_they_should():
    for value, expected in (
        (-1, {"nllb_moe__bias_cap": True, "switch_transformers": True, "nllb_moe": False}),
        (-1, {"switch_transformers__bias_nocap": False}),
        (12, {"zaya": False, "zaya__skip": True}),
    ):
        for name, is_there in expected.items():
            routers = observe(model_of(name), name)
            assert any((router.chosen == value).any() for router in routers) is is_there, name
