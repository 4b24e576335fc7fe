"""What happened to a router, as a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moegeom.core.text import percent
from moegeom.document.verdict_text import places


@dataclass(frozen=True)
class Change:
    """One thing that happened to a router.

    ``word`` is one of the closed list, ``phrase`` the word with its qualifier, in which ``{size}``
    stands for the size as a percentage; phrases that are equal are told together. ``evidence``
    holds the numbers, ``detail`` the most telling of them in words. ``subject`` is what changed:
    ``rows``, or a kind of bias.
    """

    word: str
    phrase: str
    meaning: str
    size: float | None = None
    detail: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    subject: str = "rows"


@dataclass(frozen=True)
class RouterChange:
    """One router of both sides. No changes: bit for bit the same.

    ``beside`` holds what is no change of the rows: whether the gain is equal, how numbers are
    stored, whether experts moved along. Row i of B was row ``place[i]`` of A, and ``moved[i]`` is
    by how much, over its length, it moved from there, beside what changes no choice; empty where
    that is not known. ``size`` is that of all rows together, of projected rows.
    ``experts_followed`` their rows, as samples of all of them tell; None where these do not.
    """

    router: str
    changes: tuple[Change, ...] = ()
    beside: tuple[str, ...] = ()
    place: Sequence[int] = ()
    moved: Sequence[float] = ()
    size: float = 0.0
    experts_followed: bool | None = None

    @property
    def is_identical(self) -> bool:
        return not self.changes

    @property
    def phrases(self) -> tuple[str, ...]:
        """The key by which routers with the same changes are grouped."""
        return tuple(change.phrase for change in self.changes)


def phrase_of(changes: Sequence[Change]) -> str:
    """The phrase that the changes share, with their size, or the range of their sizes."""
    phrase, sizes = changes[0].phrase, [one.size for one in changes if one.size is not None]
    if not sizes:
        return phrase
    low, high = percent(min(sizes)), percent(max(sizes))
    return phrase.replace("{size}", low if low == high else f"{low.removesuffix(' %')} to {high}")


def where(names: Sequence[str], every: Sequence[str]) -> str:
    """``layers 3-7,9`` of ``every`` router, or whole names where several stacks could be meant."""
    return places(names, {"routers": [{"name": name} for name in every]})
