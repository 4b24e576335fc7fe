"""What changes no choice is no error, with and without a baseline."""

from __future__ import annotations

import pytest

from tests.by_day import by_day
from tests.museum.invariances import MODELS, NEUTRAL, applicable, changed
from tests.museum.renumbering import permuted, text_order

_DAY = {
    "common vector": ("shift", "synthetic softmax"),
    "long common vector": ("long shift", "olmoe-balanced"),
    "places of experts": ("renumbering", "synthetic softmax"),
    "places within groups": ("renumbering", "deepseek-tiny"),
    "gain": ("folding", "synthetic sigmoid"),
    "factor in the dtype": ("half", "olmoe-collapsed"),
    "factor that rounds": ("triple", "olmoe-balanced"),
    "rounding": ("rounding", "deepseek-tiny"),
}


@pytest.mark.parametrize(("change", "model"), by_day(applicable(), _DAY))
def test_a_change_that_changes_no_choice_is_an_error_only_where_weights_change(
    museum, change, model
):
    new, old = changed(change, model)
    assert museum.show(new).codes == ()
    seen = museum.show(new, old)
    assert seen.codes == NEUTRAL[change].says
    assert seen.exit_code == int(bool(seen.codes))


@pytest.mark.parametrize("model", by_day(MODELS, ["synthetic sigmoid", "olmoe-balanced"]))
def test_rows_renumbered_alone_are_an_error(museum, model):
    old = MODELS[model].build()
    experts = len(old.tensors["model.layers.1.mlp.gate.weight"])
    seen = museum.show(permuted(old, text_order(experts), ("weight",)), old)
    assert seen.exit_code == 1
    assert "MGI121" in seen.codes


@pytest.mark.parametrize(
    ("model", "factor"),
    by_day(
        [(m, f) for m in ("synthetic sigmoid", "deepseek-tiny") for f in (0.5, 2.0)],
        {"smaller": ("synthetic sigmoid", 0.5), "larger": ("deepseek-tiny", 2.0)},
    ),
)
def test_a_scaled_router_of_sigmoid_scores_is_another_router(museum, model, factor):
    old = MODELS[model].build()
    seen = museum.show(old.edited("weight", lambda w, _: factor * w), old)
    assert "MGI128" in seen.codes
