"""Figures of a balance: how even the loads would be with the bias, and what the bias is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moegeom.core.text import figure_text
from moegeom.document.chart import Axis, Bars, Chart, Heat, Panel, Polyline
from moegeom.document.place import place
from moegeom.studies.balance.record import Balance, RouterBalance


def balance_figures(found: Balance) -> Iterator[Chart]:
    """Nothing where no router could be looked at."""
    if not found.routers:
        return
    names = [place(each.router, [r.router for r in found.routers]) for each in found.routers]
    yield _loads(found.routers, names)
    yield _bias(found.routers, names)


def _loads(routers: Sequence[RouterBalance], names: Sequence[str]) -> Chart:
    now = [router.before.max_vio for router in routers]
    these = [router.after.max_vio for router in routers]
    others = [None if (w := router.worst) is None else w.after.max_vio for router in routers]
    chance = [None if (w := router.worst) is None else w.limit for router in routers]
    at = list(range(len(routers)))
    marks = [
        Bars("now", "tokens", now),
        Bars("with the bias, these documents", "dim", these),
        Bars("with the bias, other documents", "other", others),
        Polyline("even routing stays below, other documents", "limit", at, chance),
    ]
    worst = max(at, key=lambda i: now[i])
    tried = others[worst]
    then = (
        f"{figure_text(these[worst])} on these documents"
        if tried is None
        else f"{figure_text(tried)} on other documents"
    )
    return Chart(
        "loads",
        "How even the loads would be",
        "MaxVio of each layer, the largest load over the mean less 1: now, with the bias that was "
        "made from these documents, and on the half of the documents that the bias was not made "
        "from. Below the red line chance alone can be the reason.",
        "What the bias costs: it moves weight off the experts that the scores prefer.",
        f"The least even layer is {names[worst]}: MaxVio {figure_text(now[worst])} now, with the "
        f"bias {then}.",
        [Panel("", Axis("layer", names=names), Axis("MaxVio"), marks)],
        [
            ("router", [router.router for router in routers]),
            ("max_vio", now),
            ("max_vio_with_bias", these),
            ("max_vio_with_bias_other_documents", others),
            ("limit_other_documents", chance),
            ("changed_share", [router.changed_share for router in routers]),
            ("displaced_weight", [router.displaced_weight for router in routers]),
        ],
    )


def _bias(routers: Sequence[RouterBalance], names: Sequence[str]) -> Chart:
    """Changes in spreads of the scores, so that layers compare."""
    experts = max(router.num_experts for router in routers)
    scaled = [
        [c / router.spread if router.spread else None for c in router.change] for router in routers
    ]
    known = [abs(value) for row in scaled for value in row if value is not None]
    most = max(known, default=0.0) or 1.0
    heat = Heat(
        [[*row, *[None] * (experts - len(row))] for row in scaled],
        "change of the bias, in standard deviations of the scores",
        -most,
        most,
        0.0,
    )
    far = max(routers, key=lambda router: router.largest_change / (router.spread or 1.0))
    expert = max(range(far.num_experts), key=lambda e: abs(far.change[e]))
    rows = [(router, e) for router in routers for e in range(router.num_experts)]
    return Chart(
        "bias",
        "The bias that would balance them",
        "What is added to the selection bias of each expert: blue pushes tokens away from it, red "
        "draws them to it.",
        "Why the loads are uneven.",
        f"The largest change is that of expert {expert} in layer {names[routers.index(far)]}: "
        f"{far.change[expert]:+.3g} ({far.score_unit}).",
        [
            Panel(
                "",
                Axis("expert", names=[str(e) for e in range(experts)]),
                Axis("layer", names=names),
                [heat],
            )
        ],
        [
            ("router", [router.router for router, _ in rows]),
            ("expert", [e for _, e in rows]),
            ("change", [router.change[e] for router, e in rows]),
            ("unit", [router.score_unit for router, _ in rows]),
        ],
    )
