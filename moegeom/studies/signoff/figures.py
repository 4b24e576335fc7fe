"""Figures of a sign-off: what changed in each router, and how often choices differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.text import half_width, number_of, percent
from moegeom.document.chart import Axis, Bars, Chart, Guide, Mark, Panel
from moegeom.document.place import place
from moegeom.studies.signoff.record import SignOff

#: The name of all layers together.
_ALL = "all"


def sign_off_figures(report: SignOff) -> Iterator[Chart]:
    """What happened to the rows, and on text; nothing where no router is on both sides."""
    evidence: dict[str, Any] = {}
    for line in report.lines:
        evidence |= line.evidence
    if routers := evidence.get("routers"):
        yield _rows(routers)
    if "between" in evidence:
        yield _routing(evidence)


def _rows(judged: Mapping[str, Any]) -> Chart:
    """The largest change of each router, as a share of what it changed."""
    names = [place(router, judged) for router in judged]
    largest = [
        max((change["size"] or 0.0 for change in one["changes"]), default=0.0)
        for one in judged.values()
    ]
    marks = [
        Bars(text, role, [size if is_in(one) else None for size, one in _pairs(largest, judged)])
        for text, role, is_in in _ENDS
        if any(is_in(one) for one in judged.values())
    ]
    changes = [(router, c) for router, one in judged.items() for c in one["changes"]]
    worst = max(range(len(names)), key=lambda i: largest[i])
    summary = (
        f"the largest change is {percent(largest[worst], '.3g')}, in layer {names[worst]}"
        if largest[worst]
        else "nothing changed in size"
    )
    failed = sum(one["state"] == "failed" for one in judged.values())
    return Chart(
        "rows",
        "What changed in each router",
        "The largest change of each router from A to B, as a share of what it changed; red where "
        "it makes another function of the router.",
        "Changes that have no size, such as experts in another order. How many choices change: "
        "only tokens can tell.",
        f"{number_of(len(names), 'router')} compared, {failed} failed; {summary}.",
        [Panel("", Axis("layer", names=names), Axis("largest change"), marks)],
        [
            ("router", [router for router, _ in changes]),
            ("change", [change["word"] for _, change in changes]),
            ("state", [change["state"] for _, change in changes]),
            ("size", [change["size"] for _, change in changes]),
        ],
    )


def _pairs(sizes: Sequence[float], judged: Mapping[str, Any]) -> list[tuple[float, Any]]:
    return list(zip(sizes, judged.values(), strict=True))


#: Ends of a router with their colours.
_ENDS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], bool]], ...] = (
    ("failed", "limit", lambda one: one["state"] == "failed"),
    ("the same function, or not known", "tokens", lambda one: one["state"] != "failed"),
)


def _routing(evidence: Mapping[str, Any]) -> Chart:
    between, rerun, limit = (evidence[name] for name in ("between", "rerun", "limit"))
    routers = [*between["by_router"]]
    names = [_ALL, *(place(router, routers) for router in routers)]
    marks: list[Mark] = [_bars("A and B, 95 % interval", "other", between, routers)]
    if rerun is not None:
        marks.append(_bars("A and A again, 95 % interval", "tokens", rerun, routers))
    if limit is not None:
        marks.append(Guide("limit of all layers", "limit", limit))
    worst = max(routers, key=lambda router: between["by_router"][router])
    text = f"{percent(between['share'], '.3g')} of (token, layer) pairs differ"
    against = "no limit was given" if limit is None else f"the limit is {percent(limit, '.3g')}"
    again = "" if rerun is None else f"; A run again differs in {percent(rerun['share'], '.3g')}"
    return Chart(
        "routing",
        "How often A and B choose differently",
        "The share of tokens whose set of experts is another one in B, in all layers together and "
        "in each. The limit is for all of them together.",
        "What a flipped expert costs: answers may be as good. Layers without a recording on both "
        "sides are left out.",
        f"{text}; {against}{again}; the most in layer {place(worst, routers)}, "
        f"{percent(between['by_router'][worst], '.3g')}.",
        [Panel("", Axis("layer", names=names), Axis("share of tokens that differ"), marks)],
        [
            ("router", [_ALL, *routers]),
            ("share", [between["share"], *between["by_router"].values()]),
            ("standard_error", [between["error"], *[None] * len(routers)]),
            ("share_of_a_again", [None] * len(names) if rerun is None else _shares(rerun, routers)),
            ("limit", [limit, *[None] * len(routers)]),
        ],
    )


def _shares(flips: Mapping[str, Any], routers: Sequence[str]) -> list[float | None]:
    return [flips["share"], *(flips["by_router"].get(router) for router in routers)]


def _bars(text: str, role: str, flips: Mapping[str, Any], routers: Sequence[str]) -> Bars:
    """Shares, with the interval of that of all layers, the only one whose error is known."""
    share, error, unknown = flips["share"], flips["error"], [None] * len(routers)
    if error is None:
        return Bars(text.partition(",")[0], role, _shares(flips, routers))
    reach = half_width(error, flips["num_documents"])
    low, high = [max(share - reach, 0.0), *unknown], [share + reach, *unknown]
    return Bars(text, role, _shares(flips, routers), low, high)
