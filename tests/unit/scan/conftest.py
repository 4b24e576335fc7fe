"""A router, and tokens that live in memory, cut and interrupted as a test likes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.core.router import GroupMask, Norm, Provenance, Router, Rule, Weights
from moegeom.core.tokens import TILE, SourceFacts, TokenColumns, TopLogits
from moegeom.engine.request import MeasureOptions
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.results.schema import arrow_schema, metric_tables, table_of

EXPERTS, HIDDEN, TOP_K = 12, 8, 3
TOKENS = 4 * TILE + 100
NAME = "text/0"


class ArraySource:
    """A recording in memory; ``values`` and ``chosen`` are those of the one router."""

    def __init__(self, stage, columns, values=None, chosen=None, domains=("code", "prose")) -> None:
        self.columns, self.values, self.chosen = columns, values, chosen
        self.facts = SourceFacts(
            name="array",
            stage=stage,
            num_tokens=len(columns.document),
            routers=(NAME,),
            domains=domains,
            has_documents=True,
            has_chosen=chosen is not None,
        )

    def read_columns(self, start, stop):
        return TokenColumns(**{n: a[start:stop] for n, a in vars(self.columns).items()})

    def read_values(self, router, start, stop):
        return self.values[start:stop]

    def read_top_logits(self, router, start, stop):
        return TopLogits(self.values.logits[start:stop], self.values.expert[start:stop])

    def read_chosen(self, router, start, stop):
        return None if self.chosen is None else self.chosen[start:stop]


def columns_of(tokens: int) -> TokenColumns:
    """Documents of 97 tokens, three in four of them with a domain."""
    token = np.arange(tokens)
    document = token // 97
    return TokenColumns(
        document=document,
        position=(token % 97).astype(np.int32),
        token_id=np.full(tokens, -1, np.int32),
        domain=np.array([0, 1, -1, 0], np.int16)[document % 4],
    )


def router_of(kind: str = "softmax", seed: int = 0, norm: bool = False) -> Router:
    """An affine router, or with ``sigmoid`` one with selection bias and groups; rows 2 and 7 duplicate rows."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
    weight[7] = weight[2]
    rule = Rule(TOP_K, "softmax", Weights("scores", True))
    bias = None
    if kind == "sigmoid":
        groups = GroupMask(4, 2, "top2_sum", -np.inf)
        rule = Rule(TOP_K, "sigmoid", Weights("scores", True, 1e-20, 2.5), True, groups=groups)
        bias = (0.1 * random.standard_normal(EXPERTS)).astype(np.float32)
    return Router(
        name=NAME,
        stack="text",
        layer=0,
        weight=weight,
        rule=rule,
        provenance=Provenance("made", ("gate.weight",), "made.safetensors", "F32"),
        selection_bias=bias,
        gain=np.linspace(0.5, 1.5, HIDDEN).astype(np.float32) if norm else None,
        norm=Norm("rms", 1e-6, "norm.weight") if norm else None,
    )


def inputs_of(tokens: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, HIDDEN)).astype(np.float32)


def recording(tokens: int = TOKENS, **given) -> ArraySource:
    return ArraySource("router_input", columns_of(tokens), inputs_of(tokens), **given)


#: All but the searches for ties of several experts, which take a second each and have tests of
#: their own.
MEASURED = [metric for metric in METRICS.all() if metric.scope != "exposure"]


def run_of(source, router=None, **changes) -> RouterRun:
    asked = {f.name for f in dataclasses.fields(MeasureOptions)} & changes.keys()
    options = {"batch_tokens": TILE} | {name: changes.pop(name) for name in asked}
    run = RouterRun(router or router_of(), source, MEASURED, MeasureOptions(**options))
    return dataclasses.replace(run, **changes)


def tables_of(measured) -> dict[str, list[dict]]:
    """Rows as they are written: nan is null, and columns have their types."""
    metrics = METRICS.all()
    return {
        table: table_of(measured.rows.get(table, []), arrow_schema(table, metrics)).to_pylist()
        for table in metric_tables(metrics)
    }


class Made:
    """What tests of the scan build things with."""

    source = staticmethod(ArraySource)
    columns = staticmethod(columns_of)
    router = staticmethod(router_of)
    inputs = staticmethod(inputs_of)
    recording = staticmethod(recording)
    run = staticmethod(run_of)
    tables = staticmethod(tables_of)

    @staticmethod
    def measured(source, router=None, **changes) -> dict[str, list[dict]]:
        return tables_of(measure_router(run_of(source, router, **changes)))

    @staticmethod
    def layer(source, router=None, **changes) -> dict:
        """The one row of ``layers`` for the stored router on all tokens."""
        rows = Made.measured(source, router, **changes)["layers"]
        return next(r for r in rows if (r["variant"], r["population"]) == ("as_stored", "all"))


@pytest.fixture(scope="session")
def made():
    return Made


@pytest.fixture(scope="session", params=["softmax", "sigmoid"])
def undisturbed(request):
    """Kind of router, and its tables from one thread and batches of one tile."""
    return request.param, Made.measured(recording(), router_of(request.param))
