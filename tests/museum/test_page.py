"""The page of the museum is what the gate says today, and every thread on it can be followed."""

from __future__ import annotations

import re

from tests.museum.gallery import SIZES
from tests.museum.incidents import INCIDENTS
from tests.museum.page import PAGE, render

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


def test_the_page_is_up_to_date(museum):
    assert PAGE.read_text("utf-8") == render(museum), "run python -m tests.museum.refresh_museum"


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
