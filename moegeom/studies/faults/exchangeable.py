"""Tests whether flips spread as noise over documents, positions, ranks, experts and rows.

Noise knows nothing of any of these: given how near a token is to its boundary, each is as likely to
flip as any other. A fault of some tokens leaves a trace in one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.core.tokens import TokenColumns
from moegeom.geometry.set_code import last_and_next
from moegeom.studies.faults.operator import Site
from moegeom.studies.faults.scope import listed

#: Family-wise probability that noise fails one of the tests of a router (Holm's procedure).
LEVEL = 0.001

#: Noise differs from document to document (a long one has more of it), so that a test counts only
#: where flips of some groups are this many times what is expected, and so large a part of all.
_TIMES, _PART = 3.0, 0.3

#: Share of switches that go to lower (or higher) numbers, beyond which noise does not explain it.
_LEANING = 0.75

#: Classes of distance from the boundary, and of positions; groups of ranks.
_CLASSES, _POSITIONS, _RANKS = 24, 16, 16

#: Flips from which it can be told how they are spread.
LEAST = 20


@dataclass(frozen=True)
class Uneven:
    """One way in which flips are not spread as noise; ``p_value`` by Holm's procedure."""

    test: str
    text: str
    p_value: float


#: How many ways are looked at.
NUM_TESTS = 5


@dataclass(frozen=True)
class Spread:
    """How flips are spread: ``uneven`` are the ways in which noise would not spread them.

    ``num_flips`` tokens were looked at, at the first router that differs and as many after it as
    it took; none of the tests can tell anything where they are fewer than 20.
    """

    routers: tuple[str, ...]
    num_flips: int
    uneven: tuple[Uneven, ...]

    @property
    def is_tested(self) -> bool:
        """Whether there were enough flips to tell."""
        return self.num_flips >= LEAST


@dataclass(frozen=True, eq=False)
class FlippedRouter:
    """A router, which of its tokens flip, and which agreed at all earlier ones."""

    site: Site
    is_flipped: Bool[np.ndarray, "tokens"]
    is_clean: Bool[np.ndarray, "tokens"]


def spread(routers: Sequence[FlippedRouter]) -> Spread:
    """The tests on clean tokens of the first routers that together hold enough flips.

    Later routers inherit how earlier ones flipped; each adds tokens that had agreed until then.
    """
    sample: list[FlippedRouter] = []
    total = 0
    for one in routers:
        number = int((one.is_flipped & one.is_clean).sum())
        if number:
            sample.append(one)
            total += number
        if total >= LEAST:
            break
    names = tuple(one.site.router.name for one in sample)
    if total < LEAST:
        return Spread(names, total, ())
    parts = [_clean_tokens(one) for one in sample]
    flipped, chance, place, change, repeats = (
        np.concatenate(columns) for columns in zip(*parts, strict=True)
    )
    first, *others = (one.site.columns.at(np.flatnonzero(one.is_clean)) for one in sample)
    tests = sorted(
        (
            *_grouped(flipped, chance, first.then(*others), place),
            *_leaning(change),
            *_repeats(repeats, flipped),
        ),
        key=lambda one: one.p_value,
    )
    uneven = []
    for rank, one in enumerate(tests):
        if one.p_value * (NUM_TESTS - min(rank, NUM_TESTS - 1)) > LEVEL:
            break
        uneven.append(one)
    return Spread(names, total, tuple(uneven))


def _clean_tokens(
    one: FlippedRouter,
) -> tuple[
    Bool[np.ndarray, "tokens"],
    Float64[np.ndarray, "tokens"],
    Int64[np.ndarray, "tokens"],
    Int64[np.ndarray, "flips"],
    Bool[np.ndarray, "tokens"],
]:
    """Flips of clean tokens, their chance under noise, and what may group them.

    The number of each token, the sign of the change of the numbers of each one that flips, and
    whether the set is that of the token before.
    """
    site, rows = one.site, np.flatnonzero(one.is_clean)
    flipped = one.is_flipped[rows]
    mine, theirs = (
        sets[rows][flipped].astype(np.int64).sum(axis=1) for sets in (site.mine, site.theirs)
    )
    before = site.shifted(-1)[rows]
    has_before, repeats = before >= 0, np.zeros(len(rows), bool)
    repeats[has_before] = site.kernels["same_set"](
        site.theirs[rows[has_before]], site.theirs[before[has_before]]
    )
    chance = _expected(_gap(site.selection[rows], site.theirs.shape[1]), flipped)
    # experts that both have cancel
    return flipped, chance, rows, np.sign(theirs - mine), repeats


def _gap(selection: Float[np.ndarray, "tokens experts"], k: int) -> Float64[np.ndarray, "tokens"]:
    """Distance between the last chosen score and the next."""
    experts = selection.shape[1]
    if k == experts:
        return np.full(len(selection), np.inf)
    last, following = last_and_next(selection, k)
    return np.asarray(last - following, np.float64)


def _expected(
    gap: Float64[np.ndarray, "tokens"], flipped: Bool[np.ndarray, "tokens"]
) -> Float64[np.ndarray, "tokens"]:
    """Share of flips among tokens as near to their boundary as each, half a flip added."""
    order = np.argsort(gap, kind="stable")
    share = np.empty(len(gap))
    for part in np.array_split(order, min(_CLASSES, len(order))):
        share[part] = (flipped[part].sum() + 0.5) / (len(part) + 1.0)
    return share


def _grouped(
    flipped: Bool[np.ndarray, "tokens"],
    chance: Float64[np.ndarray, "tokens"],
    columns: TokenColumns,
    place: Int64[np.ndarray, "tokens"],
) -> Iterator[Uneven]:
    length = int(columns.position.max()) + 1
    position = columns.position.astype(np.int64)
    width = max(1, -(-length // _POSITIONS))
    kinds: dict[str, tuple[Int64[np.ndarray, "tokens"], str]] = {
        "documents": (columns.document.astype(np.int64), "documents {}"),
        "positions": (position // width, f"positions in blocks of {width}: blocks {{}}"),
    }
    for name, (group, words) in kinds.items():
        yield from _overdispersed(name, words, group, flipped, chance)
    best: Uneven | None = None
    for ranks in range(2, _RANKS + 1):
        group = place % ranks
        words = f"tokens {{}} modulo {ranks}"
        for one in _overdispersed("ranks", words, group, flipped, chance):
            one = Uneven(one.test, one.text, min(1.0, one.p_value * (_RANKS - 1)))
            best = one if best is None or one.p_value < best.p_value else best
    if best is not None:
        yield best


def _overdispersed(
    name: str,
    words: str,
    group: Int64[np.ndarray, "tokens"],
    flipped: Bool[np.ndarray, "tokens"],
    chance: Float64[np.ndarray, "tokens"],
) -> Iterator[Uneven]:
    from scipy.stats import chi2

    is_grouped = group >= 0
    names, place = np.unique(group[is_grouped], return_inverse=True)
    if len(names) < 2:
        return
    observed = np.bincount(place, weights=flipped[is_grouped])
    expected = np.bincount(place, weights=chance[is_grouped])
    spread = np.bincount(place, weights=(chance * (1.0 - chance))[is_grouped])
    statistic = float(((observed - expected) ** 2 / np.maximum(spread, 1e-9)).sum())
    many = (observed >= _TIMES * expected) & (observed >= 5)
    # the others set what is usual: those that flip most raise what is expected of all
    rest = ~many
    usual = observed[rest].sum() / max(expected[rest].sum(), 1e-9)
    part = float(observed[many].sum() / observed.sum())
    if not many.any():
        return
    excess = float(observed[many].sum() - usual * expected[many].sum())
    if part < _PART or excess < _PART * observed.sum():
        return
    subject, usually = words.format(listed(names[many])), expected[many].sum() / observed.sum()
    text = f"{subject} hold {100 * part:.0f} % of what differs, {100 * usually:.0f} % are expected"
    yield Uneven(name, text, float(chi2.sf(statistic, len(names) - 1)))


def _leaning(change: Int64[np.ndarray, "flips"]) -> Iterator[Uneven]:
    """Do switches go to lower numbers as often as to higher ones?"""
    from scipy.stats import binomtest

    lower, higher = int((change < 0).sum()), int((change > 0).sum())
    if lower + higher == 0:
        return
    most, word = (lower, "lower") if lower >= higher else (higher, "higher")
    if most < _LEANING * (lower + higher):
        return
    text = f"{most} of {lower + higher} switches go to {word} expert numbers"
    yield Uneven("direction", text, float(binomtest(most, lower + higher).pvalue))


def _repeats(
    same: Bool[np.ndarray, "tokens"], flipped: Bool[np.ndarray, "tokens"]
) -> Iterator[Uneven]:
    """Is a flipped row more often that of the token before than other rows are?"""
    from scipy.stats import fisher_exact

    counts = [[int((same & f).sum()), int((~same & f).sum())] for f in (flipped, ~flipped)]
    part = counts[0][0] / max(sum(counts[0]), 1)
    usual = counts[1][0] / max(sum(counts[1]), 1)
    if part < _PART or part < _TIMES * usual:
        return
    text = f"{100 * part:.0f} % of what differs repeats the row of the token before"
    _, chance = fisher_exact(counts, "greater")
    yield Uneven("repeats", text, float(np.asarray(chance)))
