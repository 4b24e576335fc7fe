"""The page of the museum is what the exhibits state, and every thread on it can be followed."""

import re
from typing import get_args

import numpy as np
import pytest

from tests.museum.incidents import DISAGREEMENTS, INCIDENTS, RECIPES
from tests.museum.page import NOT_ASKED, PAGE, render
from tests.museum.questions import Checked, Explained
from tests.museum.recipe import Grade, Planted, Said, TwinGrade, half_of
from tests.museum.score import answered
from tests.museum.two_runs import PLAIN

THREAD = re.compile(r"[\w.-]+/[\w.-]+#[0-9]+")


def test_the_page_says_what_the_exhibits_state():
    stated = render(lambda recipe: ()).splitlines()
    page = PAGE.read_text("utf-8").splitlines()
    assert len(page) == len(stated), "run python -m tests.museum.refresh_museum"
    for line, expected in zip(page, stated, strict=True):
        if expected.endswith(NOT_ASKED):
            # a row of a recipe: what was done to it is stated, what is said of it is not
            assert line.startswith(expected.removesuffix(NOT_ASKED))
            assert any(f"| {grade}: " in line for grade in (*get_args(Grade), *get_args(TwinGrade)))
        else:
            assert line == expected


@pytest.mark.nightly
def test_the_page_says_what_is_answered_to_the_tuned_half():
    assert PAGE.read_text("utf-8") == render(lambda recipe: list(answered(recipe)))


def test_names_are_unique_and_threads_can_be_followed():
    for shown in (INCIDENTS, DISAGREEMENTS, RECIPES):
        names = [one.name for one in shown]
        assert len(set(names)) == len(names)
        for one in shown:
            assert all(THREAD.fullmatch(thread) for thread in one.threads)
            assert one.story.endswith(".")


# ------------------------------------------------------------------------------------------ recipes
def test_records_are_complete_and_halves_follow_from_the_first_thread_alone():
    for recipe in RECIPES:
        assert recipe.threads
        assert all(text.endswith(".") for text in (recipe.planting, recipe.answer))
        assert 2 <= len(recipe.sizes) <= 3
        assert recipe.twins
    threads = [thread for recipe in RECIPES for thread in recipe.threads]
    assert len(set(threads)) == len(threads)
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
