"""What a disagreement is: two runs that differ for a known reason, and the verdict that names it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moegeom.studies.explain.record import Cause, Explanation
from tests.museum.recipe import Needs
from tests.museum.two_runs import TwoRuns


@dataclass(frozen=True)
class Pair:
    """Two runs and the verdict on them; ``begins`` is the router where it begins, where it says."""

    text: str
    build: Callable[[], TwoRuns]
    cause: Cause
    begins: str = ""


@dataclass(frozen=True)
class Disagreement:
    """Something that made two runs disagree in public, rebuilt, and twins that merely look alike."""

    name: str
    threads: tuple[str, ...]
    story: str
    pairs: tuple[Pair, ...]
    twins: tuple[Pair, ...]
    needs: Needs = "choices of both runs"


class Hall:
    """Explains pairs below a folder; those that are built alike are one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._explained = functools.cache(self._explain)

    def explained(self, pair: Pair) -> Explanation:
        """What the command says of the pair."""
        return self._explained(pair.build)

    def _explain(self, build: Callable[[], TwoRuns]) -> Explanation:
        self._count += 1
        return build().explained(self._folder / f"pair_{self._count}")

    def confirm(self, pair: Pair) -> None:
        """Asserts that the verdict is the one that the pair states."""
        found = self.explained(pair).verdict
        assert found.cause == pair.cause, found.detail
        assert not pair.begins or found.router == pair.begins


def all_pairs(disagreements: Sequence[Disagreement]) -> list[Pair]:
    """Every pair and every twin."""
    return [pair for d in disagreements for pair in (*d.pairs, *d.twins)]


def labels(disagreements: Sequence[Disagreement]) -> list[str]:
    """A name for each, such as ``weights_cast-0`` and ``weights_cast-twin0``."""
    return [
        f"{d.name}-{kind}{number}"
        for d in disagreements
        for kind, pairs in (("", d.pairs), ("twin", d.twins))
        for number in range(len(pairs))
    ]
