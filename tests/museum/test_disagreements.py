"""Every disagreement is explained by its own cause, and no twin by any."""

from __future__ import annotations

import re

import pytest

from moegeom.studies.explain.record import VERDICTS
from tests.generator.scoring import HEALTHY, NAMES
from tests.museum.disagreement import Hall, all_pairs, labels
from tests.museum.disagreements import DISAGREEMENTS


@pytest.fixture(scope="session")
def hall(tmp_path_factory) -> Hall:
    return Hall(tmp_path_factory.mktemp("hall"))


#: By day the first pair of every second, and the first twin of some of the rest; others at night.
BY_DAY = {d.pairs[0] for d in DISAGREEMENTS[::2]} | {d.twins[0] for d in DISAGREEMENTS[1::6]}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "pair",
    [
        pair if pair in BY_DAY else pytest.param(pair, marks=pytest.mark.nightly)
        for pair in all_pairs(DISAGREEMENTS)
    ],
    ids=labels(DISAGREEMENTS),
)
def test_the_verdict_is_the_cause(hall, pair):
    hall.confirm(pair)


def test_twins_are_healthy_and_pairs_are_not():
    assert {twin.cause for d in DISAGREEMENTS for twin in d.twins} <= HEALTHY
    assert not {pair.cause for d in DISAGREEMENTS for pair in d.pairs} & HEALTHY


def test_every_verdict_is_shown_by_a_pair():
    shown = {pair.cause for pair in all_pairs(DISAGREEMENTS)}
    of_generator = {cause for causes in NAMES.values() for cause in causes}
    assert shown | of_generator == set(VERDICTS)


def test_threads_can_be_followed_and_names_are_unique():
    names = [d.name for d in DISAGREEMENTS]
    assert len(set(names)) == len(names)
    for disagreement in DISAGREEMENTS:
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#[0-9]+", t) for t in disagreement.threads)
        assert disagreement.story.endswith(".")
