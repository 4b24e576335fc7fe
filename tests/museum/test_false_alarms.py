"""What is healthy passes the gate: any shape, any documents, drawn anew as often as wanted, and
every step of a training. Incidents are found by their code, disagreements explained by their own
cause, twins left alone; the page is built of what the exhibits state, its threads can be followed.
"""

import dataclasses
import functools
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checks import run_checks
from moegeom.checks.baseline import Baseline, baseline_of
from moegeom.checks.check import CHECKS
from moegeom.checks.profile import BUILT_IN, Profile
from moegeom.core.errors import CheckpointError
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
from moegeom.studies.explain.record import VERDICTS, CauseVerdict
from moegeom.tokens.open import open_tokens
from tests.array_source import ArraySource
from tests.by_day import IS_NIGHT, by_day, one_of_each
from tests.columns import columns_of
from tests.doc_scripts import script
from tests.generator.scoring import NAMES
from tests.museum import disagreements as of
from tests.museum.checkpoint import Checkpoint, name_of, permuted, text_order
from tests.museum.exhibit_biases import BIAS_BEFORE_CAST, BIAS_NEVER_UPDATED, BIAS_RAN_AWAY
from tests.museum.exhibit_rows import ROWS_SORTED_AS_TEXT
from tests.museum.gallery import Case, Incident, all_cases
from tests.museum.healthy import SAMPLES, drawn_shape, sigmoid_model, softmax_model, trained
from tests.museum.invariances import NEUTRAL, applicable, changed
from tests.museum.questions import Checked, Explained
from tests.museum.recipe import Grade, Planted, Recipe, Said, half_of
from tests.museum.score import DISAGREEMENTS, INCIDENTS, RECIPES, Scored, answered
from tests.museum.two_runs import PLAIN, Runs, all_pairs

#: Columns that checks of tokens read, and the metrics that fill them or a run's facts; a scan has
#: thirty more, which take most of its time.
_NEEDS = {need for check in CHECKS.all() if "tokens" in check.inputs for need in check.needs}
_METRICS = [
    metric
    for metric in METRICS.all()
    if metric.name in ("agreement", "tokens", "directions")
    or not _NEEDS.isdisjoint(column.name for column in metric.columns.get("layers", ()))
]

Arrays = Mapping[str, np.ndarray]


class Documents(ArraySource):
    """Router inputs of documents of any length, and what was chosen where that is known."""

    def __init__(self, values: Arrays, columns: TokenColumns, chosen: Arrays | None) -> None:
        super().__init__(values, chosen=chosen)
        self._columns = columns

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return self._columns.at(slice(start, stop))


class Population(Protocol):
    """Where documents come from; ``path`` is the checkpoint that they are of."""

    path: str

    def draw(self, random: np.random.Generator, count: int) -> Documents: ...


def _columns(lengths: Sequence[int]) -> TokenColumns:
    return columns_of(np.repeat(np.arange(len(lengths)), lengths))


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
def test_a_change_of_no_choice_is_an_error_only_where_weights_change(museum, change, model):
    new, old = changed(change, model)
    assert museum.show(new).codes == ()
    seen = museum.show(new, old)
    assert seen.codes == NEUTRAL[change].says
    assert seen.exit_code == int(bool(seen.codes))


# ---------------------------------------------------------------------------------------- incidents
def mechanism(shown: tuple[Incident, Case]) -> tuple[str, bool, bool]:
    """By day one size that is found, one that is missed and one twin of each incident."""
    incident, case = shown
    return incident.name, case in incident.twins, case.is_missed


def label(one: Any) -> str:
    """Of an incident and of a disagreement its name, of a case what was done."""
    return getattr(one, "name", "") or one.text


@pytest.mark.parametrize(
    ("incident", "case"), one_of_each(all_cases(INCIDENTS), mechanism), ids=label
)
def test_the_gate_says_exactly_what_the_table_states(museum, incident, case):
    museum.confirm(incident, case)


# ----------------------------------------------------------------------------- what the gate tells
@pytest.mark.parametrize(
    ("incident", "size", "code", "title", "detail"),
    [
        (BIAS_BEFORE_CAST, 1, "MGN112", "", "238 distinct values become 8"),
        (BIAS_RAN_AWAY, 1, "MGI110", "expert 9", "Certificate: 31 experts beat expert 9 for every"),
        (BIAS_NEVER_UPDATED, 0, "MGN116", "selection bias 0:", ""),
        (BIAS_NEVER_UPDATED, 2, "MGN116", "selection bias 0.5:", ""),
        (ROWS_SORTED_AS_TEXT, 0, "MGI121", "2 was 3, 3 was 2", "16 of 16 experts are where they"),
    ],
)
def test_a_finding_names_what_it_is_about(museum, incident, size, code, title, detail):
    finding = museum.visit(incident, incident.sizes[size]).of(code)
    assert title in finding.title
    assert detail in finding.detail


def test_a_repair_has_its_proof_and_rows_renumbered_without_experts_are_an_error(museum):
    fix = museum.visit(BIAS_BEFORE_CAST, BIAS_BEFORE_CAST.sizes[1]).of("MGN112").fix
    assert "subtract 6.94 from every bias" in fix
    assert "Proof that no choice changes" in fix
    assert name_of("bias", 0).replace("0", "*") in fix
    model = softmax_model()
    seen = museum.show(permuted(model, text_order(32), ("weight",)), model)
    assert (seen.codes, seen.exit_code) == (("MGI121",), 1)
    assert "is not known" in seen.of("MGI121").detail


def test_a_sharded_save_is_refused_before_its_slices_are_taken_for_tensors(tmp_path):
    model = sigmoid_model()
    (tmp_path / "config.json").write_text(json.dumps(dict(model.config)), encoding="utf-8")
    for part in (0, 1):
        slices = {n: np.array_split(t, 2)[part].copy() for n, t in model.tensors.items()}
        file = tmp_path / f"shard-0000{part + 1}-model-00001-of-00001.safetensors"
        save_file(slices, file, metadata={"DCP_SHARDING_INFO": "{}"})
    with pytest.raises(CheckpointError, match="row slices"):
        gate(GateRequest(str(tmp_path)))


PAIRS = all_pairs(DISAGREEMENTS)

_INCIDENTS_BY_DAY = {
    "gain not folded": (of.SMOOTHED, of.SMOOTHED.pairs[0]),
    "router stale": (of.ANOTHER_REVISION, of.ANOTHER_REVISION.pairs[1]),
    "bias rounded": (of.BIAS_CAST, of.BIAS_CAST.pairs[1]),
    "bias stale": (of.BIAS_FROZEN, of.BIAS_FROZEN.pairs[0]),
    "bias in routing weights": (of.BIAS_LEAKS, of.BIAS_LEAKS.pairs[0]),
    "layers shifted": (of.LAYERS_SHIFTED, of.LAYERS_SHIFTED.pairs[0]),
    "padding counted": (of.PADDING, of.PADDING.pairs[0]),
    "beyond noise": (of.RACE, of.RACE.pairs[1]),
    "not the router": (of.NOT_THE_ROUTER, of.NOT_THE_ROUTER.pairs[0]),
    "arithmetic noise only": (of.LAYERS_SHIFTED, of.LAYERS_SHIFTED.twins[0]),
}


@functools.cache
def verdict(build: Runs) -> CauseVerdict:
    """What the command says, by day of half the tokens; pairs that are built alike are one run."""
    runs = build()
    if not IS_NIGHT and build is not of.RACE.pairs[1].build:  # which many tokens tell from noise
        runs = replace(runs, tokens=min(runs.tokens, 1024))
    with tempfile.TemporaryDirectory() as folder:
        return runs.explained(Path(folder) / "runs").verdict


@pytest.mark.parametrize(("disagreement", "pair"), by_day(PAIRS, _INCIDENTS_BY_DAY), ids=label)
def test_the_verdict_is_the_cause(disagreement, pair):
    assert verdict(pair.build).cause == pair.cause, verdict(pair.build).detail
    assert pair.begins is None or verdict(pair.build).router == f"text/{pair.begins}"


def test_every_verdict_is_shown_and_every_disagreement_has_a_twin():
    assert {pair.cause for _, pair in PAIRS} | NAMES == set(VERDICTS)
    assert all(disagreement.pairs and disagreement.twins for disagreement in DISAGREEMENTS)


THREAD = re.compile(r"[\w.-]+/[\w.-]+#[0-9]+")


def rows_of(ask: Callable[[Recipe], Sequence[Scored]]) -> list[str]:
    """Of the page of the site one row for each size, pair and twin."""
    page = script("refresh_museum").render(ask)
    assert page.count("\n- **") == len([*INCIDENTS, *DISAGREEMENTS, *RECIPES])
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    built = [case for one in INCIDENTS for case in (*one.sizes, *one.twins)]
    built += [pair for one in DISAGREEMENTS for pair in one.built]
    built += [planted for one in RECIPES for planted in (*one.sizes, *one.twins)]
    assert len(rows) == len(built)
    assert [row for row, one in zip(rows, built, strict=True) if one.text not in row] == []
    assert {row.count(" |") for row in rows} == {7}
    return rows


def test_the_page_has_what_the_exhibits_state_and_asks_the_tuned_half_alone():
    asked = []
    rows = rows_of(asked.append)
    assert asked == [recipe for recipe in RECIPES if recipe.half == "tuned"]
    assert sum(row.endswith("| ? | ? | ? |") for row in rows) == sum(
        len((*recipe.sizes, *recipe.twins)) for recipe in asked
    )


@pytest.mark.nightly
def test_the_page_says_what_is_answered_to_the_tuned_half():
    rows = rows_of(lambda recipe: list(answered(recipe)))
    assert not any("| ? " in row for row in rows)
    assert any(f"| {get_args(Grade)[0]}: **" in row for row in rows)


def test_names_are_unique_and_threads_can_be_followed():
    for shown in (INCIDENTS, DISAGREEMENTS, RECIPES):
        names = [one.name for one in shown]
        assert len(set(names)) == len(names)
        for one in shown:
            assert all(THREAD.fullmatch(thread) for thread in one.threads)
            assert one.story.endswith(".")


# ------------------------------------------------------------------------------------------ recipes
def test_records_are_complete_and_halves_follow_from_the_first_thread_alone():
    for recipe in RECIPES:
        assert recipe.threads
        assert all(text.endswith(".") for text in (recipe.planting, recipe.answer))
        assert 2 <= len(recipe.sizes) <= 3
        assert recipe.twins
    threads = [thread for recipe in RECIPES for thread in recipe.threads]
    assert len(set(threads)) == len(threads)
    # sha256 of "radixark/miles#3277" begins with 0x22, that of "radixark/miles#1724" with 0x7f
    assert half_of(("radixark/miles#3277",)) == "tuned"
    assert half_of(("radixark/miles#1724",)) == "untouched"
    both = ("radixark/miles#3277", "radixark/miles#1724")
    assert half_of(both) == half_of(both[::-1]) == "untouched"
    assert {recipe.half for recipe in RECIPES} == {"tuned", "untouched"}


def test_a_grade_asks_for_the_word_and_for_what_must_be_told():
    planted = Planted("", lambda: pytest.fail("not asked"), ("rows repeated",), r"\b40\b")
    for word, text, claims, *grades in (
        ("rows repeated", "positions 40 to 106", "cause", "named", "right"),
        ("rows repeated", "some rows", "cause", "only something is off", "error"),
        ("router stale", "positions 40 to 106", "cause", "wrong cause", "error"),
        ("inconclusive", "", "open", "only something is off", "warned"),
        ("silent", "positions 40 to 106", "health", "missed", "warned"),
    ):
        answer = Said((word,), text, claims, claims == "cause", 0)
        assert [planted.grade(answer), planted.twin_grade(answer)] == grades


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_damage_is_there_and_a_twin_routes_as_noise_of_less_than_a_hundredth_would(recipe):
    twins = [twin.build() for twin in recipe.twins]
    for planted in recipe.sizes:
        question = planted.build()
        if isinstance(question, Explained):
            found = question.runs.routed()
            healthy = PLAIN.route(question.runs.a, 0, found.a_inputs["text/0"])[1]
            by_weights = np.abs(found.b_weights["text/0"] - healthy).mean() > 0.05
            assert found.differs().mean() > 0.0015 or by_weights, planted.text
        else:
            is_check = isinstance(question, Checked)
            healthy = (twins[0].checkpoint if is_check else question.a).tensors
            damaged = (question.checkpoint if is_check else question.b).tensors
            same = [n for n in healthy if n in damaged and np.array_equal(healthy[n], damaged[n])]
            assert len(same) < len(healthy), planted.text
    for twin in twins:
        if isinstance(twin, Explained):
            assert twin.runs.routed().differs().mean() < 0.06
