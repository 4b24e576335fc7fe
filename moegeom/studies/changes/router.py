"""What happened to one router between two checkpoints: rows, gain, biases and experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int64

from moegeom.core.router import Router, Rule, mantissa_bits
from moegeom.geometry.number_formats import cast_of, grid_of
from moegeom.geometry.rows import cycles
from moegeom.studies.changes.bias import Biases, bias_changes
from moegeom.studies.changes.effective import UNRELATED, effective_changes, place_of
from moegeom.studies.changes.row_pair import row_pair
from moegeom.studies.changes.words import change
from moegeom.studies.diff.record import Change, RouterChange, percent

#: Hashes of the experts of one router; None where they are not known.
Samples = Sequence[str] | None

#: Permuted rows that are listed as ``3 was 7``.
_MOST_SWAPS = 4


def compare_routers(
    a: Router, b: Router, samples: tuple[Samples, Samples] | None = None
) -> RouterChange:
    """Everything that happened on the way from ``a`` to ``b``, in the words of the closed list.

    ``samples`` are those of the experts of both, None when experts were not checked. Routers of
    different shape, or with values that are not finite, are not compared unless they are equal.
    """
    beside = tuple(_beside(a, b))
    if a.weight.shape != b.weight.shape:
        shapes = f"{_shape(a)} in A, {_shape(b)} in B"
        return RouterChange(a.name, (change("not compared", b.rule, kind=shapes),), beside)
    place, rows = _rows(a, b)
    experts, said = _experts(b, place, samples)
    found = (*rows, *bias_changes(Biases.of(a), Biases.of(b), place), *experts)
    return RouterChange(a.name, found, (*beside, *said))


def _rows(a: Router, b: Router) -> tuple[Int64[np.ndarray, "experts"], list[Change]]:
    own = np.arange(a.num_experts)
    exact = _exact(a.weight, a.gain, b)
    if exact is not None:
        return own, exact
    if not (_is_finite(a) and _is_finite(b)):
        return own, [change("not compared", b.rule, kind="values that are not finite")]
    rows = row_pair(a, b, own)
    place = place_of(rows)
    if (place == own).all():
        return own, effective_changes(a, b, own, rows)
    left = _exact(a.weight[place], a.gain, b)
    if left is None:
        left = effective_changes(a, b, place, row_pair(a, b, place))
    if any(one.word == UNRELATED for one in left):
        return own, effective_changes(a, b, own, rows)
    return place, [permuted(b.rule, place), *left]


def _exact(
    weight: Float[np.ndarray, "experts hidden"],
    gain: Float[np.ndarray, "hidden"] | None,
    b: Router,
) -> list[Change] | None:
    """What can be told bit by bit: nothing changed, or rounded. None when it is neither."""
    same = np.array_equal(weight, b.weight, equal_nan=True)
    same_gain = is_same(gain, b.gain)
    if same and same_gain:
        return []
    parts = {"weight": (weight, b.weight)}
    if gain is not None and b.gain is not None:
        parts["gain"] = (gain[None], b.gain[None])
    elif not same_gain:
        return None
    for later, names in ((1, "B is A"), (0, "A is B")):
        casts = _casts(parts, later, b)
        if casts is not None:
            what = " and ".join(f"{part} to {cast}" for part, cast in casts.items())
            kinds = sorted(set(casts.values()))
            only = "" if "weight" in casts else "gain "
            moved = _rms_change(weight, b.weight)
            return [
                change(
                    "rounded",
                    b.rule,
                    kind=f"{names}, {only}rounded to {' and '.join(kinds)}",
                    size=moved,
                    detail=f"{what}, all values; rms change of the weight {percent(moved)}",
                    dtypes=casts,
                    rms_change=moved,
                )
            ]
    return None


def _casts(
    parts: dict[str, tuple[np.ndarray, np.ndarray]], later: int, b: Router
) -> dict[str, str] | None:
    """The cast of each part that is not the same; None unless all are casts this way round."""
    casts = {}
    for part, pair in parts.items():
        if np.array_equal(*pair):
            continue
        finer, coarser = pair[1 - later], pair[later]
        name = cast_of(finer, coarser)
        if name is None and part == "weight":
            bits = mantissa_bits(b.provenance.stored_dtype) or 0
            # scaled storage is multiplied out in float32, whatever it is stored as
            precision = 2.0 ** -(bits + 1) if bits in (7, 10) else 1e-6
            name = grid_of(finer, coarser, precision)
        if name is None:
            return None
        casts[part] = name
    return casts


def permuted(rule: Rule, place: Int64[np.ndarray, "experts"]) -> Change:
    """The change of a router whose row i was row ``place[i]``."""
    moved = np.flatnonzero(place != np.arange(len(place))).tolist()
    swaps = ", ".join(f"{expert} was {place[expert]}" for expert in moved[:_MOST_SWAPS])
    more = " ..." if len(moved) > _MOST_SWAPS else ""
    groups = rule.groups
    mixed = ""
    if groups is not None:
        of_group = place.reshape(groups.num_groups, -1) // (len(place) // groups.num_groups)
        if not (of_group == of_group[:, :1]).all():
            mixed = "; the new order mixes groups of the rule, so choices change in any case"
    return change(
        "permuted",
        rule,
        kind=f"({len(moved)} of {len(place)} rows)",
        detail=f"{swaps}{more}; cycles: {len(cycles(place))}{mixed}",
        place=place.tolist(),
        mixes_groups=bool(mixed),
    )


def _experts(
    b: Router, place: Int64[np.ndarray, "experts"], samples: tuple[Samples, Samples] | None
) -> tuple[list[Change], list[str]]:
    """Whether experts moved along with the rows: changes, and what is told beside them."""
    is_permuted = bool((place != np.arange(len(place))).any())
    if samples is None:
        unknown = "whether the experts moved along is not known: --experts"
        return [], [unknown] if is_permuted else []
    before, after = samples
    if before is None or after is None:
        return [], ["experts not found, or not to be told apart"]
    number = len(place)
    stayed = sum(after[i] == before[i] for i in range(number))
    followed = sum(after[i] == before[place[i]] for i in range(number))
    if is_permuted and followed == number:
        return [], [f"all {number} experts moved along"]
    told = f"samples of {stayed} of {number} experts are where they were"
    if is_permuted and stayed:
        left = change("experts left behind", b.rule, detail=told, stayed=stayed, followed=followed)
        return [left], []
    if is_permuted:
        return [], ["the weights of the experts changed too: samples do not tell where they are"]
    if stayed == number:
        return [], [f"all {number} experts where they were"]
    if sorted(before) == sorted(after):
        alone = change("experts moved alone", b.rule, detail=told, stayed=stayed)
        return [alone], []
    return [], [f"{number - stayed} of {number} experts have other weights"]


def _beside(a: Router, b: Router) -> Iterator[str]:
    """What is told beside the changes, where there is something to tell."""
    if (a.gain is None) != (b.gain is None):
        yield f"no gain known in {'A' if a.gain is None else 'B'}"
    elif not is_same(a.gain, b.gain):
        yield "gain different"
    elif a.gain is not None:
        yield "gain equal"
    stored = [r.provenance.stored_dtype.lower() for r in (a, b)]
    if stored[0] != stored[1]:
        yield f"stored {stored[0]} in A, {stored[1]} in B"


def is_same(a: Float[np.ndarray, "size"] | None, b: Float[np.ndarray, "size"] | None) -> bool:
    """True for equal values, whatever they are stored as, or when neither is there."""
    if a is None or b is None:
        return a is b
    return np.array_equal(a, b, equal_nan=True)


def _is_finite(router: Router) -> bool:
    gain = router.gain
    is_gain_finite = gain is None or bool(np.isfinite(gain).all())
    return is_gain_finite and bool(np.isfinite(router.weight).all())


def _rms_change(
    a: Float[np.ndarray, "experts hidden"], b: Float[np.ndarray, "experts hidden"]
) -> float:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        a64 = a.astype(np.float64)
        return float(np.linalg.norm(b - a64) / np.linalg.norm(a64))


def _shape(router: Router) -> str:
    return f"{router.num_experts} x {router.hidden_size}"
