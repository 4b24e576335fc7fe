"""Every incident, disagreement and recipe, in the order of the page: that of rooms, and in them; how
well moegeom answers the recipes of one half: a line for each size and each twin, and sums.

`python -m tests.museum.score tuned|untouched`. Do not improve moegeom on what the untouched half
shows: it is there to tell whether improvements hold for incidents that nobody looked at.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeVar, get_args

from tests.museum.gallery import SIZES, Incident
from tests.museum.recipe import Grade, Half, Planted, Recipe, Said, TwinGrade
from tests.museum.two_runs import Disagreement

Shown = TypeVar("Shown")


def _all(kind: type[Shown], *rooms: str) -> list[Shown]:
    modules = [import_module(f"tests.museum.{room}") for room in rooms]
    return [one for room in modules for one in vars(room).values() if isinstance(one, kind)]


#: What weights alone can show.
EXHIBITS = ("biases", "quantisers", "rows", "storage")
INCIDENTS = _all(Incident, *(f"exhibit_{room}" for room in EXHIBITS))

#: What two runs can show.
DISAGREEMENTS = _all(Disagreement, "disagreements")

#: What is scored.
SCORED = ("rules", "weights", "checkpoints")
RECIPES = _all(Recipe, *(f"recipes_of_{room}" for room in SCORED))


@dataclass(frozen=True)
class Scored:
    recipe: Recipe
    size: str
    planted: Planted
    said: Said
    grade: Grade | TwinGrade


def answers(half: Half) -> Iterator[Scored]:
    for recipe in RECIPES:
        if recipe.half == half:
            yield from answered(recipe)


def answered(recipe: Recipe) -> Iterator[Scored]:
    for size, planted in zip(SIZES, recipe.sizes, strict=False):
        said = _asked(planted)
        yield Scored(recipe, size, planted, said, planted.grade(said))
    for planted in recipe.twins:
        said = _asked(planted)
        yield Scored(recipe, "twin", planted, said, planted.twin_grade(said))


def _asked(planted: Planted) -> Said:
    with tempfile.TemporaryDirectory() as folder:
        return planted.build().asked(Path(folder) / "files")


def main(half: Half) -> None:
    ends: Counter[str] = Counter()
    for one in answers(half):
        kind = "twin" if one.size == "twin" else "damage"
        ends[f"{kind} {one.grade}"] += 1
        line = f"{one.recipe.name:34} {one.size:6} {one.grade:21} {', '.join(one.said.words)}"
        says = f"{one.planted.text}; {one.recipe.command} says: {one.said.text[:160]}"
        sys.stdout.write(f"{line}\n    {says}\n")
        sys.stdout.flush()
    for kind, grades in (("damage", get_args(Grade)), ("twin", get_args(TwinGrade))):
        sums = ", ".join(f"{grade} {ends[f'{kind} {grade}']}" for grade in grades)
        sys.stdout.write(f"{kind}: {sums}\n")


if __name__ == "__main__":
    if sys.argv[1:] not in [[half] for half in get_args(Half)]:
        sys.exit("python -m tests.museum.score tuned|untouched")
    main(*sys.argv[1:])  # pyright: ignore[reportArgumentType]
