"""Sets of documents drawn anew, as often as wanted, and what the gate reads of them."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import Router
from moegeom.core.tokens import TokenColumns
from moegeom.engine.run_facts import column_versions
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.pipeline import lint
from moegeom.results.reader import MemoryResults
from moegeom.router.load import load_routers
from moegeom.testing.array_source import ArraySource
from moegeom.tokens.open import open_tokens
from tests.museum.checkpoint import Checkpoint
from tests.museum.healthy import SAMPLES, sigmoid_model, softmax_model

#: Metrics that checks of tokens read; a scan has thirty more, which take most of its time.
_METRICS = [
    METRICS[name]
    for name in (
        *("agreement", "bf16_flip", "directions", "expert_sets"),
        *("input_pull", "input_pull_random", "load", "tokens"),
    )
]

Arrays = Mapping[str, np.ndarray]


class Documents(ArraySource):
    """Router inputs of documents of any length, and what was chosen where that is known."""

    def __init__(self, values: Arrays, columns: TokenColumns, chosen: Arrays | None) -> None:
        super().__init__(values, chosen=chosen)
        self._columns = columns

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return TokenColumns(
            **{name: values[start:stop] for name, values in vars(self._columns).items()}
        )


class Population(Protocol):
    """Where documents come from; ``path`` is the checkpoint that they are of."""

    path: str

    def draw(self, random: np.random.Generator, count: int) -> Documents: ...


def _columns(lengths: Sequence[int]) -> TokenColumns:
    document = np.repeat(np.arange(len(lengths)), lengths)
    unknown = np.full(len(document), -1)
    position = np.concatenate([np.arange(length) for length in lengths])
    return TokenColumns(
        document, position.astype(np.int32), unknown.astype(np.int32), unknown.astype(np.int16)
    )


class Recorded:
    """Documents of the recording of a sample, each cut somewhere; drawn with replacement."""

    def __init__(self, name: str) -> None:
        self.path = str(SAMPLES / name / "step_1500")
        routers = [router.name for router in load_routers(open_checkpoint(self.path)).routers]
        source = open_tokens(str(SAMPLES / name / "rec/step_1500"), None, None, tuple(routers))
        count = source.facts.num_tokens
        document = source.read_columns(0, count).document
        self._documents = [np.flatnonzero(document == d) for d in np.unique(document)]
        self._inputs = {name: np.array(source.read_values(name, 0, count)) for name in routers}
        self._chosen = {name: np.array(source.read_chosen(name, 0, count)) for name in routers}

    def draw(self, random: np.random.Generator, count: int) -> Documents:
        drawn = [self._documents[d] for d in random.integers(len(self._documents), size=count)]
        cut = [tokens[: random.integers(4, len(tokens) + 1)] for tokens in drawn]
        token = np.concatenate(cut)
        inputs, chosen = (
            {name: values[token] for name, values in arrays.items()}
            for arrays in (self._inputs, self._chosen)
        )
        return Documents(inputs, _columns([len(tokens) for tokens in cut]), chosen)


class OnTopics:
    """Documents of 4 to 128 tokens that each share a direction; all lean to a common one."""

    def __init__(self, model: Checkpoint, topic: float) -> None:
        self.path = str(model.write(Path(tempfile.mkdtemp()) / "model"))
        self._routers: tuple[Router, ...] = load_routers(open_checkpoint(self.path)).routers
        self._topic = topic

    def draw(self, random: np.random.Generator, count: int) -> Documents:
        columns = _columns(random.integers(4, 129, count).tolist())
        own = np.sqrt(1.0 - self._topic**2)
        values = {}
        for router in self._routers:
            hidden = router.hidden_size
            common = 0.2 * np.random.default_rng([7, router.layer]).standard_normal(hidden)
            topics = random.standard_normal((count, hidden))[columns.document]
            inputs = own * random.standard_normal(topics.shape) + self._topic * topics + common
            inputs *= np.sqrt(hidden) / np.linalg.norm(inputs, axis=1, keepdims=True)
            values[router.name] = (inputs * router.gain).astype(np.float32)
        return Documents(values, columns, None)


#: Documents that share half of their directions have 16 blocks that differ as much as loads do.
POPULATIONS: Mapping[str, Callable[[], Population]] = {
    "trained softmax": functools.cache(lambda: Recorded("olmoe-balanced")),
    "trained sigmoid": functools.cache(lambda: Recorded("deepseek-tiny")),
    "softmax": functools.cache(lambda: OnTopics(softmax_model(layers=2), 0.7)),
    "sigmoid": functools.cache(lambda: OnTopics(sigmoid_model(layers=2), 0.3)),
}


@functools.cache
def _weights(path: str) -> tuple[MemoryResults, Mapping[str, Router]]:
    routers = load_routers(open_checkpoint(path)).routers
    return lint(path), {router.name: router for router in routers}


def results_on(path: str, source: Documents) -> MemoryResults:
    """What the gate reads of a checkpoint and tokens; the weights are measured once."""
    weights, routers = _weights(path)
    tables: dict[str, list[dict[str, Any]]] = {"layers": [], "experts": []}
    parts: dict[str, Any] = {}
    for router in routers.values():
        made = measure_router(RouterRun(router, source, _METRICS))
        parts[router.name], rows = made.facts, made.rows
        for table, found in tables.items():
            known = {_key(row): row for row in weights.rows(table)}
            found += [{**known.get(_key(row), {}), **row} for row in rows[table]]
    facts = {
        "tokens": dataclasses.asdict(source.facts),
        "column_versions": column_versions(METRICS.all()),
        "parts": parts,
    }
    return MemoryResults({**weights.run, **facts}, tables)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("router", "variant", "population", "expert"))
