"""Pairs of healthy runs that differ in rounding alone: no verdict may name a fault.

`python -m tests.generator.noise_pairs FIRST LAST` explains the pairs of these seeds and counts.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moegeom.studies.explain.record import CauseVerdict, ExplainRequest
from moegeom.studies.explain.study import explain
from tests.generator.engine import Arithmetic, Schedule, serve
from tests.generator.files import Form, write_checkpoint, write_recording
from tests.generator.model import FAMILIES, Shape, draw_model
from tests.generator.scoring import twin_outcome
from tests.generator.text import draw_text

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


def main(first: str, last: str) -> None:
    ends: Counter[str] = Counter()
    for one in all_noise_pairs(range(int(first), int(last))):
        ends[one.outcome] += 1
        if one.outcome != "healthy":
            shape = f"({one.shape.hidden}, {one.shape.experts}, {one.shape.top_k})"
            said = f"{one.verdict.cause}; {one.verdict.detail}"
            sys.stdout.write(
                f"{one.seed} {one.outcome} {one.arithmetic} {shape} [{one.form}]: {said}\n"
            )
            sys.stdout.flush()
    sys.stdout.write(f"{dict(ends)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
