"""Every incident, disagreement and recipe, in the order of the page: that of rooms, and in them."""

from types import ModuleType
from typing import TypeVar

from tests.museum import (
    disagreements,
    exhibit_biases,
    exhibit_quantisers,
    exhibit_rows,
    exhibit_storage,
    exhibit_untrained,
    recipes_of_checkpoints,
    recipes_of_rules,
    recipes_of_tokens,
    recipes_of_weights,
)
from tests.museum.gallery import Incident
from tests.museum.recipe import Recipe
from tests.museum.two_runs import Disagreement

Shown = TypeVar("Shown")


def _all(kind: type[Shown], *rooms: ModuleType) -> list[Shown]:
    return [one for room in rooms for one in vars(room).values() if isinstance(one, kind)]


#: What weights alone can show.
INCIDENTS = _all(
    Incident,
    exhibit_biases,
    exhibit_quantisers,
    exhibit_rows,
    exhibit_storage,
    exhibit_untrained,
)

#: What two runs can show.
DISAGREEMENTS = _all(Disagreement, disagreements)

#: What is scored.
RECIPES = _all(
    Recipe, recipes_of_rules, recipes_of_weights, recipes_of_checkpoints, recipes_of_tokens
)
