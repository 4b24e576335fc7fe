"""Figures of an imbalance: its causes, what a bias makes of it, and what is near a boundary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moegeom.core.text import figure_text, percent
from moegeom.document.chart import Axis, Bars, Chart, Heat, Panel, Polyline
from moegeom.document.place import place
from moegeom.studies.imbalance.record import Imbalance, RouterImbalance

#: Parts of a figure, and words for them.
_PARTS = {"rows": "rows", "mean": "mean input", "covariance": "covariance", "rest": "rest"}

#: Laws whose shares near a boundary are drawn, with the colour of each.
_LAWS = {"tokens": "tokens", "gaussian": "g1", "isotropic": "g2", "ball": "random"}


def imbalance_figures(imbalance: Imbalance) -> Iterator[Chart]:
    """Nothing where no router could be looked at, or of what is not known of any."""
    routers = imbalance.routers
    if not routers:
        return
    names = [place(one.router, [other.router for other in routers]) for one in routers]
    if any("max_vio" in router.parts for router in routers):
        yield _causes(routers, names)
    yield _loads(routers, names)
    yield _bias(routers, names)
    if any(router.tokens.near_share is not None for router in routers):
        yield _near(routers, names)


def _causes(routers: Sequence[RouterImbalance], names: Sequence[str]) -> Chart:
    parts = [router.parts.get("max_vio") for router in routers]
    values = {
        name: [None if part is None else getattr(part, name) for part in parts] for name in _PARTS
    }
    at = list(range(len(routers)))
    tokens, limits = [r.tokens.max_vio for r in routers], [r.limit for r in routers]
    marks = [
        # the first colour of groups is that of the tokens
        *(Bars(_PARTS[part], f"g{number}", values[part]) for number, part in enumerate(_PARTS, 1)),
        Polyline("MaxVio of the tokens", "tokens", at, tokens),
        Polyline("even routing stays below", "limit", at, limits),
    ]
    worst = max(at, key=lambda i: tokens[i])
    of_worst = {part: value for part in _PARTS if (value := values[part][worst]) is not None}
    largest = max(of_worst, key=lambda part: of_worst[part], default=None)
    made = (
        ""
        if largest is None
        else f", of which the {_PARTS[largest]} makes {figure_text(of_worst[largest])}"
    )
    return Chart(
        "causes",
        "What makes the loads uneven",
        "MaxVio of each layer, the largest load over the mean less 1, parted: what the rows make "
        "alone, what the mean of all inputs adds, what their covariance adds, and the rest. Bars "
        "add up to the blue line. Below the red line chance alone can be the reason.",
        "What a layer would lose without its mean input: parts may be negative, where one evens "
        "out what another does.",
        f"The least even layer is {names[worst]}: MaxVio {figure_text(tokens[worst])}{made}.",
        [Panel("", Axis("layer", names=names), Axis("part of MaxVio"), marks)],
        [
            ("router", [router.router for router in routers]),
            *((part, values[part]) for part in _PARTS),
            ("max_vio", tokens),
            ("limit", limits),
            ("input_pull", [router.pull for router in routers]),
            ("input_pull_random", [router.pull_random for router in routers]),
        ],
    )


def _loads(routers: Sequence[RouterImbalance], names: Sequence[str]) -> Chart:
    results = [router.evening for router in routers]
    now = [router.tokens.max_vio for router in routers]
    these = [one.after.max_vio for one in results]
    others = [None if (w := one.worst) is None else w.after.max_vio for one in results]
    chance = [None if (w := one.worst) is None else w.limit for one in results]
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
            ("changed_share", [one.changed_share for one in results]),
            ("displaced_weight", [one.displaced_weight for one in results]),
            ("score_lost", [one.score_lost for one in results]),
        ],
    )


def _bias(routers: Sequence[RouterImbalance], names: Sequence[str]) -> Chart:
    """Changes in spreads of the scores, so that layers compare."""
    results = [router.evening for router in routers]
    experts = max(router.num_experts for router in routers)
    scaled = [
        [c / one.spread if one.spread else None for c in one.change]
        + [None] * (experts - len(one.change))
        for one in results
    ]
    most = max((abs(v) for row in scaled for v in row if v is not None), default=0.0) or 1.0
    words = "change of the bias, in standard deviations of the scores"
    far = max(
        range(len(results)), key=lambda n: results[n].largest_change / (results[n].spread or 1)
    )
    change, unit = results[far].change, results[far].score_unit
    expert = max(range(len(change)), key=lambda e: abs(change[e]))
    rows = [(router, e) for router in routers for e in range(router.num_experts)]
    return Chart(
        "bias",
        "The bias that would balance them",
        "What is added to the selection bias of each expert: blue pushes tokens away from it, red "
        "draws them to it.",
        "Why the loads are uneven.",
        f"The largest change is that of expert {expert} in layer {names[far]}: "
        f"{change[expert]:+.3g} ({unit}).",
        [
            Panel(
                "",
                Axis("expert", names=[str(e) for e in range(experts)]),
                Axis("layer", names=names),
                [Heat(scaled, words, -most, most, 0.0)],
            )
        ],
        [
            ("router", [router.router for router, _ in rows]),
            ("expert", [e for _, e in rows]),
            ("change", [router.evening.change[e] for router, e in rows]),
            ("unit", [router.evening.score_unit for router, _ in rows]),
        ],
    )


def _near(routers: Sequence[RouterImbalance], names: Sequence[str]) -> Chart:
    shares = {
        law: [
            next((one.figures.near_share for one in router.laws if one.law == law), None)
            for router in routers
        ]
        for law in _LAWS
    }
    marks = [Bars(law, role, shares[law]) for law, role in _LAWS.items()]
    apart = [
        (abs(ball - own), number)
        for number, (own, ball) in enumerate(zip(shares["tokens"], shares["ball"], strict=True))
        if own is not None and ball is not None
    ]
    far = max(apart, default=(0.0, 0))[1]
    own, ball = shares["tokens"][far], shares["ball"][far]
    caption = (
        "No router inputs are recorded: laws of the rows are not known."
        if own is None or ball is None
        else f"In layer {names[far]}, {percent(own, '.1f')} of the tokens are near, and "
        f"{percent(ball, '.1f')} of a ball."
    )
    return Chart(
        "near",
        "Why tokens are near boundaries",
        "Share of points nearer to a boundary than the nearest tenth of the tokens of that layer: "
        "of the tokens, of normal logits with their mean and covariance, of inputs without "
        "preferred direction, and of a ball of the same size.",
        "Ties of more than two experts: imbalance --measure FILE has them.",
        caption,
        [Panel("", Axis("layer", names=names), Axis("share near a boundary"), marks)],
        [
            ("router", [router.router for router in routers]),
            ("width", [None if r.near is None else r.near.width for r in routers]),
            *((law, shares[law]) for law in _LAWS),
        ],
    )
