"""A part of the text on few experts is found with its place, and ordinary documents are none."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student

import moegeom as mg
from moegeom.geometry.load import effective_by_unit, lowest_part
from moegeom.studies.check.text_parts import domain_facts
from tests.unit.tokens.dialects.written import Written, write_vllm

CHECKPOINT = Path("sample_ckpts/olmoe-balanced/step_1500").resolve()
LAYERS, EXPERTS, TOP_K = 3, 16, 4


def documents(seed: int, number: int, few: range, experts: int = TOP_K + 1) -> list[np.ndarray]:
    """Choices of heavy-tailed routers on documents of different topics; ``few`` live on few."""
    draw = np.random.default_rng(seed)
    favour = draw.standard_t(4, (LAYERS, EXPERTS)) * 0.3
    topics = draw.standard_normal((6, LAYERS, EXPERTS)) * 0.5
    texts = []
    for document in range(number):
        length = int(np.exp(draw.normal(4.5, 0.6))) + 33
        scores = favour + topics[draw.integers(6)] + draw.gumbel(size=(length, LAYERS, EXPERTS))
        if document in few:
            scores[:, :, experts:] -= 50.0
        texts.append(np.argsort(-scores, axis=2)[:, :, :TOP_K])
    return texts


def judged(path: Path, texts: list[np.ndarray]):
    """The outcome of MGB205 on replies of these choices."""
    whole = [
        Written(f"r{n}", ids, np.arange(len(ids) + 1), 1, dtype="int16")
        for n, ids in enumerate(texts)
    ]
    write_vllm(path / "r.jsonl", whole)
    verdict = mg.check(CHECKPOINT, path / "r.jsonl", select=("MGB205",)).value.verdict
    (outcome,) = verdict.outcomes
    return outcome


@pytest.mark.parametrize(
    ("few", "place"),
    [(range(7, 8), "document 7 (tokens "), (range(10, 14), "documents 10 to 13 (tokens ")],
)
def test_a_part_on_few_experts_is_found_at_its_place(few, place, tmp_path):
    texts = documents(1, 32, few)
    outcome = judged(tmp_path, texts)
    assert outcome.state == "failed"
    starts = np.cumsum([0, *map(len, texts)])
    tokens = f"{starts[few.start]:,} to {starts[few.stop] - 1:,}"
    assert all(f"{place}{tokens})" in finding.title for finding in outcome.findings)


@pytest.mark.parametrize("seed", range(4))
def test_ordinary_documents_are_no_finding_of_check(seed, tmp_path):
    assert judged(tmp_path, documents(seed, 32, range(0))).state == "passed"


def test_a_part_of_one_long_text_is_found_and_few_documents_are_not_judged(tmp_path):
    text = np.concatenate(documents(2, 40, range(0)))[:4096]
    text[1024:1536] = text[1024:1025]
    outcome = judged(tmp_path, [text])
    assert outcome.state == "failed"
    assert "tokens 1,024 to 1,535 lies on few experts" in outcome.findings[0].title
    outcome = judged(tmp_path, documents(3, 8, range(2, 3)))
    assert outcome.state == "does not apply"
    assert outcome.reason.startswith("8 documents; needed: 9 at least")


def test_two_hundred_heavy_tailed_routers_have_no_low_part():
    """70 seeds of three layers, none below one in a thousand; on each, four documents are found."""
    for seed in range(70):
        for texts, is_low in (
            (documents(seed, 40, range(0)), False),
            (documents(seed, 40, range(20, 24), TOP_K), True),
        ):
            counts = np.zeros((LAYERS, 40, EXPERTS), np.int64)
            for (document, ids), layer in itertools.product(enumerate(texts), range(LAYERS)):
                counts[layer, document] = np.bincount(ids[:, layer].ravel(), minlength=EXPERTS)
            for of_layer in counts:
                part = lowest_part(np.log(effective_by_unit(of_layer, TOP_K)), math.log(2.0))
                assert (part.p_value < 1e-3) == is_low
                if is_low:
                    assert (part.first, part.last) == (20, 23)


def test_effective_experts_count_pairs_of_different_tokens():
    draw = np.random.default_rng(0)
    for top_k in (1, 3):
        ids = np.argsort(draw.random((9, EXPERTS)), axis=1)[:, :top_k]
        pairs = list(itertools.permutations(range(9), 2))
        meet = [(a == b) for i, j in pairs for a in ids[i] for b in ids[j]]
        counts = np.bincount(ids.ravel(), minlength=EXPERTS)[None]
        expected = min(EXPERTS, 1.0 / np.mean(meet)) if any(meet) else EXPERTS
        np.testing.assert_allclose(effective_by_unit(counts, top_k), expected)


def test_the_lowest_part_is_the_run_whose_students_t_is_largest():
    draw = np.random.default_rng(1)
    for _ in range(60):
        num = int(draw.integers(9, 30))
        values = draw.normal(0.0, 0.1, num)
        start, size = int(draw.integers(num - 4)), int(draw.choice([1, 2, 4]))
        values[start : start + size] -= 2.0
        runs = [
            (at, length)
            for length in (1, 2, 4, 8)
            if length <= min(num // 2, num - 8)
            for at in range(num - length + 1)
        ]
        if (start, size) not in runs:
            continue
        p_values = []
        for at, length in runs:
            others = np.delete(values, slice(at, at + length))
            error = others.std(ddof=1) * math.sqrt(1 / length + 1 / len(others))
            fall = others.mean() - values[at : at + length].mean()
            p_values.append(student.sf(fall / error, len(others) - 1) if fall > math.log(2) else 1)
        part = lowest_part(values, math.log(2.0))
        assert part.num_tests == len(runs)
        assert (part.first, part.last) == (start, start + size - 1)
        assert part.p_value == pytest.approx(len(runs) * min(p_values), rel=1e-6)


@pytest.mark.parametrize(("maths", "is_few"), [(3.0, True), (9.0, False)])
def test_a_domain_is_compared_with_the_median_of_the_others(maths, is_few):
    effective = {"web": 14.0, "code": 12.0, "maths": maths}
    rows = [
        {
            "population": f"domain={name}",
            "effective_experts": value,
            "effective_experts_se": 0.02 * value,
            "num_blocks": 16,
            "num_tokens": 1000,
        }
        for name, value in effective.items()
    ]
    shape = {"router": "text/0", "variant": "as_stored", "num_experts": 16, "top_k": 4}
    (facts,) = domain_facts([shape | row for row in rows])
    assert facts["num_tests"] == 3
    assert bool(facts["low"]) == is_few
    if is_few:
        error = 0.02 * math.sqrt(2.0)
        expected = 3.0 * student.sf(math.log(13.0 / 3.0) / error, 15)
        place = {"place": "domain maths", "effective": 3.0, "others": 13.0}
        assert facts["low"] == place | {"p_value": pytest.approx(expected)}
    few = [shape | row | {"num_tokens": 30} for row in rows]
    assert domain_facts(few) == []
