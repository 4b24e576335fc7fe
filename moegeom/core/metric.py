"""What a metric declares: columns with unit and formula, needs, and what leaves it alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moegeom.core.registry import record_of_function
from moegeom.core.router import Router

#: ``flip``: a variant beside the reference on the same tokens, not one choice by itself;
#: ``noise``: a choice under noise on the inputs, whose size has to be said;
#: ``exposure``: one choice, but costly: measured only where somebody asks what would flip;
#: ``jump`` and ``flip_jump``: one choice, or a variant, by what experts make of it, which are read;
#: ``harm``: one choice, by flips that were made in the running model.
Scope = Literal["weights", "router", "flip", "noise", "exposure", "jump", "flip_jump", "harm"]

#: Transformations under which a metric keeps its values (held to it by a test).
Invariance = Literal[
    "token_permutation",
    "expert_relabelling",
    "common_row_shift",
    "positive_scaling",
    "gain_folding",
]


#: How a reason begins that is a fact of the rule, not a gap in what was recorded: nobody has to be
#: told that a model without some part has no figure of it.
RULE_HAS_NO = "the rule has no "

#: Another: flips are made by those who ask for them (``capture --flips``).
NO_FLIPS_MADE = "no flips were made in the model"

#: Seeded projections that stand for a router row in a baseline.
NUM_PROJECTIONS = 32


@dataclass(frozen=True)
class Column:
    """One column of a results table.

    ``kind`` is float, int, bool, str or list; ``has_se`` adds ``<name>_se``, the standard error by
    leave-one-block-out. ``formula`` is a key of docs/formulas.md. ``changes_with`` names
    invariances of the metric that this column does not share.
    """

    name: str
    text: str
    unit: str = "1"
    kind: Literal["float", "int", "bool", "str", "list"] = "float"
    formula: str = ""
    has_se: bool = False
    changes_with: tuple[Invariance, ...] = ()


def count(name: str, text: str, unit: str, **more: Any) -> Column:
    """The column of a whole number."""
    return Column(name, text, unit, "int", **more)


def figure(name: str, text: str, formula: str, unit: str = "1", **more: Any) -> Column:
    """The column of a number that the formula defines."""
    return Column(name, text, unit, formula=formula, **more)


def estimate(name: str, text: str, formula: str, unit: str = "1", **more: Any) -> Column:
    """The same with a standard error."""
    return figure(name, text, formula, unit, has_se=True, **more)


@dataclass(frozen=True)
class RouterFacts:
    """What a metric may know besides its reductions; ``is_whole`` but for one domain's tokens."""

    router: Router
    num_tokens: int
    is_random: bool = False
    num_blocks: int = 0
    is_whole: bool = True


#: Values of one metric for one router, variant and population: table -> column -> value. In
#: ``layers`` a value is a number; in other tables it is an array, one entry per row.
Values = Mapping[str, Mapping[str, Any]]


#: Columns of tables, by their names.
Tables = Mapping[str, tuple[Column, ...]]


@dataclass(frozen=True)
class Metric:
    """A figure, or a family of figures that share one reduction.

    ``finish`` maps the selected reductions (name -> array, see ``Reduction.select``) and the facts
    to values; ``page`` explains them. A metric of scope ``weights`` is finished once per router; it
    needs no reduction but may name quantities of the weights that several metrics share.
    ``errors`` gives standard errors where leaving out blocks does not: from the reductions of the
    whole and of the whole without each block to table -> column -> error. ``without_each`` is what
    ``finish`` says of several selections in columns with a standard error, one after the other on a
    first axis: a metric has it where that takes less than to finish each of them. What
    ``is_for_figures`` is drawn and never judged: a scan writes it, a gate does not ask for it.
    """

    name: str
    page: str
    finish: Callable[[Mapping[str, Any], RouterFacts], Values]
    columns: Tables
    needs: tuple[str, ...] = ()
    scope: Scope = "router"
    version: int = 1
    invariances: tuple[Invariance, ...] = ()
    errors: Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], Values] | None = None
    without_each: Callable[[Sequence[Mapping[str, Any]], RouterFacts], Values] | None = None
    is_for_figures: bool = False

    @property
    def text(self) -> str:
        """What it is, in a sentence: the first of its page."""
        return " ".join(self.page.partition("\n\n")[0].split())


@record_of_function
def metric(
    name: str,
    page: str,
    finish: Callable[[Mapping[str, Any], RouterFacts], Values],
    layers: tuple[Column, ...] = (),
    tables: Tables | None = None,
    **fields: Any,
) -> Metric:
    """A metric of the function that finishes it: its columns of ``layers``, then other tables."""
    columns = {"layers": layers} if layers else {}
    return Metric(name, page, finish, {**columns, **(tables or {})}, **fields)
