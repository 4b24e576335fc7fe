"""A verdict as a document: what was judged, the verdict, findings, what was not seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from moegeom.checks.check import Page
from moegeom.core.finding import EXIT_FAILED, Outcome, Verdict
from moegeom.core.text import number_of
from moegeom.document.chart import Axis, Bars, Chart, Panel
from moegeom.document.header import header, recording_hint, skipped, tokens_line
from moegeom.document.model import (
    Block,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Judged,
    Look,
    Note,
    Table,
    Title,
    View,
)
from moegeom.document.place import place
from moegeom.document.rule_words import rule_facts
from moegeom.document.summary import Summary, summarise_verdict
from moegeom.document.verdict_blocks import (
    checks_table,
    findings_excerpt,
    unjudged,
    verdict_card,
    verdict_record,
)
from moegeom.document.verdict_text import places, profile_line, verdict_word
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
            verdict_card(verdict),
            [*_header(verdict, summary)],
            [*findings_excerpt(verdict.findings, run, view.detail)],
            [*unjudged(verdict, run, view.detail)],
            [Excerpt([], [*_where_found(gate)])],
            [Gallery(lambda: [*gate_figures(gate)])],
            [Excerpt([], [checks_table(verdict)], f"All checks ({len(verdict.outcomes)})")],
            [
                # what the built-in profile ``release`` would say of a checkpoint that passed
                *([Note(f"--profile release: {_would(gate.release)}")] if gate.release else []),
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


#: Columns of a limit with its value.
_WIDE = 28


def page_document(page: Page, view: View) -> Document:
    """What ``check --explain CODE`` says: what holds when it passes, what it needs, its limits."""
    check = page.check
    texts = {"Holds": page.statement, **page.sections, "Needs": f"{_NEEDS[check.inputs]}."}
    sections: list[list[Block]] = [
        [Title(check.code, f"{check.severity}: {check.title}")],
        *([Note(f"{name}: {text}", "plain")] for name, text in texts.items()),
    ]
    if check.limits:
        text = f"Limits, changed in moegeom.toml under [limits.{check.code}]:"
        limits: list[Block] = [
            Fact(
                f"{one.name} = {one.default:g}", f"{one.text} ({one.basis})", "plain", indent=_WIDE
            )
            for one in check.limits
        ]
        sections.append([Note(text, "plain"), *limits])
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


#: Checks that looked at the layers, by how they ended.
_JUDGED = ("passed", "failed", "inconclusive", "ignored")

#: How a check ends in a layer where it does not pass, worst first: the colour of its rows and of
#: its bars, which stand beside those of the same colour.
_ENDS: Mapping[str, tuple[Look, str]] = {
    "error": ("error", "limit"),
    "warning": ("warning", "other"),
    "not judged": ("warning", "other"),
    "note": ("plain", "random"),
    "accepted": ("plain", "random"),
}

#: What the bars of each colour are.
_BARS = {"limit": "errors", "other": "warnings, or not judged", "random": "notes, or accepted"}


def _ends(gate: Gate) -> dict[Outcome, dict[str, str]]:
    """How each check that was judged ended in each router; nothing where none was looked at."""
    routers = [router["name"] for router in gate.run["routers"]]
    judged = [one for one in gate.verdict.outcomes if one.state in _JUDGED]
    return {one: {name: _end(one, name) for name in routers} for one in judged} if routers else {}


def _end(outcome: Outcome, router: str) -> str:
    """How a check ended in one layer; a finding that names no layer is about all of them."""
    if any(router in (finding.routers or (router,)) for finding in outcome.findings):
        return outcome.severity
    if any(router in (finding.routers or (router,)) for finding, _ in outcome.accepted):
        return "accepted"
    return "not judged" if outcome.state == "inconclusive" or outcome.num_open else "passed"


def _where_found(gate: Gate) -> Iterator[Table]:
    """The checks that do not pass in every layer, and where; none where all do."""
    rows: list[tuple[str, ...]] = []
    looks: list[Look] = []
    for outcome, ends in _ends(gate).items():
        for end, (look, _) in _ENDS.items():
            if names := [name for name, each in ends.items() if each == end]:
                statement = outcome.statement or outcome.title
                rows.append((outcome.code, end, places(names, gate.run), statement))
                looks.append(look)
    if rows:
        yield Table([("check", "found", "in", "statement")], rows, looks, left=(0, 1, 2, 3))


def gate_figures(gate: Gate) -> Iterator[Chart]:
    """Nothing where no check looked at a router."""
    by_check = _ends(gate)
    routers = [router["name"] for router in gate.run["routers"]]
    names = [place(router, routers) for router in routers]
    roles = [
        [_ENDS[ends[router]][1] for ends in by_check.values() if ends[router] in _ENDS]
        for router in routers
    ]
    if not by_check:
        return
    bars = [
        Bars(text, role, [float(each.count(role)) or None for each in roles])
        for role, text in _BARS.items()
        if any(role in each for each in roles)
    ] or [Bars("passed", "tokens", [float(len(by_check))] * len(routers))]
    findings = [
        f"{outcome.code} ({outcome.title}): {', '.join(where)}"
        for outcome, ends in by_check.items()
        if (
            where := [
                n for n, r in zip(names, routers, strict=True) if ends[r] in ("error", "warning")
            ]
        )
    ]
    cells = [(one.code, router, end) for one, of in by_check.items() for router, end in of.items()]
    code, router, end = map(list, zip(*cells, strict=True))
    yield Chart(
        "checks",
        "What was found in which layer",
        "How many checks found something in each layer: red for errors, amber for warnings and for "
        "what could not be judged, grey for notes and for what is accepted. Where none did, how "
        "many passed, in blue.",
        "Checks that need tokens or a baseline, or do not apply. How far a layer is from a limit.",
        f"{number_of(len(by_check), 'check')} judged, in {number_of(len(routers), 'layer')}; "
        + (f"found by layer: {'; '.join(findings)}." if findings else "no error or warning."),
        [Panel("", Axis("layer", names=names), Axis("checks", low=0.0), bars)],
        [("check", code), ("router", router), ("end", end)],
    )
