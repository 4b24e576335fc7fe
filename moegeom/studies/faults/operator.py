"""An operator: one thing that may have been done, and what each router would choose then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, Int64, Integer

from moegeom.core.registry import Rooms
from moegeom.core.router import Router
from moegeom.core.tokens import TokenColumns
from moegeom.engine.choice import group_masked
from moegeom.engine.flipping import engine_logits
from moegeom.geometry.set_code import TIE_WAYS
from moegeom.kernels.reduction import Kernels
from moegeom.studies.faults.causes import Cause
from moegeom.variants.arithmetic import Arithmetic
from moegeom.variants.emulated import Emulated, emulate

#: The router as stored, in float32; top-k of an affine rule compares logits.
AS_STORED = Arithmetic(name="", text="", engine="none", version="", source="", compared="logits")


#: Inputs of a router for some tokens.
Values = Callable[[np.ndarray], Float[np.ndarray, "rows hidden"] | None]


@dataclass(frozen=True, eq=False)
class Site:
    """One router, and what both sides chose there for the same tokens.

    ``logits`` are those of the inputs at hand, ``scores`` what is selected by, and ``selection``
    the same with dropped groups at their fill, which top-k compares.
    ``previous`` is for each token the row of the one before it in its document, -1 for none.
    ``routers`` are all that are looked at, this one at ``number``; ``other`` is that of the
    checkpoint that B may have loaded. ``has_inputs`` where the rows can be routed again, and
    ``has_logits`` where there are logits: else the scores are no more than A's sets;
    ``chosen_at`` gives what A chose at another of the routers, ``values_at`` what A read there.
    """

    router: Router
    number: int
    routers: Sequence[Router]
    other: Router | None
    logits: Float[np.ndarray, "tokens experts"]
    scores: Float[np.ndarray, "tokens experts"]
    selection: Float[np.ndarray, "tokens experts"]
    mine: Int32[np.ndarray, "tokens k"]
    theirs: Int32[np.ndarray, "tokens k"]
    columns: TokenColumns
    matching: Int64[np.ndarray, "experts"]
    kernels: Kernels
    has_inputs: bool
    has_logits: bool
    chosen_at: Callable[[int], Int32[np.ndarray, "tokens k"]]
    values_at: Callable[[int], Values]

    @property
    def differs(self) -> Bool[np.ndarray, "tokens"]:
        """Tokens with different sets."""
        return ~self.kernels["same_set"](self.mine, self.theirs)

    @cached_property
    def place(self) -> Int64[np.ndarray, "tokens"]:
        """Row of each token: the token s further on is at ``place[row] + s``, if it is there."""
        return np.arange(len(self.columns.document))

    def shifted(self, by: int) -> Int64[np.ndarray, "tokens"]:
        """Row of the token that stands ``by`` further on in the same document; -1 for none."""
        document, position = self.columns.document, self.columns.position
        row = self.place + by
        inside = (row >= 0) & (row < len(row))
        there = np.clip(row, 0, len(row) - 1)
        same = inside & (document[there] == document)
        known = (position[there] - position == by) | (position < 0)
        return np.where(same & known, row, -1)


#: What enters a product in place of a router's own inputs, for some tokens.
Inputs = Callable[[Site, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Proposal:
    """An operator with its parameters at one router; ``name`` says which on all routers.

    One of three tells what would be chosen: a ``routed`` router (with the rows, biases and rule
    that it would have, behind ``inputs`` if they are changed too), the scores of other ``rows``
    (-1: nothing is predicted), or ``scores`` as they stand. ``numbers`` are A's numbers of B's
    experts; ``of_other`` where the other checkpoint is needed to say it. It counts only where it
    reproduces ``least_met`` of the sets in its scope and, if it is one of all routers
    (``everywhere``), at each of them; with ``of_some_only`` never for all experts together, with
    ``of_all_only`` never for some.
    ``ties`` are the ways in which equal scores may be told apart; ``stands_for`` counts those that
    were tried before it and went no further.
    ``bits`` say which parameters these are, ``own_bits`` those of this router alone.
    """

    name: str
    text: str
    cause: Cause
    bits: float = 0.0
    own_bits: float = 0.0
    routed: Emulated | None = None
    inputs: Inputs | None = None
    rows: Int64[np.ndarray, "tokens"] | None = None
    scores: Callable[[Site], Float[np.ndarray, "tokens experts"]] | None = None
    numbers: Int32[np.ndarray, "experts"] | None = None
    of_other: bool = False
    least_met: float = 0.0
    everywhere: bool = False
    of_some_only: bool = False
    of_all_only: bool = False
    ties: tuple[str, ...] = TIE_WAYS
    stands_for: int = 1

    @property
    def needs_inputs(self) -> bool:
        """Whether the inputs have to be routed again."""
        return self.routed is not None

    def selection(
        self, site: Site, rows: np.ndarray, values: Float[np.ndarray, "rows hidden"] | None
    ) -> Float[np.ndarray, "rows experts"]:
        """Scores that top-k would compare, for some tokens with these inputs."""
        if self.routed is not None:
            return self.masked(site, self.unmasked(site, rows, values))
        if self.rows is not None:
            there = self.rows[rows]
            found = site.selection[np.maximum(there, 0)].copy()
            found[there < 0] = np.nan
            return found
        if self.scores is not None:
            return self.scores(site)[rows]
        return site.selection[rows]

    def unmasked(
        self, site: Site, rows: np.ndarray, values: Float[np.ndarray, "rows hidden"] | None
    ) -> Float[np.ndarray, "rows experts"]:
        """Scores of a ``routed`` router before its groups are chosen.

        Recorded logits stand for those of the inputs where there are none.
        """
        assert self.routed is not None
        logits = site.logits[rows]
        if values is not None:
            seen = values if self.inputs is None else self.inputs(site, rows, values)
            logits = engine_logits(self.routed, self.routed.inputs(seen))
        return self.routed.compared(logits)

    def masked(
        self, site: Site, scores: Float[np.ndarray, "rows experts"]
    ) -> Float[np.ndarray, "rows experts"]:
        """These scores with the groups that a ``routed`` router drops at their fill."""
        assert self.routed is not None
        return group_masked(self.routed.router.rule, scores, site.kernels)[0]

    def theirs(self, site: Site, rows: np.ndarray) -> Int32[np.ndarray, "rows k"]:
        """What B chose, in A's numbers."""
        found = site.theirs[rows]
        return found if self.numbers is None else self.numbers[found]


@dataclass(frozen=True)
class Operator:
    """A kind of fault: from a router, the candidates that apply there, simplest first."""

    name: str
    candidates: Callable[[Site], Iterator[Proposal]]


OPERATORS: Rooms[Operator] = Rooms("operator", "moegeom.studies.faults.operators", Operator)


def routed(
    site: Site,
    name: str,
    text: str,
    cause: Cause,
    router: Router | None,
    how: Arithmetic = AS_STORED,
    *,
    needs_inputs: bool = True,
    only_stores: bool = False,
    bits: float = 0.0,
    own_bits: float = 0.0,
    inputs: Inputs | None = None,
) -> Iterator[Proposal]:
    """The candidate of an edited router; none where the edit does not apply, or nothing changes.

    ``needs_inputs`` where logits alone cannot tell, ``only_stores`` where numbers are stored
    otherwise: of numbers that are stored so it changes nothing.
    """
    if router is None or not site.has_logits or (needs_inputs and not site.has_inputs):
        return
    emulated = emulate(router, dataclasses.replace(how, name=name))
    if only_stores and _is_stored_so(emulated, site.router):
        return
    yield Proposal(
        name, text, cause, bits, own_bits, emulated, inputs, of_other=name.endswith("_of_other")
    )


def of_sets(
    sets: Integer[np.ndarray, "tokens k"], experts: int, is_known: Bool[np.ndarray, "tokens"]
) -> Float32[np.ndarray, "tokens experts"]:
    """Scores of which these sets are the best, all alike; nan where nothing is predicted."""
    found = np.zeros((len(sets), experts), np.float32)
    np.put_along_axis(found, np.maximum(sets, 0).astype(np.int64), np.float32(1.0), axis=1)
    found[~is_known] = np.nan
    return found


def plain(router: Router, has_inputs: bool) -> Router:
    """The router that recorded values go through: logits of an affine rule hold their bias."""
    if not has_inputs and router.rule.is_affine:
        return dataclasses.replace(router, selection_bias=None)
    return router


def _is_stored_so(emulated: Emulated, router: Router) -> bool:
    """Whether rows and selection bias are what they were: already in the coarser format."""
    bias, own = emulated.selection_bias, router.selection_bias
    same_bias = bias is own or (bias is not None and own is not None and np.array_equal(bias, own))
    return same_bias and np.array_equal(emulated.router.weight, router.weight)
