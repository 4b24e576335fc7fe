"""What is healthy passes the gate under every built-in profile, whatever documents it is shown."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from moegeom.checks.baseline import Baseline, baseline_of
from moegeom.checks.profile import BUILT_IN, Profile
from moegeom.core.finding import Verdict
from moegeom.pipeline import lint
from moegeom.results.reader import ResultsView
from moegeom.studies.check.study import GateRequest, gate, judge_results
from tests.museum.fresh_documents import POPULATIONS, results_on
from tests.museum.healthy_shapes import drawn_shape
from tests.museum.test_judges import said

#: Sets of documents of each population, and shapes of routers; by day a few of them.
SETS, SHAPES, BY_DAY = 100, 200, 1

#: Sets are compared with one of so many baselines, and hold so many documents.
BASELINES, SIZES = 10, (20, 400)


def verdicts(
    path: str, results: ResultsView, baseline: Baseline | None = None
) -> Iterator[Verdict]:
    """Under every built-in profile."""
    for base in BUILT_IN:
        yield judge_results(GateRequest(path), results, Profile(base=base), baseline)


def nightly(numbers: range) -> list:
    marks = {True: (), False: (pytest.mark.nightly,)}
    return [pytest.param(number, marks=marks[number < BY_DAY]) for number in numbers]


@pytest.mark.parametrize("number", nightly(range(SHAPES)))
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


@pytest.mark.parametrize("population", POPULATIONS)
@pytest.mark.parametrize("number", nightly(range(SETS)))
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
