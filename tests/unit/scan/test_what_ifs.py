"""What-ifs on the road of a scan: cut in any way, at their limits, and against routers by hand."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cityblock

from moegeom.core.row_keys import ALL
from moegeom.core.tokens import TILE
from moegeom.engine import loop
from moegeom.measure.finish import MeasuredRouter
from moegeom.measure.passes import measure_router
from moegeom.measure.what_ifs import with_what_ifs
from moegeom.metrics import METRICS
from moegeom.variants.whatif import _choices, capacity

#: One of each kind, and both orders of a capacity.
KINDS = (
    "smooth:extra=0.5",
    "relu:experts=4",
    "temperature:0.5",
    "topk:2",
    "capacity:0.8",
    "capacity:0.8,order=score",
    "expert-choice",
    "sinkhorn",
    "osr",
    "cosine",
    "centred",
    "jitter:0.05,on=input",
    "without:5,9",
    "random",
)

#: Enough metrics to see every token and every slot of it.
FEW = [
    METRICS[name]
    for name in ("tokens", "load", "set_sizes", "coactivation", "flips", "weight_moved")
]

#: Columns that say whose a row is.
OF_ROWS = {"variant", "router"}


def tried(made, source, *texts, router=None, **changes) -> MeasuredRouter:
    run = made.run(source, router, what_ifs=texts, **changes)
    return with_what_ifs(run, MeasuredRouter({}, {}))


def rows_of(tables, table: str, variant: str) -> list[dict]:
    """Rows of one variant, without its name."""
    return [
        {name: value for name, value in row.items() if name not in OF_ROWS}
        for row in tables.get(table, [])
        if row["variant"] == variant
    ]


def the_row(tables, variant: str) -> dict:
    (row,) = [row for row in rows_of(tables, "layers", variant) if row["population"] == ALL]
    return row


def choices_of(tables, variant: str, reasons) -> dict[str, Counter]:
    """How often each row of a table occurs, of the metrics that a choice has."""
    found = {}
    for metric in METRICS.all():
        if metric.scope == "router" and not metric.is_for_figures and metric.name not in reasons:
            for table, columns in metric.columns.items():
                found.setdefault(table, {"population"}).update(column.name for column in columns)
    return {
        table: Counter(
            repr([row[name] for name in sorted(names)]) for row in rows_of(tables, table, variant)
        )
        for table, names in found.items()
    }


def assert_rows_are_those_of(made, found, name: str, expected) -> None:
    """That every row of a what-if is one of the router as stored; margins may lack quantities."""
    reasons = found.facts["what_ifs"][name]["reasons"]
    after, before = choices_of(made.tables(found), name, reasons), choices_of(
        expected, "as_stored", reasons
    )  # fmt: skip
    assert after.keys() == before.keys() > {"layers", "experts", "coactivation", "expert_sets"}
    for table, rows in after.items():
        assert rows <= before[table], table
        assert table == "margins" or rows == before[table], table


@pytest.fixture(scope="module", autouse=True)
def few_alone():
    """Batches of one are tried for a few tokens only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_choices, "_ALONE", 8)
        yield


# ----------------------------------------------------------------------------------------- cuts
def len_of(batch: int) -> int:
    """Tokens of a recording whose last batch is not whole."""
    return max(batch, TILE) + 100


@pytest.fixture(scope="module", params=[64, 2 * TILE])
def cut_once(request, made):
    """How many tokens are tried together, and what threads say that read a tile at a time."""
    pace = {"batch_tokens": TILE, "num_workers": 3, "what_if_batch": request.param}
    found = tried(made, made.recording(len_of(request.param)), *KINDS, metrics=FEW, **pace)
    return request.param, found


def test_batches_and_threads_change_no_row_and_no_figure(made, cut_once, monkeypatch):
    monkeypatch.setattr(loop, "_BATCHES", 1)  # all tokens at once
    batch, expected = cut_once
    pace = {"batch_tokens": 8 * TILE, "num_workers": 1, "what_if_batch": batch}
    found = tried(made, made.recording(len_of(batch)), *KINDS, metrics=FEW, **pace)
    np.testing.assert_equal(made.tables(found), made.tables(expected))
    np.testing.assert_equal(found.facts, expected.facts)


def test_every_kind_has_rows_and_tells_what_it_moves(made, cut_once):
    batch, found = cut_once
    assert tuple(found.facts["what_ifs"]) == KINDS
    for name in KINDS:
        row = the_row(made.tables(found), name)
        assert row["num_tokens"] == len_of(batch)
        assert 0.0 < row["weight_moved_mean"] <= 1.0, name


@pytest.mark.parametrize("batch", [16, TILE, 2 * TILE])
@pytest.mark.parametrize("exclude_first", [0, 2])
def test_other_tokens_are_the_neighbours_of_one_batch_and_no_more(
    made, monkeypatch, batch, exclude_first
):
    seen, lock, kind = [], threading.Lock(), capacity.WHATIF

    def make(router, values, sample):
        gate = kind.make(router, values, sample)

        def choose(tokens):
            with lock:
                seen.append(tokens.token)
            return gate.choose(tokens)  # pyright: ignore[reportOptionalCall]

        return dataclasses.replace(gate, choose=choose, measure=None)

    monkeypatch.setattr(capacity, "WHATIF", dataclasses.replace(kind, make=make))
    pace = {"batch_tokens": TILE, "num_workers": 3, "what_if_batch": batch, "metrics": FEW}
    source = made.recording(2 * TILE + 100)
    tried(made, source, "capacity:0.8", exclude_first=exclude_first, **pace)
    kept = np.flatnonzero(source.columns.position >= exclude_first)
    groups = [kept[kept // batch == number] for number in np.unique(kept // batch)]
    # the first call learns which quantities come with a choice
    np.testing.assert_equal(sorted(map(list, seen[1:])), [list(group) for group in groups])


# -------------------------------------------------------------------------------------- limits
LIMITS = ("topk:3", "temperature:1", "smooth:eps=0", "sinkhorn:steps=0,log", "capacity:inf",
          "jitter:0", "without")  # fmt: skip


@pytest.fixture(scope="module", params=["softmax", "sigmoid"])
def at_the_limits(request, made):
    source, router = made.recording(TILE + 100), made.router(request.param)
    router.weight[7] *= -0.5  # without equal rows no two scores are equal
    stored = made.tables(measure_router(made.run(source, router)))
    return stored, tried(made, source, *LIMITS, router=router)


@pytest.mark.parametrize("limit", LIMITS)
def test_at_its_limit_every_table_is_that_of_the_router_bit_for_bit(made, at_the_limits, limit):
    stored, found = at_the_limits
    assert_rows_are_those_of(made, found, limit, stored)
    assert not set(METRICS.names()).isdisjoint(found.facts["what_ifs"][limit]["reasons"])
    tables = made.tables(found)
    row = the_row(tables, limit)
    assert (row["weight_moved_mean"], row["flipped_share"]) == (0.0, 0.0)


def test_what_a_choice_lacks_has_a_reason_and_no_column(made, at_the_limits):
    _, found = at_the_limits
    tables = made.tables(found)
    for limit in LIMITS:
        reasons = found.facts["what_ifs"][limit]["reasons"]
        row = the_row(tables, limit)
        for metric in METRICS.all():
            names = [column.name for column in metric.columns.get("layers", ())]
            if metric.name in reasons:
                assert reasons[metric.name]
                assert {row[name] for name in names} <= {None}, metric.name


# -------------------------------------------------------------------------- routers changed by hand
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_another_number_of_experts_has_the_rows_of_a_router_with_that_number(made, kind):
    source, router = made.recording(TILE + 100), made.router(kind)
    by_hand = dataclasses.replace(router, rule=dataclasses.replace(router.rule, top_k=5))
    expected = made.tables(measure_router(made.run(source, by_hand)))
    found = tried(made, source, "topk:5", router=router)
    assert_rows_are_those_of(made, found, "topk:5", expected)
    assert found.facts["what_ifs"]["topk:5"]["top_k"] == 5


def test_without_experts_tokens_route_as_at_a_router_without_their_rows(made):
    source, router, gone = made.recording(TILE + 100), made.router(), [5, 9]
    kept = np.setdiff1d(np.arange(12), gone)
    by_hand = dataclasses.replace(router, weight=np.ascontiguousarray(router.weight[kept]))
    expected = made.tables(measure_router(made.run(source, by_hand)))
    found = made.tables(tried(made, source, "without:5,9"))
    loads = {row["expert"]: row["num_slots"] for row in rows_of(found, "experts", "without:5,9")
             if row["population"] == ALL}  # fmt: skip
    by_place = {kept[row["expert"]]: row["num_slots"]
                for row in rows_of(expected, "experts", "as_stored")
                if row["population"] == ALL}  # fmt: skip
    np.testing.assert_equal({e: v for e, v in loads.items() if e not in gone}, by_place)
    assert [loads[expert] for expert in gone] == [0, 0]
    row, other = the_row(found, "without:5,9"), the_row(expected, "as_stored")
    same = ("margin_p50", "boundary_distance_p50", "num_expert_sets", "expert_set_entropy_nats")
    for name in (*same, "neighbour_overlap", "chosen_score_share", "log_sum_exp_mean"):
        np.testing.assert_allclose(row[name], other[name], rtol=1e-6, err_msg=name)


# ------------------------------------------------------------------------------- recorded logits
def test_recorded_logits_give_what_recorded_inputs_give_or_are_refused(made):
    router, inputs = made.router(), made.recording(300)
    of_logits = made.source("logits", inputs.columns, inputs.values @ router.weight.T)
    expected, found = (tried(made, s, *KINDS, metrics=FEW) for s in (inputs, of_logits))
    refused = {name for name, facts in found.facts["what_ifs"].items() if "refused" in facts}
    assert refused == {"osr", "cosine", "random", "jitter:0.05,on=input"}
    assert all("inputs" in found.facts["what_ifs"][name]["refused"] for name in refused)
    for name in set(KINDS) - refused:
        before, after = (the_row(made.tables(one), name) for one in (expected, found))
        for column in ("weight_moved_mean", "flipped_share", "max_vio_global"):
            np.testing.assert_allclose(after[column], before[column], rtol=1e-3, err_msg=name)


def test_a_router_without_a_finite_token_has_no_what_if_and_a_reason(made):
    source = made.recording(100)
    source.values[:] = np.nan
    found = tried(made, source, *KINDS, skip_non_finite=True, metrics=FEW)
    said = {facts["refused"].partition(": ")[2] for facts in found.facts["what_ifs"].values()}
    assert said == {"router text/0: no token that it could be fitted to is finite."}


def test_tokens_that_are_not_finite_are_left_out_of_every_batch(made):
    source, whole = made.recording(200), made.recording(200)
    source.values[[3, 64, 65]] = np.inf
    found = tried(made, source, *KINDS, skip_non_finite=True, what_if_batch=64, metrics=FEW)
    for name in KINDS:
        assert the_row(made.tables(found), name)["num_tokens"] == 197
    alone = tried(made, whole, "capacity:0.8", what_if_batch=64, metrics=FEW)
    assert the_row(made.tables(alone), "capacity:0.8")["num_tokens"] == 200


# ------------------------------------------------------------------------------------- rounding
def test_rounding_moves_the_weight_that_rounded_logits_move(made):
    router, source = made.router(), made.recording(300)
    found = tried(made, source, "topk:1", "topk:3", "smooth:eps=0", arithmetics=("bf16-logits",),
                  metrics=FEW)  # fmt: skip
    inputs, weight = torch.tensor(source.values), torch.tensor(router.weight)
    logits = inputs @ weight.T
    rounded = (inputs.bfloat16().float() @ weight.bfloat16().float().T).bfloat16().float()
    for name, k in (("topk:1", 1), ("topk:3", 3)):
        shares = []
        for z in (logits, rounded):
            best = z.sort(dim=-1, descending=True, stable=True)
            scores = z.double().softmax(-1).gather(1, best.indices[:, :k])
            dense = torch.zeros(z.shape, dtype=torch.float64).scatter(
                1, best.indices[:, :k], scores
            )
            shares.append((dense / dense.sum(-1, keepdim=True)).numpy())
        moved = np.mean([cityblock(*pair) / 2.0 for pair in zip(*shares, strict=True)])
        figures = found.facts["what_ifs"][name]["figures"]
        np.testing.assert_allclose(figures["weight_moved_by_bf16-logits"], moved, rtol=1e-2)
    stored = {f["figures"]["weight_moved_by_bf16-logits_as_stored"]
              for f in found.facts["what_ifs"].values()}  # fmt: skip
    limit = found.facts["what_ifs"]["smooth:eps=0"]["figures"]["weight_moved_by_bf16-logits"]
    assert stored == {limit}
