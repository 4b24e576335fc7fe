"""How well the verdicts of explain name the faults of the generator: named, wrong, open, missed.

`python -m tests.generator.scoring SIZE FIRST LAST` explains the cases of these seeds, with twins.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.errors import MoeGeomError
from moegeom.studies.explain.record import Cause, CauseVerdict, ExplainRequest
from moegeom.studies.explain.study import explain
from tests.generator.cases import Case, draw, write
from tests.generator.faults import KINDS

#: Verdicts that name no cause and claim no health.
OPEN: frozenset[Cause] = frozenset({"inconclusive", "beyond noise", "another checkpoint"})

#: Verdicts that find nothing wrong.
HEALTHY: frozenset[Cause] = frozenset({"no disagreement", "arithmetic noise only"})

_ROUNDING: tuple[Cause, ...] = ("inputs rounded", "logits rounded", "weights rounded")

#: Every verdict that names a fault.
NAMES: frozenset[Cause] = frozenset(cause for kind in KINDS.values() for cause in kind.named)


@dataclass(frozen=True)
class Scored:
    seed: int
    operators: tuple[str, ...]
    scopes: tuple[str, ...]
    form: str
    verdict: CauseVerdict
    outcome: str
    twin: CauseVerdict
    twin_outcome: str


def outcome(case: Case, verdict: CauseVerdict) -> str:
    """named, wrong, open (nothing is named), missed (nothing is wrong), refused."""
    right = [cause for truth in case.truths for cause in KINDS[truth.operator].named]
    if case.form == "router_input" and any(
        truth.operator.startswith("gain_") for truth in case.truths
    ):
        right += ["not the router", "inputs differ"]  # the norm has made what is recorded
    if verdict.cause in right:
        return "named"
    if verdict.detail.startswith("refused:"):
        is_right = any(KINDS[truth.operator].may_be_refused for truth in case.truths)
        return "named" if is_right else "refused"
    if verdict.cause in OPEN:
        return "open"
    return "missed" if verdict.cause in HEALTHY else "wrong"


def twin_outcome(verdict: CauseVerdict) -> str:
    """healthy, rounding (which is how a twin may differ), open, wrong."""
    if verdict.cause in HEALTHY:
        return "healthy"
    if verdict.cause in _ROUNDING:
        return "rounding"
    return "open" if verdict.cause in OPEN else "wrong"


def scored(seed: int, size: str, folder: Path) -> Scored:
    case = draw(seed, size)  # pyright: ignore[reportArgumentType]
    written = write(case, folder)
    named = None if written.other_checkpoint is None else str(written.other_checkpoint)
    found = []
    for run_b in (written.b, written.twin):
        request = ExplainRequest(
            checkpoint=str(written.checkpoint),
            tokens=str(written.a),
            run_b=str(run_b),
            checkpoint_b=named,
        )
        try:
            found.append(explain(request).verdict)
        except MoeGeomError as refusal:
            found.append(CauseVerdict("inconclusive", f"refused: {refusal.message}"))
    b, twin = found
    what = [tuple(getattr(truth, part) for truth in case.truths) for part in ("operator", "scope")]
    return Scored(seed, *what, case.form, b, outcome(case, b), twin, twin_outcome(twin))


def all_scored(size: str, seeds: Sequence[int]) -> Iterator[Scored]:
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            yield scored(seed, size, Path(folder) / "case")


def main(size: str, first: str, last: str) -> None:
    ends: Counter[str] = Counter()
    for one in all_scored(size, range(int(first), int(last))):
        ends[one.outcome] += 1
        ends[f"twin {one.twin_outcome}"] += 1
        what = "+".join(f"{o}@{s}" for o, s in zip(one.operators, one.scopes, strict=True))
        said = f"{one.verdict.cause}; {one.verdict.detail}"
        sys.stdout.write(f"{one.seed} {one.outcome.upper():7} {what} [{one.form}]: {said}\n")
        if one.twin_outcome != "healthy":
            sys.stdout.write(f"    twin {one.twin_outcome}: {one.twin.cause}; {one.twin.detail}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(ends)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
