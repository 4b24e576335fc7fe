"""Every recipe: those that are scored, and those whose exhibits tests assert already."""

from __future__ import annotations

from tests.generator.scoring import HEALTHY
from tests.museum import (
    recipes_of_checkpoints,
    recipes_of_rules,
    recipes_of_tokens,
    recipes_of_weights,
)
from tests.museum.disagreement import Disagreement, Pair
from tests.museum.disagreements_elsewhere import NOT_THE_ROUTER
from tests.museum.exhibit_configs import (
    DROPPED_GROUPS_WIN,
    GATING_UNSAID,
    GROUPS_IMPOSSIBLE,
    SCORE_FROM_SUM,
)
from tests.museum.exhibit_copies import COPIES_DIFFER
from tests.museum.exhibit_tables import TABLE_CAST
from tests.museum.exhibit_untrained import ROWS_NEVER_TRAINED
from tests.museum.gallery import Case, Incident
from tests.museum.questions import SILENT, Checked, Explained
from tests.museum.recipe import Planted, Recipe


def _of_incident(incident: Incident, planting: str, answer: str) -> Recipe:
    """An exhibit of the gate as a recipe."""

    def planted(case: Case, right: tuple[str, ...]) -> Planted:
        return Planted(case.text, lambda: Checked(case.build()), right)

    assert incident.baseline is None, "a recipe shows the weights alone"
    return Recipe(
        incident.name,
        incident.threads,
        incident.story,
        planting,
        answer,
        "check",
        "the weights",
        tuple(planted(case, (incident.code,)) for case in incident.sizes),
        tuple(planted(case, (SILENT,)) for case in incident.twins),
        is_shown=True,
    )


def _of_disagreement(disagreement: Disagreement, planting: str, answer: str) -> Recipe:
    """Two runs that are shown already as a recipe."""

    def planted(pair: Pair, right: tuple[str, ...]) -> Planted:
        return Planted(pair.text, lambda: Explained(pair.build()), right)

    return Recipe(
        disagreement.name,
        disagreement.threads,
        disagreement.story,
        planting,
        answer,
        "explain",
        disagreement.needs,
        tuple(planted(pair, (pair.cause,)) for pair in disagreement.pairs),
        tuple(planted(pair, tuple(sorted(HEALTHY))) for pair in disagreement.twins),
        is_shown=True,
    )


SHOWN = (
    _of_incident(
        TABLE_CAST,
        "A table of int64 goes through bfloat16 and back.",
        "The table names experts that do not exist, or one twice in a row, or no odd one above "
        "256.",
    ),
    _of_incident(
        GATING_UNSAID,
        "Keys that name the gating function are taken out of the config.",
        "The gating function is missing, and engines guess.",
    ),
    _of_incident(
        GROUPS_IMPOSSIBLE,
        "The config asks for groups that cannot be.",
        "The groups contradict the number of experts, or of those that are chosen.",
    ),
    _of_incident(
        DROPPED_GROUPS_WIN,
        "Biases of most experts of a group are moved below 0.",
        "Groups that were dropped and filled with 0 would win.",
    ),
    _of_incident(
        SCORE_FROM_SUM,
        "Biases are moved up, beside scores that stay.",
        "A step of a number as large as the bias swallows the scores.",
    ),
    _of_incident(
        ROWS_NEVER_TRAINED,
        "Rows are drawn as the config says that they begin.",
        "The rows are no other than at their initialisation.",
    ),
    _of_incident(
        COPIES_DIFFER,
        "A router is stored under a second name, changed.",
        "Two copies of one router differ.",
    ),
    _of_disagreement(
        NOT_THE_ROUTER,
        "Log-probabilities of B differ from A's by noise that has nothing to do with its choices.",
        "The router is not the cause.",
    ),
)

RECIPES = (
    *SHOWN,
    *recipes_of_rules.RECIPES,
    *recipes_of_weights.RECIPES,
    *recipes_of_checkpoints.RECIPES,
    *recipes_of_tokens.RECIPES,
)
