"""How well the verdicts of explain name the faults of the generator: named, wrong, open, missed; is a
verdict with a margin of so many bits right as often as that says; and pairs of healthy runs that
differ in rounding alone, of which no verdict may name a fault.

`python -m tests.generator.scoring [--kinds old|new|all|threads] SIZE FIRST LAST [SIZE FIRST LAST ...]` explains
the cases of these seeds, with twins, and prints the table of docs/explain.md.
"""

import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import MoeGeomError
from moegeom.studies.explain.record import VERDICTS, Cause, CauseVerdict, ExplainRequest
from moegeom.studies.explain.study import explain
from tests.generator.cases import Case, Selection, draw, num_different, write
from tests.generator.engine import Arithmetic, Schedule, serve
from tests.generator.faults import KINDS, NEW, THREADS
from tests.generator.files import Form, write_checkpoint, write_recording
from tests.generator.kinds import EXPERTS
from tests.generator.model import FAMILIES, Shape, draw_model, draw_text

#: Verdicts that name no cause and claim no health.
OPEN: frozenset[Cause] = frozenset({"inconclusive", "beyond noise", "another checkpoint"})

#: Verdicts that find nothing wrong.
HEALTHY: frozenset[Cause] = frozenset({"no disagreement", "arithmetic noise only"})

_ROUNDING: tuple[Cause, ...] = ("inputs rounded", "logits rounded", "weights rounded")

#: Every verdict that names a fault; kinds may list words that no verdict has yet.
NAMES: frozenset[Cause] = frozenset(
    cause for kind in KINDS.values() for cause in kind.named if cause in VERDICTS
)

#: A fault can be told where so many tokens differ from the twin's in what is recorded.
_TELLING = 20


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
    num_different: int = 0

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows of the table of results that count it."""
        parts = {"new": NEW, "threads": THREADS}
        kinds = next((part for part in parts if self.operators[0] in parts[part]), "old")
        if self.num_different < _TELLING:
            return (f"{kinds}, under {_TELLING} tokens differ",)
        return f"{kinds}, all that can be told", f"{kinds}, {self.form}"


def outcome(case: Case, verdict: CauseVerdict) -> str:
    """named, wrong, open (nothing is named), missed (nothing is wrong), refused."""
    right = [cause for truth in case.truths for cause in KINDS[truth.operator].named]
    if case.form == "router_input" and any(
        truth.operator.startswith("gain_") for truth in case.truths
    ):
        right += ["not the router", "inputs differ"]  # the norm has made what is recorded
    for truth in case.truths:
        kind = KINDS[truth.operator]
        # what all experts read cannot be what some of them have loaded
        is_told = case.form == kind.told_by or truth.scope in EXPERTS
        right += () if is_told else kind.unseen
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


def scored(seed: int, size: str, folder: Path, selection: Selection = "old") -> Scored:
    case = draw(seed, size, selection)  # pyright: ignore[reportArgumentType]
    written = write(case, folder)
    other = None if written.other_checkpoint is None else str(written.other_checkpoint)
    found = []
    for run_b in (written.b, written.twin):
        request = ExplainRequest(
            checkpoint=str(written.checkpoint),
            tokens=str(written.a),
            run_b=str(run_b),
            checkpoint_b=other,
        )
        try:
            found.append(explain(request).verdict)
        except MoeGeomError as refusal:
            found.append(CauseVerdict("inconclusive", f"refused: {refusal.message}"))
    b, twin = found
    what = [tuple(getattr(truth, part) for truth in case.truths) for part in ("operator", "scope")]
    ends = (b, outcome(case, b), twin, twin_outcome(twin))
    return Scored(seed, *what, case.form, *ends, num_different(case))


def all_scored(size: str, seeds: Sequence[int], selection: Selection = "old") -> Iterator[Scored]:
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            yield scored(seed, size, Path(folder) / "case", selection)


# ------------------------------------------------------------------------------------------ margins
#: Least margins of the classes, in bits.
CLASSES = (10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(frozen=True)
class Reliability:
    """Verdicts with margins from ``least`` to below ``most`` bits, and how many were right."""

    least: float
    most: float
    number: int
    right: int


def named(found: Iterable[Scored]) -> Iterator[tuple[float, bool]]:
    """Margins of verdicts that name a fault, and whether it is there; a twin may be rounded."""
    for one in found:
        for verdict, is_right in (
            (one.verdict, one.outcome == "named"),
            (one.twin, one.twin_outcome == "rounding"),
        ):
            if verdict.margin is not None and verdict.cause not in OPEN | HEALTHY:
                yield verdict.margin, is_right


def reliability(verdicts: Iterable[tuple[float, bool]]) -> list[Reliability]:
    told = list(verdicts)
    ends = itertools.pairwise((*CLASSES, float("inf")))
    classes = [
        (least, most, [ok for bits, ok in told if least <= bits < most]) for least, most in ends
    ]
    return [Reliability(least, most, len(ok), sum(ok)) for least, most, ok in classes]


def table(found: Iterable[Reliability]) -> str:
    lines = ["| margin, bits | verdicts | right |", "|---|---|---|"]
    for one in found:
        end = "and more" if one.most == float("inf") else f"to {one.most:g}"
        share = f"{100 * one.right / one.number:.1f} %" if one.number else ""
        lines.append(f"| {one.least:g} {end} | {one.number} | {share} |")
    return "\n".join(lines)


ENDS = ("named", "wrong", "open", "missed", "refused")


def results(cases: Iterable[Scored]) -> str:
    """How cases end, old and new kinds apart: those that can be told, by form, and the others."""
    rows: dict[str, Counter[str]] = {}
    for one in cases:
        for row in one.rows:
            rows.setdefault(row, Counter())[one.outcome] += 1
    lines = [f"| kinds, form | cases | {' | '.join(ENDS)} |", "|---" * (len(ENDS) + 2) + "|"]
    for row, ends in sorted(rows.items()):
        counts = [ends.total(), *(ends[end] for end in ENDS)]
        lines.append(f"| {row} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ healthy pairs
#: Arithmetics of A and of B: another format, another order of sums, both, and either in bfloat16.
ARITHMETICS = {
    "bf16 against fp32": (Arithmetic(), Arithmetic(True)),
    "fp32 against bf16": (Arithmetic(True), Arithmetic()),
    "another order, bf16": (Arithmetic(True), Arithmetic(True, is_reversed=True)),
    "another order, fp32": (Arithmetic(), Arithmetic(is_reversed=True)),
    "both": (Arithmetic(), Arithmetic(True, is_reversed=True)),
}

_SHAPES = (
    Shape(2, 32, 8, 2, 16, 256, 24, 52),
    Shape(3, 64, 16, 2, 16, 256, 24, 80),
    Shape(2, 128, 32, 4, 16, 256, 48, 106),
    Shape(3, 64, 64, 8, 16, 256, 40, 80),
    Shape(4, 96, 16, 1, 16, 256, 40, 64),
)

_FORMS: tuple[Form, ...] = ("ids", "router_input", "logits")


@dataclass(frozen=True)
class NoisePair:
    seed: int
    arithmetic: str
    shape: Shape
    form: Form
    verdict: CauseVerdict

    @property
    def outcome(self) -> str:
        return twin_outcome(self.verdict)


def noise_pair(seed: int, folder: Path) -> NoisePair:
    rng = np.random.default_rng([seed, 7])
    arithmetic = tuple(ARITHMETICS)[seed % len(ARITHMETICS)]
    shape = _SHAPES[int(rng.integers(len(_SHAPES)))]
    documents, length = shape.documents, shape.length
    stored = "bfloat16" if rng.random() < 0.8 else "float32"
    model = draw_model(rng, str(rng.choice(tuple(FAMILIES))), shape, stored)
    text = draw_text(rng, documents, length, shape.vocabulary)
    whole = Schedule(tuple(np.array_split(np.arange(documents), 4)), length, length)
    shuffled = np.array_split(rng.permutation(documents), 3)
    packed = Schedule(tuple(np.sort(batch) for batch in shuffled), length // 3, length // 2)
    form = _FORMS[int(rng.integers(len(_FORMS)))]
    checkpoint = folder / "model"
    write_checkpoint(model, model.routers, checkpoint)
    for name, how, schedule, kept in zip(
        "ab", ARITHMETICS[arithmetic], (whole, packed), ("router_input", form), strict=True
    ):
        write_recording(serve(model, text, how, schedule), text, kept, checkpoint, folder / name)
    request = ExplainRequest(
        checkpoint=str(checkpoint), tokens=str(folder / "a"), run_b=str(folder / "b")
    )
    return NoisePair(seed, arithmetic, shape, form, explain(request).verdict)


def all_noise_pairs(seeds: Sequence[int]) -> Iterator[NoisePair]:
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            yield noise_pair(seed, Path(folder))


def main(*arguments: str) -> None:
    cases: list[Scored] = []
    selection: Any = "old"
    if arguments[:1] == ("--kinds",):
        selection, arguments = arguments[1], arguments[2:]
    for size, first, last in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        for one in all_scored(size, range(int(first), int(last)), selection):
            cases.append(one)
            what = "+".join(f"{o}@{s}" for o, s in zip(one.operators, one.scopes, strict=True))
            said = f"{one.verdict.cause}; {one.verdict.detail}"
            sys.stdout.write(f"{one.seed} {one.outcome.upper():7} {what} [{one.form}]: {said}\n")
            if one.twin_outcome != "healthy":
                said = f"{one.twin.cause}; {one.twin.detail}"
                sys.stdout.write(f"    twin {one.twin_outcome}: {said}\n")
            sys.stdout.flush()
    ends = Counter(end for one in cases for end in (one.outcome, f"twin {one.twin_outcome}"))
    sys.stdout.write(f"{dict(ends)}\n{results(cases)}\n{table(reliability(named(cases)))}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
