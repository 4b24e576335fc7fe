"""What was done to a router is what `balance` says about it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from moegeom.core.errors import NonFiniteError, RecordingError, UsageError
from moegeom.core.router import GroupMask, Provenance, Router, Rule, Weights
from moegeom.core.tokens import TopLogits
from moegeom.document.model import View
from moegeom.document.render import render
from moegeom.kernels.table import load_kernels
from moegeom.studies.balance.document import document
from moegeom.studies.balance.record import SENTENCES, Loads
from moegeom.studies.balance.router import balance_router, meaning_of, read_sample
from moegeom.studies.balance.study import BalanceRequest, balance
from moegeom.testing.array_source import ArraySource

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = ROOT / "sample_ckpts"
EXPERTS, TOP_K, HIDDEN, LENGTH = 16, 2, 24, 32
KERNELS = load_kernels("cpu")


def router_of(
    selection_bias: np.ndarray | None = None,
    groups: GroupMask | None = None,
    experts: int = EXPERTS,
    **changes,
) -> Router:
    """Orthonormal rows, so that isotropic tokens load all experts alike in expectation.

    A sigmoid rule, or softmax without a bias.
    """
    rows = np.linalg.qr(np.random.default_rng(0).standard_normal((HIDDEN, HIDDEN)))[0]
    rows = np.ascontiguousarray(rows[:experts]).astype(np.float32)
    curved = selection_bias is not None or groups is not None
    rule = Rule(
        TOP_K,
        "sigmoid" if curved else "softmax",
        Weights("scores", True),
        has_selection_bias=selection_bias is not None,
        groups=groups,
    )
    made = Router("text/0", "text", 0, rows, rule, Provenance("made", ("w",), "made", "F32"))
    bias = None if selection_bias is None else selection_bias.astype(np.float32)
    return dataclasses.replace(made, selection_bias=bias, **changes)


def inputs_of(documents: int, lean: np.ndarray | None = None, seed: int = 1) -> np.ndarray:
    """Gaussian tokens, document by document; ``lean`` [documents hidden] is what each leans to."""
    random = np.random.default_rng(seed)
    tokens = random.standard_normal((documents * LENGTH, HIDDEN))
    if lean is not None:
        tokens += np.repeat(lean, LENGTH, axis=0)
    return tokens.astype(np.float32)


def balanced(router: Router, inputs: np.ndarray, level: float = 0.002):
    """At a level at which chance fails no test of what is meant; 5 % is tested by itself."""
    source = ArraySource({"text/0": inputs}, document_tokens=LENGTH)
    return balance_router(router, read_sample(router, source, KERNELS, 0), KERNELS, level, 0)


def wrong_bias() -> np.ndarray:
    return 0.2 * np.random.default_rng(3).standard_normal(EXPERTS)


def test_a_bad_update_of_the_bias_is_told_from_a_bad_router():
    inputs = inputs_of(128)
    found = balanced(router_of(wrong_bias()), inputs)
    assert found.meaning == "holds"
    assert found.before.max_vio > 1.0
    assert found.after.max_vio <= 1 / 512 + 1e-12
    assert all(half.after.max_vio < 0.4 for half in found.held_out)
    # what was done wrong is undone, up to what the true router needs on these tokens
    right = balanced(router_of(np.zeros(EXPERTS)), inputs)
    undone = np.array(found.change) - right.change + wrong_bias() - wrong_bias().mean()
    assert np.abs(undone).max() < 0.01 * np.abs(wrong_bias()).max()


def test_an_even_router_is_left_alone():
    lean = 0.6 * np.random.default_rng(4).standard_normal((128, HIDDEN))
    found = balanced(router_of(np.zeros(EXPERTS)), inputs_of(128, lean))
    assert found.meaning == "balanced"
    assert found.before.cv > 1.1 * found.cv_floor  # documents differ, tokens are not independent
    assert found.limit > found.max_vio_floor


@pytest.mark.nightly
def test_even_routers_are_called_uneven_as_rarely_as_the_level_says():
    """Forty even routers on documents that differ, at 10 %: now, and with the other half's bias."""
    above = np.zeros(2)
    for seed in range(40):
        lean = 0.4 * np.random.default_rng([4, seed]).standard_normal((64, HIDDEN))
        found = balanced(router_of(np.zeros(EXPERTS)), inputs_of(64, lean, seed), level=0.1)
        above += found.before.max_vio > found.limit, not all(h.is_within for h in found.held_out)
    assert (above <= 10).all()


def test_a_router_without_bias_is_told_so():
    lean = np.broadcast_to(0.6 * router_of().weight[3], (128, HIDDEN))
    found = balanced(router_of(), inputs_of(128, lean))
    assert found.meaning == "holds, no bias now"
    assert found.score_unit == "logit"
    assert found.pushes()[-1][0] == 3 or found.pushes()[-2][0] == 3
    assert found.change[3] == min(found.change)


def test_documents_of_two_kinds_in_the_two_halves_are_seen():
    """Even blocks lean to one expert and odd blocks to another: a bias for one is wrong for both."""
    rows = router_of().weight
    document = np.arange(128)
    half = (document + document // 16) % 2
    lean = np.where(half[:, None] == 0, 1.5 * rows[2], -1.5 * rows[2] + 1.5 * rows[9])
    found = balanced(router_of(), inputs_of(128, lean))
    assert found.meaning == "documents"
    assert found.after.max_vio < 0.01


def test_equal_rows_are_named_and_equal_scores_too():
    rows = router_of().weight.copy()
    rows[7] = rows[2]
    found = balanced(router_of(weight=rows), inputs_of(64))
    assert found.duplicates == (((2, 7), "equal rows"),)
    dull = router_of(np.zeros(EXPERTS))
    far = np.where(np.isin(np.arange(EXPERTS), (4, 5)), 60.0, 0.0)
    dull = dataclasses.replace(dull, logit_bias=far)
    assert balanced(dull, inputs_of(64)).duplicates == (((4, 5), "equal scores"),)


def test_duplicates_of_different_groups_can_be_told_apart():
    rows = router_of().weight.copy()
    rows[7] = rows[2]
    rows[3] = rows[2]
    groups = GroupMask(4, 2, "top2_sum", -np.inf)
    found = balanced(router_of(np.zeros(EXPERTS), groups, weight=rows), inputs_of(64))
    assert [experts for experts, _ in found.duplicates] == [(2, 3)]


def test_tokens_that_are_all_alike_cannot_be_balanced():
    inputs = np.tile(inputs_of(1)[:1], (64 * LENGTH, 1))
    found = balanced(router_of(), inputs)
    assert found.meaning == "none"
    assert found.num_tied == 64 * LENGTH
    assert len(found.duplicates[0][0]) == EXPERTS


def test_one_or_two_documents_tell_nothing():
    lean = np.broadcast_to(2.0 * router_of().weight[3], (2, HIDDEN))
    assert balanced(router_of(), inputs_of(1, lean[:1])).meaning == "unknown"
    assert balanced(router_of(), inputs_of(2, lean)).meaning in ("unknown", "few")


@pytest.mark.parametrize("score", ["max", "top2_sum"])
@pytest.mark.parametrize("fill", [-np.inf, 0.0])
def test_groups_are_balanced_by_the_true_rule(score, fill):
    groups = GroupMask(4, 2, score, fill)
    found = balanced(router_of(wrong_bias() + 1.0, groups), inputs_of(128))
    assert found.is_grouped
    assert (found.gap, found.num_tied) == (None, None)
    assert found.before.max_vio > 1.0
    assert found.after.max_vio < 0.05
    assert found.meaning == "holds"


def test_groups_without_bias_are_balanced_in_the_unit_of_their_score():
    groups = GroupMask(4, 2, "max", 0.0)
    router = router_of(None, groups)
    found = balanced(router, inputs_of(64))
    assert found.score_unit == "sigmoid score + bias"
    assert not found.has_selection_bias
    assert found.after.max_vio < 0.1


def test_displaced_weight_and_changed_sets_are_those_of_the_new_choice():
    router, inputs = router_of(wrong_bias()), inputs_of(64)
    found = balanced(router, inputs)
    score = 1.0 / (1.0 + np.exp(-(inputs @ router.weight.T).astype(np.float64)))
    q = score + router.selection_bias.astype(np.float64)
    first, second = (np.argsort(-b, axis=1)[:, :TOP_K] for b in (q, q + found.change))
    lost = (first[:, :, None] != second[:, None, :]).all(axis=2)
    weight = np.take_along_axis(score, first, axis=1)
    weight /= weight.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        found.displaced_weight, (weight * lost).sum(axis=1).mean(), rtol=1e-6
    )
    np.testing.assert_allclose(found.changed_share, lost.any(axis=1).mean())
    np.testing.assert_allclose(np.mean(found.change), 0.0, atol=1e-15)


def test_every_half_is_tried_with_the_bias_of_the_other():
    found = balanced(router_of(wrong_bias()), inputs_of(64))
    assert [half.num_units for half in found.held_out] == [32, 32]
    assert sum(half.num_tokens for half in found.held_out) == found.num_tokens
    # held out is worse than in sample, and no worse than the limit
    assert all(found.after.max_vio < half.after.max_vio < half.limit for half in found.held_out)


def test_choosing_every_expert_is_balanced():
    router = router_of(experts=TOP_K)
    assert balanced(router, inputs_of(64)).meaning == "balanced"


def test_a_token_that_is_not_finite_is_refused():
    inputs = inputs_of(4)
    inputs[5, 0] = np.nan
    with pytest.raises(NonFiniteError, match="token 5"):
        balanced(router_of(), inputs)


@pytest.fixture(scope="module")
def uneven():
    return balanced(router_of(wrong_bias()), inputs_of(128))


@pytest.mark.parametrize(
    ("changes", "of_halves", "meaning"),
    [
        ({}, {}, "holds"),
        ({"has_selection_bias": False}, {}, "holds, no bias now"),
        ({"limit": 9.0}, {}, "unknown"),
        ({"limit": 6.9}, {}, "balanced"),
        ({"after": Loads(3.0, 1.0)}, {}, "none"),
        ({"after": Loads(3.0, 1.0), "is_grouped": True}, {}, "none found"),
        ({"held_out": ()}, {}, "few"),
        ({}, {"num_units": 1}, "few"),
        ({}, {"reduction_p": 0.2}, "few"),
        ({}, {"reduction": -0.1}, "documents"),
        ({}, {"after": Loads(9.0, 1.0)}, "partly"),
    ],
)
def test_each_meaning_has_its_condition(uneven, changes, of_halves, meaning):
    halves = tuple(dataclasses.replace(half, **of_halves) for half in uneven.held_out)
    found = dataclasses.replace(uneven, **({"held_out": halves} | changes))
    assert meaning_of(found, 0.05) == meaning
    assert meaning in SENTENCES


def sample(name: str, **changes) -> BalanceRequest:
    tokens = str(SAMPLES / name / "rec/step_1500")
    request = BalanceRequest(str(SAMPLES / name / "step_1500"), tokens=tokens)
    return dataclasses.replace(request, **changes)


@pytest.fixture(scope="module")
def collapsed():
    return balance(sample("olmoe-collapsed", layers="0-1"))


def test_the_collapsed_sample_can_be_balanced(collapsed):
    assert [router.meaning for router in collapsed.routers] == ["holds, no bias now"] * 2
    assert all(router.before.max_vio > 1.5 for router in collapsed.routers)
    assert all(router.after.max_vio < 0.02 for router in collapsed.routers)
    assert all(router.largest_change > router.spread for router in collapsed.routers)


def test_the_balanced_sample_is_even():
    found = balance(sample("olmoe-balanced", layers="2"))
    assert [router.meaning for router in found.routers] == ["balanced"]


def shown(found, form: str, **view) -> str:
    return render(document(found, View(**view)), form, View(**view))


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_screen_fits_and_says_each_sentence(collapsed, width):
    text = shown(collapsed, "table", width=width)
    assert max(map(len, text.splitlines())) <= width
    said = " ".join(text.split())
    assert SENTENCES["holds, no bias now"] in said
    heading = next(line for line in text.splitlines() if line.strip().startswith("MaxVio"))
    assert ("CV" in heading) == (width > 80)


def test_json_holds_every_figure(collapsed):
    told = json.loads(shown(collapsed, "json"))
    first = told["routers"][0]
    assert first["sentence"] == SENTENCES["holds, no bias now"]
    assert len(first["change"]) == 16
    assert len(first["held_out"]) == 2
    assert told["run"]["tokens"]["num_tokens"] == 4096


def test_markdown_has_a_row_for_every_router(collapsed):
    text = shown(collapsed, "md")
    assert "| text/0 |" in text
    assert "| text/1 |" in text


def test_a_screen_shows_the_least_even_routers_and_a_page_all(collapsed):
    first, *_ = collapsed.routers
    routers = [
        dataclasses.replace(first, router=f"text/{n}", before=Loads(2.0 + n, 1.0))
        for n in range(14)
    ]
    found = dataclasses.replace(collapsed, routers=tuple(routers))
    some, every = (
        re.findall(r"^(\d+) ", shown(found, "table", width=100, detail=detail), re.M)
        for detail in (False, True)
    )
    assert some == [str(n) for n in range(14 - len(some), 14)]
    assert every == [str(n) for n in range(14)]
    rest = 14 - len(some)
    assert f"and {rest} more that were more even: --detail" in shown(found, "table", width=100)
    for page in ("md", "html"):
        text = shown(found, page)
        assert all(f"text/{n}" in text for n in range(14))
        assert "--detail" not in text


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_the_file_holds_the_bias_in_both_precisions(tmp_path, ending):
    out = tmp_path / f"bias.{ending}"
    found = balance(sample("deepseek-tiny", layers="1", out=out)).routers[0]
    arrays = dict(np.load(out)) if ending == "npz" else load_file(out)
    np.testing.assert_array_equal(arrays["text/1/change_float64"], found.change)
    added = arrays["text/1/selection_bias_float64"] - arrays["text/1/change_float64"]
    stored = np.array(load_file(SAMPLES / "deepseek-tiny/step_1500/model.safetensors")[
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ])  # fmt: skip
    np.testing.assert_allclose(added, stored, atol=1e-15)
    assert arrays["text/1/selection_bias_float32"].dtype == np.float32
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    with pytest.raises(UsageError, match="exists already"):
        balance(sample("deepseek-tiny", layers="1", out=out))


@pytest.mark.parametrize("stage", ["ids", "top_logits"])
def test_a_recording_of_some_experts_cannot_answer(tmp_path, stage):
    random = np.random.default_rng(0)
    ids = np.argsort(random.random((64, 16)), axis=1)[:, :8].astype(np.int32)
    arrays = {"text.0": ids[:, :4]}
    if stage == "top_logits":
        values = -np.sort(-random.standard_normal((64, 8)), axis=1).astype(np.float32)
        arrays = {"text.0.top_logits": values, "text.0.top_ids": ids}
    source = Partial(stage, arrays)
    with pytest.raises(RecordingError, match="cannot say which bias balances router text/0: needs"):
        balance(sample("olmoe-balanced", layers="0", tokens=source))


class Partial:
    """A source of some experts: no choices of the model, and of the largest logits what is asked."""

    def __init__(self, stage, arrays) -> None:
        base = ArraySource({"text/0": np.zeros((64, 64), np.float32)})
        self.facts = dataclasses.replace(base.facts, stage=stage)
        self.arrays = arrays

    def read_top_logits(self, router, start, stop) -> TopLogits:
        values, ids = self.arrays["text.0.top_logits"], self.arrays["text.0.top_ids"]
        return TopLogits(values[start:stop], ids[start:stop])


def test_what_is_missing_is_said():
    with pytest.raises(UsageError, match="needs recorded tokens"):
        balance(sample("olmoe-balanced", tokens=None))
    with pytest.raises(UsageError, match="ends in"):
        balance(sample("olmoe-balanced", out=Path("bias.pt")))
    other = ArraySource({"text/9": np.zeros((64, 64), np.float32)})
    with pytest.raises(RecordingError, match="none of the routers"):
        balance(sample("olmoe-balanced", tokens=other))


def test_layers_that_were_not_recorded_are_told():
    inputs = np.random.default_rng(5).standard_normal((4096, 64)).astype(np.float32)
    source = ArraySource({"text/1": inputs}, document_tokens=64)
    found = balance(sample("olmoe-balanced", tokens=source, unverified=True))
    assert [router.router for router in found.routers] == ["text/1"]
    assert [name for name, _ in found.left_out] == ["text/0", "text/2"]
    assert "not checked" in shown(found, "table")
