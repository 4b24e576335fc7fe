"""The commands that a recipe can be asked by, and what of their answers counts."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.errors import MoeGeomError
from moegeom.core.finding import EXIT_FAILED, EXIT_INCONCLUSIVE
from moegeom.studies.check.study import GateRequest, gate
from moegeom.studies.diff.record import DifferenceRequest
from moegeom.studies.diff.study import difference
from moegeom.studies.explain.record import Cause
from moegeom.studies.signoff.record import SignOffRequest
from moegeom.studies.signoff.study import sign_off
from tests.generator.scoring import HEALTHY, OPEN
from tests.museum.checkpoint import Checkpoint
from tests.museum.recipe import Said
from tests.museum.two_runs import TwoRuns

#: What a gate says that found nothing, and a difference of routers that are the same.
SILENT, IDENTICAL = "silent", "identical"

#: Words of a difference that name no cause.
_UNNAMED = frozenset({"noise", "not compared"})


def exit_of(cause: Cause) -> int:
    return EXIT_INCONCLUSIVE if cause == "inconclusive" else 0


def _or_refused(ask: Callable[[], Said]) -> Said:
    """A refusal names no cause: it says that something is off."""
    try:
        return ask()
    except MoeGeomError as refusal:
        return Said(("refused",), str(refusal), "open", True, refusal.exit_code)


@dataclass(frozen=True, eq=False)
class Checked:
    """`moegeom check`, with a baseline of ``before`` where there is one."""

    checkpoint: Checkpoint
    before: Checkpoint | None = None

    def asked(self, folder: Path) -> Said:
        return _or_refused(lambda: self._asked(folder))

    def _asked(self, folder: Path) -> Said:
        # a profile of its own, so that none of the working directory counts
        folder.mkdir(parents=True)
        profile = folder / "moegeom.toml"
        profile.write_text("", encoding="utf-8")
        baseline = None
        if self.before is not None:
            baseline = folder / "baseline.json"
            made = GateRequest(str(self.before.write(folder / "before")), profile=profile)
            gate(dataclasses.replace(made, baseline=baseline, update_baseline=True))
        target = str(self.checkpoint.write(folder / "model"))
        asked = GateRequest(target, profile=profile, baseline=baseline)
        verdict = gate(asked).verdict
        release = gate(dataclasses.replace(asked, profile=Path("release"))).verdict
        heavy = [one for one in verdict.findings if one.severity != "note"]
        words = tuple(sorted({one.code for one in heavy}))
        text = " ".join(f"{' '.join(one.routers)} {one.title} {one.detail}" for one in heavy)
        claims = "cause" if words else "open" if verdict.open else "health"
        code = verdict.exit_code
        return Said(words or (SILENT,), text, claims, code == EXIT_FAILED, code, release.exit_code)


@dataclass(frozen=True, eq=False)
class Explained:
    runs: TwoRuns

    def asked(self, folder: Path) -> Said:
        return _or_refused(lambda: self._asked(folder))

    def _asked(self, folder: Path) -> Said:
        verdict = self.runs.explained(folder).verdict
        claims = "health" if verdict.cause in HEALTHY else "cause"
        claims = "open" if verdict.cause in OPEN else claims
        alarms = claims == "cause"
        return Said((verdict.cause,), verdict.detail, claims, alarms, exit_of(verdict.cause))


@dataclass(frozen=True, eq=False)
class OfTwo(ABC):
    a: Checkpoint
    b: Checkpoint

    def asked(self, folder: Path) -> Said:
        a, b = (str(side.write(folder / name)) for name, side in (("a", self.a), ("b", self.b)))
        return _or_refused(lambda: self._answer(a, b))

    @abstractmethod
    def _answer(self, a: str, b: str) -> Said: ...


class SignedOff(OfTwo):
    """`moegeom signoff A B`, of which the lines on weights count: nothing was run on text."""

    def _answer(self, a: str, b: str) -> Said:
        found = sign_off(SignOffRequest(a, b))
        lines = [line for line in found.lines if line.name != "routing on text"]
        words = tuple(sorted({line.state for line in lines}))
        text = " ".join(" ".join([line.sentence, *line.details]) for line in lines)
        claims = "health" if words == ("passed",) else "open"
        return Said(words, text, claims, "failed" in words, found.exit_code)


class Compared(OfTwo):
    def _answer(self, a: str, b: str) -> Said:
        found = difference(DifferenceRequest(a, b))
        changes = [change for router in found.routers for change in router.changes]
        words = tuple(sorted({change.word for change in changes}))
        text = " ".join(f"{change.word} {change.phrase} {change.detail}" for change in changes)
        named = set(words) - _UNNAMED
        claims = "cause" if named else "open" if words else "health"
        return Said(words or (IDENTICAL,), text, claims, bool(named), 0)
