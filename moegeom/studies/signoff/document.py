"""A sign-off as a document: both sides, the verdict, four lines, what was not checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.text import all_of, half_width, number_of, percent
from moegeom.document.chart import Axis, Bars, Chart, Guide, Mark, Panel, percents
from moegeom.document.excerpts import in_part
from moegeom.document.model import Block, Command, Document, Fact, Headline, Look, Note, View
from moegeom.document.place import place
from moegeom.studies.diff.document import pair_page, sides_record
from moegeom.studies.signoff.record import STATES, Line, LineName, LineState, SignOff

#: How each state looks.
_LOOKS: dict[LineState, Look] = {
    "failed": "error",
    "inconclusive": "warning",
    "not judged": "warning",
    "passed": "good",
}

#: What each line says where it fails; the effective router with the sizes of its changes.
_FAILS: dict[LineName, str] = {
    "storage": "storage differs",
    "effective router": "effective router differs{}",
    "up to rotation": "no rotation explains it",
    "routing on text": "routing on text above its limit",
}

#: Columns of the state in front of a line.
_STATE = 14


def document(report: SignOff, view: View) -> Document:
    """What ``moegeom signoff`` says."""
    # green only when every line passed
    failed, *unjudged, passed = (len(report.in_state(state)) for state in STATES)
    look: Look = next(look for state, look in _LOOKS.items() if report.in_state(state))
    return pair_page(
        "signoff",
        report,
        [
            Fact("VERDICT", verdict_sentence(report), look, f"exit {report.exit_code}"),
            Headline.of_classes(passed, failed, sum(unjudged), "lines", "error"),
        ],
        *(_line(line, view.detail) for line in report.lines),
        figures=lambda: [*sign_off_figures(report)],
        record=lambda: {
            "verdict": verdict_sentence(report),
            "exit_code": report.exit_code,
            **sides_record(report),
            "lines": [dataclasses.asdict(line) for line in report.lines],
            "notes": report.notes,
            "not_looked_at": report.not_looked_at,
        },
    )


def verdict_sentence(report: SignOff) -> str:
    """``PASSED, signed off: all 4 lines passed; 3 things not checked.``, or what is in the way.

    Of what failed the sentence says how; of what has no limit, the options that would set one.
    """
    number = len(report.not_looked_at)
    unseen = f"; {number_of(number, 'thing')} not checked" if number else ""
    if len(report.in_state("passed")) == len(report.lines):
        return f"PASSED, signed off: {all_of(len(report.lines), 'line')} passed{unseen}."
    parts = [_FAILS[line.name].format(_sizes(line)) for line in report.in_state("failed")]
    if lines := report.in_state("not judged"):
        # the line of a rotation is not judged either, and no limit helps it
        measured = [line for line in lines if "limit" in line.evidence]
        if measured and measured[0].evidence["limit"] is None:
            rerun = "" if measured[0].evidence["rerun"] else " (or --rerun)"
            parts.append(f"give --max-flipped{rerun}")
    open_states: dict[LineState, str] = {"inconclusive": "not known", "not judged": "not judged"}
    for state, words in open_states.items():
        if lines := report.in_state(state):
            parts.append(f"{', '.join(line.name for line in lines)} {words}")
    word = "FAILED" if report.in_state("failed") else "INCONCLUSIVE"
    return f"{word}, not signed off: {'; '.join(parts)}{unseen}."


def _sizes(line: Line) -> str:
    """`` (8.8 to 11 %)``, of changes that fail; empty where none has a size."""
    changes = (one for of in line.evidence.get("routers", {}).values() for one in of["changes"])
    sizes = [c["size"] for c in changes if c["state"] == "failed" and c["size"] is not None]
    if not sizes:
        return ""
    low, high = percent(min(sizes)), percent(max(sizes))
    return f" ({low})" if low == high else f" ({low.removesuffix(' %')} to {high})"


def _line(line: Line, detail: bool) -> list[Block]:
    look = _LOOKS[line.state]
    details = [Note(text, indent=_STATE) for text in line.details]
    return [
        Fact(line.state, f"{line.name}: {line.sentence}", look, indent=_STATE),
        in_part(details, "paragraph", detail, indent=_STATE),
        *(Command("fill in ", text) for text in line.commands),
    ]


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
    has_failed = [one["state"] == "failed" for one in judged.values()]
    marks = [
        Bars(
            text,
            role,
            [100.0 * size if has_failed[i] is is_red else None for i, size in enumerate(largest)],
        )
        for text, role, is_red in _ENDS
        if is_red in has_failed
    ]
    changes = [(router, c) for router, one in judged.items() for c in one["changes"]]
    worst = max(range(len(names)), key=lambda i: largest[i])
    summary = (
        f"the largest change is {percent(largest[worst], '.3g')}, in layer {names[worst]}"
        if largest[worst]
        else "nothing changed in size"
    )
    return Chart(
        "rows",
        "What changed in each router",
        "The largest change of each router from A to B, in percent of what it changed; red where "
        "it makes another function of the router.",
        "Changes that have no size, such as experts in another order. How many choices change: "
        "only tokens can tell.",
        f"{number_of(len(names), 'router')} compared, {sum(has_failed)} failed; {summary}.",
        [Panel("", Axis("layer", names=names), Axis("largest change, %"), marks)],
        [
            ("router", [router for router, _ in changes]),
            ("change", [change["word"] for _, change in changes]),
            ("state", [change["state"] for _, change in changes]),
            ("size", [change["size"] for _, change in changes]),
        ],
    )


#: Ends of a router, their colours, and whether it failed.
_ENDS = (("failed", "limit", True), ("the same function, or not known", "tokens", False))


def _routing(evidence: Mapping[str, Any]) -> Chart:
    between, rerun, limit = (evidence[name] for name in ("between", "rerun", "limit"))
    routers = [*between["by_router"]]
    names = [_ALL, *(place(router, routers) for router in routers)]
    marks: list[Mark] = [_bars("A and B, 95 % interval", "other", between, routers)]
    if rerun is not None:
        marks.append(_bars("A and A again, 95 % interval", "tokens", rerun, routers))
    if limit is not None:
        marks.append(Guide("limit of all layers", "limit", 100.0 * limit))
    worst = max(routers, key=lambda router: between["by_router"][router])
    text = f"{percent(between['share'], '.3g')} of (token, layer) pairs differ"
    against = "no limit was given" if limit is None else f"the limit is {percent(limit, '.3g')}"
    again = "" if rerun is None else f"; A run again differs in {percent(rerun['share'], '.3g')}"
    return Chart(
        "routing",
        "How often A and B choose differently",
        "Tokens whose set of experts is another one in B, in percent: in all layers together, and "
        "in each. The limit is for all of them together.",
        "What a flipped expert costs: answers may be as good. Layers without a recording on both "
        "sides are left out.",
        f"{text}; {against}{again}; the most in layer {place(worst, routers)}, "
        f"{percent(between['by_router'][worst], '.3g')}.",
        [Panel("", Axis("layer", names=names), Axis("tokens that differ, %"), marks)],
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
    share, error, unknown = 100.0 * flips["share"], flips["error"], [None] * len(routers)
    height = percents(_shares(flips, routers))
    if error is None:
        return Bars(text.partition(",")[0], role, height)
    reach = 100.0 * half_width(error, flips["num_documents"])
    return Bars(text, role, height, [max(share - reach, 0.0), *unknown], [share + reach, *unknown])
