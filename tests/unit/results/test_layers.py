"""``Results.layers``: one row for each router."""

from __future__ import annotations

import pytest

from moegeom.pipeline import scan
from moegeom.results.reader import open_results


@pytest.fixture(scope="module")
def results(disk, tmp_path_factory):
    return open_results(scan(disk.request(tmp_path_factory.mktemp("layers") / "out")))


def test_layers_are_the_rows_of_the_routers_as_stored_on_all_tokens(results):
    layers = results.layers()
    all_rows = results.table("layers").to_pylist()
    expected = [r for r in all_rows if (r["variant"], r["population"]) == ("as_stored", "all")]
    assert len(all_rows) > len(expected) == len(results.run["routers"])
    by_router = {row["router"]: row for row in expected}
    for row, facts in zip(layers.to_pylist(), results.run["routers"], strict=True):
        known = by_router[facts["name"]]
        assert row["router"] == facts["name"]
        assert row["layer"] == int(facts["name"].split("/")[1])
        assert (row["num_experts"], row["top_k"]) == (facts["num_experts"], facts["top_k"])
        assert {n: v for n, v in row.items() if n in known} == {
            n: v for n, v in known.items() if n in row
        }
    assert layers.column_names[:4] == ["router", "layer", "num_experts", "top_k"]
    assert not any(layers[name].null_count == len(layers) for name in layers.column_names)


def test_layers_of_the_random_router_are_other_rows(results):
    assert results.layers("random")["margin_p50"] != results.layers()["margin_p50"]


def test_a_variant_that_was_not_measured_has_no_rows(results):
    assert results.layers("bf16").num_rows == 0


def test_results_tell_what_they_are_in_a_line(results):
    tokens = results.run["tokens"]["num_tokens"]
    said = repr(results)
    assert said.startswith("Results(") and len(said) < 300
    assert f"{len(results.run['routers'])} router" in said and f"{tokens:,} tokens" in said
