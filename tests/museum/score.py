"""How well moegeom answers the recipes of one half: a line for each size and each twin, and sums.

`python -m tests.museum.score tuned|untouched`. Do not improve moegeom on what the untouched half
shows: it is there to tell whether improvements hold for incidents that nobody looked at.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from tests.museum.gallery import SIZES
from tests.museum.recipe import Grade, Half, Planted, Recipe, Said, TwinGrade
from tests.museum.recipes import RECIPES


@dataclass(frozen=True)
class Scored:
    """One size or twin of a recipe, what moegeom said of it, and how that is graded."""

    recipe: Recipe
    size: str
    planted: Planted
    said: Said
    grade: Grade | TwinGrade


def answers(half: Half) -> Iterator[Scored]:
    """Every size and every twin of the recipes of a half, asked one after the other."""
    for recipe in RECIPES:
        if recipe.half == half:
            yield from answered(recipe)


def answered(recipe: Recipe) -> Iterator[Scored]:
    """Every size and every twin of one recipe."""
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
    """The table of a half, and its sums over all, and over those that no test asserts."""
    ends: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for one in answers(half):
        kind = "twin" if one.size == "twin" else "damage"
        ends[one.recipe.is_shown][f"{kind} {one.grade}"] += 1
        words = ", ".join(one.said.words)
        told = one.said.text[:160]
        line = f"{one.recipe.name:34} {one.size:6} {one.grade:21} {words}"
        sys.stdout.write(f"{line}\n    {one.planted.text}; {one.recipe.command} says: {told}\n")
        sys.stdout.flush()
    for is_shown, text in ((False, "scored only"), (True, "asserted by tests as well")):
        sys.stdout.write(f"{text}:\n")
        for kind, grades in (("damage", get_args(Grade)), ("twin", get_args(TwinGrade))):
            sums = ", ".join(f"{g} {ends[is_shown][f'{kind} {g}']}" for g in grades)
            sys.stdout.write(f"  {kind}: {sums}\n")


if __name__ == "__main__":
    if sys.argv[1:] not in [[half] for half in get_args(Half)]:
        sys.exit("python -m tests.museum.score tuned|untouched")
    main(*sys.argv[1:])  # pyright: ignore[reportArgumentType]
