"""A scope: the tokens that a fault affects, found from the bits that each saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from moegeom.core.registry import Rooms, record_of_function
from moegeom.core.shapes import Bool, Float64, Int64, Integer
from moegeom.core.tokens import TokenColumns
from moegeom.geometry.set_code import log2_sets
from moegeom.studies.faults.operator import Cause


@dataclass(frozen=True, eq=False)
class TokenRegion:
    """Some of the tokens: ``text`` names them, ``bits`` say which they are."""

    is_inside: Bool[np.ndarray, "tokens"]
    text: str
    bits: float


@dataclass(frozen=True, eq=False)
class Where:
    """Document and position of each token, and its number in A's recording."""

    document: Int64[np.ndarray, "tokens"]
    position: Int64[np.ndarray, "tokens"]
    number: Int64[np.ndarray, "tokens"]

    @staticmethod
    def of(columns: TokenColumns, number: Int64[np.ndarray, "tokens"]) -> Where:
        """From the columns of these tokens."""
        document, position = (x.astype(np.int64) for x in (columns.document, columns.position))
        return Where(document, position, number)

    @cached_property
    def documents(self) -> tuple[Int64[np.ndarray, "documents"], Int64[np.ndarray, "tokens"]]:
        """The numbers of the documents, ascending, and the place there of that of each token."""
        names, group = np.unique(self.document, return_inverse=True)
        return names, group.ravel()

    def turn(self, what: str, count: int) -> Int64[np.ndarray, "tokens"]:
        """``number``, ``position`` or ``document`` of each token modulo so many, -1 for none."""
        if (what, count) not in self._turns:
            number = getattr(self, what)
            self._turns[what, count] = np.where(number >= 0, number % count, -1)
        return self._turns[what, count]

    @cached_property
    def _turns(self) -> dict[tuple[str, int], Int64[np.ndarray, "tokens"]]:
        """Those that were asked for: every scope is looked for many times."""
        return {}


@dataclass(frozen=True)
class Scope:
    """A kind of region. ``find`` proposes the best ones for bits that each token would save."""

    name: str
    page: str
    find: Callable[[Float64[np.ndarray, "tokens"], Where], Iterator[TokenRegion]]


#: The decorator that makes a scope of a function, under its name.
scope: Final = record_of_function(Scope)()

SCOPES: Rooms[Scope] = Rooms("scope", "moegeom.studies.faults.scopes", Scope)


#: Bits that a region has to save beyond all tokens together, and the share of theirs.
_WORTH, _SHARE = 12.0, 0.03


def best_region(saved: Float64[np.ndarray, "tokens"], where: Where) -> TokenRegion:
    """The region with the largest net saving; two kinds may intersect (documents, positions).

    ``text`` is empty for all tokens.
    """
    whole = TokenRegion(np.ones(len(saved), bool), "", 0.0)
    best, most = whole, float(saved.sum())
    # a region has to be worth telling, not only to leave out what fits a little worse
    least = most + max(_WORTH, _SHARE * abs(most))
    kind = math.log2(len(SCOPES.all()) + 1)
    for one in SCOPES.all():
        for region in one.find(saved, where):
            gained = float(saved[region.is_inside].sum()) - region.bits - kind
            if gained > max(most, least):
                best, most = TokenRegion(region.is_inside, region.text, region.bits + kind), gained
    if not best.text:
        return best
    inside = np.where(best.is_inside, saved, 0.0)
    for region in (region for one in SCOPES.all() for region in one.find(inside, where)):
        both = best.is_inside & region.is_inside
        bits = best.bits + region.bits + kind
        gained = float(saved[both].sum()) - bits
        is_worth = gained > most + max(_WORTH, _SHARE * most)
        if is_worth and not (both == best.is_inside).all():
            return TokenRegion(both, f"{best.text}, {region.text}", bits)
    return best


#: Orders of the tokens in which a scope is looked for that can only be there by chance.
_SHUFFLES = 4


def found_by_chance(saved: Float64[np.ndarray, "tokens"], where: Where) -> float:
    """By how much a scope saves more than all tokens, or none, on the same tokens in random order.

    What each token saves has heavier tails than any model of noise: a search among so many scopes
    finds some that hold a few lucky ones. 0 at least.
    """
    most, random = 0.0, np.random.default_rng(0)
    whole = max(float(saved.sum()), 0.0)
    for _ in range(_SHUFFLES):
        shuffled = saved[random.permutation(len(saved))]
        region = best_region(shuffled, where)
        if region.text:
            gained = float(shuffled[region.is_inside].sum()) - region.bits
            most = max(most, gained - whole)
    return most


#: Share of the tokens beyond which they are all that differ; that of what differs which a region
#: holds, and the bits that it is worth.
_NEARLY_ALL, _MOSTLY, _TELLING = 0.9, 0.5, 30.0


def region_of(differs: Bool[np.ndarray, "tokens"], where: Where) -> tuple[TokenRegion, float]:
    r"""The region that holds what differs, and which share of it; no text where none does.

    Each token is worth :math:`\log_2 (q / r)` where it differs and :math:`\log_2 ((1-q) / (1-r))`
    where not: q is the share inside of the region so far, r that outside, from q = 1/2.
    """
    number = int(differs.sum())
    whole = TokenRegion(np.ones(len(differs), bool), "", 0.0)
    if not number or number >= _NEARLY_ALL * len(differs):
        return whole, 1.0
    inner, outer = 0.5, 0.5 * number / len(differs)
    region, saved = whole, np.zeros(len(differs))
    for _ in range(2):
        if inner <= outer:
            return whole, 1.0
        worth, cost = math.log2(inner / outer), math.log2((1.0 - inner) / (1.0 - outer))
        saved = np.where(differs, worth, cost)
        region = best_region(saved, where)
        if not region.text:
            return whole, 1.0
        inside = region.is_inside
        inner, outer = (
            (float(differs[some].sum()) + 0.5) / (float(some.sum()) + 1.0)
            for some in (inside, ~inside)
        )
    gained = float(saved[region.is_inside].sum()) - region.bits
    share = float(differs[region.is_inside].sum()) / number
    if share < _MOSTLY or gained - found_by_chance(saved, where) < _TELLING:
        return whole, 1.0
    return region, share


def sums(
    saved: Float64[np.ndarray, "tokens"], group: Integer[np.ndarray, "tokens"]
) -> Float64[np.ndarray, "groups"]:
    """Bits that the tokens of each group save; group -1 is ignored."""
    is_grouped = group >= 0
    if not is_grouped.all():
        group, saved = group[is_grouped], saved[is_grouped]
    return np.bincount(group, weights=saved, minlength=1)


#: Documents that are named.
_NAMED = 8


def some_documents(
    of_each: Float64[np.ndarray, "documents"], names: Int64[np.ndarray, "documents"], most: int
) -> tuple[Int64[np.ndarray, "some"], str, float]:
    """The documents, at most so many, that save most beside what it costs to name them.

    Their places, words for them, and the bits that say which of all they are.
    """
    order = np.argsort(-of_each, kind="stable")[:most]
    count = np.arange(1, len(order) + 1)
    cost = np.array([log2_sets(len(names), int(m)) for m in count]) + math.log2(len(names))
    best = int((np.cumsum(of_each[order]) - cost).argmax())
    chosen = np.sort(order[: best + 1])
    named = f" ({listed(names[chosen])})" if len(chosen) <= _NAMED else ""
    return chosen, f"{len(chosen)} of {len(names)} documents{named}", float(cost[best])


def listed(numbers: np.ndarray, most: int = 6) -> str:
    """Some numbers in words, runs as ranges."""
    parts, start = [], 0
    for stop in range(1, len(numbers) + 1):
        if stop == len(numbers) or numbers[stop] != numbers[stop - 1] + 1:
            first, last = int(numbers[start]), int(numbers[stop - 1])
            parts.append(f"{first}" if first == last else f"{first}-{last}")
            start = stop
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return ", ".join(parts[:most]) + more


@dataclass(frozen=True, eq=False)
class Fault:
    """An operator on its scope: ``bits`` are its saving less its cost.

    ``explained`` is the share of the base's bits at ``router``, the first of ``routers``, that it
    saves there; ``reproduced`` the share of equal sets in its scope, by router, and ``before`` the
    same as the router is. ``inherits`` where an earlier router differs as much for another reason.
    ``mended`` is the share of all sets that differ at its first router that it removes,
    ``of_values`` that of the bits of B's recorded values. What an ``is_estimate`` leaves is its own
    error. ``ways`` is the noise that fits best at
    each router: 0 as for all tokens, 1 as for some. ``parts`` are the faults that it is composed
    of, each on tokens of its own; none for a single one. ``met`` marks the sets that it reproduces
    with what is left behind it, where there is a second fault of the same tokens: then ``leading``
    is the name of the first.
    """

    name: str
    text: str
    cause: Cause
    region: TokenRegion
    routers: tuple[str, ...]
    bits: float
    explained: float
    reproduced: Mapping[str, float]
    before: Mapping[str, float]
    mended: float = 0.0
    of_values: float = 0.0
    of_other: bool = False
    is_fitted: bool = False
    is_estimate: bool = False
    inherits: bool = False
    ways: Mapping[str, int] = field(default_factory=dict)
    parts: tuple[Fault, ...] = ()
    met: Mapping[str, Bool[np.ndarray, "tokens"]] = field(default_factory=dict)
    leading: str = ""

    @property
    def repaired(self) -> float:
        """Share of the sets that differ in its scope that it removes, at its first router.

        Where none differs, that of the bits of recorded values; all where it is about ties: a set
        that ties admit is met in any case.
        """
        missing = 1.0 - self.before[self.router]
        if missing == 0.0:
            return 1.0 if self.cause == "ties broken by number" else self.of_values
        gained = self.reproduced[self.router] - self.before[self.router]
        return gained / missing if missing > 0.0 else 0.0

    @property
    def router(self) -> str:
        return self.routers[0]

    @property
    def operator(self) -> str:
        """The name of the operator, of the first of two."""
        return self.leading or self.name

    @property
    def scope(self) -> str:
        """Words for the tokens that it is about; empty for all."""
        return self.region.text

    @property
    def share(self) -> float:
        """Share of the tokens that it is about."""
        return float(self.region.is_inside.mean())
