"""The page of the museum is what the exhibits state, and every thread on it can be followed."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from moegeom.checks.check import CHECKS
from moegeom.core.finding import SEVERITY_ORDER
from tests.museum.incidents import DISAGREEMENTS, INCIDENTS, RECIPES
from tests.museum.page import NOT_ASKED, PAGE, render
from tests.museum.recipe import Grade, TwinGrade
from tests.museum.score import answered

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


def test_names_are_unique_threads_can_be_followed_and_release_weighs_no_less():
    for shown in (INCIDENTS, DISAGREEMENTS, RECIPES):
        names = [one.name for one in shown]
        assert len(set(names)) == len(names)
        for one in shown:
            assert all(THREAD.fullmatch(thread) for thread in one.threads)
            assert one.story.endswith(".")
    for check in CHECKS.all():
        default, release = check.weighs("default"), check.weighs("release")
        if default is not None:
            assert release is not None
            assert SEVERITY_ORDER[release] <= SEVERITY_ORDER[default]
