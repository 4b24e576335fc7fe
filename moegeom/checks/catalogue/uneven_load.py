"""MGB202: the load is spread over the experts.

Looked for: the entropy of the load over log E, 1 for even load.

A finding means: on these tokens the layer works as if it had far fewer experts (exp of the entropy
says how many).

What to do: look at the busiest experts and their domains; follow the entropy over training. The
limit is heuristic.
"""

from __future__ import annotations

from moegeom.checks.check import Limit
from moegeom.checks.figure import Figure, figure_check
from moegeom.core.text import number_of


def _words(figure: Figure) -> tuple[str, str]:
    router, effective = figure.row["router"], figure.row["effective_experts"]
    at_work = number_of(len(figure.measured.experts[router]), "expert does", "experts do")
    return (
        f"load entropy {figure.value:.2f} of 1: {effective:.1f} of {at_work} the work.",
        f"Limit {figure.limit:g}, {figure.basis(2)}.",
    )


CHECK = figure_check(
    "MGB202",
    "the load is spread over few experts",
    "load_entropy_normalised",
    Limit("entropy", 0.8, "least load entropy over log E"),
    _words,
    lambda shift: f"a load entropy {shift:.3f} below its limit",
    room=lambda figure: figure.limit,
    absent="the tokens say nothing of load",
    sign=-1.0,
)
