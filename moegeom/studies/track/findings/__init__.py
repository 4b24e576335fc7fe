"""What a check of a series is, and the verdict of all of them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from moegeom.checks.check import Check, Claim, Inputs
from moegeom.checks.profile import DEFAULT, FAMILY_WISE_ERROR
from moegeom.checks.run import JudgedCheck, verdict_of
from moegeom.core.finding import Finding, Severity, State, Verdict
from moegeom.core.registry import Rooms, record_of_function
from moegeom.core.row_keys import is_domain
from moegeom.core.text import number_of
from moegeom.studies.track.steps import History


@record_of_function
def series_check(
    name: str,
    page: str,
    judge: Callable[[History], Iterable[Claim]],
    code: str,
    title: str,
    severity: Severity,
    inputs: Inputs = "series",
    least_steps: Callable[[History], int] = lambda history: 2,
    of_each_step: bool = False,
    needs_bias: bool = False,
    needs_one_text: bool = False,
    too_little: Callable[[History], str] = lambda history: "",
) -> Check:
    """A check of a series of checkpoints, made of the function under it, which judges.

    ``least_steps`` says how many steps it takes for these routers; ``needs_bias`` and
    ``needs_one_text`` what else, beside its ``inputs``. ``too_little`` says what more there is too
    little of. One ``of_each_step`` needs none of that; findings of the others are told as one where
    they begin at one step. Profiles of a gate do not reach it, and none of its limits can be moved.
    """

    def lacking(history: History) -> str:
        if needs_bias and all(router.bias is None for router in history.routers):
            return _NO_BIAS
        if of_each_step:
            is_series = len(history.steps) > 1 or history.unread or history.broken
            return "" if is_series else "1 step; needs 2"
        if not history.routers:
            return "no router is at every step with the same experts"
        domains = {p for r in history.routers for p in r.concentrations if is_domain(p)}
        if inputs == "series and domains" and len(domains) < 2:
            return "the recordings do not name two domains at every step"
        if needs_one_text and history.other_text:
            return history.other_text
        least, steps = least_steps(history), len(history.steps)
        if steps < least:
            return f"{number_of(steps, 'step')}; needs {least}"
        return too_little(history)

    return Check(
        name,
        page,
        judge,
        code,
        title,
        severity,
        inputs=inputs,
        too_little=lacking,
        alike=(lambda finding: "") if of_each_step else same_onset,
        only_in=("default",),
    )


#: Checks of a series.
SERIES_CHECKS = Rooms("check of a series", "moegeom.studies.track.findings", Check)

#: What a router lacks that needs no mention: it has no such part.
_NO_BIAS = "no router has a selection bias at every step"

#: What the checks of a series leave to those of a checkpoint; told with the verdict.
SINGLE_STEPS = "each step by itself beyond its integrity (moegeom check)"

#: What no check of this version looks at in a series.
NOT_LOOKED_AT = (
    "expert weights beyond samples",
    "the optimiser's state",
    "the loss",
    "what lies between steps",
)


def judge_series(history: History, fail_on: Severity = "error") -> Verdict:
    """The verdict of all checks of a series; what lacked its inputs is in ``unseen``, by reason."""
    judged = [
        _judge(check, history)
        for check in sorted(SERIES_CHECKS.all(), key=lambda check: check.code)
    ]
    verdict = verdict_of(judged, dataclasses.replace(DEFAULT, fail_on=fail_on))
    unseen = tuple(_unseen(judged, history))
    return dataclasses.replace(verdict, unseen=unseen, not_looked_at=(*unseen, *NOT_LOOKED_AT))


def _judge(check: Check, history: History) -> JudgedCheck:
    lacking = check.too_little(history)
    if check.inputs != "series" and not history.has_tokens and lacking != _NO_BIAS:
        return JudgedCheck(check, state="needs tokens", reason="no tokens: --tokens")
    if lacking:
        state: State = "does not apply" if lacking == _NO_BIAS else "needs more"
        return JudgedCheck(check, state=state, reason=lacking)
    return JudgedCheck(check, tuple(check.judge(history)))


def _unseen(judged: Sequence[JudgedCheck], history: History) -> Iterator[str]:
    """Statements that could be made of such routers and were not judged, with the reason."""
    by_reason: dict[str, list[str]] = {}
    for entry in judged:
        if entry.state is not None and entry.reason != _NO_BIAS:
            by_reason.setdefault(entry.reason, []).append(entry.check.code)
    for reason, codes in by_reason.items():
        yield f"{', '.join(codes)} ({reason})"
    if history.left_out:
        number = number_of(len(history.left_out), "router")
        yield f"{number} that not every step has with the same experts"
    yield SINGLE_STEPS


#: Checks of a series that test, each of them once a router at most.
NUM_TESTING = 6


def least_steps_for(p_value: Callable[[int], float]) -> Callable[[History], int]:
    """Steps from which on the least p-value of a test is below its share of the error of a run.

    The smallest of all p-values of a run is held to the whole error over their number.
    """

    def least(history: History) -> int:
        return next(steps for steps in itertools.count(2) if p_value(steps) <= share(history))

    return least


def share(history: History) -> float:
    """The error of a run over the largest number of tests that it can have."""
    return FAMILY_WISE_ERROR / (NUM_TESTING * max(len(history.routers), 1))


def same_onset(finding: Finding) -> str:
    """Key of findings that begin at one step: ``from step 300 on ...``, ``step 300 ...``."""
    onset = re.search(r"step (\S+)", finding.title)
    return onset[1] if onset else ""
