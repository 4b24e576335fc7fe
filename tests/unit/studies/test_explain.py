"""What a verdict of explain may say, and that its table does not contradict it."""

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from moegeom.core.errors import InternalError
from moegeom.core.tokens import TokenColumns
from moegeom.document.chart import Bars, Polyline
from moegeom.document.model import View
from moegeom.geometry.rows import common_choices, overlap_beyond_chance
from moegeom.studies.explain.document import document
from moegeom.studies.explain.layer import InputsApart
from moegeom.studies.explain.record import (
    VERDICTS,
    CauseVerdict,
    Differing,
    EmptySlots,
    Evidence,
    Explanation,
    FlipNoise,
    LayerEvidence,
    WeightRule,
)
from moegeom.studies.explain.verdict import verdict
from moegeom.studies.faults.exchangeable import Spread, Uneven
from moegeom.studies.faults.scope import TokenRegion
from moegeom.studies.faults.score import Fault
from moegeom.studies.log_probs import _cost, _rows, log_probs
from tests.unit.document.records import sample_run
from tests.unit.studies.samples import unwrapped, worded

EVEN = Spread(("text/0",), 40, ())


def fault(name: str, bits: float, **facts: Any) -> Fault:
    """A fault of all tokens at the first router, that explains all of it."""
    inside = np.ones(10, bool)
    every: dict[str, Any] = {
        "cause": "logits rounded",
        "region": TokenRegion(inside, "", 0.0),
        "routers": ("text/0",),
        "explained": 1.0,
        "reproduced": {"text/0": 1.0},
        "before": {"text/0": 0.9},
        "mended": 1.0,
    }
    return Fault(name=name, text=name.replace("_", " "), bits=bits, **(every | facts))


def layer(number: int, agreement: float = 0.9, **facts: Any) -> LayerEvidence:
    every: dict[str, Any] = {"num_tokens": 1000, "num_clean": 900, "num_routed": 1000}
    every |= {"num_tried": 9, "num_differ": round(1000 * (1.0 - agreement))}
    every |= {"reproduced": agreement, "bits": 500.0, "num_renamed": 0, "noise": None}
    return LayerEvidence(
        f"text/{number}", agreement=agreement, **(every | {"weights": None} | facts)
    )


def evidence(*layers: LayerEvidence, **facts: Any) -> Evidence:
    other = {"name": "o", "engine": "", "stage": "ids", "num_tokens": 1000, "notes": []}
    every: dict[str, Any] = {"run": sample_run(), "other": other, "inputs_of": "A", "faults": ()}
    every |= dict.fromkeys(("num_matched", "num_examined"), 1000) | {"num_non_finite": 0}
    every |= {"any_share": 0.1, "spread": EVEN, "log_probs": None}
    return Evidence(layers=layers, **(every | facts))


def explanation(
    *layers: LayerEvidence, faults: tuple[Fault, ...] = (), cause: str = "inconclusive"
) -> Explanation:
    case = evidence(*layers, faults=faults, not_looked_at=("one thing", "another thing"))
    return Explanation(**vars(case), verdict=CauseVerdict(cause, ""))


def shown(record: Explanation, form: str = "table", width: int = 200, detail: bool = False) -> str:
    return worded(document, record, form, width=width, detail=detail)


def many(seed: int) -> tuple[Fault, ...]:
    """In the order of what they save, as the study returns them."""
    bits = np.sort(np.random.default_rng(seed).uniform(1.0, 900.0, 8))[::-1]
    return tuple(fault(f"change_{letter}", b) for letter, b in zip("abcdefgh", bits, strict=True))


@pytest.mark.parametrize(("form", "detail"), [("table", False), ("table", True), ("md", False)])
def test_faults_stand_in_the_order_of_the_bits_that_are_printed(form, detail):
    for seed in range(5):
        text = shown(explanation(layer(0), faults=many(seed)), form, detail=detail)
        bits = [
            int(re.findall(r"(\d+)[ |]*$", line)[0])
            for line in text.splitlines()
            if re.search(r"change [a-h]", line)
        ]
        assert len(bits) == (8 if detail or form == "md" else 5)
        assert bits == sorted(bits, reverse=True)


def test_a_screen_leaves_out_what_saves_nothing_and_asks_nothing_where_all_agrees():
    some = TokenRegion(np.ones(10, bool), "documents 3", 1.0)
    record = explanation(layer(0), faults=(fault("good", 50.0, region=some), fault("bad", -3.0)))
    screen, page = (unwrapped(shown(record, form)) for form in ("table", "md"))
    assert ("bad" in screen, "bad" in page) == (False, True)
    assert "2 things" in screen
    assert "2 things" in page
    assert '"scope": "documents 3"' in shown(record, "json")
    record = explanation(layer(0, 1.0), faults=many(0), cause="no disagreement")
    screen, page = (shown(record, form, 100, detail=True) for form in ("table", "md"))
    assert [word for word in ("causes", "change a", "sets") if word in screen] == []
    assert [word for word in ("causes", "change a", "sets") if word not in page] == []


def test_a_page_holds_every_layer_of_which_a_screen_shows_some_or_a_line_for_several():
    record = explanation(*(layer(n, 0.5 + 0.01 * n) for n in range(30)))
    screen, page = (shown(record, form, 100) for form in ("table", "md"))
    assert len(re.findall(r"^\W+\d+ .* 900 ", page, re.MULTILINE)) == 30
    assert len(re.findall(r"^\W+\d+ .* 900 ", screen, re.MULTILINE)) == 8
    assert "and 22 more layers: --detail" in screen
    assert "--detail" not in page
    screen = shown(explanation(*(layer(n, 0.8 if n == 3 else 0.9) for n in range(30))), width=100)
    rows = re.findall(r"^  (\S.*?)  .* 900 ", screen, re.MULTILINE)
    assert rows == ["0-2 (3)", "3", "4-29 (26)"]


def test_where_the_runs_part_is_drawn_in_percent_on_powers_of_ten_where_it_takes_them():
    for agreements, scale in (((0.95, 0.9, 1.0), "linear"), ((0.9995, 0.5, 1.0), "log10")):
        record = explanation(*(layer(n, one) for n, one in enumerate(agreements)))
        figure = next(one for one in document(record, View()).figures() if one.name == "agreement")
        (panel,) = figure.panels
        bars, before = panel.marks
        assert isinstance(bars, Bars)
        assert isinstance(before, Polyline)
        assert panel.y.scale == scale
        assert bars.y == [pytest.approx(100.0 * (1.0 - a)) if a < 1.0 else None for a in agreements]
        assert min(v for v in (*bars.y, *before.y) if v) > (panel.y.low or 0.0)


def noisy(missing: float = 0.02, **facts: Any) -> LayerEvidence:
    noise = FlipNoise(0.002, 0.1, 1.0, missing, missing, 0.001, 0, ())
    return layer(0, 1.0 - missing, noise=noise, **facts)


def of_noise(*faults: Fault, **facts: Any) -> Evidence:
    return evidence(noisy(), faults=faults, **facts)


def weighed(rule: WeightRule, **facts: Any) -> Evidence:
    return evidence(layer(0, 1.0, weights=rule), **facts)


def weighed_first(rule: WeightRule) -> Evidence:
    """Sets still agree where weights do not, and differ behind it."""
    behind = replace(noisy(0.3), router="text/1")
    return evidence(layer(0, 1.0, weights=rule), behind)


ODD = Spread(("text/0",), 40, (Uneven("documents", "documents 3 hold all", 1e-9),))
WHOLE = fault("x", 100.0)
PART = fault("x", 100.0, cause="bias missing", reproduced={"text/0": 0.96})
FITTED = fault("x", 1000.0, cause="bias differs", is_fitted=True)
UNSCALED = WeightRule(500, 0.4, None, "without the scaling factor", 0.0)
NO_RULE = WeightRule(500, 0.4, None, "renormalised", 0.3)
DROPPED = replace(UNSCALED, zeros=0.1, zeros_last=0.3)
SOME = WeightRule(500, 0.001, None, "renormalised", 0.3, outlying=0.02)
OUTLYING = WeightRule(500, 0.01, None, "renormalised", 0.02, outlying=0.02, outlying_error=0.08)
EXPLAINED = replace(OUTLYING, nearest_error=0.001)
DICE = layer(0, 0.1, beyond_chance=0.01, beyond_chance_renamed=0.04)
EMPTY = EmptySlots(100, 0, True, 1.0, False, "positions before 9")
ZEROS = replace(EMPTY, is_written=False, agreement=0.5)


def lacking(empty: EmptySlots, **facts: Any) -> Evidence:
    return evidence(layer(0, 1.0, empty=empty, **facts), layer(1))


def between(share: float | None, flips: float = 0.3, **facts: Any) -> Evidence:
    """The first router agrees, and behind it so many flip, of which other rows foretell a share."""
    far = replace(noisy(flips, foretold=share, num_clean=1000), router="text/1")
    assert far.noise is not None
    far = replace(far, noise=replace(far.noise, scale=0.04, roundings=20.0))
    return evidence(layer(0, 1.0), far, **facts)


NEAR = fault("x", 40.0, routers=("text/1",), reproduced={"text/1": 0.9}, before={"text/1": 0.7})

NOISE, OPEN, AGREED = "arithmetic noise only", "inconclusive", "no disagreement"
ROUNDED, MISSING, WEIGHTS = "logits rounded", "bias missing", "routing weights differ"


def missing(bits: float, **facts: Any) -> Fault:
    return fault("y", bits, cause=MISSING, **facts)


#: What is known, the cause that a verdict may name, and words of its detail.
BELIEVED = {
    "noise that is spread as noise is": (of_noise(), NOISE, "is (level 0.001 over 5 tests)"),
    "noise that operators did not explain": (of_noise(), NOISE, "None of the 9 operators"),
    "few flips": (of_noise(spread=Spread(("text/0",), 19, ())), OPEN, "19 flips are too few"),
    "nothing was routed": (evidence(noisy(num_routed=0)), OPEN, ""),
    "uneven flips": (of_noise(spread=ODD), OPEN, "documents 3 hold all"),
    "a fault alone": (of_noise(WHOLE), ROUNDED, ""),
    "two faults close to each other": (of_noise(WHOLE, missing(95.0)), OPEN, "y"),
    "a fault far before another": (of_noise(WHOLE, missing(60.0)), ROUNDED, ""),
    "two faults of one cause": (of_noise(WHOLE, fault("y", 99.0)), ROUNDED, ""),
    "a fault that explains little": (of_noise(fault("x", 100.0, explained=0.05)), NOISE, ""),
    "a fault that inherits": (of_noise(fault("x", 100.0, inherits=True)), NOISE, ""),
    "a fault that saves little": (of_noise(fault("x", 20.0)), NOISE, ""),
    "rounding that mends no set": (of_noise(fault("x", 100.0, mended=0.0)), NOISE, ""),
    "a fault that leaves uneven flips": (of_noise(PART, spread=ODD), OPEN, "would explain 60 %"),
    "a fault that leaves none": (of_noise(missing(100.0), spread=ODD), MISSING, ""),
    "a part of what B does": (of_noise(PART), MISSING, ""),
    "a part, on inputs of B": (of_noise(PART, inputs_of="B"), OPEN, ""),
    "what is not fitted": (of_noise(FITTED, missing(900.0)), MISSING, ""),
    "what is fitted and much better": (of_noise(FITTED, missing(800.0)), "bias differs", ""),
    "weights before sets": (weighed_first(UNSCALED), WEIGHTS, ""),
    "weights after sets": (evidence(layer(0, 0.995), layer(1, 1.0, weights=UNSCALED)), WEIGHTS, ""),
    "weights dropped by capacity": (weighed_first(DROPPED), "capacity", ""),
    "fewer weights": (weighed_first(replace(DROPPED, zeros=0.5, zeros_last=1.0)), WEIGHTS, ""),
    "weights of no rule": (weighed(NO_RULE), OPEN, ""),
    "weights of no rule, on inputs of B": (weighed(NO_RULE, inputs_of="B"), WEIGHTS, ""),
    "weights of some": (weighed(SOME), AGREED, ""),
    "weights of some, on inputs of B": (weighed(SOME, inputs_of="B"), WEIGHTS, "2 % of"),
    "weights of some that no rule explains": (weighed(OUTLYING), AGREED, ""),
    "weights of some that a rule explains": (weighed(EXPLAINED), WEIGHTS, "2 % of the tokens much"),
    "another fingerprint": (of_noise(is_of_another=True), "another checkpoint", ""),
    "another fingerprint, and A's router on B's inputs": (
        evidence(noisy(reproduced=1.0), is_of_another=True, inputs_of="B"),
        "another checkpoint",
        "the router of A gives 100 % of B's choices on B's inputs",
    ),
    "another fingerprint and a fault": (
        of_noise(WHOLE, is_of_another=True),
        "another checkpoint",
        "(logits rounded)",
    ),
    "slots that a capacity dropped": (lacking(EMPTY), "capacity", "in positions before 9"),
    "slots of low scores": (
        lacking(replace(EMPTY, is_below=True)),
        "rule differs",
        "begins too high",
    ),
    "slots of rows that A did not choose": (
        lacking(replace(EMPTY, agreement=0.5)),
        "rule differs",
        "A chose in 50 % only",
    ),
    "rows without any": (lacking(replace(EMPTY, num_whole=90)), "padding counted", "nothing was"),
    "weights of 0 and other experts": (
        lacking(ZEROS, weights=DROPPED),
        "rule differs",
        "each expert takes its best tokens",
    ),
    "choices that B's own logits do not give": (
        evidence(noisy(by_own_logits=0.9)),
        "rule differs",
        "90 % of B's choices from the logits",
    ),
    "choices that they nearly give": (evidence(noisy(by_own_logits=0.99)), NOISE, ""),
    "inputs that no rows foretell": (between(0.4), "not the router", "foretell 40 % of what"),
    "values that rows foretell": (between(0.97), OPEN, ""),
    "inputs that nothing foretells, at random": (between(0.02), OPEN, ""),
    "sets alone, of many tokens": (between(None, spread=ODD), "not the router", "look at experts"),
    "sets alone, at random": (between(None), OPEN, ""),
    "sets alone, of few": (between(None, 0.09, spread=ODD), OPEN, ""),
    "sets that something nearly explains": (between(None, faults=(NEAR,), spread=ODD), OPEN, ""),
    "weights of chance": (evidence(replace(DICE, weights=UNSCALED)), "unrelated", ""),
    "an estimate and what fits outright": (
        of_noise(
            fault("x", 900.0, cause="rows damaged", is_estimate=True, is_fitted=True),
            missing(200.0),
        ),
        MISSING,
        "",
    ),
    "an estimate and its own error": (
        of_noise(replace(PART, cause="rows damaged", is_estimate=True), inputs_of="B", spread=ODD),
        "rows damaged",
        "",
    ),
    "noise in a region": (
        of_noise(differing=Differing("text/0", "90 % of it in documents 3", (), 50, 0.9)),
        OPEN,
        "not spread as noise",
    ),
    "dice": (evidence(DICE), "unrelated", ""),
    "experts of other numbers": (evidence(replace(DICE, beyond_chance_renamed=0.9)), OPEN, ""),
}


def test_a_verdict_names_what_leads_every_other_cause_and_needs_no_bug():
    answers = {name: verdict(case) for name, (case, _, _) in BELIEVED.items()}
    causes = {n: cause for n, (_, cause, _) in BELIEVED.items()}
    assert {n: one.cause for n, one in answers.items()} == causes
    assert [n for n, (_, _, words) in BELIEVED.items() if words not in answers[n].detail] == []
    assert answers["weights before sets"].router == "text/0"
    assert "x" in answers["two faults close to each other"].detail
    assert not any("no bug" in text for pair in VERDICTS.values() for text in pair)
    with pytest.raises(InternalError, match="'weights rotten' is none of the"):
        CauseVerdict("weights rotten", "")


def test_overlap_beyond_chance_is_kappa_one_of_equal_sets_and_none_of_dice():
    random = np.random.default_rng(0)
    mine = random.integers(0, 6, 400)
    theirs = np.where(random.random(400) < 0.4, mine, random.integers(0, 6, 400))
    counts = common_choices(mine[:, None], theirs[:, None], 6)
    overlap = overlap_beyond_chance(counts, np.arange(6), 400)
    np.testing.assert_allclose(overlap, cohen_kappa_score(mine, theirs))
    mine, theirs = (random.random((20_000, 16)).argsort(axis=1)[:, :4] for _ in range(2))
    own, numbers = np.arange(16), random.permutation(16)
    cases = ((mine, own, 1.0), (theirs, own, 0.0), (numbers[mine], numbers, 1.0))
    for other, names, expected in cases:
        overlap = overlap_beyond_chance(common_choices(mine, other, 16), names, 20_000)
        np.testing.assert_allclose(overlap, expected, atol=0.02 * (expected == 0.0), rtol=1e-7)


def test_one_long_token_does_not_hide_by_how_much_the_inputs_of_others_differ():
    mine = np.random.default_rng(0).standard_normal((1000, 8), np.float32)
    mine[0] *= 1000.0
    length = np.linalg.norm(mine, axis=1, keepdims=True)
    theirs = mine + np.where(np.arange(1000)[:, None] == 0, 0.0, 0.05) * length / np.sqrt(8.0)
    apart = InputsApart(np.zeros(1000), set(), set())
    sides: Any = SimpleNamespace(kernels={"input_norm": lambda x: np.linalg.norm(x, axis=1)})
    inspect.unwrap(InputsApart.note)(apart, slice(0, 1000), sides, mine, theirs)
    assert apart.size == pytest.approx(0.05, rel=1e-3)


def test_documents_of_any_number_are_found():
    document, position = np.array([0, 2**32, 2**32, 7]), np.array([1, 1, 2, 3], np.int32)
    tokens = TokenColumns(document, position, np.zeros(4, np.int32), np.zeros(4, np.int16))
    documents = np.array([2**32, 0, 2**33, 2**33 + 7, 7, 7, 0])
    position = np.array([1, 1, 1, 3, 3, 4, -1])
    assert _rows(tokens, documents, position).tolist() == [1, 0, -1, -1, 3, -1, -1]


def test_log_probs_of_the_first_token_count_like_those_of_any_other(tmp_path):
    tokens = TokenColumns(*(np.arange(3, dtype=t) for t in (np.int64, *[np.int32] * 2, np.int16)))
    head, file = "document,position,logprob,other_logprob", tmp_path / "scored.csv"
    for row in range(3):
        file.write_text(f"{head}\n{row},{row + 1},-1.0,-{1 + row}.5\n")
        found = log_probs(file, tokens, np.zeros(3, np.int64))
        assert (found.num_tokens, found.mean, found.num_unflipped) == (1, 0.5 + row, 1)


def test_the_error_of_a_cost_is_that_of_drawing_documents_again_of_which_it_needs_some():
    generator = np.random.default_rng(5)
    document = np.repeat(np.arange(60), 40)
    of_document = 0.4 * generator.standard_normal(60)[document]
    is_flipped = generator.random(len(document)) < 0.2 + 0.3 * (document % 2)
    change = np.abs(0.5 + 0.3 * is_flipped + of_document + 0.1 * generator.standard_normal(2400))
    cost = _cost(change, is_flipped, document)
    assert cost is not None

    def mean_cost(chosen: np.ndarray) -> float:
        rows = (chosen[:, None] * 40 + np.arange(40)).ravel()
        kind = is_flipped[rows]
        return change[rows][kind].mean() - change[rows][~kind].mean()

    again = [mean_cost(generator.integers(0, 60, 60)) for _ in range(2000)]
    np.testing.assert_allclose(cost.nats, mean_cost(np.arange(60)), rtol=1e-12)
    np.testing.assert_allclose(cost.error, np.std(again), rtol=0.1)
    # as if tokens were independent it would be less than half
    alone = np.sqrt(change[is_flipped].var() / is_flipped.sum())
    assert cost.error > 2.0 * alone
    # and needs documents and tokens of both kinds
    change, document = np.ones(100), np.arange(100) // 10
    assert _cost(change, np.arange(100) < 20, document) is None
    assert _cost(change, np.arange(100) < 50, np.zeros(100, np.int64)) is None
    cost = _cost(change, np.arange(100) < 50, document)
    assert cost is not None
    assert (cost.nats, cost.error) == (0.0, 0.0)
