"""Incidents are found by their code, disagreements explained by their own cause, twins left alone;
the page is built of what the exhibits state, and every thread on it can be followed.
"""

import functools
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.core.errors import CheckpointError
from moegeom.studies.check.study import GateRequest, gate
from moegeom.studies.explain.record import VERDICTS, CauseVerdict
from tests.by_day import IS_NIGHT, by_day, one_of_each
from tests.doc_scripts import script
from tests.generator.scoring import NAMES
from tests.museum import disagreements as of
from tests.museum.checkpoint import name_of, permuted, text_order
from tests.museum.exhibit_biases import BIAS_BEFORE_CAST, BIAS_NEVER_UPDATED, BIAS_RAN_AWAY
from tests.museum.exhibit_rows import ROWS_SORTED_AS_TEXT
from tests.museum.gallery import Case, Incident, all_cases
from tests.museum.healthy import sigmoid_model, softmax_model
from tests.museum.incidents import DISAGREEMENTS, INCIDENTS, RECIPES
from tests.museum.questions import Checked, Explained
from tests.museum.recipe import Grade, Planted, Recipe, Said, half_of
from tests.museum.score import Scored, answered
from tests.museum.two_runs import PLAIN, Runs, all_pairs


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

_DAY = {
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


@pytest.mark.parametrize(("disagreement", "pair"), by_day(PAIRS, _DAY), ids=label)
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
