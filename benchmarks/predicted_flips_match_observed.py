"""Claim: the noise model foretells how many tokens an arithmetic flips, within a factor of 1.3.

Prints, for each arithmetic and layer, the share of tokens that flip when the arithmetic is
emulated (with its standard error over documents), the share that the model predicts without
emulation, and their ratio; then the share of layers whose ratio is within 1.3 (target: >= 90 %).
Layers with fewer than 30 flips are counted apart: chance alone moves them by as much. Of the
layers outside, those within two standard errors of the limit are counted as well.

Layers are those of the sample checkpoints, on the last half of the documents of their recordings,
which nothing was fitted to, and random ones of full size: rows of unlike length that share
directions, inputs with a few large coordinates, documents about different means, and sinks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.core.tokens import TILE
from moegeom.engine.batch import LazyBatch
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.kernels.table import load_kernels
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from moegeom.variants.emulated import arithmetic, emulate
from tests.array_source import ArraySource

SAMPLES = Path(__file__).resolve().parents[1] / "sample_ckpts"

#: (checkpoint, step). Grouped and curved rules have no prediction.
RECORDED = (("olmoe-balanced", "step_1500"), ("olmoe-collapsed", "step_1500"))

#: (hidden, experts, top_k, tokens of a layer).
SHAPES = ((2048, 64, 8, 65_536), (7168, 256, 8, 16_384))

ARITHMETICS = ("tf32", "fp16", "bf16", "bf16-logits", "int8", "fp8", "int4")

#: The factor that is meant, and the fewest flips that can tell.
FACTOR, FEWEST = 1.3, 30

#: Tokens of a synthetic document.
DOCUMENT = 256


@dataclass(frozen=True, eq=False)
class Layer:
    """A router, and its tokens in parts that fit into memory; documents lie within a part."""

    name: str
    router: Router
    parts: tuple[tuple[int, int], ...]
    seed: int | None = None
    values: np.ndarray | None = None
    document: int = DOCUMENT

    def read(self) -> Iterator[np.ndarray]:
        for number, (start, stop) in enumerate(self.parts):
            if self.values is not None:
                yield self.values[start:stop]
            else:
                yield _inputs(self.router.hidden_size, stop - start, self.seed, number)


@dataclass(frozen=True)
class Found:
    """Flips of a layer that were seen and that were predicted, document by document."""

    layer: str
    tokens: int
    observed: np.ndarray
    predicted: np.ndarray

    @property
    def ratio(self) -> float:
        seen = float(self.observed.sum())
        return float(self.predicted.sum()) / seen if seen else np.inf

    @property
    def error(self) -> float:
        """Standard error of the observed share, over documents."""
        each = self.tokens / len(self.observed)
        return float(self.observed.std(ddof=1) / each / np.sqrt(len(self.observed)))

    @property
    def is_within(self) -> bool:
        return 1.0 / FACTOR <= self.ratio <= FACTOR

    @property
    def is_near(self) -> bool:
        """Whether two standard errors of the observed share lead to a ratio within the factor."""
        slack, share = 2.0 * self.error, self.observed.sum() / self.tokens
        wanted = self.predicted.sum() / self.tokens
        return wanted / FACTOR <= share + slack and share - slack <= wanted * FACTOR


def _rows(hidden: int, experts: int, random: np.random.Generator) -> np.ndarray:
    """Half of each row in directions that all share, lengths a third apart."""
    shared = random.standard_normal((experts, 16)) @ random.standard_normal((16, hidden)) / 4.0
    rows = random.standard_normal((experts, hidden)) + shared
    lengths = np.exp(0.3 * random.standard_normal((experts, 1)))
    return (lengths * rows / np.sqrt(2.0 * hidden)).astype(np.float32)


def _inputs(hidden: int, tokens: int, seed: int | None, part: int) -> np.ndarray:
    """Inputs of one part of a layer; means, scales and sinks are those of the layer."""
    own = np.random.default_rng([seed or 0, 1])
    scale = np.exp(0.5 * own.standard_normal(hidden)).astype(np.float32)
    scale[own.choice(hidden, 4, replace=False)] *= 10.0
    mean = 0.3 * own.standard_normal(hidden, dtype=np.float32)
    sink = 30.0 * own.standard_normal(hidden, dtype=np.float32)
    random = np.random.default_rng([seed or 0, 2, part])
    values = random.standard_normal((tokens, hidden), dtype=np.float32)
    about = 0.5 * random.standard_normal((tokens // DOCUMENT, hidden), dtype=np.float32)
    values += mean + np.repeat(about, DOCUMENT, axis=0)
    values *= scale
    values[::DOCUMENT] = sink + values[::DOCUMENT]
    return values


def _synthetic(hidden: int, experts: int, top_k: int, tokens: int, seeds: int) -> Iterator[Layer]:
    rule, origin = Rule(top_k, "softmax", Weights("scores")), Provenance("", (), "", "F32")
    step = 4 * TILE
    parts = tuple((start, start + step) for start in range(0, tokens, step))
    for seed in range(seeds):
        weight = _rows(hidden, experts, np.random.default_rng([seed, 0]))
        router = Router("text/0", "text", 0, weight, rule, origin)
        yield Layer(f"({hidden}, {experts}, {top_k}) seed {seed}", router, parts, seed)


def _recorded(model: str, step: str) -> Iterator[Layer]:
    """Every layer of a sample, with the last half of the documents of its recording."""
    routers = load_routers(open_checkpoint(str(SAMPLES / model / step))).routers
    source = open_tokens(
        str(SAMPLES / model / "rec" / step), None, None, tuple(r.name for r in routers)
    )
    total = source.facts.num_tokens
    document = source.read_columns(0, total).document
    first = int(np.flatnonzero(document >= len(np.unique(document)) // 2)[0])
    each = (total - first) // len(np.unique(document[first:]))
    for router in routers:
        values = source.read_values(router.name, 0, total)[first:]
        parts = ((0, total - first),)
        yield Layer(f"{model} {router.name}", router, parts, values=values, document=each)


def _compare(layer: Layer, name: str) -> Found | None:
    """None where the rule has no prediction."""
    router = layer.router
    if not router.rule.is_affine:
        return None
    emulated = emulate(router, arithmetic(name))
    prepared, kernels = prepare(router), load_kernels("cpu")
    observed, predicted, tokens = [], [], 0
    for values in layer.read():
        source = ArraySource({router.name: values}, document_tokens=layer.document)
        found = LazyBatch(Task(prepared, source, kernels, variant=emulated), 0, len(values))
        flip = found.flip
        if flip is None or flip.predicted is None:
            return None
        observed.append(np.bincount(found.document, flip.differs))
        predicted.append(np.bincount(found.document, flip.predicted))
        tokens += len(values)
    return Found(layer.name, tokens, np.concatenate(observed), np.concatenate(predicted))


def _mark(found: Found) -> str:
    if found.observed.sum() < FEWEST:
        return "few"
    return "" if found.is_within else "outside, chance" if found.is_near else "OUTSIDE"


def _summary(found: Iterable[Found]) -> str:
    marks = [_mark(one) for one in found]
    counted = [mark for mark in marks if mark != "few"]
    within, near = counted.count(""), counted.count("outside, chance")
    share = 100.0 * within / len(counted) if counted else np.nan
    return (
        f"{within} of {len(counted)} layers within {FACTOR} ({share:.0f} %), {near} more within "
        f"two errors of it; {marks.count('few')} with under {FEWEST} flips"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=ARITHMETICS, metavar="ARITHMETIC")
    arguments = parser.parse_args()
    layers = [layer for sample in RECORDED for layer in _recorded(*sample)]
    layers += [layer for shape in SHAPES for layer in _synthetic(*shape, arguments.seeds)]
    all_found: list[Found] = []
    with threadpool_limits(1):
        for name in arguments.only:
            print(f"{name}:")
            compared = [found for layer in layers if (found := _compare(layer, name))]
            for one in compared:
                seen, wanted = (
                    100.0 * part.sum() / one.tokens for part in (one.observed, one.predicted)
                )
                print(
                    f"  {one.layer:28} {one.observed.sum():6.0f} flips, observed "
                    f"{seen:7.3f} +- {100.0 * one.error:.3f} %, predicted {wanted:7.3f} %, "
                    f"ratio {one.ratio:5.2f} {_mark(one)}"
                )
            print(f"  {name}: {_summary(compared)}", flush=True)
            all_found += compared
    print(f"all: {_summary(all_found)}")


if __name__ == "__main__":
    main()
