"""What is healthy passes the gate: any shape, any documents, and every step of a training."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from moegeom.checks import run_checks
from moegeom.checks.baseline import Baseline, baseline_of
from moegeom.checks.profile import BUILT_IN, Profile
from moegeom.core.finding import Verdict
from moegeom.pipeline import lint
from moegeom.results.reader import ResultsView
from moegeom.studies.check.study import GateRequest, gate, measured_of
from tests.by_day import by_day, one_of_each
from tests.museum.fresh_documents import POPULATIONS, results_on
from tests.museum.healthy import SAMPLES, trained
from tests.museum.healthy_shapes import drawn_shape
from tests.museum.invariances import NEUTRAL, applicable, changed

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
