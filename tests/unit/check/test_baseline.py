"""A baseline keeps what comparisons need, holds no weights and no tokens, and is refused if damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moegeom.checks.baseline import baseline_of, read_baseline, write_baseline
from moegeom.core.errors import ResultsError, UsageError
from moegeom.pipeline import ScanRequest, lint, scan
from moegeom.results.reader import open_results
from tests.unit.check.conftest import Case, keep, write_model
from tests.unit.check.defects import WEIGHTS


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


def test_there_is_no_baseline_of_made_up_tokens_or_broken_rows(model, tmp_path):
    out = scan(ScanRequest(str(model), tmp_path / "out", prior="isotropic-rms", layers="1"))
    with pytest.raises(UsageError, match="synthetic"):
        baseline_of(open_results(out))
    broken = write_model(tmp_path, Case(), WEIGHTS["MGI101"].spoil)
    with pytest.raises(UsageError, match="not finite"):
        baseline_of(lint(str(broken)))
