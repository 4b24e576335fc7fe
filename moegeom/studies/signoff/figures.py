"""Figures of a sign-off: how often A and B choose differently, against the limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.text import half_width, percent
from moegeom.document.chart import Axis, Bars, Chart, Guide, Mark, Panel
from moegeom.document.place import place
from moegeom.studies.signoff.record import SignOff

#: The name of all layers together.
_ALL = "all"


def sign_off_figures(found: SignOff) -> Iterator[Chart]:
    """Nothing without recordings of both sides."""
    evidence = next((e for line in found.lines if "between" in (e := line.evidence)), None)
    if evidence is None:
        return
    between, rerun, limit = (evidence[name] for name in ("between", "rerun", "limit"))
    routers = [*between["by_router"]]
    names = [_ALL, *(place(router, routers) for router in routers)]
    marks: list[Mark] = [_bars("A and B, 95 % interval", "other", between, routers)]
    if rerun is not None:
        marks.append(_bars("A and A again, 95 % interval", "tokens", rerun, routers))
    if limit is not None:
        marks.append(Guide("limit of all layers", "limit", limit))
    worst = max(routers, key=lambda router: between["by_router"][router])
    said = f"{percent(between['share'], '.3g')} of (token, layer) pairs differ"
    against = "no limit was given" if limit is None else f"the limit is {percent(limit, '.3g')}"
    again = "" if rerun is None else f"; A run again differs in {percent(rerun['share'], '.3g')}"
    yield Chart(
        "routing",
        "How often A and B choose differently",
        "The share of tokens whose set of experts is another one in B, in all layers together and "
        "in each. The limit is for all of them together.",
        "What a flipped expert costs: answers may be as good. Layers without a recording on both "
        "sides are left out.",
        f"{said}; {against}{again}; the most in layer {place(worst, routers)}, "
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
