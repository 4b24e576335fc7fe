"""Figures of the space of routers: what makes loads uneven, and what is near a boundary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moegeom.core.text import figure_text, percent
from moegeom.document.chart import Axis, Bars, Chart, Panel, Polyline
from moegeom.document.place import place
from moegeom.studies.space.record import RouterSpace, RouterSpaces

#: Parts of a figure, and words for them.
_PARTS = {"rows": "rows", "mean": "mean input", "covariance": "covariance", "rest": "rest"}

#: Laws of which shares near a boundary are drawn, with the colour of each.
_LAWS = {"tokens": "tokens", "gaussian": "g1", "isotropic": "g2", "ball": "random"}


def space_figures(found: RouterSpaces) -> Iterator[Chart]:
    """Nothing of what is not known of any router."""
    names = [place(each.router, [r.router for r in found.routers]) for each in found.routers]
    if any("max_vio" in router.parts for router in found.routers):
        yield _causes(found.routers, names)
    if any(router.tokens.near_share is not None for router in found.routers):
        yield _near(found.routers, names)


def _causes(routers: Sequence[RouterSpace], names: Sequence[str]) -> Chart:
    values = {
        part: [
            None if (of := router.parts.get("max_vio")) is None else getattr(of, part)
            for router in routers
        ]
        for part in _PARTS
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


def _near(routers: Sequence[RouterSpace], names: Sequence[str]) -> Chart:
    shares = {
        law: [
            next((one.figures.near_share for one in router.laws if one.law == law), None)
            for router in routers
        ]
        for law in _LAWS
    }
    marks = [Bars(law, role, shares[law]) for law, role in _LAWS.items()]
    known = [
        (abs(ball - own), number)
        for number, (own, ball) in enumerate(zip(shares["tokens"], shares["ball"], strict=True))
        if own is not None and ball is not None
    ]
    far = max(known, default=(0.0, 0))[1]
    own, ball = shares["tokens"][far], shares["ball"][far]
    told = (
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
        "Ties of more than two experts: space --measure FILE has them.",
        told,
        [Panel("", Axis("layer", names=names), Axis("share near a boundary"), marks)],
        [
            ("router", [router.router for router in routers]),
            ("width", [None if r.near is None else r.near.width for r in routers]),
            *((law, shares[law]) for law in _LAWS),
        ],
    )
