"""What happened to a router, as a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moegeom.core.text import percent
from moegeom.document.verdict_text import places
from moegeom.studies.faults.scope import listed


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
class ExpertsChange:
    """What samples show of the experts of B beside those whose rows they have.

    Of ``num_experts`` those ``sampled``, in the first ``num_bytes`` of their ``tensors``.
    ``other`` are the tensors that differ, by expert; ``sources`` the experts of A that such experts
    are. Where the gain changed, first matrices of ``folded`` ones changed inversely, and nothing of
    ``unfolded`` ones. ``reason`` says why nothing could be compared; ``miscount`` where B has other
    numbers of experts than rows.
    """

    num_experts: int = 0
    num_bytes: int = 0
    sampled: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    other: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    sources: Mapping[int, int] = field(default_factory=dict)
    folded: tuple[int, ...] = ()
    unfolded: tuple[int, ...] = ()
    reason: str = ""
    miscount: str = ""

    @property
    def changed(self) -> tuple[int, ...]:
        """Experts with weights that no expert of A has."""
        return tuple(expert for expert in self.other if expert not in self.sources)

    @property
    def of_tensors(self) -> tuple[str, ...]:
        """Tensors that differ in some expert with other weights."""
        named = {name for expert in self.changed for name in self.other[expert]}
        return tuple(name for name in self.tensors if name in named)

    @property
    def in_words(self) -> str:
        """``5 (down)``: which experts have other weights, and in what."""
        return f"{listed(np.array(self.changed))} ({', '.join(self.of_tensors)})"

    @property
    def have_followed(self) -> bool | None:
        """Whether every expert is where its row is; None where samples do not tell."""
        if self.sources or self.unfolded:
            return False
        return None if self.other or len(self.sampled) < max(self.num_experts, 1) else True


@dataclass(frozen=True)
class RouterChange:
    """One router of both sides. No changes: bit for bit the same.

    ``beside`` holds what is no change of the rows: whether the gain is equal, how numbers are
    stored, whether experts moved along. Row i of B was row ``place[i]`` of A, and ``moved[i]`` is
    by how much, over its length, it moved from there, beside what changes no choice; empty where
    that is not known. ``size`` is that of all rows together, of projected rows.
    ``experts`` is None where they were not looked at.
    """

    router: str
    changes: tuple[Change, ...] = ()
    beside: tuple[str, ...] = ()
    place: Sequence[int] = ()
    moved: Sequence[float] = ()
    size: float = 0.0
    experts: ExpertsChange | None = None

    @property
    def is_identical(self) -> bool:
        return not self.changes

    @property
    def phrases(self) -> tuple[str, ...]:
        """The key by which routers with the same changes are grouped."""
        return tuple(change.phrase for change in self.changes)


def differing(experts: Sequence[ExpertsChange]) -> str:
    """``12 of 16 sampled experts differ (gate)``, or which do: those of some routers together."""
    number, sampled = sum(len(one.changed) for one in experts), sum(len(o.sampled) for o in experts)
    tensors = ", ".join(dict.fromkeys(name for one in experts for name in one.of_tensors))
    is_named = len(experts) == 1 and number < sampled
    which = f": {experts[0].in_words}" if is_named else f" ({tensors})"
    return f"{number:,} of {sampled:,} sampled experts differ{which}"


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
