"""What a check is: a statement to be judged, its limits, and the page that explains it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from moegeom.checks.measured import Measured, Row
from moegeom.checks.profile import BuiltIn
from moegeom.core.errors import InternalError
from moegeom.core.finding import Finding, Severity
from moegeom.core.registry import Rooms, record_of_function, unknown_name
from moegeom.core.tokens import ONE_DOCUMENT

#: Where a limit comes from. ``definition``: it follows from the statement. ``heuristic``: from
#: practice or set by hand. ``random``: relative to a random router on the same tokens.
Basis = Literal["definition", "heuristic", "random"]


#: Why a statement about the config is not judged on some results.
OLDER = "these results do not hold what the config says: an older moegeom wrote them"

#: Why a figure of tokens cannot be judged, and what is needed.
NO_ERROR = (
    "one block of documents gives no standard error; needed: tokens of 2 documents at least, "
    f"better of 16 ({ONE_DOCUMENT})"
)
NOTHING_FOUND = f"too few documents to find anything; needed: tokens of more ({ONE_DOCUMENT})"


@dataclass(frozen=True)
class Limit:
    """A number that a profile may change: ``[limits.<code>] <name> = ...``."""

    name: str
    default: float
    text: str
    basis: Basis = "heuristic"


@dataclass(frozen=True)
class Tested:
    """A statistical statement about one router: what would be said of it, and its p-value.

    ``finding`` is None where there is nothing to say whatever the p-value. ``error``, ``freedom``
    and ``num_tests``, the hypotheses that the p-value already accounts for, tell how small a defect
    could have been found; ``room`` is how far the figure can be beyond its limit at all: a test
    that could find nothing within it has judged nothing, unless the figure is shown to be within
    its limit, for which ``p_beyond``, the p-value of "it is beyond", is to be small.
    """

    router: str
    finding: Finding | None
    p_value: float
    error: float = 0.0
    freedom: float = 1.0
    num_tests: int = 1
    room: float = math.inf
    p_beyond: float = 1.0


@dataclass(frozen=True)
class Unknown:
    """A router that could not be judged although everything needed was asked for.

    What lies ``outside`` of the check counts where a profile requires it, and is named elsewhere.
    """

    router: str
    reason: str
    outside: bool = False


Claim = Finding | Tested | Unknown

#: Limits of one check: name and router to value, so that a layer may have a limit of its own.
Limits = Callable[[str, str], float]

#: What a statement takes: of one checkpoint, or of a series of them.
Inputs = Literal[
    "weights",
    "experts",
    "attention",
    "tokens",
    "baseline",
    "baseline and tokens",
    "series",
    "series and tokens",
    "series and domains",
]


def has_rows(measured: Measured, row: Row) -> bool:
    """Whether the router has rows to compare: a listed one has none, and one row has no other."""
    facts = measured.facts(row["router"])
    return facts.get("hidden_size", 1) > 0 and facts.get("num_experts", 2) > 1


def without_saying(measured: Measured, row: Row) -> bool:
    """Never: the figure is missing where the router has nothing of the kind, and there alone."""
    return False


def has_selection_bias(measured: Measured, row: Row) -> bool:
    """Whether the router has one."""
    return bool(measured.facts(row["router"]).get("bias_tensor"))


@dataclass(frozen=True)
class Check:
    """A statement to be judged by ``judge``, of one checkpoint or of a series. ``code`` is never
    reused.

    ``judge`` yields a finding for each router concerned, the worst first; statistical checks yield
    a ``Tested`` for every router that they test, so that errors of the whole run can be controlled.
    It gets ``Measured`` and the limits, and in a series the history alone. ``page`` explains the
    check: the statement, what is looked for, what a finding means, and what to do.
    ``needs`` are columns of ``layers``. A router without one of them, which it ``concerns`` all the
    same, is not judged; where it concerns none the check does not apply, and ``absent`` says why;
    so where ``facts``, a key of ``run.json``, holds nothing, and where ``too_little`` says what
    there is less of than the statement needs. ``alike`` gives
    findings of the same statement the same key: those are told as one. ``inputs`` says what it
    takes; one that takes experts, or attention, is judged, and counted, where they were read or it
    was named.
    ``detects`` puts the least defect that could have been found, in units of the tested figure,
    into words. ``severities`` says what every finding weighs in another built-in profile than the
    default one, where that differs; ``only_in`` names the profiles that judge the check at all,
    every one when it is empty.
    """

    name: str
    page: str
    judge: Callable[..., Iterable[Claim]]
    code: str
    title: str
    severity: Severity
    needs: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    inputs: Inputs = "weights"
    facts: str = ""
    absent: str = "nothing of the kind is in this checkpoint"
    concerns: Callable[[Measured, Row], bool] = has_rows
    too_little: Callable[[Any], str] = lambda inputs: ""
    detects: Callable[[float], str] | None = None
    alike: Callable[[Finding], str] = lambda finding: ""
    severities: Mapping[BuiltIn, Severity] = field(default_factory=dict)
    only_in: tuple[BuiltIn, ...] = ()

    def weighs(self, base: BuiltIn) -> Severity | None:
        """What a finding weighs in a built-in profile; None where the check is not judged."""
        if self.only_in and base not in self.only_in:
            return None
        return self.severities.get(base, self.severity)

    def finding(
        self,
        router: str | tuple[str, ...],
        title: str,
        detail: str = "",
        next_command: str = "",
        fix: str = "",
    ) -> Finding:
        """A finding of this check, at its default severity; it leads to its page, or further."""
        routers = (router,) if isinstance(router, str) else router
        next_command = next_command or f"moegeom check --explain {self.code}"
        return Finding(self.severity, self.code, routers, title, detail, next_command, fix)

    def refused(self, measured: Measured) -> Iterator[Finding]:
        """The refusal that stopped reading, when it breaks the statement of this check."""
        refusal = measured.run.get("refused")
        if refusal and refusal["code"] == self.code:
            yield self.finding((), refusal["message"], refusal["hint"])


#: Makes a check of the function under it, which judges: ``@check(code, title, severity, ...)``.
check: Final = record_of_function(Check)

#: Checks of one checkpoint.
CHECKS = Rooms("check", "moegeom.checks.catalogue", Check)


def same_sentence(finding: Finding) -> str:
    """Key of findings whose titles differ in numbers only, and whose severity is the same."""
    return finding.severity + re.sub(r"[-+0-9.e]+", "#", finding.title)


#: Sections of the page of a check, in this order.
SECTIONS = ("Looked for", "A finding means", "What to do")


@dataclass(frozen=True)
class Page:
    """A check in words. ``statement`` is what holds when it passes."""

    check: Check
    statement: str
    sections: dict[str, str]


def page_of(check: Check) -> Page:
    """The page of a check, in its parts."""
    statement, _, rest = check.page.partition("\n\n")
    parts = re.split(rf"(?:^|\n\n)({'|'.join(SECTIONS)}): ", rest)
    sections = {
        name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    if tuple(sections) != SECTIONS:
        raise InternalError(f"The docstring of {check.name} is no page of {check.code}.")
    return Page(check, statement[:1].lower() + statement[1:], sections)


def find_check(code: str, others: Iterable[Check] = ()) -> Check:
    """The check with this code, of one checkpoint or among ``others``; else UsageError."""
    by_code = {check.code: check for check in (*CHECKS.all(), *others)}
    if code.upper() not in by_code:
        raise unknown_name("code", code, by_code)
    return by_code[code.upper()]


def all_pages(others: Iterable[Check] = ()) -> list[Page]:
    """Every page, with those of ``others``, in the order of codes."""
    checks = sorted((*CHECKS.all(), *others), key=lambda check: check.code)
    return [page_of(check) for check in checks]
