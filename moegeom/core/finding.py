"""What a scan or a check has to say, and what a gate decides from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Severity = Literal["error", "warning", "note"]

#: Order in which findings are shown, worst first.
SEVERITY_ORDER: dict[str, int] = {"error": 0, "warning": 1, "note": 2}

#: Fair shares that one expert may take before a check finds that too many, where no profile says
#: otherwise; bars of loads on a screen end there.
MOST_FAIR_SHARES = 3.0


@dataclass(frozen=True)
class Finding:
    """One statement about one or several routers.

    ``title`` is the sentence a person reads first, ``detail`` the evidence with its numbers,
    ``fix`` a change that is proved to be neutral, with the proof, and ``next_command`` what to
    type to learn more. ``code`` is empty for a note that explains a null.
    """

    severity: Severity
    code: str
    routers: tuple[str, ...]
    title: str
    detail: str = ""
    next_command: str = ""
    fix: str = ""


# ----------------------------------------------------------------------------------------- verdicts
#: How a check can end. ``inconclusive``: it was asked for, had its inputs, and could not be judged.
State = Literal[
    "passed",
    "failed",
    "inconclusive",
    "needs tokens",
    "needs a baseline",
    "needs tokens in the baseline",
    "needs experts",
    "needs more",
    "needs routers",
    "does not apply",
    "ignored",
]

STATES: tuple[State, ...] = get_args(State)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INCONCLUSIVE = 4


@dataclass(frozen=True)
class Outcome:
    """How one check ended.

    ``severity`` is what its findings weigh (a profile may have changed it); ``reason`` says why it
    was not judged, as a whole or in ``num_open`` layers. ``accepted`` are findings that a profile
    ignores, each with the reason that it gives; a check with no others is ignored. ``title`` is
    what a finding says, ``statement`` what holds when the check passes. Of findings that weigh
    the same, those of the least ``weight`` come first: what would stop a release.
    """

    code: str
    title: str
    severity: Severity
    state: State
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    accepted: tuple[tuple[Finding, str], ...] = ()
    num_open: int = 0
    statement: str = ""
    weight: int = 0


@dataclass(frozen=True)
class Verdict:
    """Outcomes of all checks that were selected, in the order of codes.

    ``fail_on`` is the least severity that fails the gate; ``detectable`` says in words how small a
    defect the statistical checks could have found; ``profile`` says by which file was judged, and
    what that changes; ``not_looked_at`` is printed with every pass, ``unseen``, the part of it that
    is missed, in the sentence itself.
    """

    outcomes: tuple[Outcome, ...]
    fail_on: Severity = "error"
    detectable: tuple[str, ...] = ()
    not_looked_at: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    profile: tuple[str, ...] = ()

    def in_state(self, state: State) -> tuple[Outcome, ...]:
        """Outcomes that ended so."""
        return tuple(outcome for outcome in self.outcomes if outcome.state == state)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of failed checks, worst first."""
        order: list[tuple[tuple[int, int, str], Finding]] = [
            ((SEVERITY_ORDER[finding.severity], outcome.weight, finding.code), finding)
            for outcome in self.in_state("failed")
            for finding in outcome.findings
        ]
        return tuple(finding for _, finding in sorted(order, key=lambda pair: pair[0]))

    def fails(self, outcome: Outcome) -> bool:
        """True when this outcome alone fails the gate."""
        limit = SEVERITY_ORDER[self.fail_on]
        return outcome.state == "failed" and SEVERITY_ORDER[outcome.severity] <= limit

    @property
    def exit_code(self) -> int:
        """1 when a check fails the gate, else 4 when one is not judged in full, else 0.

        A verdict without a judgement, because everything selected lacked its inputs, is no pass: 4.
        """
        if any(self.fails(outcome) for outcome in self.outcomes):
            return EXIT_FAILED
        judged = {outcome.state for outcome in self.outcomes} & {"passed", "failed", "ignored"}
        return EXIT_OK if judged and not self.open else EXIT_INCONCLUSIVE

    @property
    def open(self) -> tuple[Outcome, ...]:
        """Checks that were asked for and not judged, at least in some layers."""
        return tuple(o for o in self.outcomes if o.state == "inconclusive" or o.num_open)
