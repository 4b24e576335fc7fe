"""Incidents of expert numbers: rows that changed places without what belongs to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.museum.checkpoint import Checkpoint
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import trained, trained_sigmoid
from tests.museum.renumbering import permuted, swapped, text_order, within_groups

_LAYER = ("text/1",)


def olmoe() -> Checkpoint:
    """A trained checkpoint with 16 experts in each of 3 layers."""
    return trained("olmoe-balanced/step_1500")


def deepseek() -> Checkpoint:
    """A trained checkpoint with 32 experts in 4 groups and a selection bias; layers 1 to 3."""
    return trained_sigmoid()


def _moved(
    model: Callable[[], Checkpoint],
    order: Sequence[int],
    parts: Sequence[str],
    layers: Sequence[int] | None = None,
) -> Callable[[], Checkpoint]:
    return lambda: permuted(model(), order, parts, layers)


_SORTED = (
    "A conversion sorted the names of experts as text, 10 before 2, and moved one of rows and "
    "experts without the other."
)
_ROWS = ("weight",)
_EVERYTHING = ("weight", "bias", "experts")

ROWS_SORTED_AS_TEXT = Incident(
    "rows_sorted_as_text",
    ("pytorch/torchtitan#1918",),
    _SORTED,
    "MGI121",
    (
        Case(
            "two rows of one layer swapped",
            _moved(olmoe, swapped(16), _ROWS, (1,)),
            ("MGI121",),
            _LAYER,
        ),
        Case(
            "one layer sorted as text",
            _moved(olmoe, text_order(16), _ROWS, (1,)),
            ("MGI121",),
            _LAYER,
        ),
        Case(
            "all layers sorted as text",
            _moved(olmoe, text_order(16), _ROWS),
            ("MGI121",),
            ("text/0", "text/1", "text/2"),
        ),
    ),
    (
        Case(
            "two rows and their experts swapped",
            _moved(olmoe, swapped(16), ("weight", "experts")),
        ),
        Case(
            "rows and experts sorted as text, all of them",
            _moved(olmoe, text_order(16), ("weight", "experts")),
        ),
    ),
    olmoe,
)

_ORDER = within_groups(32, 4)
_DEEP = ("text/1", "text/2", "text/3")

BIAS_LEFT_BEHIND = Incident(
    "bias_left_behind",
    ("pytorch/torchtitan#1918",),
    "The same with a selection bias: rows and experts were moved, and the bias was not.",
    "MGI121",
    (
        Case(
            "two experts swapped in one layer",
            _moved(deepseek, swapped(32), ("weight", "experts"), (1,)),
            ("MGI121",),
            _LAYER,
        ),
        Case(
            "all experts of one layer",
            _moved(deepseek, _ORDER, ("weight", "experts"), (1,)),
            ("MGI121",),
            _LAYER,
        ),
        Case(
            "all experts of all layers",
            _moved(deepseek, _ORDER, ("weight", "experts")),
            ("MGI121",),
            _DEEP,
        ),
    ),
    (
        Case(
            "groups and what is in them renumbered, bias included",
            _moved(deepseek, _ORDER, _EVERYTHING),
        ),
    ),
    deepseek,
)

EXPERTS_LEFT_BEHIND = Incident(
    "experts_left_behind",
    ("pytorch/torchtitan#1918",),
    "Rows and selection bias were moved, and the experts were not.",
    "MGI121",
    (
        Case(
            "two experts swapped in one layer",
            _moved(deepseek, swapped(32), ("weight", "bias"), (1,)),
            ("MGI121",),
            _LAYER,
        ),
        Case(
            "all experts of one layer",
            _moved(deepseek, _ORDER, ("weight", "bias"), (1,)),
            ("MGI121",),
            _LAYER,
        ),
        Case(
            "all experts of all layers",
            _moved(deepseek, _ORDER, ("weight", "bias")),
            ("MGI121",),
            _DEEP,
        ),
    ),
    (
        Case(
            "groups and what is in them renumbered, experts included",
            _moved(deepseek, _ORDER, _EVERYTHING),
        ),
    ),
    deepseek,
)

GROUPS_MIXED = Incident(
    "groups_mixed",
    (),
    "Everything that belongs to an expert was moved along, but across the borders of groups: a "
    "rule that keeps whole groups now keeps other experts together.",
    "MGI121",
    (
        Case(
            "one expert of each of two groups exchanged",
            _moved(deepseek, [8, *range(1, 8), 0, *range(9, 32)], _EVERYTHING, (1,)),
            ("MGI121",),
            ("text/1",),
        ),
        Case(
            "one layer sorted as text",
            _moved(deepseek, text_order(32), _EVERYTHING, (1,)),
            ("MGI121",),
            ("text/1",),
        ),
        Case(
            "all layers sorted as text",
            _moved(deepseek, text_order(32), _EVERYTHING),
            ("MGI121",),
            _DEEP,
        ),
    ),
    (Case("groups and what is in them renumbered", _moved(deepseek, _ORDER, _EVERYTHING)),),
    deepseek,
)

INCIDENTS = (ROWS_SORTED_AS_TEXT, BIAS_LEFT_BEHIND, EXPERTS_LEFT_BEHIND, GROUPS_MIXED)
