"""How well the verdicts of explain name the faults of the generator: named, wrong, open, missed.

`python -m tests.generator.scoring SIZE FIRST LAST` explains the cases of these seeds, with twins.
"""

from __future__ import annotations

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
from tests.generator.words import Operator as Op

#: Verdicts that name no cause and claim no health.
OPEN: frozenset[Cause] = frozenset({"inconclusive", "beyond noise", "another checkpoint"})

#: Verdicts that find nothing wrong.
HEALTHY: frozenset[Cause] = frozenset({"no disagreement", "arithmetic noise only"})

_ROUNDING: tuple[Cause, ...] = ("inputs rounded", "logits rounded", "weights rounded")

#: The verdicts that name an operator, by operator; what is not here has no name of its own.
NAMES: dict[Op, tuple[Cause, ...]] = {
    Op.ROWS_PERMUTED: ("experts renamed", "rows damaged"),
    Op.ROWS_INTERLEAVED: ("experts renamed", "rows damaged"),
    Op.ROWS_SHIFTED: ("experts renamed", "rows damaged"),
    Op.ROWS_DUPLICATED: ("rows damaged",),
    Op.ROWS_ZEROED: ("rows damaged",),
    Op.ROW_SCALED: ("rows damaged",),
    Op.WEIGHTS_TRANSPOSED: ("rows damaged",),
    Op.WEIGHTS_SCALED: ("rows damaged", "routing weights differ", "rule differs"),
    Op.WEIGHTS_OF_ANOTHER_LAYER: ("rows of another layer",),
    Op.WEIGHTS_OF_OLDER_CHECKPOINT: ("router stale",),
    Op.WEIGHTS_OF_ANOTHER_TRAINING: ("router stale", "unrelated"),
    Op.WEIGHTS_AT_INITIALISATION: ("unrelated", "rows damaged"),
    Op.LOW_RANK_UPDATE: ("rows damaged",),
    Op.WEIGHTS_BF16: ("weights rounded",),
    Op.WEIGHTS_FP8_E4M3: ("weights rounded",),
    Op.WEIGHTS_FP8_E5M2: ("weights rounded",),
    Op.WEIGHTS_INT8: ("weights rounded",),
    Op.WEIGHTS_INT4: ("weights rounded",),
    Op.WEIGHTS_BF16_AFTER_INT8: ("weights rounded",),
    Op.BIAS_DROPPED: ("bias missing",),
    Op.BIAS_NOT_IN_SELECTION: ("bias missing",),
    Op.BIAS_NEGATED: ("bias differs",),
    Op.BIAS_OFFSET: ("bias differs",),
    Op.BIAS_SHIFTED: ("bias differs",),
    Op.BIAS_MISREAD: ("bias differs",),
    Op.BIAS_BF16: ("bias rounded",),
    Op.BIAS_OF_ANOTHER_LAYER: ("bias stale", "bias differs"),
    Op.BIAS_OF_OLDER_CHECKPOINT: ("bias stale", "bias differs"),
    Op.GAIN_DROPPED: ("gain not folded",),
    Op.GAIN_TWICE: ("gain not folded",),
    Op.GAIN_PLUS_ONE: ("gain not folded",),
    Op.GAIN_OF_ANOTHER_LAYER: ("gain not folded",),
    Op.INPUT_OF_ANOTHER_TOKEN: ("tokens shifted", "inputs differ", "not the router"),
    Op.INPUT_STALE: ("tokens shifted", "inputs differ", "not the router"),
    Op.INPUT_OF_ANOTHER_LAYER: ("inputs differ", "not the router"),
    Op.INPUT_NORMALISED_TWICE: ("inputs differ", "gain not folded", "not the router"),
    Op.INPUT_BF16: ("inputs rounded", *_ROUNDING[1:2], "not the router"),
    Op.INPUT_FP8: ("inputs rounded", "not the router"),
    Op.INPUT_NOISE: ("arithmetic noise only", "not the router"),
    Op.CACHE_LEFT_OVER: ("not the router",),
    Op.CACHE_LOST: ("not the router",),
    Op.CACHE_TOKEN_TWICE: ("not the router",),
    Op.CACHE_TOKEN_SKIPPED: ("not the router",),
    Op.CACHE_OF_ANOTHER_REQUEST: ("not the router",),
    Op.CACHE_FP8: ("not the router", "arithmetic noise only"),
    Op.OTHER_SCORE: ("rule differs", "routing weights differ"),
    Op.SOFTMAX_MOVED: ("rule differs", "routing weights differ"),
    Op.GROUP_SCORE: ("rule differs",),
    Op.GROUP_COUNT: ("rule differs",),
    Op.GROUPS_IGNORED: ("rule differs",),
    Op.GROUP_FILL: ("rule differs",),
    Op.TOP_K_MORE: ("rule differs", "routing weights differ"),
    Op.TOP_K_FEWER: ("rule differs", "routing weights differ"),
    Op.BIAS_IN_WEIGHTS: ("bias in routing weights",),
    Op.RENORMALISATION_FLIPPED: ("routing weights differ",),
    Op.OTHER_SCALE: ("routing weights differ",),
    Op.SOFT_CAP: ("rule differs", "routing weights differ"),
    Op.TIES_TO_HIGH_INDEX: ("ties broken by number",),
    Op.CAPACITY_DROPPED: ("capacity",),
    Op.CAPACITY_REROUTED: ("capacity",),
    Op.EXPERTS_RENAMED: ("experts renamed",),
    Op.EXPERTS_OFFSET: ("experts renamed",),
    Op.REPLICA_IDS: ("experts renamed",),
    Op.IDS_INT8: ("experts renamed",),
    Op.IDS_UINT8: ("experts renamed",),
    Op.IDS_SORTED: ("no disagreement", "routing weights differ", "arithmetic noise only"),
    Op.PADDING_ROWS: ("padding counted", "tokens shifted"),
    Op.WRITTEN_ROWS_SHIFTED: ("tokens shifted",),
    Op.WRITTEN_ROWS_STALE: ("rows repeated",),
    Op.WRITTEN_LAYERS_SHIFTED: ("layers shifted",),
}  # fmt: skip

_OF_GAINS = (Op.GAIN_DROPPED, Op.GAIN_TWICE, Op.GAIN_PLUS_ONE, Op.GAIN_OF_ANOTHER_LAYER)


@dataclass(frozen=True)
class Scored:
    """One case: its faults, the verdict on B and on the twin, and how they end."""

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
    right = [cause for truth in case.truths for cause in NAMES[truth.operator]]
    if case.form == "router_input" and any(truth.operator in _OF_GAINS for truth in case.truths):
        right += ["not the router", "inputs differ"]  # the norm has made what is recorded
    if verdict.cause in right:
        return "named"
    if verdict.detail.startswith("refused:"):
        return "named" if any(truth.may_be_refused for truth in case.truths) else "refused"
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
    """The case of a seed, explained."""
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
    return Scored(
        seed,
        tuple(str(truth.operator) for truth in case.truths),
        tuple(str(truth.scope) for truth in case.truths),
        case.form,
        b,
        outcome(case, b),
        twin,
        twin_outcome(twin),
    )


def all_scored(size: str, seeds: Sequence[int]) -> Iterator[Scored]:
    """The cases of these seeds, one after the other."""
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            yield scored(seed, size, Path(folder) / "case")


def main(size: str, first: str, last: str) -> None:
    """One line for each case, and the sums."""
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
