"""What an incident is, and the run that shows it to the gate."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moegeom.checks.check import CHECKS
from moegeom.checks.profile import BuiltIn
from moegeom.core.finding import EXIT_FAILED, EXIT_OK, Finding
from moegeom.studies.check.study import GateRequest, gate
from tests.museum.checkpoint import Build, Checkpoint

SIZES = ("small", "medium", "large")

#: Checks by the codes that cases state.
JUDGES = {check.code: check for check in CHECKS.all()}


@dataclass(frozen=True)
class Case:
    """One checkpoint: what was done to it, and what the gate says about it.

    ``layers`` are those of the routers that the incident's own code names; codes ``beside`` it are
    complete, notes included. A size that ``is_missed`` lacks the own code, a twin is silent.
    ``exits`` are the exit codes by default and under the profile release, where they do not follow
    from what the codes weigh.
    """

    text: str
    build: Build
    layers: Sequence[int] = ()
    beside: tuple[str, ...] = ()
    exits: tuple[int, int] | None = None
    is_missed: bool = False


@dataclass(frozen=True)
class Incident:
    """Something that went wrong, rebuilt in three sizes; ``twins`` were treated rightly."""

    name: str
    story: str
    code: str
    small: Case
    medium: Case
    large: Case
    twins: tuple[Case, ...]
    baseline: Build | None = None
    threads: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[Case, Case, Case]:
        return self.small, self.medium, self.large

    def says(self, case: Case) -> tuple[str, ...]:
        is_named = case in self.sizes and not case.is_missed
        return tuple(sorted((*case.beside, *[self.code] * is_named)))

    def exit_code(self, case: Case, base: BuiltIn) -> int:
        if case.exits is not None:
            return case.exits[base == "release"]
        is_error = any(JUDGES[code].weighs(base) == "error" for code in self.says(case))
        return EXIT_FAILED if is_error else EXIT_OK


@dataclass(frozen=True)
class Seen:
    """What the gate said; ``release`` is the exit code under that profile, None after a failure."""

    findings: Sequence[Finding]
    exit_code: int
    release: int | None

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(sorted({finding.code for finding in self.findings}))

    def routers(self, code: str) -> tuple[str, ...]:
        named = {r for finding in self.findings if finding.code == code for r in finding.routers}
        return tuple(sorted(named))

    def of(self, code: str) -> Finding:
        return next(finding for finding in self.findings if finding.code == code)


class Museum:
    """Writes checkpoints below a folder and shows them to the gate; each baseline is made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profile = folder / "moegeom.toml"
        self._profile.write_text("", encoding="utf-8")
        self._count = 0
        self.show = functools.cache(self._show)
        self.visit = functools.cache(self._visit)
        self.baseline_of = functools.cache(self._baseline_of)

    def _show(self, checkpoint: Checkpoint, baseline: Checkpoint | None = None) -> Seen:
        file = None if baseline is None else self.baseline_of(baseline)
        request = GateRequest(str(self._write(checkpoint)), profile=self._profile, baseline=file)
        judged = gate(request)
        release = None if judged.release is None else judged.release.exit_code
        return Seen(judged.verdict.findings, judged.verdict.exit_code, release)

    def _visit(self, incident: Incident, case: Case) -> Seen:
        baseline = None if incident.baseline is None else incident.baseline()
        return self.show(case.build(), baseline)

    def confirm(self, incident: Incident, case: Case) -> None:
        seen = self.visit(incident, case)
        assert seen.codes == incident.says(case)
        assert seen.exit_code == incident.exit_code(case, "default")
        # what fails by default fails under release too: no check weighs less there
        release = None if seen.exit_code else incident.exit_code(case, "release")
        assert seen.release == release
        assert seen.routers(incident.code) == tuple(f"text/{layer}" for layer in case.layers)

    def _baseline_of(self, checkpoint: Checkpoint) -> Path:
        folder = self._write(checkpoint)
        file = folder.with_suffix(".json")
        request = GateRequest(
            str(folder), profile=self._profile, baseline=file, update_baseline=True
        )
        assert gate(request).written == file
        return file

    def _write(self, checkpoint: Checkpoint) -> Path:
        self._count += 1
        return checkpoint.write(self._folder / f"exhibit_{self._count}")


def all_cases(incidents: Sequence[Incident]) -> list[tuple[Incident, Case]]:
    return [(i, case) for i in incidents for case in (*i.sizes, *i.twins)]
