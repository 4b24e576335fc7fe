"""What a recipe says that it plants is planted, whatever is said of it afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from tests.museum.incidents import RECIPES
from tests.museum.questions import Checked, Explained
from tests.museum.recipe import Planted, Said, half_of
from tests.museum.two_runs import PLAIN


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


def test_a_grade_asks_for_the_word_and_for_what_must_be_told():
    planted = Planted("", lambda: pytest.fail("not asked"), ("rows repeated",), r"\b40\b")
    for word, text, claims, *grades in (
        ("rows repeated", "positions 40 to 106", "cause", "named", "right"),
        ("rows repeated", "some rows", "cause", "only something is off", "error"),
        ("router stale", "positions 40 to 106", "cause", "wrong cause", "error"),
        ("inconclusive", "", "open", "only something is off", "warned"),
        ("silent", "positions 40 to 106", "health", "missed", "warned"),
    ):
        answer = Said((word,), text, claims, claims == "cause", 0)
        assert [planted.grade(answer), planted.twin_grade(answer)] == grades


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_damage_is_there_and_a_twin_routes_as_noise_of_less_than_a_hundredth_would(recipe):
    twins = [twin.build() for twin in recipe.twins]
    for planted in recipe.sizes:
        question = planted.build()
        if isinstance(question, Explained):
            found = question.runs.routed()
            healthy = PLAIN.route(question.runs.a, 0, found.a_inputs["text/0"])[1]
            by_weights = np.abs(found.b_weights["text/0"] - healthy).mean() > 0.05
            assert found.differs().mean() > 0.0015 or by_weights, planted.text
        else:
            is_check = isinstance(question, Checked)
            healthy = (twins[0].checkpoint if is_check else question.a).tensors
            damaged = (question.checkpoint if is_check else question.b).tensors
            same = [n for n in healthy if n in damaged and np.array_equal(healthy[n], damaged[n])]
            assert len(same) < len(healthy), planted.text
    for twin in twins:
        if isinstance(twin, Explained):
            assert twin.runs.routed().differs().mean() < 0.06
