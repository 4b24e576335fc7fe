"""What happened to one router between two checkpoints: rows, gain, biases and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Float, Int64
from moegeom.core.text import all_of
from moegeom.studies.changes.bias_pair import KINDS, Biases, BiasPair
from moegeom.studies.changes.edit import EDITS
from moegeom.studies.changes.operators.places import LEFT_BEHIND, MOVED_ALONE, NOT_COMPARED
from moegeom.studies.changes.operators.rounding import ROUNDED, rounding_of_broken
from moegeom.studies.changes.others import RoutersOfA
from moegeom.studies.changes.record import Change, RouterChange
from moegeom.studies.changes.row_pair import row_pair
from moegeom.studies.changes.search import explained, explained_biases

#: Hashes of the experts of one router; None where they are not known.
Samples = Sequence[str] | None

#: Biases of other routers by name.
OtherBiases = Mapping[str, Float[np.ndarray, "experts"]]


def compare_routers(
    a: Router,
    b: Router,
    samples: tuple[Samples, Samples] | None = None,
    others: RoutersOfA | None = None,
) -> RouterChange:
    """All edits that lead from router ``a`` to router ``b``.

    ``samples`` are those of the experts of both, None when experts were not checked; ``others`` are
    all routers of A, which b may be another one of. Routers of different shape, unless rows were
    left out or repeated, or with values that are not finite, are not compared unless they are
    equal.
    """
    place, rows = _rows(a, b, others)
    if place is None:
        return RouterChange(a.name, tuple(rows), tuple(_beside(a, b)))
    experts, gaps = _experts(b, place, samples)
    biases = (
        change
        for kind in KINDS
        for change in bias_changes(
            kind, Biases.of(a), Biases.of(b), place, others.biases(kind, a.name) if others else {}
        )
    )
    return RouterChange(a.name, (*rows, *biases, *experts), (*_beside(a, b), *gaps), place.tolist())


def _rows(
    a: Router, b: Router, others: RoutersOfA | None
) -> tuple[Int64[np.ndarray, "experts"] | None, list[Change]]:
    """The row of A behind each row of B, and the edits; None for shapes that do not match."""
    own = np.arange(b.num_experts)
    if a.weight.shape == b.weight.shape and not _has_changed(a, b):
        return own, []
    if not (_is_finite(a) and _is_finite(b)):
        if a.weight.shape == b.weight.shape:
            for fit in rounding_of_broken(a, b):
                if fit.evidence["dtypes"]:
                    return own, [
                        ROUNDED.change(b.rule, kind=fit.kind, detail=fit.detail, **fit.evidence)
                    ]
        return own, [NOT_COMPARED.change(b.rule, kind="values that are not finite")]
    changes: list[Change] = []
    if a.weight.shape != b.weight.shape:
        fits = [(edit, *one) for edit in EDITS.all() for one in edit.fit_places(a, b)]
        if not fits:
            kind = f"{_shape(a)} in A, {_shape(b)} in B"
            return None, [NOT_COMPARED.change(b.rule, kind=kind)]
        edit, own, fit = min(fits, key=lambda one: one[2].bits)
        changes.append(edit.change(b.rule, kind=fit.kind, detail=fit.detail, **fit.evidence))
    pair = row_pair(a, b, own, None if others is None else others.beside(b))
    row_changes, pair = explained(pair)
    return pair.place, [*changes, *row_changes]


def bias_changes(
    kind: str,
    a: Biases,
    b: Biases,
    place: Int64[np.ndarray, "experts"],
    others: OtherBiases,
) -> Iterator[Change]:
    """Changes of one kind of bias; none where one side has no such bias.

    Bias ``place[i]`` of ``a`` is compared with bias i of ``b``: it belongs to the row.
    """
    before, after = a.values.get(kind), b.values.get(kind)
    if before is None or after is None or len(after) != len(place):
        return
    if np.array_equal(before[place], after, equal_nan=True):
        return
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        yield NOT_COMPARED.change(b.rule, kind=f"{kind} that is not finite", subject=kind)
        return
    stored = before.astype(np.float64)
    yield from explained_biases(
        BiasPair(
            kind, stored[place], after.astype(np.float64), b.rule, stored, place, b.dtype, others
        )
    )


def _experts(
    b: Router, place: Int64[np.ndarray, "experts"], samples: tuple[Samples, Samples] | None
) -> tuple[list[Change], list[str]]:
    """Whether experts moved along with their rows: changes, and notes."""
    number = len(place)
    is_permuted = bool((place != np.arange(number)).any())
    if samples is None:
        unknown = "whether the experts moved along is not known: --experts"
        return [], [unknown] if is_permuted else []
    before, after = samples
    if before is None or after is None:
        return [], ["experts not found, or not to be told apart"]
    stayed = sum(after[i] == before[i] for i in range(min(number, len(before))))
    followed = sum(after[i] == before[place[i]] for i in range(number))
    if is_permuted and followed == number:
        return [], [f"{all_of(number, 'expert')} moved along"]
    detail = f"samples of {stayed} of {number} experts are where they were"
    if is_permuted and stayed:
        left = LEFT_BEHIND.change(b.rule, detail=detail, stayed=stayed, followed=followed)
        return [left], []
    if is_permuted:
        return [], ["the weights of the experts changed too: samples do not tell where they are"]
    if stayed == number:
        return [], [all_of(number, "expert where it was", "experts where they were")]
    if sorted(before) == sorted(after):
        return [MOVED_ALONE.change(b.rule, detail=detail, stayed=stayed)], []
    return [], [f"{number - stayed} of {number} experts have other weights"]


def _beside(a: Router, b: Router) -> Iterator[str]:
    """Notes on the router that are no changes."""
    if (a.gain is None) != (b.gain is None):
        yield f"no gain known in {'A' if a.gain is None else 'B'}"
    elif not is_same(a.gain, b.gain):
        yield "gain different"
    elif a.gain is not None:
        yield "gain equal"
    stored = [r.provenance.stored_dtype.lower() for r in (a, b)]
    if stored[0] != stored[1]:
        yield f"stored {stored[0]} in A, {stored[1]} in B"


def is_same(a: Float[np.ndarray, "*size"] | None, b: Float[np.ndarray, "*other"] | None) -> bool:
    """True for equal values, whatever they are stored as, or when neither is there."""
    if a is None or b is None:
        return a is b
    return np.array_equal(a, b, equal_nan=True)


def _has_changed(a: Router, b: Router) -> bool:
    same = np.array_equal(a.weight, b.weight, equal_nan=True)
    return not (same and is_same(a.gain, b.gain))


def _is_finite(router: Router) -> bool:
    gain = router.gain
    is_gain_finite = gain is None or bool(np.isfinite(gain).all())
    return is_gain_finite and bool(np.isfinite(router.weight).all())


def _shape(router: Router) -> str:
    return f"{router.num_experts} x {router.hidden_size}"
