"""The page of the museum is what the exhibits state, and every thread on it can be followed."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from moegeom.checks.check import CHECKS
from moegeom.core.finding import SEVERITY_ORDER
from tests.museum.gallery import SIZES
from tests.museum.incidents import INCIDENTS
from tests.museum.page import NOT_ASKED, PAGE, render
from tests.museum.recipe import Grade, TwinGrade
from tests.museum.score import answered

THREAD = re.compile(r"[\w.-]+/[\w.-]+#[0-9]+")

#: Sizes that the gate does not find, or finds under another name.
MISSED = {
    ("bias_before_cast", "small"),
    ("bias_cast_in_float32", "small"),
    ("bias_cast_in_bfloat16", "small"),
    ("bias_offset", "small"),
    ("bias_frozen", "small"),
    ("bias_ran_away", "small"),
    ("quantised_against_baseline", "small"),
    ("row_too_long", "small"),
    ("rows_crowd", "small"),
    ("router_of_another_revision", "small"),
}


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


def test_no_check_weighs_less_under_release():
    for check in CHECKS.all():
        default, release = check.weighs("default"), check.weighs("release")
        if default is not None:
            assert release is not None
            assert SEVERITY_ORDER[release] <= SEVERITY_ORDER[default]


def test_what_is_missed_is_known():
    missed = {
        (incident.name, size)
        for incident in INCIDENTS
        for size, case in zip(SIZES, incident.sizes, strict=True)
        if not incident.is_found(case)
    }
    assert missed == MISSED


def test_twins_are_silent():
    alarms = {twin.text for incident in INCIDENTS for twin in incident.twins if twin.says}
    assert alarms == set()


def test_names_are_unique_and_threads_can_be_followed():
    names = [incident.name for incident in INCIDENTS]
    assert len(set(names)) == len(names)
    for incident in INCIDENTS:
        assert all(THREAD.fullmatch(thread) for thread in incident.threads)
        assert incident.story.endswith(".")
