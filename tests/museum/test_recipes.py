"""What a recipe says that it plants is planted, whatever is said of it afterwards."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.museum import recipes_of_rules as rules
from tests.museum import recipes_of_tokens as rows
from tests.museum import recipes_of_weights as weights
from tests.museum.checkpoint import Checkpoint, name_of
from tests.museum.disagreements import model
from tests.museum.healthy import sigmoid_model
from tests.museum.incidents import RECIPES
from tests.museum.questions import Checked, Explained, OfTwo
from tests.museum.recipe import Planted, Recipe, Said, half_of
from tests.museum.two_runs import PLAIN, Engine, Routed

#: Sizes and twins; by day the theorems below look at what one size of each plants.
SIZES = [planted for recipe in RECIPES for planted in recipe.sizes]
TWINS = [planted for recipe in RECIPES for planted in recipe.twins if recipe.command == "explain"]


@functools.cache
def routed(planted: Planted) -> Routed:
    question = planted.build()
    assert isinstance(question, Explained)
    return question.runs.routed()


def smallest(recipe: Recipe) -> Routed:
    return routed(recipe.sizes[0])


def sets(chosen: np.ndarray) -> list[frozenset[int]]:
    return [frozenset(row) for row in chosen.tolist()]


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


# ---------------------------------------------------------------------------------- numbers and rules
def test_lowered_logits_change_no_choice_and_what_is_lost_concerns_tokens_with_few_positive():
    found = smallest(rules.NEGATIVE_LOST)
    inputs, healthy = found.a_inputs["text/1"], model()
    column = healthy.tensors[name_of("weight", 1)].astype(np.float32)[:, :1]
    chosen, _ = PLAIN.route(
        healthy.edited("weight", lambda w, _: np.where(np.arange(256) == 0, 0.0, w)), 1, inputs
    )
    assert column.std() > 0.0
    assert sets(chosen) == sets(found.a_chosen["text/1"])
    logits = inputs @ rules.lowered(0.75).tensors[name_of("weight", 1)].astype(np.float32).T
    is_exposed = (logits > 0.0).sum(axis=1) < 4
    assert is_exposed[found.differs()[1]].all()
    assert 0.03 < is_exposed.mean() < 0.1


@pytest.mark.parametrize("number", [0, 1])
def test_a_leaning_tie_break_only_switches_down_and_its_twin_does_both(number):
    found = routed((rules.LEANING.sizes[1], rules.LEANING.twins[0])[number])
    differs = found.differs()[0]
    a, b = (chosen["text/0"][differs].sum(axis=1) for chosen in (found.a_chosen, found.b_chosen))
    downward = (b < a).mean()
    assert downward == 1.0 if number == 0 else 0.3 < downward < 0.7


def test_another_gating_function_matters_beside_a_bias_alone():
    engine = Engine(score=rules._softmax)
    found = smallest(rules.GATING_GUESSED)
    inputs, unbiased = found.a_inputs["text/0"], rules.live_biases(0.0)
    chosen = [sets(one.route(unbiased, 0, inputs)[0]) for one in (engine, PLAIN)]
    assert chosen[0] == chosen[1]
    assert found.differs().mean() > 0.1


def test_weights_sum_up_to_the_factor_unless_a_step_is_left_out():
    def sums(planted: Planted) -> np.ndarray:
        return routed(planted).b_weights["text/0"].sum(axis=1)

    np.testing.assert_allclose(sums(rules.NOT_SCALED.sizes[0]), 1.0, rtol=1e-5)
    np.testing.assert_allclose(sums(rules.NOT_SCALED.twins[0]), 2.5, rtol=1e-5)
    np.testing.assert_allclose(sums(rules.RULE_OF_ANOTHER_FAMILY.sizes[0]), 1.0, rtol=1e-5)
    assert (np.abs(sums(rules.NOT_RENORMALISED.sizes[0]) - 2.5) > 0.1).all()


# -------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize(
    ("recipe", "reached"),
    [
        (weights.PREFIX_REROUTED, lambda columns: columns.position < 16),
        (weights.REQUESTS_STALE, lambda columns: columns.document == 5),
    ],
)
def test_tokens_that_the_other_rows_do_not_reach_differ_by_noise_alone(recipe, reached):
    found = smallest(recipe)
    inside = reached(found.columns)
    differs = found.differs()
    assert differs[:, inside].mean() > 0.1
    assert differs[:, ~inside].mean() < 0.01


def test_pruned_rows_are_rows_of_before_and_only_the_twin_has_their_biases():
    before = sigmoid_model()
    old_rows, old_bias = (before.tensors[name_of(part, 0)] for part in ("weight", "bias"))
    for planted in (*weights.PRUNED.sizes, *weights.PRUNED.twins):
        b = planted.build().b
        new_rows, new_bias = (b.tensors[name_of(part, 0)] for part in ("weight", "bias"))
        place = [int(np.flatnonzero((old_rows == row).all(axis=1))[0]) for row in new_rows]
        assert place == sorted(set(place))
        assert len(place) == b.config["n_routed_experts"] == 48
        per_group = np.bincount(np.array(place) // 32).tolist()
        is_even, has_biases = per_group == [24, 24], (new_bias == old_bias[place]).all()
        expected = {"18 of": (False, True), "rows ": (True, True)}
        assert (is_even, has_biases) == expected.get(planted.text[:5], (True, False))


# ---------------------------------------------------------------------------------------- checkpoints
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


# --------------------------------------------------------------------------------------------- tokens
def test_a_document_that_repeats_a_token_chooses_alike_on_both_sides():
    found = routed(rows.STALE_ROWS.twins[0])
    inside = np.flatnonzero(found.columns.document == 3)
    for chosen in (found.a_chosen["text/0"], found.b_chosen["text/0"]):
        repeated = sets(chosen[inside[40:107]])
        assert repeated.count(sets(chosen[inside[5:6]])[0]) > 60
