"""A verdict as a document: what was judged, the verdict, findings, what was not seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from moegeom.checks.check import Check, Page
from moegeom.core.finding import EXIT_FAILED, Outcome, Verdict
from moegeom.core.text import number_of
from moegeom.document.chart import Axis, Chart, Heat, Panel
from moegeom.document.header import header, skipped, tokens_line
from moegeom.document.model import (
    Block,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Judged,
    Note,
    Title,
    View,
)
from moegeom.document.place import place
from moegeom.document.recording_hint import recording_hint
from moegeom.document.rule_trust import rule_facts
from moegeom.document.summary import Summary, summarise_verdict
from moegeom.document.verdict_blocks import (
    anchor,
    checks_table,
    findings_excerpt,
    unjudged,
    verdict_fact,
    verdict_record,
)
from moegeom.document.verdict_text import profile_line, verdict_word
from moegeom.studies.check.record import Gate

#: Codes in the line of the built-in profile ``release``, before the rest is counted.
_MOST_CODES = 8


def document(gate: Gate, view: View) -> Document:
    """What ``moegeom check`` says."""
    verdict, run = gate.verdict, gate.run
    summary = summarise_verdict(verdict, run)
    return Document(
        "check",
        run["checkpoint"]["name"],
        [
            [verdict_fact(verdict)],
            [*_header(verdict, summary)],
            [*findings_excerpt(verdict.findings, run, view.detail)],
            [*unjudged(verdict, run, view.detail)],
            [Gallery(lambda: [*gate_figures(gate)])],
            [Excerpt([], [checks_table(verdict)], f"All checks ({len(verdict.outcomes)})")],
            [
                # what the built-in profile ``release`` would say of a checkpoint that passed
                *([Note(f"release: {_would(gate.release)}")] if gate.release else []),
                *_ending(verdict, summary),
            ],
        ],
        lambda: {
            **verdict_record(verdict),
            **rule_facts(run),
            "run": run,
            "release": gate.release
            and {
                "verdict": verdict_word(gate.release),
                "exit_code": gate.release.exit_code,
                "codes": [outcome.code for outcome in _stopping(gate.release)],
            },
        },
        Judged(verdict, run),
    )


def _header(verdict: Verdict, summary: Summary) -> Iterator[Block]:
    run, name = summary.run, summary.run["checkpoint"]["name"]
    if "refused" in run:
        refused, text = run["refused"], "none could be read"
        if any(finding.code == refused["code"] for finding in verdict.findings):
            why = f"{text}: {refused['code']} says why."
        else:
            why = f"{text}. {refused['message']} {refused['hint']}".rstrip()
        yield from (Title(name), Fact("routers", why))
    else:
        yield from header(summary, "routers", "rule")
        if loaders := run.get("loaders"):
            yield Fact("weights", _weights(loaders))
        tokens = [Fact("tokens", tokens_line(summary))]
        yield Excerpt(tokens if run["tokens"] is not None else [], tokens)
    if verdict.profile:
        yield Fact("profile", profile_line(verdict))


def _weights(loaders: Mapping[str, Any]) -> str:
    """Whose answer is judged, and who takes the same routers."""
    entry = loaders["entry"] or "the files of the folder"
    if not loaders["judged"]:
        return f"{entry}, as named." if loaders["entry"] else f"{entry}."
    if loaders["judged"] not in loaders["agree"]:
        return f"{entry}, each tensor from the file that it names."
    first, *others = loaders["agree"]
    if not others:
        return f"{entry} as {first} takes it."
    return f"{entry} as {first} and {number_of(len(others), 'more loader')} take it."


def _ending(verdict: Verdict, summary: Summary) -> Iterator[Block]:
    if verdict.detectable:
        yield Note(f"Smallest change this run can catch: {'; '.join(verdict.detectable)}.")
    if verdict.not_looked_at:
        yield Note(f"Not checked: {'; '.join(verdict.not_looked_at)}.")
    yield from map(Note, skipped(summary))
    routers = summary.run["routers"]
    if routers and summary.run["tokens"] is None:
        hint, label = recording_hint(routers), "   record"
        on_screen = Fact(label, hint, "dim", indent=len(label) + 2)
        yield Excerpt([on_screen], [Fact(label.strip(), hint, "dim")])


def _would(release: Verdict) -> str:
    stopping = _stopping(release)
    if not stopping:
        return "would pass on what was checked"
    codes = ", ".join(outcome.code for outcome in stopping[:_MOST_CODES])
    if (rest := len(stopping) - _MOST_CODES) > 0:
        codes += f" and {rest} more"
    if release.exit_code == EXIT_FAILED:
        count = sum(len(outcome.findings) for outcome in stopping)
        return f"would fail on {codes} ({number_of(count, 'finding')})"
    return f"would be inconclusive on {codes} ({stopping[0].reason})"


def _stopping(release: Verdict) -> tuple[Outcome, ...]:
    """The outcomes for which it would not pass: those that fail, else those that are open."""
    failing = tuple(outcome for outcome in release.outcomes if release.fails(outcome))
    return failing or release.open


#: What a check looks at, in words.
_NEEDS = {
    "weights": "the weights alone",
    "experts": "a sample of each expert (--experts)",
    "attention": "gates and sinks of attention (--attention)",
    "tokens": "tokens (--tokens)",
    "baseline": "a baseline (--baseline)",
    "baseline and tokens": "tokens, and a baseline that was made with tokens",
    "series": "a series of checkpoints (moegeom track)",
    "series and tokens": "a series of checkpoints, and tokens (moegeom track --tokens)",
    "series and domains": "a series of checkpoints, and tokens of two domains at least (moegeom "
    "track --tokens)",
}


def page_document(page: Page, view: View) -> Document:
    """What ``check --explain CODE`` says: what holds when it passes, what it needs, its limits."""
    check = page.check
    texts = {"Holds": page.statement, **page.sections, "Needs": f"{_NEEDS[check.inputs]}."}
    sections: list[list[Block]] = [
        [Title(check.code, f"{check.severity}: {check.title}")],
        *([Note(f"{name}: {text}", "plain")] for name, text in texts.items()),
        [*_limits(check)],
    ]
    record = {
        "code": check.code,
        "severity": check.severity,
        "title": check.title,
        "holds": page.statement,
        **{name.lower().replace(" ", "_"): text for name, text in page.sections.items()},
        "needs": check.inputs,
        "limits": [dataclasses.asdict(limit) for limit in check.limits],
    }
    return Document("check page", check.code, sections, lambda: record)


#: Columns of a limit with its value.
_WIDE = 28


def _limits(check: Check) -> Iterator[Block]:
    if check.limits:
        yield Note(f"Limits, changed in moegeom.toml under [limits.{check.code}]:", "plain")
    for limit in check.limits:
        text = f"{limit.text} ({limit.basis})"
        yield Fact(f"{limit.name} = {limit.default:g}", text, "plain", indent=_WIDE)


#: How red each ending is; blue is what was asked for and not judged.
_SHADES = {
    "not judged": -1.0,
    "passed": 0.0,
    "accepted": 0.2,
    "note": 0.2,
    "warning": 0.6,
    "error": 1.0,
}

#: Ends of checks that looked at the layers.
_JUDGED = ("passed", "failed", "inconclusive", "ignored")


def gate_figures(gate: Gate) -> Iterator[Chart]:
    """Nothing where no check looked at a router."""
    routers = [router["name"] for router in gate.run["routers"]]
    outcomes = [outcome for outcome in gate.verdict.outcomes if outcome.state in _JUDGED]
    if not routers or not outcomes:
        return
    ends = [[_end(outcome, router) for router in routers] for outcome in outcomes]
    names = [place(router, routers) for router in routers]
    findings = [
        f"{outcome.code} ({outcome.title}): {', '.join(where)}"
        for outcome, row in zip(outcomes, ends, strict=True)
        if (where := [name for name, end in zip(names, row, strict=True) if _SHADES[end] > 0.2])
    ]
    places = [(outcome, router) for outcome in outcomes for router in routers]
    yield Chart(
        "checks",
        "What was found in which layer",
        "Each check that was judged, in each layer: pale where it passed, red where it found "
        "something, darker for an error than for a warning; blue where it could not be judged. The "
        "code of a check leads to what holds when it passes.",
        "Checks that need tokens or a baseline, or do not apply: they are in the list of all "
        "checks. How far a layer is from a limit.",
        f"{number_of(len(outcomes), 'check')} judged, in {number_of(len(routers), 'layer')}; "
        + (f"found by layer: {'; '.join(findings)}." if findings else "nothing was found."),
        [
            Panel(
                "",
                Axis("layer", names=names),
                Axis(
                    "",
                    names=[f"{o.code} {o.statement or o.title}" for o in outcomes],
                    links=[f"#{anchor(outcome)}" for outcome in outcomes],
                ),
                [
                    Heat(
                        [[_SHADES[end] for end in row] for row in ends],
                        "pale: passed",
                        -1.0,
                        1.0,
                        0.0,
                        cells=[["" if end == "passed" else end for end in row] for row in ends],
                        ends=("not judged", "passed", "error"),
                    )
                ],
            )
        ],
        [
            ("check", [outcome.code for outcome, _ in places]),
            ("router", [router for _, router in places]),
            ("end", [end for row in ends for end in row]),
        ],
    )


def _end(outcome: Outcome, router: str) -> str:
    """How a check ended in one layer; a finding that names no layer is about all of them."""
    if any(router in (finding.routers or (router,)) for finding in outcome.findings):
        return outcome.severity
    if any(router in (finding.routers or (router,)) for finding, _ in outcome.accepted):
        return "accepted"
    return "not judged" if outcome.state == "inconclusive" or outcome.num_open else "passed"
