"""Ids of rows that should be choices and are none: told as what they are, with place and share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.router import format_layers
from moegeom.core.shapes import Bool, Int32, Int64
from moegeom.core.text import number_of, percent
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.axes import unset_value
from moegeom.tokens.traces.oddities import part_size

#: Slots up to which comparing all pairs is faster than sorting, and rows that are turned at once.
_FEW_SLOTS, _TURNED = 32, 65_536

#: Rows in which one number alone stands twice, and no other number does, from which it fills slots.
_FILLED_ROWS = 3

#: Share of slots from which on a number stands for experts of other ranks: half for two of them.
_OF_OTHER_RANKS = 0.35

#: Ids for each expert from which on it is no accident that expert 0 has none.
_MANY = 20


class OddIdsError(RecordingError):
    """Rows hold no choices; ``word`` names the kind, which other requests may have too.

    Of some kinds other slots of the same rows are choices: the kind ``leaves_empty`` slots.
    """

    def __init__(self, word: str, text: str, hint: str, leaves_empty: bool) -> None:
        super().__init__(text, hint)
        self.word: str = word
        self.leaves_empty: bool = leaves_empty


def check_choices(
    ids: np.ndarray,
    row: Int64[np.ndarray, "rows"],
    routers: Sequence[KnownRouter],
    where: str,
    may_be_empty: bool = False,
) -> None:
    """Raises OddIdsError for ids that are no experts, and for experts named twice.

    Slots ``may_be_empty`` where the caller looks at what the others hold.
    """
    if not len(ids):
        return
    least = min(router.num_experts for router in routers)
    is_twice = ids.shape[2] > 1 and _has_equal(ids)
    if int(ids.max()) < least and int(ids.min()) >= 0 and not is_twice:
        return
    try:
        _Strangers(ids, row, routers, where).refuse(is_twice)
    except OddIdsError as odd:
        if not (may_be_empty and odd.leaves_empty):
            raise


def empty_slots(
    ids: Int32[np.ndarray, "rows slots"], num_experts: int, others: Int32[np.ndarray, "rows slots"]
) -> Bool[np.ndarray, "rows slots"]:
    """Slots without an expert: -1, and a number that alone stands in rows more than once.

    That number in other rows, too, where the choices of ``others`` lack it.
    """
    is_empty = (ids < 0) | (ids >= num_experts)
    if ids.shape[1] > 1 and _has_equal(ids[:, None]):
        is_twice = _twice(ids[:, None])[:, 0]
        repeated = _repeated(ids[is_twice])
        filling = repeated[(repeated >= 0) & (repeated < num_experts)]
        if len(filling) == 1:
            is_filled = is_twice | ~(others == filling[0]).any(axis=1)
            is_empty |= (ids == filling[0]) & is_filled[:, None]
    return is_empty


class _Strangers:
    """The ids of a request of which some are no choices."""

    def __init__(
        self, ids: np.ndarray, row: np.ndarray, routers: Sequence[KnownRouter], where: str
    ) -> None:
        self.ids, self.row, self.routers, self.where = ids, row, routers, where
        self.num_experts = np.array([router.num_experts for router in routers])[:, None]

    def refuse(self, is_twice: bool) -> None:
        """Raises the error of the first kind that explains all of them."""
        ids, unset = self.ids, unset_value(self.ids.dtype)
        twice = _twice(ids) if is_twice else np.zeros(ids.shape[:2], bool)
        repeated = _repeated(ids[twice])
        # 255 names an expert of 256, unless it stands in a row twice
        is_unset = ids == unset
        if unset >= 0 and not (repeated == unset).any():
            is_unset &= ids >= self.num_experts
        strange = ((ids < 0) | (ids >= self.num_experts)) & ~is_unset
        if (ids[strange] < 0).any():
            self._raise(
                "ids are negative",
                strange & (ids < 0),
                "A narrower integer has wrapped, or the row is damaged: -1 stands for no expert.",
            )
        is_end = strange.any() and (ids[strange] == self.num_experts.max()).all()
        if is_end and not is_twice and ids.min() and ids.size > _MANY * self.num_experts.max():
            self._raise(
                "ids are counted from 1",
                strange,
                "No id is 0, and the last is the number of experts: subtract 1.",
            )
        if is_end:
            self._raise(
                f"id {self.num_experts.max()}, the number of experts, stands in place of experts",
                strange,
                "What masks slots out, or rows of NaN, gives that id: look at the scores there.",
            )
        if strange.any():
            self._raise(
                f"ids name none of the {self.num_experts.max()} experts",
                strange,
                "Physical ids of expert load balancing? Give its map (--expert-map), record with "
                "it off, or with an engine that captures logical ids: vLLM from 0.16, SGLang from "
                "0.5.10. Or recorded from another model.",
            )
        if is_unset.any():
            self._refuse_unset(is_unset)
        if len(repeated) == 1 and (not repeated[0] or twice.sum() >= _FILLED_ROWS):
            self._refuse_filling(int(repeated[0]), twice)
        if is_twice:
            self._raise(
                "an expert stands twice",
                twice,
                "Damaged or wrapped ids, or a wrong shape of the array.",
            )

    def _refuse_unset(self, is_unset: Bool[np.ndarray, "rows layers slots"]) -> None:
        """Raises the error for rows with -1 in some slots, however their integers spell it."""
        share = percent(float(is_unset.mean()))
        partly = is_unset & ~is_unset.all(axis=2, keepdims=True)
        if not partly.any():
            self._refuse_layer(is_unset)
        if self._is_expert_choice(is_unset):
            self._raise(
                "experts choose their tokens",
                partly,
                "Expert choice: tokens have different numbers of experts, and each expert of a "
                f"layer has as many tokens as the others ({share} of the slots are empty). No "
                "top-k of a token follows from it: moegeom measures token choice alone.",
                leaves_empty=True,
            )
        valid, size = self.ids[~is_unset], int(self.num_experts.max())
        low, high = int(valid.min()), int(valid.max())
        # where -1 passed for the last expert, nobody knows how many there are
        is_known = not self.ids.max() == size - 1 > high
        if is_known and part_size(low, high, size, 2):
            self._raise(
                "ids are those of one rank",
                partly,
                f"Only experts {low} to {high} of {size} stand there, and -1 in {share} of the "
                "slots, for those of other ranks: merge the files of all ranks, or record before "
                "choices are made local.",
            )
        self._raise(
            "slots are dropped by a capacity",
            partly,
            f"-1 stands in {share} of the slots, beside experts: those over a capacity, or of "
            "other ranks where most slots are. Record what the router chose, before tokens are "
            "dispatched.",
            leaves_empty=True,
        )

    def _is_expert_choice(self, is_unset: np.ndarray) -> bool:
        """Whether all experts of each layer have one number of tokens, two at least."""
        for layer, router in enumerate(self.routers):
            experts = self.ids[:, layer][~is_unset[:, layer]]
            counts = np.bincount(experts.astype(np.int64), minlength=router.num_experts)
            if counts.min() != counts.max() or counts.min() < 2:
                return False
        return True

    def _refuse_filling(self, value: int, twice: Bool[np.ndarray, "rows layers"]) -> None:
        """Raises the error for rows in which one number alone stands more than once."""
        filled = (self.ids == value) & twice[:, :, None]
        share = percent(float(filled.mean()))
        if filled[twice].all():
            self._refuse_layer(filled)
        if value and value == self.ids.max() and filled.mean() >= _OF_OTHER_RANKS:
            self._raise(
                "ids are those of one rank",
                filled,
                f"{value} stands in {share} of the slots, in place of several experts, and all "
                f"others are below it: local ids of a rank with {value} experts, {value} for those "
                "of other ranks. Record before choices are made local.",
            )
        self._raise(
            f"slots are filled with expert {value}",
            filled,
            f"Padding of slots that were dropped or masked ({share} of all), and no choice: have "
            "the engine write the ids of the router, or -1 and fewer experts.",
            leaves_empty=True,
        )

    def _refuse_layer(self, filled: Bool[np.ndarray, "rows layers slots"]) -> None:
        """Raises the error for rows that hold choices in other layers."""
        self._raise(
            "layers lack choices",
            filled,
            "The rows hold choices in other layers: a rank, or a stage of a pipeline, was not "
            "gathered for them.",
            leaves_empty=True,
        )

    def _raise(self, word: str, strange: np.ndarray, hint: str, leaves_empty: bool = False) -> None:
        """Raises the error: ``strange`` are the slots, or the rows and layers, that it is about."""
        places = strange if strange.ndim == 2 else strange.any(axis=2)
        at, layer = np.argwhere(places)[0].tolist()
        slots = self.ids[at, layer].tolist()
        layers = {self.routers[n].layer for n in np.flatnonzero(places.any(axis=0)).tolist()}
        rows = self.row[np.flatnonzero(places.sum(axis=1))]
        is_run = 1 < len(rows) == rows[-1] - rows[0] + 1 < len(self.ids)
        run = f" ({rows[0]} to {rows[-1]})" if is_run else ""
        raise OddIdsError(
            word,
            f"{self.where}, row {self.row[at]}, layer {self.routers[layer].layer}: {word} in "
            f"{slots}; so it is in {number_of(len(rows), 'row')} of {len(self.ids)}{run}, at "
            f"layer{'s' * (len(layers) > 1)} {format_layers(layers)}.",
            hint,
            leaves_empty,
        )


def _twice(ids: np.ndarray) -> Bool[np.ndarray, "rows layers"]:
    """Rows and layers in which a number stands more than once."""
    ordered = np.sort(ids, axis=2)
    return np.asarray((ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2))


def _repeated(rows: np.ndarray) -> np.ndarray:
    """The numbers that stand in some row more than once."""
    ordered = np.sort(rows, axis=1)
    return np.unique(ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]])


def _has_equal(ids: np.ndarray) -> bool:
    """Whether some row names an expert twice in some layer."""
    slots = ids.shape[2]
    if slots > _FEW_SLOTS:
        return bool(_twice(ids).any())
    rows = ids.reshape(-1, slots)
    for start in range(0, len(rows), _TURNED):
        turned = np.ascontiguousarray(rows[start : start + _TURNED].T)
        if any((turned[slot] == turned[:slot]).any() for slot in range(1, slots)):
            return True
    return False
