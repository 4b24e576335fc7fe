"""What was done to a checkpoint is what the difference says, alone and in combination."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from fnmatch import fnmatchcase

import ml_dtypes
import numpy as np
import pytest
from scipy.linalg import expm
from scipy.stats import ttest_ind_from_stats

from moegeom.core.errors import CheckpointError
from moegeom.core.router import GroupMask, Router
from moegeom.metrics import METRICS
from moegeom.pipeline import lint
from moegeom.results.memory import MemoryResults
from moegeom.studies.changes.edit import EDITS
from moegeom.studies.changes.figures import FREE_OF_T, LEVEL, figure_changes, is_free_of_t
from moegeom.studies.changes.others import RoutersOfA
from moegeom.studies.changes.projected import ProjectedRouters, compare_projected
from moegeom.studies.changes.router import compare_routers
from moegeom.studies.changes.row_pair import row_pair
from moegeom.studies.diff.document import document
from moegeom.studies.diff.record import FigureChange, Figures
from moegeom.studies.diff.study import DifferenceRequest, difference
from moegeom.studies.signoff.judgement import judge
from tests.museum.checkpoint import BF16, F32, Checkpoint
from tests.museum.exhibit_smoothing import smoothed
from tests.museum.healthy import softmax_model, trained, with_experts
from tests.museum.renumbering import permuted, swapped, text_order, within_groups
from tests.unit.studies.edited import (
    INF_FILLED,
    cast,
    common,
    made_up,
    noise,
    noisy,
    not_finite,
    rotated,
    sigmoid,
    single,
    softmax,
)
from tests.unit.studies.samples import unwrapped, widest, worded

shown = functools.partial(worded, document)


def with_small_gains() -> Checkpoint:
    return softmax().edited("gain", lambda g, _: g / 128.0)


def int8(w, layer):
    scale = np.abs(w).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127.0)
    return np.rint(w.astype(np.float32) / scale) * scale


def fp8(w, layer):
    scale = np.abs(w).max().astype(np.float32) / np.float32(448.0)
    return (w.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn).astype(float) * scale


def cleared(w, layer):
    w = w.copy()
    w[3] = 0.0
    return w


def times(factor: float, expert: int) -> np.ndarray:
    """Factors of 32 rows."""
    return np.where(np.arange(32) == expert, factor, 1.0)[:, None]


def copied(sources: dict[int, int]):
    """Row ``copy`` becomes row ``source``."""

    def change_rows(w, layer):
        w = w.copy()
        w[list(sources)] = w[list(sources.values())]
        return w

    return change_rows


def one_noisy(w, layer):
    w = w.copy()
    w[3] += noise(0.3 * np.sqrt((w**2).mean()), layer, w[3].shape)
    return w


def exchanged(model: Checkpoint) -> Checkpoint:
    """Rows and gains of layers 0 and 1 in each other's place."""
    tensors = {
        name.replace(f"layers.{layer}.", f"layers.{1 - layer}."): tensor
        for layer in (0, 1)
        for name, tensor in model.tensors.items()
        if f"layers.{layer}." in name
    }
    return model.changed(tensors)


def fresh(w, layer):
    return np.random.default_rng([5, layer]).standard_normal(w.shape) / 16.0


def flat(g, layer):
    return g * 1.3 ** np.random.default_rng(layer).uniform(-1.0, 1.0, g.shape[-1])


SORTED, BF = text_order(32), "rounded to bf16"

#: Name, what is compared, and what must be said: (word, part of the phrase) in order.
CASES = {
    "identical": (softmax, lambda m: m, []),
    "another storage of the same": (softmax, lambda m: m.edited("weight", lambda w, _: w, dtype=F32), []),
    "rounded": (single, cast, [("rounded", f"B is A, {BF}")]),
    "rounded to fp16": (single, lambda m: m.edited("weight", lambda w, _: w, dtype=np.dtype(np.float16)), [("rounded", "to fp16")]),
    "int8": (single, lambda m: m.edited("weight", int8), [("rounded", "int8, a scale for each row")]),
    "int8 in bf16": (softmax, lambda m: m.edited("weight", int8), [("rounded", "int8, a scale for each row")]),
    "fp8": (softmax, lambda m: m.edited("weight", fp8), [("rounded", "fp8 e4m3, one scale")]),
    "folded": (softmax, lambda m: smoothed(m, 3.0, True), [("gain folded", "")]),
    "slightly folded": (softmax, lambda m: smoothed(m, 1.02, True), [("gain folded", "")]),
    "folded and noise": (softmax, lambda m: smoothed(m, 3.0, True).edited("weight", noisy(0.05)), [("gain folded", ""), ("trained on", "")]),
    "folded and noise behind small gains": (with_small_gains, lambda m: smoothed(m, 3.0, True).edited("weight", noisy(0.05)), [("gain folded", ""), ("trained on", "")]),
    "gain alone": (softmax, lambda m: smoothed(m, 1.2, False), [("gain not followed", "")]),
    "router alone": (softmax, lambda m: m.edited("weight", flat), [("columns scaled", "")]),
    "gain times 1.3": (softmax, lambda m: m.edited("gain", lambda g, _: 1.3 * g), [("scaled", "by 1.3")]),
    "gain times 1.3 in float32": (single, lambda m: m.edited("gain", lambda g, _: 1.3 * g), [("scaled", "by 1.3")]),
    "gain times -1": (softmax, lambda m: m.edited("gain", lambda g, _: -g), [("negated", "")]),
    "rotated": (softmax, rotated, [("rotated", "")]),
    "rotated in float32": (single, rotated, [("rotated", "")]),
    "permuted": (softmax, lambda m: permuted(m, SORTED, ("weight",)), [("permuted", "30 of 32 rows")]),
    "swapped": (softmax, lambda m: permuted(m, swapped(32), ("weight",)), [("permuted", "2 of 32 rows")]),
    "permuted and noise": (softmax, lambda m: permuted(m, SORTED, ("weight",)).edited("weight", noisy(0.003)), [("permuted", "30"), ("trained on", "")]),
    "permuted and rounded": (single, lambda m: cast(permuted(m, SORTED, ("weight",))), [("permuted", "30"), ("rounded", BF)]),
    "permuted and folded": (softmax, lambda m: smoothed(permuted(m, SORTED, ("weight",)), 2.0, True), [("permuted", "30"), ("gain folded", "")]),
    "scaled": (softmax, lambda m: m.edited("weight", lambda w, _: 1.7 * w), [("scaled", "by 1.7")]),
    "scaled and noise": (softmax, lambda m: m.edited("weight", lambda w, layer: noisy(0.02)(1.5 * w, layer)), [("scaled", "by 1.5"), ("trained on", "")]),
    "negated": (softmax, lambda m: m.edited("weight", lambda w, _: -w), [("negated", "")]),
    "shifted": (softmax, lambda m: m.edited("weight", common), [("common shift", "")]),
    "shifted and scaled": (softmax, lambda m: m.edited("weight", lambda w, layer: common(1.5 * w, layer)), [("scaled", "by 1.5"), ("common shift", "")]),
    "shifted and noise": (softmax, lambda m: m.edited("weight", lambda w, layer: noisy(0.02)(common(w, layer), layer)), [("common shift", ""), ("trained on", "")]),
    "permuted and shifted": (softmax, lambda m: permuted(m, SORTED, ("weight",)).edited("weight", common), [("permuted", "30"), ("common shift", "")]),
    "a little noise": (softmax, lambda m: m.edited("weight", noisy(0.003)), [("trained on", "")]),
    "much noise": (softmax, lambda m: m.edited("weight", noisy(1.0)), [("trained on", "")]),
    "one row": (softmax, lambda m: m.edited("weight", cleared), [("rows scaled", "expert 3 set to zero")]),
    "a row times 3": (softmax, lambda m: m.edited("weight", lambda w, _: w * times(3.0, 5)), [("rows scaled", "expert 5 scaled by 3.0")]),
    "two rows scaled": (softmax, lambda m: m.edited("weight", lambda w, _: w * times(3.0, 5) * times(-0.25, 7)), [("rows scaled", "expert 5 scaled by 3.0 and expert 7 scaled by -0.25")]),
    "a row times 3 and noise": (softmax, lambda m: m.edited("weight", lambda w, layer: noisy(0.02)(w * times(3.0, 5), layer)), [("rows scaled", "expert 5 scaled by 3.0"), ("trained on", "rows changed by")]),
    "every row scaled": (softmax, lambda m: m.edited("weight", lambda w, _: w * np.linspace(0.5, 2.0, len(w))[:, None]), [("rows scaled", "32 of 32 experts scaled, each by its own factor, 0.5 to 2.0")]),
    "a row of noise": (softmax, lambda m: m.edited("weight", one_noisy), [("trained on", "1 of 32 rows changed by")]),
    "a row copied": (softmax, lambda m: m.edited("weight", copied({5: 6})), [("rows copied", "row 5 is now a copy of row 6")]),
    "two rows copied": (softmax, lambda m: m.edited("weight", copied({5: 6, 9: 6})), [("rows copied", "row 5 is now a copy of row 6, row 9 is now a copy of row 6")]),
    "a row copied and noise": (softmax, lambda m: m.edited("weight", lambda w, layer: copied({5: 6})(noisy(0.02)(w, layer), layer)), [("rows copied", "row 5 is now a copy of row 6"), ("trained on", "")]),
    "a row copied and all scaled": (softmax, lambda m: m.edited("weight", lambda w, layer: copied({5: 6})(1.5 * w, layer)), [("scaled", "by 1.5, rows 0-4, 6-31 (31 of 32)"), ("rows copied", "row 5 is now a copy of row 6")]),
    "layers exchanged": (softmax, exchanged, [("another layer", "router of layer ")]),
    "unrelated": (softmax, lambda m: m.edited("weight", fresh), [("unrelated", "")]),
    "bias rounded": (sigmoid, lambda m: m.edited("bias", lambda c, _: c, dtype=BF16), [("rounded", "selection bias rounded to bf16")]),
    "bias shifted": (sigmoid, lambda m: m.edited("bias", lambda c, _: c + 3.0), [("selection bias shifted", "")]),
    "bias changed": (sigmoid, lambda m: m.edited("bias", lambda c, layer: c + noise(0.002, layer, c.shape)), [("bias changed", "selection bias")]),
    "bias and rows": (sigmoid, lambda m: m.edited("bias", lambda c, _: c + 3.0).edited("weight", noisy(0.01)), [("trained on", ""), ("selection bias shifted", "")]),
    "bias left behind": (sigmoid, lambda m: permuted(m, swapped(64), ("weight",)), [("permuted", "2 of 64"), ("bias left behind", "selection bias")]),
    "bias moved along": (sigmoid, lambda m: permuted(m, within_groups(64, 2), ("weight", "bias")), [("permuted", "64 of 64")]),
}  # fmt: skip


@pytest.fixture
def differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def compare(a: Checkpoint, b: Checkpoint, **options):
        a.write(tmp_path / "a")
        b.write(tmp_path / "b")
        return difference(DifferenceRequest("a", "b", **options))

    return compare


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """Two routers with noise in every row."""
    folder = tmp_path_factory.mktemp("moved")
    softmax().write(folder / "a")
    softmax().edited("weight", noisy(0.01)).write(folder / "b")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return difference(DifferenceRequest("a", "b"))


def words(router) -> list[str]:
    return [change.word for change in router.changes]


@pytest.mark.parametrize("name", CASES)
def test_what_was_done_is_what_is_said(differ, name):
    model, edit, changes = CASES[name]
    difference_of_case = differ(model(), edit(model()))
    for router in difference_of_case.routers:
        assert words(router) == [word for word, _ in changes], router
        for change, (_, part) in zip(router.changes, changes, strict=True):
            assert part in change.phrase
    for width in (80, 120):
        text = shown(difference_of_case, width=width)
        assert widest(text) <= width
        assert [word for word, _ in changes if f"{word}:" not in text] == []  # what each means
        assert "Not checked" in text


OF_BIASES = {
    "bias scaled": lambda bias, _: -bias,
    "bias read as another dtype": lambda bias, _: np.nan_to_num(
        bias.view(ml_dtypes.bfloat16)[: len(bias)].astype(np.float32), posinf=0.0, neginf=0.0
    ),
    "bias of another layer": lambda _, other: other,
    "bias of other experts": lambda bias, _: np.roll(bias, 3),
    "rounded": lambda bias, _: bias.astype(ml_dtypes.bfloat16).astype(np.float32),
    "bias changed": lambda bias, other: bias + 0.1 * other,
}


@pytest.mark.parametrize("word", OF_BIASES)
@pytest.mark.parametrize("kind", ["selection_bias", "logit_bias"])
def test_what_was_done_to_biases_is_what_is_said(word, kind):
    random = np.random.default_rng(2)
    rows = random.standard_normal((2, 16, 64))
    biases = random.standard_normal((2, 16)).astype(np.float32)
    first, second = (
        dataclasses.replace(made_up(w), name=f"text/{n}", **{kind: bias})
        for n, (w, bias) in enumerate(zip(rows, biases, strict=True))
    )
    changed = dataclasses.replace(first, **{kind: OF_BIASES[word](*biases).astype(np.float32)})
    router = compare_routers(first, changed, None, RoutersOfA((first, second)))
    assert words(router) == [word]
    assert kind.replace("_", " ") in router.changes[0].phrase


def test_every_word_has_a_case():
    of_cases = {word for _, _, changes in CASES.values() for word, _ in changes}
    # the others have tests of their own below
    elsewhere = {
        "update of low rank",
        "pruned",
        *OF_BIASES,
        "experts left behind",
        "experts moved alone",
        "not compared",
        "logit bias shifted",
        "turned",
    }
    assert of_cases | elsewhere == set(EDITS.names())


def test_a_rounding_is_said_in_the_right_direction(differ):
    (router, _) = differ(cast(single()), single()).routers
    assert router.phrases == ("A is B, rounded to bf16",)


@pytest.mark.parametrize(
    ("parts", "changes", "beside"),
    [
        (("weight",), ["permuted", "experts left behind"], ""),
        (("weight", "experts"), ["permuted"], "all 32 experts moved along"),
        (("experts",), ["experts moved alone"], ""),
        ((), [], "all 32 experts where they were"),
    ],
)
def test_experts_tell_whether_they_moved_along(differ, parts, changes, beside):
    model = with_experts(softmax())
    for router in differ(model, permuted(model, SORTED, parts), experts=True).routers:
        assert words(router) == changes
        assert beside in " ".join(router.beside)


def test_a_permutation_is_told_row_by_row_and_of_experts_only_what_was_read(differ):
    (router, _) = differ(softmax(), permuted(softmax(), SORTED, ("weight",))).routers
    assert router.changes[0].evidence["place"] == SORTED
    assert "not known: --experts" in " ".join(router.beside)


def test_an_order_that_mixes_groups_is_told_even_when_all_moved_along(differ):
    model = with_experts(sigmoid())
    mixed = permuted(model, [*range(1, 64), 0], ("weight", "bias", "experts"))
    (router, _) = differ(model, mixed, experts=True).routers
    assert router.changes[0].evidence["mixes_groups"]
    assert "mixes groups" in router.changes[0].detail


def test_routers_of_other_shapes_are_told_first(differ):
    record = differ(softmax(), softmax_model(layers=3, experts=16, hidden=128))
    assert [words(router) for router in record.routers] == [["not compared"]] * 2
    assert record.only_second == ("text/2",)
    assert "256 in A, 16 x 128 in B" in record.routers[0].phrases[0]


def test_another_rule_or_norm_is_told_although_rows_are_identical(differ):
    record = differ(
        softmax(), softmax().changed(config={"num_experts_per_tok": 8, "rms_norm_eps": 1e-3})
    )
    assert all(router.is_identical for router in record.routers)
    assert "experts chosen 4 in A, 8 in B" in record.unlike[0]
    assert "norm" in " ".join(record.unlike)
    text = unwrapped(shown(record))
    assert "the weights of both routers are identical, and the routers are not" in text
    assert text.index("VERDICT") < text.index("UNLIKE")


@pytest.mark.parametrize("is_of_both", [False, True])
def test_a_damaged_router_is_identical_to_itself_and_compared_with_no_other(differ, is_of_both):
    broken = not_finite(np.nan)(softmax())
    for router in differ(broken if is_of_both else softmax(), broken).routers:
        assert (words(router), router.is_identical) == (
            [] if is_of_both else ["not compared"],
            is_of_both,
        )


def test_few_rows_are_judged_by_what_can_be_told():
    for experts in (1, 2, 3):
        rows = np.random.default_rng(experts).standard_normal((experts, 512))
        other = np.random.default_rng(experts + 9).standard_normal((experts, 512))
        pairs = {
            "trained on": rows + 0.05 * other,
            "scaled": 2.0 * rows,
            "negated": -rows,
            "unrelated": other,
        }
        for word, changed in pairs.items():
            assert words(compare_routers(made_up(rows), made_up(changed))) == [word]


def test_a_logit_bias_that_is_shifted_changes_nothing_for_softmax():
    rows = np.random.default_rng(0).standard_normal((8, 64))
    bias = np.random.default_rng(1).standard_normal(8).astype(np.float32)
    routers = [made_up(rows, logit_bias=b) for b in (bias, bias + np.float32(0.5))]
    (change,) = compare_routers(*routers).changes
    assert change.word == "logit bias shifted"
    assert "neither choices nor weights" in change.meaning


def test_a_zero_router_is_unrelated_to_what_filled_it():
    pair = made_up(np.zeros((8, 64))), made_up(np.random.default_rng(0).standard_normal((8, 64)))
    for first, second in (pair, pair[::-1]):
        assert words(compare_routers(first, second)) == ["unrelated"]


def test_a_missing_side_is_an_input_error():
    with pytest.raises(CheckpointError):
        difference(DifferenceRequest("nowhere", "nowhere"))


# ------------------------------------------------------------------------------------------ figures


def results(values: dict[str, float], num_tokens=4096, version="m/1", blocks=16) -> MemoryResults:
    """One router with these figures, each with a standard error of a tenth."""
    row = {"router": "text/0", "variant": "as_stored", "population": "all"}
    row |= {"num_tokens": num_tokens, "num_blocks": blocks}
    row |= values | {f"{name}_se": 0.1 for name in values}
    return MemoryResults({"column_versions": dict.fromkeys(values, version)}, {"layers": [row]})


def compared(first: MemoryResults, second: MemoryResults) -> Figures:
    figures = figure_changes(first, second)
    assert figures is not None
    return figures


def test_a_change_far_beyond_its_error_is_significant():
    (test,) = compared(results({"margin_p50": 1.0}), results({"margin_p50": 2.0})).tests
    assert test.is_significant
    np.testing.assert_allclose([test.change, test.error], [1.0, 0.1 * np.sqrt(2.0)])


def test_the_p_value_is_that_of_welch():
    sides = results({"margin_p50": 1.0}, blocks=16), results({"margin_p50": 1.3}, blocks=9)
    # a standard error of a tenth with n - 1 degrees of freedom is that of n numbers
    expected = ttest_ind_from_stats(1.0, 0.1 * 4.0, 16, 1.3, 0.1 * 3.0, 9, equal_var=False)
    np.testing.assert_allclose(compared(*sides).tests[0].p_value, expected.pvalue)


@pytest.mark.parametrize(
    ("other", "columns", "reason"),
    [
        ({"num_tokens": 2048}, ["margin_p50"], "depends on the number of tokens"),
        ({"version": "m/2"}, [], "another version of the metric"),
    ],
)
def test_figures_of_other_numbers_of_tokens_or_other_versions_are_not_compared(
    other, columns, reason
):
    values = {"load_cv_ddof0": 1.0, "margin_p50": 1.0}
    figures = compared(results(values), results(values, **other))
    assert [test.column for test in figures.tests] == columns
    assert figures.left_out == {reason: [name for name in values if name not in columns]}


def test_a_figure_without_error_is_not_compared():
    sides = results({"margin_p50": 1.0}), results({"margin_p50": 2.0})
    for side in sides:
        side.tables["layers"][0]["margin_p50_se"] = 0.0
    assert compared(*sides).tests == []


def test_quantiles_need_tokens_below_them():
    of_numbers = [results({"margin_p01": 1.0}, number) for number in (4096, 16_384)]
    assert [len(compared(side, side).tests) for side in of_numbers] == [0, 1]


def test_independent_estimates_are_significant_as_rarely_as_promised():
    generator = np.random.default_rng(0)
    names = ("margin_p50", "z_loss", "load_cv_ddof0", "gini", "jain")
    wrong = 0
    for _ in range(400):
        sides = []
        for _side in range(2):
            blocks = generator.standard_normal((16, len(names)))
            side = results(dict(zip(names, blocks.mean(axis=0), strict=True)))
            errors = blocks.std(axis=0, ddof=1) / 4.0
            side.tables["layers"][0].update(
                {f"{n}_se": float(e) for n, e in zip(names, errors, strict=True)}
            )
            sides.append(side)
        wrong += bool(compared(*sides).significant)
    assert 0 < wrong <= 400 * LEVEL + 3.0 * np.sqrt(400 * LEVEL)


def test_the_lists_of_figures_name_figures():
    names = [
        column.name
        for metric in METRICS.all()
        for column in metric.columns.get("layers", ())
        if column.has_se
    ]
    assert [p for p in FREE_OF_T if not any(fnmatchcase(name, p) for name in names)] == []
    assert not any(is_free_of_t(name) for name in ("load_cv_ddof0", "max_vio_global", "num_dead"))


# ------------------------------------------------------------------------------------------ reports


def test_routers_to_which_the_same_happened_are_told_together(differ):
    record = differ(trained("olmoe-balanced/step_1000"), trained("olmoe-balanced/step_1500"))
    text = unwrapped(shown(record))
    assert "no router is identical: layers 0-2 rows changed by 8.8 to 11 %, no pattern." in text


def test_one_changed_layer_stands_beside_the_others(differ):
    model = softmax_model(layers=4)
    text = shown(differ(model, model.edited("weight", noisy(0.01), (2,))), width=120)
    assert "VERDICT  3 of 4 routers identical; 1 changed: layer 2 rows changed by" in text


def test_names_of_others_are_made_printable_and_escaped(moved):
    evil = dataclasses.replace(moved, notes=("\x1b[31mred", "<b>|`x`"))
    assert not any("\x1b" in shown(evil, form) for form in ("table", "md"))
    assert "&lt;b&gt;&#124;\\`x\\`" in shown(evil, "md")


def test_json_is_one_strict_document(moved):
    parsed = json.loads(shown(moved, "json"))
    assert parsed["routers"][0]["changes"][0]["word"] == "trained on"
    assert parsed["figures"] is None
    assert parsed["verdict"].startswith("no router is identical")


def test_a_screen_shows_the_routers_that_moved_most_and_a_page_all(moved):
    (first, *_), (change, *_) = moved.routers, moved.routers[0].changes
    routers = [
        dataclasses.replace(
            first, router=f"text/{n}", changes=(dataclasses.replace(change, size=0.01 + n),)
        )
        for n in range(14)
    ]
    record = dataclasses.replace(moved, routers=routers)
    some, every = (
        re.findall(r"^layer (\d+) ", shown(record, width=100, detail=detail), re.M)
        for detail in (False, True)
    )
    assert some == [str(n) for n in range(13, 1, -1)]
    assert every == [str(n) for n in range(14)]
    assert "and 2 more that moved less: --detail" in shown(record)
    for page in ("md", "html"):
        text = shown(record, page)
        assert all(f"text/{n}" in text for n in range(14))
        assert "--detail" not in text


@pytest.mark.parametrize(("width", "has_both"), [(80, False), (100, True)])
def test_a_narrow_screen_shows_the_change_of_a_figure_without_both_values(moved, width, has_both):
    name = "a_figure_with_a_name_of_a_length"
    figure = FigureChange("text/0", name, "", 0.75, 0.25, 0.01, 1e-4, True, 0.1)
    record = dataclasses.replace(moved, figures=Figures([figure], 0.05, (4096, 4096)))
    heading, row = shown(record, width=width).split("figure  ")[1].splitlines()[:2]
    assert ("0.75" in row, "0.25" in row) == (has_both, has_both)
    assert (" A " in heading, " B " in heading) == (has_both, has_both)
    assert "-0.5 +- 0.01" in row
    assert "| 0.75 | 0.25 | -0.5 | 0.01 |" in shown(record, "md", width=width)


# ------------------------------------------------------------------------- noise is not a rotation

FORMS = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def stored(dtype: str, *rows: np.ndarray) -> list[Router]:
    return [made_up(w.astype(FORMS[dtype]), dtype=dtype) for w in rows]


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("shape", [(32, 64), (24, 160), (32, 1024)])
def test_full_rank_noise_of_any_size_is_noise_in_any_dtype(shape, dtype):
    shares = [0.003, 0.005, 0.01, 0.02, 0.025, 0.031, 0.045, 0.0625, 0.08, 0.1, 0.2, 0.5]
    random = np.random.default_rng([11, shape[1]])
    for share in shares[dtype == "BF16" :]:
        rows = random.standard_normal(shape) / 16.0
        pair = stored(dtype, rows, rows + share / 16.0 * random.standard_normal(shape))
        (change,) = compare_routers(*pair).changes
        assert (change.word, "no pattern" in change.phrase) == ("trained on", True), share
        # rounding adds to it
        np.testing.assert_allclose(change.size, share, rtol=0.15 if dtype == "BF16" else 0.1)


@pytest.mark.parametrize("rank", [1, 4])
def test_an_update_of_low_rank_is_no_rotation(rank):
    random = np.random.default_rng(rank)
    rows = random.standard_normal((32, 256))
    update = random.standard_normal((32, rank)) @ random.standard_normal((rank, 256))
    moved = rows + 0.05 * update / np.sqrt(rank)
    (change,) = compare_routers(made_up(rows), made_up(moved)).changes
    assert (change.word, change.evidence["rank"]) == ("update of low rank", rank)


@pytest.mark.parametrize("angle", [0.1, 0.5, 3.0])
def test_a_rotation_in_bfloat16_is_one(angle):
    random = np.random.default_rng(3)
    skew = random.standard_normal((256, 256)) / 16.0
    turn = expm(angle * (skew - skew.T) / 2.0)
    rows = random.standard_normal((32, 256))
    assert words(compare_routers(*stored("BF16", rows, rows @ turn))) == ["rotated"]


def projected(folder, *models: Checkpoint) -> list[ProjectedRouters]:
    """What results keep of the routers of each model."""
    paths = (model.write(folder / f"side_{n}") for n, model in enumerate(models))
    return [ProjectedRouters(lint(str(path))) for path in paths]


def test_exchanged_layers_are_told_by_results_too(tmp_path):
    a, b = projected(tmp_path, softmax(), exchanged(softmax()))
    assert [compare_projected(a, b, name)[0].phrases for name in a.names()] == [
        ("router of layer 1 of A",),
        ("router of layer 0 of A",),
    ]


@pytest.mark.parametrize(("size", "word"), [(0.0, "turned"), (0.3, "unrelated")])
def test_rows_that_turned_are_told_by_their_lengths_where_results_are_left(tmp_path, size, word):
    random = np.random.default_rng(6)
    turn, _ = np.linalg.qr(random.standard_normal((256, 256)))

    def turned(w, layer):
        return w @ turn * np.exp(size * random.standard_normal((len(w), 1)))

    level = softmax().edited("gain", lambda g, _: np.ones_like(g))
    a, b = projected(tmp_path, level, level.edited("weight", turned))
    assert [words(compare_projected(a, b, name)[0]) for name in a.names()] == [[word]] * 2


# ------------------------------------------------------------------------------- a subset of rows

SUBSET = [0, 2, 3, 7, 8, 9, 14, 15]


def pruned(rows: list[int], biases: list[int], **parts) -> tuple[Router, Router]:
    """A router, and one with some of its rows, and biases."""
    random = np.random.default_rng(4)
    weight, bias = random.standard_normal((16, 64)), random.standard_normal(16).astype(np.float32)
    first = dataclasses.replace(made_up(weight), selection_bias=bias, **parts)
    return first, dataclasses.replace(first, weight=first.weight[rows], selection_bias=bias[biases])


def test_pruned_rows_and_biases_are_one_subset():
    pair = pruned(SUBSET, SUBSET)
    router = compare_routers(*pair)
    assert router.phrases == ("pruned: 8 of 16 rows",)
    assert list(router.place) == SUBSET
    assert judge(*pair).state == "inconclusive"


def test_biases_of_other_experts_beside_pruned_rows_are_told():
    pair = pruned(SUBSET, list(range(8)))
    assert words(compare_routers(*pair)) == ["pruned", "bias left behind"]
    assert judge(*pair).state == "failed"


def test_rows_pruned_unequally_per_group_fail():
    rule = dataclasses.replace(INF_FILLED, groups=GroupMask(4, 2, "top2_sum", float("-inf")))
    even, uneven = [0, 1, 4, 5, 8, 9, 12, 13], [0, 1, 2, 3, 4, 5, 8, 12]
    states = [judge(*pruned(rows, rows, rule=rule)).state for rows in (even, uneven)]
    assert states == ["inconclusive", "failed"]


@pytest.mark.parametrize("followed", [True, False])
def test_pruned_experts_are_the_same_subset_or_not(followed):
    samples = [f"hash {n}" for n in range(16)]
    after = [samples[n] for n in (SUBSET if followed else range(8))]
    router = compare_routers(*pruned(SUBSET, SUBSET), (samples, after))
    assert ("experts left behind" in words(router)) is not followed
    assert ("all 8 experts moved along" in router.beside) is followed


def test_a_row_that_did_not_move_is_not_blamed_for_those_that_did():
    random = np.random.default_rng(8)
    rows = random.standard_normal((12, 64))
    moved = rows + 0.1 * random.standard_normal(rows.shape)
    untouched = [1, 4, 9]
    moved[untouched] = rows[untouched]
    pair = row_pair(made_up(rows), made_up(moved), np.arange(12))
    np.testing.assert_array_equal(np.flatnonzero(pair.row_sizes() == 0.0), untouched)


def test_rows_of_another_layer_in_some_rows_are_told_with_these_rows():
    rows, other = np.random.default_rng(12).standard_normal((2, 32, 64))
    mixed = np.where(np.arange(32)[:, None] < 8, other, rows)
    routers = RoutersOfA((made_up(rows), dataclasses.replace(made_up(other), name="text/5")))
    (change,) = compare_routers(made_up(rows), made_up(mixed), None, routers).changes
    assert change.phrase == "router of layer 5 of A, rows 0-7 (8 of 32)"


@pytest.mark.parametrize(
    ("relation", "words_of_it"),
    [
        (np.ones_like, "gain left out"),
        (np.square, "gain applied twice"),
        (lambda gain: 1.0 + gain, "gain taken as 1 + g"),
    ],
)
def test_what_was_done_to_a_gain_is_said(relation, words_of_it):
    random = np.random.default_rng(14)
    rows = random.standard_normal((16, 64))
    gain = random.uniform(0.5, 1.5, 64).astype(np.float32)
    pair = (made_up(rows, gain=g.astype(np.float32)) for g in (gain, relation(gain)))
    (change,) = compare_routers(*pair).changes
    assert words_of_it in change.phrase
