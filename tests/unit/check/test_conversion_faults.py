"""What a conversion can do wrong fails the gate beside a baseline, which keeps what comparisons
need, no weights and no tokens; what a conversion does right does not fail.
"""

import json
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from moegeom.checks.baseline import baseline_of, read_baseline, write_baseline
from moegeom.core.errors import ResultsError, UsageError
from moegeom.core.finding import Verdict
from moegeom.geometry.number_formats import Code, decoded
from moegeom.pipeline import lint
from moegeom.studies.check.study import GateRequest, gate
from tests.by_day import by_day
from tests.museum.checkpoint import BF16, Checkpoint, Part, name_of
from tests.museum.healthy import (
    in_float32,
    sigmoid_model,
    softmax_model,
    trained,
    trained_sigmoid,
    with_experts,
)
from tests.unit.check.conftest import Case, keep, write_model
from tests.unit.check.defects import WEIGHTS

Change = Callable[[Checkpoint], Checkpoint]

MODELS: dict[str, Callable[[], Checkpoint]] = {
    "softmax": lambda: with_experts(softmax_model(layers=3)),
    "sigmoid": lambda: with_experts(sigmoid_model(layers=3)).changed(
        config={"routed_scaling_factor": 2.5}
    ),
    "trained softmax": lambda: trained("olmoe-balanced/step_1500"),
    "trained sigmoid": lambda: trained_sigmoid().changed(config={"routed_scaling_factor": 2.5}),
}


def of(change: Callable, part: Part = "weight", dtype: np.dtype | None = None) -> Change:
    return lambda model: model.edited(part, change, dtype=dtype)


def reordered(order: Callable[[int], object]) -> Change:
    return of(lambda w, _: w[np.asarray(order(len(w)))])


def blocks_transposed(w: np.ndarray, _: int) -> np.ndarray:
    rows, columns = w.shape
    return w.reshape(rows // 8, 8, columns // 8, 8).transpose(0, 3, 2, 1).reshape(rows, columns)


def drawn(seed: int, scale: float | None = None) -> Change:
    def change(w: np.ndarray, layer: int) -> np.ndarray:
        rows = np.random.default_rng([seed, layer]).standard_normal(w.shape)
        return rows * (w.std() if scale is None else scale)

    return of(change)


def from_next_layer(part: Part) -> Change:
    def change(model: Checkpoint) -> Checkpoint:
        after = dict(zip(model.layers, np.roll(model.layers, -1), strict=True))
        return model.changed(
            {name_of(part, n): model.tensors[name_of(part, after[n])] for n in model.layers}
        )

    return change


def exchanged(model: Checkpoint) -> Checkpoint:
    parts: tuple[Part, ...] = ("weight", "gain", "bias")
    names = [[name_of(part, n) for n in model.layers[:2]] for part in parts]
    there = [pair for pair in names if pair[0] in model.tensors]
    ways = [way for a, b in there for way in ((a, b), (b, a))]
    return model.changed({one: model.tensors[other] for one, other in ways})


def coded(form: str, rows: int, columns: int, largest: float | None) -> Change:
    code = Code(form, rows, columns, largest)
    return of(lambda w, _: decoded(w.astype(np.float32), code))


def bytes_as_bf16(bias: np.ndarray, _: int) -> np.ndarray:
    return bias.astype(np.float32).view(ml_dtypes.bfloat16)[: len(bias)].astype(np.float64)


#: What went wrong, and which codes may say so.
FAULTS: dict[str, tuple[Change, str]] = {
    "rows interleaved by blocks": (
        reordered(lambda n: np.arange(n).reshape(2, -1).T.reshape(-1)),
        "MGI121",
    ),
    "rows shifted by one": (reordered(lambda n: np.roll(np.arange(n), 1)), "MGI121"),
    "blocks transposed": (of(blocks_transposed), "MGI128"),
    "read as columns": (of(lambda w, _: np.ascontiguousarray(w.T).reshape(w.shape)), "MGI128"),
    "rows of another layer": (from_next_layer("weight"), "MGI128"),
    "layers exchanged": (exchanged, "MGI128"),
    "another checkpoint": (drawn(99), "MGI128"),
    "reinitialised": (drawn(98, 0.02), "MGI128"),
    "doubled": (of(lambda w, _: 2.0 * w), "MGI128"),
    "scaled by 1.1": (of(lambda w, _: 1.1 * w), "MGI128"),
    "int8": (coded("int8", 1, 0, 127.0), "MGN125"),
    "int4": (coded("int4", 1, 128, 7.0), "MGN125"),
    "fp8 by blocks": (coded("e4m3", 128, 128, 448.0), "MGN125"),
    "fp8 without a scale": (coded("e4m3", 0, 0, None), "MGN125"),
    "gain left out": (of(lambda g, _: np.ones_like(g), "gain"), "MGI122"),
    "gain applied twice": (of(lambda g, _: g * g, "gain"), "MGI122"),
    "gain taken as 1 + g": (of(lambda g, _: 1.0 + g, "gain"), "MGI122"),
}

FAULTS_OF_BIASES: dict[str, tuple[Change, str]] = {
    "bias zero": (of(lambda b, _: 0.0 * b, "bias"), "MGI128"),
    "bias negated": (of(lambda b, _: -b, "bias"), "MGI128"),
    "bias cast": (of(lambda b, _: b, "bias", BF16), "MGI128"),
    "bias offset and cast": (of(lambda b, _: (b + 7.0).astype(BF16), "bias"), "MGI128 MGN111"),
    "bias of another layer": (from_next_layer("bias"), "MGI128"),
    "bytes of the bias read as bf16": (of(bytes_as_bf16, "bias"), "MGI128 MGI110 MGI101"),
    "weights not normalised": (lambda m: m.changed(config={"norm_topk_prob": False}), "MGI124"),
    "scaling factor lost": (lambda m: m.changed(config={"routed_scaling_factor": 1.0}), "MGI124"),
}


@pytest.fixture
def verdict_of(tmp_path) -> Callable[[Checkpoint, Checkpoint], Verdict]:
    """The gate's verdict on a checkpoint beside the baseline of another one."""

    def judge(before: Checkpoint, after: Checkpoint) -> Verdict:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        baseline = tmp_path / f"{folder.name}.json"
        first, second = (
            str(model.write(folder / name))
            for name, model in (("before", before), ("after", after))
        )
        gate(GateRequest(first, baseline=baseline, update_baseline=True))
        return gate(GateRequest(second, baseline=baseline)).verdict

    return judge


def errors(verdict: Verdict) -> set[str]:
    return {finding.code for finding in verdict.findings if finding.severity == "error"}


#: Every fault in every model that can have it, and those of the day: each model in its turn.
PLANTED = [(model, name) for model in MODELS for name in FAULTS]
PLANTED += [(model, name) for model in MODELS if "sigmoid" in model for name in FAULTS_OF_BIASES]
OF_THE_DAY = {
    **{name: ([*MODELS][place % 4], name) for place, name in enumerate(FAULTS)},
    **{
        name: (("sigmoid", "trained sigmoid")[place % 2], name)
        for place, name in enumerate(FAULTS_OF_BIASES)
    },
}


@pytest.mark.parametrize(("model", "name"), by_day(PLANTED, OF_THE_DAY))
def test_a_fault_of_a_conversion_fails_the_gate(verdict_of, model, name):
    before, (fault, codes) = MODELS[model](), (FAULTS | FAULTS_OF_BIASES)[name]
    verdict = verdict_of(before, fault(before))
    assert verdict.exit_code == 1
    assert errors(verdict) & set(codes.split())


def turned(weight: np.ndarray, layer: int) -> np.ndarray:
    random = np.random.default_rng([3, weight.shape[1]])
    return weight @ np.linalg.qr(random.standard_normal(2 * weight.shape[1:]))[0]


def test_rows_that_were_rotated_are_not_those_of_another_checkpoint(verdict_of):
    for model in ("softmax", "trained sigmoid"):
        flat = MODELS[model]().edited("gain", lambda g, _: np.ones_like(g))
        verdict = verdict_of(flat, flat.edited("weight", turned))
        assert errors(verdict) == set()
        assert "MGG401" in {finding.code for finding in verdict.findings}


def test_a_cast_that_the_config_states_and_steps_of_a_training_are_no_fault(verdict_of):
    before = in_float32(softmax_model(layers=3)).changed(config={"dtype": "float32"})
    cast = before.edited("weight", lambda w, _: w, dtype=BF16)
    verdict = verdict_of(before, cast.changed(config={"dtype": "bfloat16"}))
    assert (verdict.exit_code, errors(verdict)) == (0, set())
    for steps in (("step_1000", "step_1500"), ("step_100", "step_300")):
        before, after = (trained(f"olmoe-balanced/{step}") for step in steps)
        assert errors(verdict_of(before, after)) == set()


def test_what_an_older_baseline_does_not_say_is_told_with_the_verdict(judged, tmp_path):
    baseline = tmp_path / "baseline.json"
    judged(baseline=baseline, update_baseline=True)
    older = json.loads(baseline.read_text("utf-8"))
    for router in older["routers"].values():
        del router["facts"]["rule"]
    baseline.write_text(json.dumps(older), "utf-8")
    verdict = gate(GateRequest("model", baseline=baseline)).verdict
    assert any("how weights are normalised" in text for text in verdict.unseen)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path, Case(family="deepseek_v3"), keep)


@pytest.fixture
def written(tmp_path, model):
    file = tmp_path / "baseline.json"
    write_baseline(file, baseline_of(lint(str(model))))
    return file


def test_what_is_written_is_read_again(model, written):
    made, read = baseline_of(lint(str(model))), read_baseline(written)
    assert (read.checkpoint, read.versions, read.num_tokens) == (made.checkpoint, made.versions, 0)
    for name, router in made.routers.items():
        again = read.routers[name]
        assert (again.facts, again.digests) == (router.facts, router.digests)
        np.testing.assert_array_equal(again.norms, router.norms)
        np.testing.assert_array_equal(again.selection_bias, router.selection_bias)
        # steps of a 4096th of the length
        bound = router.norms[:, None] / 8192 * 1.01
        assert (np.abs(again.projections - router.projections) <= bound).all()
        for column, (value, error) in router.columns.items():
            assert again.columns[column][0] == pytest.approx(value, rel=1e-6)
            assert again.columns[column][1] == error


def test_the_file_is_small_the_same_each_time_and_holds_no_weight(model, written, tmp_path):
    write_baseline(tmp_path / "again.json", baseline_of(lint(str(model))))
    assert (tmp_path / "again.json").read_bytes() == written.read_bytes()
    text = written.read_text("utf-8")
    # 16 experts of 64 weights in 3 layers: a copy would be 6 kB in base64 for each layer
    assert len(text) < 3 * 6000
    assert not any(word in text for word in ("token_id", "document", str(model.parent)))


def _column(values):
    return lambda d: d["routers"]["text/0"]["columns"].update(row_condition=values)


DAMAGES = {
    "another version": lambda d: d.update(moegeom_baseline=99),
    "too few norms": lambda d: d["routers"]["text/0"].update(norms="AAAA"),
    "a huge shape": lambda d: d["routers"]["text/0"]["facts"].update(num_experts=10**12),
    "a number beyond floats": _column([10**400, None]),
    "a negative error": _column([1.0, -1.0]),
    "a sample that is none": lambda d: d["routers"]["text/0"].update(samples=["a"]),
    "a router of no stack": lambda d: d["routers"].update(x=d["routers"].pop("text/0")),
}


def test_a_damaged_baseline_is_an_error(written, tmp_path):
    for what, damage in DAMAGES.items():
        document = json.loads(written.read_text("utf-8"))
        damage(document)
        (tmp_path / "damaged.json").write_text(json.dumps(document), "utf-8")
        with pytest.raises(ResultsError, match=r"damaged\.json"):
            pytest.fail(f"{what}: {read_baseline(tmp_path / 'damaged.json')}")


def test_a_file_that_is_no_baseline_is_an_error_and_no_version_is_told_of_it(tmp_path):
    file = tmp_path / "b.json"
    for content in (b"", b"[1]", b"\xff", b"[" * 200_000, b'{"moegeom_baseline": 1'):
        file.write_bytes(content)
        with pytest.raises(ResultsError):
            read_baseline(file)
    for content in ("{}", "[1]", '{"moegeom_baseline": null}'):
        file.write_text(content)
        with pytest.raises(ResultsError, match="no baseline of moegeom") as refused:
            read_baseline(file)
        assert "None" not in str(refused.value)
    with pytest.raises(ResultsError, match="--update-baseline --baseline"):
        read_baseline(tmp_path / "none.json")


def test_there_is_no_baseline_of_broken_rows(tmp_path):
    broken = write_model(tmp_path, Case(), WEIGHTS["MGI101"].spoil)
    with pytest.raises(UsageError, match="not finite"):
        baseline_of(lint(str(broken)))
