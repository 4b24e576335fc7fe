"""A sample of tokens: which are drawn, and which of them are left out."""

import numpy as np
import pytest

from moegeom.core.errors import NonFiniteError, RecordingError
from moegeom.core.tokens import TILE
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import draw_sample, drawn_tokens, finite_tokens
from moegeom.geometry.selection import route
from tests.unit.scan import made

TOKENS = 9 * TILE + 100
SKIP = ComputeOptions(non_finite="skip")


@pytest.fixture(scope="module")
def source():
    return made.recording(TOKENS)


def test_a_sample_is_the_same_for_all_routers_and_follows_the_seed(source):
    first, again, other = (
        drawn_tokens(source, ComputeOptions(seed=seed), 64) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first)) == 64
    assert (first != other).any()
    np.testing.assert_array_equal(drawn_tokens(source, ComputeOptions()), np.arange(TOKENS))


def test_first_tokens_of_documents_are_never_drawn(source):
    options = ComputeOptions(exclude_first=40)
    drawn = drawn_tokens(source, options, 300)
    assert len(drawn) == 300
    assert (source.columns.position[drawn] >= 40).all()
    with pytest.raises(RecordingError, match="--exclude-first 97 leaves none of the 9,316 tokens"):
        drawn_tokens(source, ComputeOptions(exclude_first=97), 300)


def test_quantities_are_those_of_the_definition_at_the_tokens_named(source):
    at, router = np.array([3, TILE - 1, TILE, 5 * TILE + 7]), made.router()
    names = ("input", "chosen", "document", "group_margin")
    sample = draw_sample(router, source, ComputeOptions(), names, at=at)
    np.testing.assert_array_equal(sample.token, at)
    np.testing.assert_array_equal(sample.inputs, source.values[at])
    expected = route(source.values[at] @ router.weight.T, router.rule).chosen
    np.testing.assert_array_equal(sample.chosen, expected)
    np.testing.assert_array_equal(sample.document, at // 97)
    assert sample.group_margin is None  # a rule without groups


def test_tokens_that_are_not_finite_are_refused_by_name_or_left_out_and_counted():
    source, router = made.recording(TOKENS), made.router()
    source.values[[5, 6000]] = np.nan
    with pytest.raises(NonFiniteError, match=r"2 of 9316 tokens.*first: token 5\)"):
        draw_sample(router, source, ComputeOptions(), ("chosen",))
    sample = draw_sample(router, source, SKIP, ("chosen",))
    assert sample.num_non_finite == 2
    np.testing.assert_array_equal(sample.token, np.setdiff1d(np.arange(TOKENS), [5, 6000]))
    with pytest.raises(NonFiniteError):  # nothing would be left
        draw_sample(router, source, SKIP, ("chosen",), at=np.array([5]))
    token, names = np.array([4, 5, 6, 6000]), source.facts.routers
    np.testing.assert_array_equal(finite_tokens(source, names, token, SKIP), [4, 6])
    with pytest.raises(NonFiniteError, match="first: token 5"):
        finite_tokens(source, names, token, ComputeOptions())
