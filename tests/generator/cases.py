"""A case: one text served by a healthy engine and by one with a fault, and the truth about it.

A is the healthy engine. B serves the same model and text with a fault. The twin is B without the
fault: it differs from A in rounding, sums and batches alone, so what tells B from the twin is the
fault and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from tests.generator.engine import Arithmetic, Run, Schedule, serve
from tests.generator.faults import KINDS, NEW, OLD, THREADS, Injected, draw_fault
from tests.generator.files import Form, write_checkpoint, write_recording, write_replies
from tests.generator.kinds import Ground, Kind, Named
from tests.generator.model import BENT, SHAPES, Model, Size, Stored, Text, draw_model, draw_text

#: Kinds that seeds count through; seeds of old kinds draw what they drew before there were others.
Selection = Literal["old", "new", "all", "threads"]
SELECTIONS: Mapping[str, tuple[str, ...]] = {
    "old": tuple(OLD),
    "new": tuple(NEW),
    "all": (*OLD, *NEW),
    "threads": tuple(THREADS),
}
SIZES: tuple[Size, ...] = tuple(SHAPES)

#: Draws of one case before it is given up: faults without effect are drawn again.
_ATTEMPTS = 60

#: A fault shows at least at this share of the tokens, and at three of them.
_LEAST_SHARE, _LEAST_TOKENS = 1e-3, 3

#: Routing weights that differ by less are equal but for rounding.
_SAME_WEIGHT = 1e-4

_COMPOSED_SHARE = 0.1

#: Share of cases in which a checkpoint is named that B has nothing to do with.
_DISTRACTED_SHARE = 0.1


@dataclass(frozen=True)
class Effect:
    """Tokens that a fault alone changes at its lowest layer, and (token, layer) pairs above it."""

    sets: int
    weights: int
    later_sets: int


@dataclass(frozen=True)
class Truth:
    operator: str
    scope: str
    effect: Effect


@dataclass(frozen=True, eq=False)
class Case:
    """Its runs, one truth or two that are composed, and what is named as checkpoint of B."""

    seed: int
    size: Size
    model: Model
    text: Text
    form: Form
    named_checkpoint: Named
    injected: tuple[Injected, ...]
    truths: tuple[Truth, ...]
    a: Run
    b: Run
    twin: Run


class Written(NamedTuple):
    checkpoint: Path
    other_checkpoint: Path | None
    a: Path
    b: Path
    twin: Path


# ---------------------------------------------------------------------------------------- drawing
def draw(seed: int, size: Size, selection: Selection = "old") -> Case:
    """The case of a seed: the operator is the seed modulo their number, all else is drawn."""
    operators = SELECTIONS[selection]
    operator = operators[seed % len(operators)]
    for attempt in range(_ATTEMPTS):
        rng = np.random.default_rng([seed, SIZES.index(size), attempt])
        case = _drawn(seed, size, operator, rng)
        if case is not None:
            return case
    raise RuntimeError(f"seed {seed}, {size}: {operator} had no effect in {_ATTEMPTS} draws")


def _arithmetics(rng: np.random.Generator, kind: Kind) -> tuple[Arithmetic, Arithmetic]:
    """Of A and of B, which differ in the order of sums, in precision, or in nothing."""
    if kind.is_exact:
        return Arithmetic(), Arithmetic()
    is_bf16 = bool(rng.integers(2))
    of_b = (Arithmetic(is_bf16, is_reversed=True), Arithmetic(not is_bf16), Arithmetic(is_bf16))
    return Arithmetic(is_bf16), of_b[int(rng.integers(3))]


def _schedules(rng: np.random.Generator, text: Text) -> tuple[Schedule, Schedule]:
    """A prefills whole documents; B serves them in chunks, decodes the end, in other batches."""
    documents, length = text.token_id.shape
    plain = np.array_split(np.arange(documents), 4)
    packed = np.array_split(rng.permutation(documents), int(rng.integers(2, 5)))
    chunk = int(rng.choice([length // 6, length // 4, length // 3]))
    decoded = int(rng.integers(4, 12))
    return (
        Schedule(tuple(plain), length, length),
        Schedule(tuple(np.sort(batch) for batch in packed), chunk, length * 3 // 5 - decoded),
    )


_FORMS: dict[str, tuple[Form, ...]] = {
    "ids": ("ids", "replies", "router_input", "logits"),
    "weights": ("ids", "router_input", "logits"),
    "ids_only": ("ids", "ids", "replies"),
}


def _fits(kind: Kind, first: Kind, family: str, form: Form) -> bool:
    asks_nothing = not (kind.bend or kind.stored or kind.equal_rows or kind.is_exact)
    return (
        asks_nothing
        and kind.bias_level is None
        # of two faults of one stage the second may undo the first
        and kind.stage != first.stage
        and family in kind.families
        and form in _FORMS[kind.visible_in]
    )


def _second(rng: np.random.Generator, operator: str, family: str, form: Form) -> str:
    """Of old kinds any that fits; of new ones one that can act on the same tokens."""
    first = KINDS[operator]
    fitting = [one for one, kind in OLD.items() if _fits(kind, first, family, form)]
    if operator in NEW:
        there = [one for one, kind in NEW.items() if _fits(kind, first, family, form)]
        # a dispatch knows no tokens, and the memory has its own
        fitting = [one for one in there if KINDS[one].stage not in ("dispatch", "memory")]
    return fitting[int(rng.integers(len(fitting)))]


def _drawn(seed: int, size: Size, operator: str, rng: np.random.Generator) -> Case | None:
    kind = KINDS[operator]
    shape = BENT[kind.bend](SHAPES[size])
    family = str(rng.choice(kind.families))
    stored: Stored = kind.stored or ("bfloat16" if rng.random() < 0.8 else "float32")
    model = draw_model(rng, family, shape, stored, kind.equal_rows, kind.bias_level)
    text = draw_text(rng, shape.documents, shape.length, shape.vocabulary)
    of_a, of_b = _arithmetics(rng, kind)
    plain, packed = _schedules(rng, text)
    forms = _FORMS[kind.visible_in]
    form = forms[int(rng.integers(len(forms)))]
    operators = [operator]
    is_composed = rng.random() < _COMPOSED_SHARE and not (operator in NEW and kind.starts)
    if is_composed and operator not in THREADS:
        operators.append(_second(rng, operator, family, form))
    ground = Ground(rng, model, text, packed)
    injected = (draw_fault(operator, ground),)
    for one in operators[1:]:
        injected += (draw_fault(one, ground, injected[0] if operator in NEW else None),)
    named = _named_checkpoint(rng, operators)

    def served(some: Sequence[Injected]) -> Run:
        return serve(model, text, of_b, packed, [one.fault for one in some])

    twin = served(())
    alone = [served([one]) for one in injected]
    truths = []
    for one, run in zip(injected, alone, strict=True):
        effect = effect_of(run, twin, one)
        if effect is None or not _is_visible(effect, form, text.num_tokens):
            return None
        truths.append(Truth(one.operator, one.scope, effect))
    b = alone[0] if len(alone) == 1 else served(injected)
    a = serve(model, text, of_a, plain)
    return Case(seed, size, model, text, form, named, injected, tuple(truths), a, b, twin)


def _named_checkpoint(rng: np.random.Generator, operators: Sequence[str]) -> Named:
    """The checkpoint that B loaded in most cases, and in a few one that it did not."""
    is_told, is_distracted = rng.random() < 0.75, rng.random() < _DISTRACTED_SHARE
    loaded = [KINDS[one].loaded for one in operators if KINDS[one].loaded]
    if loaded:
        return loaded[0] if is_told else ""
    return "older" if is_distracted else ""


# ------------------------------------------------------------------------------------------ truth
def _by_expert(run: Run, layer: int, experts: int) -> np.ndarray:
    weights = np.full((len(run.chosen[layer]), experts), np.nan, np.float32)
    np.put_along_axis(weights, run.chosen[layer], run.weights[layer], axis=1)
    return weights


def differences(run: Run, other: Run, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens whose set differs in a layer, and those of equal sets whose weights do."""
    # -1 is nobody: the last of the columns
    most = max(int(one.chosen[layer].max()) for one in (run, other)) + 2
    here, there = _by_expert(run, layer, most), _by_expert(other, layer, most)
    sets = (np.isnan(here) != np.isnan(there)).any(axis=1)
    distance = np.abs(np.nan_to_num(here) - np.nan_to_num(there)).max(axis=1)
    return sets, ~sets & (distance > _SAME_WEIGHT)


def effect_of(run: Run, twin: Run, injected: Injected) -> Effect | None:
    """What a fault alone changes against the twin; None where it acts nowhere."""
    layers = injected.fault.reach.layers
    if not layers or not injected.fault.reach.tokens.any():
        return None
    first = min(layers)
    sets, weights = differences(run, twin, first)
    later = [differences(run, twin, layer)[0] for layer in range(first + 1, len(run.chosen))]
    return Effect(int(sets.sum()), int(weights.sum()), int(sum(one.sum() for one in later)))


def num_different(case: Case) -> int:
    """Tokens of which B and its twin record other sets in some layer, or other weights."""
    layers = range(len(case.b.chosen))
    parts = [differences(case.b, case.twin, layer) for layer in layers]
    different = [sets | weights & (case.form != "replies") for sets, weights in parts]
    return int(np.logical_or.reduce(different).sum())


def _is_visible(effect: Effect, form: Form, num_tokens: int) -> bool:
    seen = effect.sets + effect.later_sets + (0 if form == "replies" else effect.weights)
    return seen >= max(_LEAST_TOKENS, _LEAST_SHARE * num_tokens)


# ---------------------------------------------------------------------------------------- writing
def write(case: Case, folder: Path) -> Written:
    checkpoint = folder / "checkpoint"
    write_checkpoint(case.model, case.model.routers, checkpoint)
    others = {"older": case.model.older, "other": case.model.other}
    named = folder / case.named_checkpoint if case.named_checkpoint else None
    if named is not None:
        write_checkpoint(case.model, others[case.named_checkpoint], named)
    write_recording(case.a, case.text, "router_input", checkpoint, folder / "a")
    b, twin = (
        _write_run(case, run, folder / name, checkpoint)
        for name, run in (("b", case.b), ("twin", case.twin))
    )
    return Written(checkpoint, named, folder / "a", b, twin)


def _write_run(case: Case, run: Run, path: Path, checkpoint: Path) -> Path:
    if case.form == "replies":
        file = path.with_suffix(".jsonl")
        write_replies(run, case.text, case.model.shape.experts, file)
        return file
    write_recording(run, case.text, case.form, checkpoint, path)
    return path
