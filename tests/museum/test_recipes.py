"""What a recipe says that it plants is planted, whatever is said of it afterwards."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.museum import recipes_of_weights as weights
from tests.museum.checkpoint import Checkpoint
from tests.museum.incidents import RECIPES
from tests.museum.questions import Checked, Explained, OfTwo
from tests.museum.recipe import Planted, Said, half_of
from tests.museum.two_runs import PLAIN, Routed

#: Sizes and twins; by day the theorems below look at what one size of each plants.
SIZES = [planted for recipe in RECIPES for planted in recipe.sizes]
TWINS = [planted for recipe in RECIPES for planted in recipe.twins if recipe.command == "explain"]


@functools.cache
def routed(planted: Planted) -> Routed:
    question = planted.build()
    assert isinstance(question, Explained)
    return question.runs.routed()


# -------------------------------------------------------------------------------- records and halves
def test_every_record_is_complete_and_no_incident_is_planted_twice():
    for recipe in RECIPES:
        assert recipe.threads
        assert all(text.endswith(".") for text in (recipe.planting, recipe.answer))
        assert 2 <= len(recipe.sizes) <= 3
        assert recipe.twins
    threads = [thread for recipe in RECIPES for thread in recipe.threads]
    assert len(set(threads)) == len(threads)


def test_the_half_follows_from_the_first_thread_in_text_order_alone():
    # sha256 of "radixark/miles#3277" begins with 0x22, that of "radixark/miles#1724" with 0x7f
    assert half_of(("radixark/miles#3277",)) == "tuned"
    assert half_of(("radixark/miles#1724",)) == "untouched"
    both = ("radixark/miles#3277", "radixark/miles#1724")
    assert half_of(both) == half_of(both[::-1]) == "untouched"
    assert {recipe.half for recipe in RECIPES} == {"tuned", "untouched"}


@pytest.mark.parametrize(
    ("words", "text", "claims", "grade", "twin_grade"),
    [
        (("rows repeated",), "positions 40 to 106", "cause", "named", "right"),
        (("rows repeated",), "some rows", "cause", "only something is off", "error"),
        (("router stale",), "positions 40 to 106", "cause", "wrong cause", "error"),
        (("inconclusive",), "", "open", "only something is off", "warned"),
        (("arithmetic noise only",), "", "health", "missed", "warned"),
        (("silent",), "positions 40 to 106", "health", "missed", "warned"),
    ],
)
def test_a_grade_asks_for_the_word_and_for_what_must_be_told(
    words, text, claims, grade, twin_grade
):
    planted = Planted("", lambda: pytest.fail("not asked"), ("rows repeated",), r"\b40\b")
    said = Said(words, text, claims, claims == "cause", 0)
    assert planted.grade(said) == grade
    assert planted.twin_grade(said) == twin_grade


# --------------------------------------------------------------------------- what every planting does
def b_differs(planted: Planted) -> bool:
    """Does B differ from A, in what the command reads, by more than its noise would make it?"""
    question = planted.build()
    if isinstance(question, Explained):
        found = routed(planted)
        healthy = PLAIN.route(question.runs.a, 0, found.a_inputs["text/0"])[1]
        by_weights = np.abs(found.b_weights["text/0"] - healthy).mean() > 0.05
        return bool(found.differs().mean() > 0.0015 or by_weights)
    if isinstance(question, Checked):
        return True  # test_a_checkpoint_is_spoilt_where_it_is_said_to_be
    assert isinstance(question, OfTwo)
    pairs = [(question.a.tensors[name], question.b.tensors[name]) for name in question.a.tensors]
    return any(a.shape != b.shape or (a != b).any() for a, b in pairs)


@pytest.mark.nightly
@pytest.mark.parametrize("planted", SIZES, ids=lambda planted: planted.text)
def test_damage_is_there(planted):
    assert b_differs(planted)


@pytest.mark.nightly
@pytest.mark.parametrize("planted", TWINS, ids=lambda planted: planted.text)
def test_a_twin_routes_as_noise_of_less_than_a_hundredth_would(planted):
    assert routed(planted).differs().mean() < 0.06


@pytest.mark.parametrize(
    ("recipe", "reached"),
    [
        (weights.PREFIX_REROUTED, lambda columns: columns.position < 16),
        (weights.REQUESTS_STALE, lambda columns: columns.document == 5),
    ],
)
def test_tokens_that_the_other_rows_do_not_reach_differ_by_noise_alone(recipe, reached):
    found = routed(recipe.sizes[0])
    inside = reached(found.columns)
    differs = found.differs()
    assert differs[:, inside].mean() > 0.1
    assert differs[:, ~inside].mean() < 0.01


#: What of a checkpoint a recipe changes, by the ends of names.
SPOILT = {
    "bias_of_a_later_layer_stale": ("bias", "gate.weight"),
    "logit_bias_lost": ("router.bias",),
    "bias_not_finite": ("bias",),
    "bias_not_restored": ("bias",),
    "prompts_of_experts_identical": ("gate.weight",),
}


def spoilt(planted: Planted, healthy: Checkpoint) -> list[str]:
    """Tensors of a planted checkpoint that are not those of the healthy one."""
    tensors = planted.build().checkpoint.tensors
    return [
        name
        for name, values in healthy.tensors.items()
        if name not in tensors or not np.array_equal(tensors[name], values)
    ]


@pytest.mark.parametrize(
    "recipe", [one for one in RECIPES if one.command == "check"], ids=lambda recipe: recipe.name
)
def test_a_checkpoint_is_spoilt_where_it_is_said_to_be(recipe):
    healthy = recipe.twins[0].build().before or recipe.twins[0].build().checkpoint
    for planted in recipe.sizes:
        names = spoilt(planted, healthy)
        assert names
        assert all(name.endswith(SPOILT[recipe.name]) for name in names)
