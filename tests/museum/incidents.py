"""Every incident, disagreement and recipe, in the order of the page: that of rooms, and in them."""

from importlib import import_module
from typing import TypeVar

from tests.museum.gallery import Incident
from tests.museum.recipe import Recipe
from tests.museum.two_runs import Disagreement

Shown = TypeVar("Shown")


def _all(kind: type[Shown], *rooms: str) -> list[Shown]:
    modules = [import_module(f"tests.museum.{room}") for room in rooms]
    return [one for room in modules for one in vars(room).values() if isinstance(one, kind)]


#: What weights alone can show.
EXHIBITS = ("biases", "quantisers", "rows", "storage", "untrained")
INCIDENTS = _all(Incident, *(f"exhibit_{room}" for room in EXHIBITS))

#: What two runs can show.
DISAGREEMENTS = _all(Disagreement, "disagreements")

#: What is scored.
SCORED = ("rules", "weights", "checkpoints", "tokens")
RECIPES = _all(Recipe, *(f"recipes_of_{room}" for room in SCORED))
