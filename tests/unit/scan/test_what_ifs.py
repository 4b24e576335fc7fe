"""What-ifs on the road of a scan: cut in any way, at their limits, and against routers by hand."""

import dataclasses
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cityblock

from moegeom.core.tokens import TILE
from moegeom.engine import loop
from moegeom.measure.finish import MeasuredRouter
from moegeom.measure.passes import with_what_ifs
from moegeom.metrics import METRICS
from moegeom.variants.what_if import WHAT_IFS
from moegeom.variants.whatif import _choices
from tests.by_day import by_day
from tests.unit.scan import made

#: One of each kind, and both orders of a capacity.
KINDS = """
    smooth:extra=0.5 relu:experts=4 temperature:0.5 topk:2 capacity:0.8 capacity:0.8,order=score
    expert-choice cosine centred jitter:0.05,on=input without:5,9 random-rows
""".split()

#: Enough metrics to see every token and every slot of it.
FEW = [METRICS[name] for name in ("tokens", "load", "set_sizes", "coactivation", "flips")]

#: Columns that say whose a row is.
OF_ROWS = {"variant", "router"}


def tried(source, *texts, router=None, **changes) -> MeasuredRouter:
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
    return made.row_of(tables["layers"], variant)


def choices_of(tables, variant: str, reasons) -> dict[str, Counter]:
    """How often each row of a table occurs, of the metrics that a choice has."""
    columns = {}
    for metric in METRICS.all():
        if metric.scope == "router" and not metric.is_for_figures and metric.name not in reasons:
            for table, of_table in metric.columns.items():
                names = columns.setdefault(table, {"population"})
                names.update(column.name for column in of_table)
    return {
        table: Counter(
            repr([row[name] for name in sorted(names)]) for row in rows_of(tables, table, variant)
        )
        for table, names in columns.items()
    }


def assert_rows_are_those_of(measured, name: str, expected) -> None:
    """That every row of a what-if is one of the router as stored; margins may lack quantities."""
    reasons = measured.facts["what_ifs"][name]["reasons"]
    after = choices_of(made.tables(measured), name, reasons)
    before = choices_of(expected, "as_stored", reasons)
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


def len_of(batch: int) -> int:
    """Tokens of a recording whose last batch is not whole."""
    return max(batch, TILE) + 100


@pytest.mark.parametrize("batch", by_day([64, 2 * TILE], [2 * TILE]))
def test_batches_and_threads_change_no_row_and_no_figure(monkeypatch, batch):
    """How many tokens are tried together, read by threads a tile at a time, or all at once."""
    source, pace = made.recording(len_of(batch)), {"what_if_batch": batch, "metrics": FEW}
    cut = tried(source, *KINDS, batch_tokens=TILE, num_workers=3, **pace)
    monkeypatch.setattr(loop, "_BATCHES", 1)
    whole = tried(source, *KINDS, batch_tokens=8 * TILE, num_workers=1, **pace)
    tables = made.tables(cut)
    np.testing.assert_equal(made.tables(whole), tables)
    np.testing.assert_equal(whole.facts, cut.facts)
    # every kind has rows and tells what it moves
    assert [*cut.facts["what_ifs"]] == KINDS
    for name in KINDS:
        row = the_row(tables, name)
        assert row["num_tokens"] == len_of(batch)
        assert 0.0 < row["weight_moved_mean"] <= 1.0, name


@pytest.mark.parametrize(("batch", "exclude_first"), [(16, 2), (2 * TILE, 2), (TILE, 0)])
def test_other_tokens_are_the_neighbours_of_a_batch_and_no_more(monkeypatch, batch, exclude_first):
    seen, lock, kind = [], threading.Lock(), WHAT_IFS["capacity"]

    def make(router, values, sample):
        gate = kind.make(router, values, sample)

        def choose(tokens):
            with lock:
                seen.append(tokens.token)
            return gate.choose(tokens)  # pyright: ignore[reportOptionalCall]

        return dataclasses.replace(gate, choose=choose, measure=None)

    monkeypatch.setitem(WHAT_IFS._records(), "capacity", dataclasses.replace(kind, make=make))
    pace = {"batch_tokens": TILE, "num_workers": 3, "what_if_batch": batch, "metrics": FEW}
    source = made.recording(2 * TILE + 100)
    tried(source, "capacity:0.8", exclude_first=exclude_first, **pace)
    counted = np.flatnonzero(source.columns.position >= exclude_first)
    groups = [counted[counted // batch == number] for number in np.unique(counted // batch)]
    # the first call learns which quantities come with a choice
    np.testing.assert_equal(sorted(map(list, seen[1:])), [list(group) for group in groups])


LIMITS = ("topk:3", "temperature:1", "smooth:eps=0", "capacity:inf", "jitter:0", "without")  # fmt: skip


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_at_its_limit_every_table_is_that_of_the_router_bit_for_bit(kind):
    source, router = made.recording(TILE + 100), made.router(kind)
    router.weight[7] *= -0.5  # without equal rows no two scores are equal
    stored = made.measured(source, router)
    measured = tried(source, *LIMITS, router=router)
    tables = made.tables(measured)
    for limit in LIMITS:
        assert_rows_are_those_of(measured, limit, stored)
        row = the_row(tables, limit)
        assert (row["weight_moved_mean"], row["flipped_share"]) == (0.0, 0.0)
        # what a choice lacks has a reason and no column
        reasons = measured.facts["what_ifs"][limit]["reasons"]
        assert all(reasons[name] for name in reasons) and set(METRICS.names()) & set(reasons)
        columns = [METRICS[n].columns.get("layers", ()) for n in reasons if n in METRICS.names()]
        assert {row[column.name] for of_metric in columns for column in of_metric} <= {None}


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_another_number_of_experts_has_the_rows_of_a_router_with_that_number(kind):
    source, router = made.recording(TILE + 100), made.router(kind)
    by_hand = dataclasses.replace(router, rule=dataclasses.replace(router.rule, top_k=5))
    measured = tried(source, "topk:5", router=router)
    assert_rows_are_those_of(measured, "topk:5", made.measured(source, by_hand))
    assert measured.facts["what_ifs"]["topk:5"]["top_k"] == 5


def test_recorded_logits_do_as_inputs_or_are_refused_and_lost_tokens_are_left_out():
    router, inputs = made.router(), made.recording(300)
    logits = made.Recorded(inputs.values @ router.weight.T, "logits")
    of_inputs, of_logits = (tried(source, *KINDS, metrics=FEW) for source in (inputs, logits))
    facts = of_logits.facts["what_ifs"]
    refused = {name for name in facts if "refused" in facts[name]}
    assert refused == {"cosine", "random-rows", "jitter:0.05,on=input"}
    assert all("inputs" in facts[name]["refused"] for name in refused)
    for name in set(KINDS) - refused:
        before, after = (the_row(made.tables(one), name) for one in (of_inputs, of_logits))
        for column in ("weight_moved_mean", "flipped_share", "max_vio_global"):
            np.testing.assert_allclose(after[column], before[column], rtol=1e-3, err_msg=name)
    source = made.recording(200)
    source.values[[3, 64, 65]] = np.inf
    measured = tried(source, *KINDS, non_finite="skip", what_if_batch=64, metrics=FEW)
    tables = made.tables(measured)
    assert {the_row(tables, name)["num_tokens"] for name in KINDS} == {197}
    source.values[:] = np.nan
    measured = tried(source, *KINDS, non_finite="skip", metrics=FEW)
    refusals = {of["refused"].partition(": ")[2] for of in measured.facts["what_ifs"].values()}
    assert refusals == {"router text/0: no token that it could be fitted to is finite."}


def test_rounding_moves_the_weight_that_rounded_logits_move():
    router, source = made.router(), made.recording(300)
    texts = ("topk:1", "topk:3", "smooth:eps=0")
    measured = tried(source, *texts, arithmetics=("bf16-logits",), metrics=FEW)
    figures = {name: of["figures"] for name, of in measured.facts["what_ifs"].items()}
    inputs, weight = torch.tensor(source.values), torch.tensor(router.weight)
    logits = inputs @ weight.T
    rounded = (inputs.bfloat16().float() @ weight.bfloat16().float().T).bfloat16().float()
    for name, k in (("topk:1", 1), ("topk:3", 3)):
        shares = []
        for z in (logits, rounded):
            best = z.sort(dim=-1, descending=True, stable=True).indices[:, :k]
            scores = z.double().softmax(-1).gather(1, best)
            dense = torch.zeros(z.shape, dtype=torch.float64).scatter(1, best, scores)
            shares.append((dense / dense.sum(-1, keepdim=True)).numpy())
        moved = np.mean([cityblock(*pair) / 2.0 for pair in zip(*shares, strict=True)])
        np.testing.assert_allclose(figures[name]["weight_moved_by_bf16-logits"], moved, rtol=1e-2)
    stored = {of["weight_moved_by_bf16-logits_as_stored"] for of in figures.values()}
    assert stored == {figures["smooth:eps=0"]["weight_moved_by_bf16-logits"]}
