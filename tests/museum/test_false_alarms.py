"""What is healthy passes the gate: any shape, any documents, drawn anew as often as wanted, and
every step of a training.
"""

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checks import run_checks
from moegeom.checks.baseline import Baseline, baseline_of
from moegeom.checks.profile import BUILT_IN, Profile
from moegeom.core.finding import Verdict
from moegeom.core.router import Router
from moegeom.core.tokens import TokenColumns
from moegeom.engine.run_facts import column_versions
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.pipeline import lint
from moegeom.results.reader import MemoryResults, ResultsView
from moegeom.router.load import load_routers
from moegeom.studies.check.study import GateRequest, gate, measured_of
from moegeom.testing.array_source import ArraySource
from moegeom.tokens.open import open_tokens
from tests.by_day import by_day, one_of_each
from tests.museum.checkpoint import Checkpoint
from tests.museum.healthy import SAMPLES, drawn_shape, sigmoid_model, softmax_model, trained
from tests.museum.invariances import NEUTRAL, applicable, changed

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


#: Sets of documents of each population, and shapes of routers.
SETS, SHAPES = 100, 200

#: Sets are compared with one of so many baselines, and hold so many documents.
BASELINES, SIZES = 10, (20, 400)


def verdicts(
    path: str, results: ResultsView, baseline: Baseline | None = None
) -> Iterator[Verdict]:
    for base in BUILT_IN:
        yield run_checks(measured_of(GateRequest(path), results, baseline), Profile(base=base))


@pytest.mark.parametrize("number", by_day(range(SHAPES), [0]))
def test_a_healthy_router_of_any_shape_gives_no_finding(number, tmp_path):
    path = str(drawn_shape(number).write(tmp_path / "model"))
    for verdict in verdicts(path, lint(path)):
        assert (verdict.exit_code, verdict.findings) == (0, ())


def drawn(population: str, *seed: int) -> ResultsView:
    """Results on documents drawn anew; sizes are spread evenly over their logarithms."""
    random = np.random.default_rng([400, *seed])
    count = int(np.exp(random.uniform(*np.log(SIZES))))
    source = POPULATIONS[population]()
    return results_on(source.path, source.draw(random, count))


@functools.cache
def baseline(population: str, number: int) -> Baseline:
    return baseline_of(drawn(population, 1, number))


@pytest.mark.parametrize(
    ("number", "population"),
    by_day(
        itertools.product(range(SETS), POPULATIONS),
        {"recorded, sigmoid": (0, "trained sigmoid"), "on topics, softmax": (0, "softmax")},
    ),
)
def test_fresh_documents_give_no_finding(number, population):
    path = POPULATIONS[population]().path
    expected = {*said("deepseek-tiny")} if population == "trained sigmoid" else set()
    results = drawn(population, 2, number)
    bases = (None, baseline(population, number % BASELINES))
    for verdict in itertools.chain.from_iterable(verdicts(path, results, b) for b in bases):
        assert {finding.code for finding in verdict.findings} == expected
        assert verdict.open == ()


@pytest.mark.nightly
def test_what_is_measured_here_is_what_the_gate_measures():
    population = POPULATIONS["trained sigmoid"]()
    source = population.draw(np.random.default_rng(5), 40)
    by_gate = gate(GateRequest(population.path, tokens=source)).verdict
    here, *_ = verdicts(population.path, results_on(population.path, source))
    assert here.outcomes == by_gate.outcomes
    assert here.detectable == by_gate.detectable


# -------------------------------------------- trained checkpoints that no limit was set on
def steps(name: str) -> list[str]:
    folders = (SAMPLES / name).glob("step_*")
    numbers = sorted(int(folder.name.removeprefix("step_")) for folder in folders)
    return [f"{name}/step_{number}" for number in numbers]


TRAININGS = [steps(name) for name in ("olmoe-balanced", "olmoe-collapsed", "deepseek-tiny")]
FOLLOWING = [pair for names in TRAININGS for pair in itertools.pairwise(names)]

#: What the config leaves to engines: it was written by a class that does not read the keys.
SAID = {"deepseek-tiny": ("MGI113",)}


def training(name: str | tuple[str, str]) -> str:
    """By day the first checkpoint and the first step of each training."""
    return (name if isinstance(name, str) else name[0]).partition("/")[0]


def said(name: str) -> tuple[str, ...]:
    return SAID.get(training(name), ())


@pytest.mark.parametrize("name", one_of_each(itertools.chain(*TRAININGS), training))
def test_the_weights_of_a_trained_checkpoint_give_no_finding(museum, name):
    seen = museum.show(trained(name))
    assert (seen.codes, seen.exit_code) == (said(name), 0)


@pytest.mark.parametrize(("before", "after"), one_of_each(FOLLOWING, training))
def test_a_step_of_training_moves_rows_and_is_no_error(museum, before, after):
    seen = museum.show(trained(after), trained(before))
    assert (seen.codes, seen.exit_code) == (("MGG401", *said(after)), 0)


# --------------------------------------------------------------------------- what changes no choice
_DAY = {
    "common vector": ("shift", "synthetic softmax"),
    "long common vector": ("long shift", "olmoe-balanced"),
    "places of experts": ("renumbering", "synthetic softmax"),
    "places within groups": ("renumbering", "deepseek-tiny"),
    "gain": ("folding", "synthetic sigmoid"),
    "factor in the dtype": ("half", "olmoe-collapsed"),
    "factor that rounds": ("triple", "olmoe-balanced"),
    "rounding": ("rounding", "deepseek-tiny"),
}


@pytest.mark.parametrize(("change", "model"), by_day(applicable(), _DAY))
def test_a_change_that_changes_no_choice_is_an_error_only_where_weights_change(
    museum, change, model
):
    new, old = changed(change, model)
    assert museum.show(new).codes == ()
    seen = museum.show(new, old)
    assert seen.codes == NEUTRAL[change].says
    assert seen.exit_code == int(bool(seen.codes))
