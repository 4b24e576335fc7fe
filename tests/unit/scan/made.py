"""Routers of any rows and rule, and tokens that live in memory, measured as a test likes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moegeom.core.router import GroupMask, Norm, Provenance, Router, Rule, Weights
from moegeom.core.tokens import TILE, SourceFacts, TokenColumns, TopLogits
from moegeom.engine.request import MeasureOptions, MergeRequest
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.pipeline import merge as merge_parts
from moegeom.results.schema import arrow_schema, metric_tables, table_of
from tests.columns import columns_of

SOFTMAX = Weights("scores")
SUM_TO_ONE = Weights("scores", renormalise=True)


def router_with(weight: np.ndarray, rule: Rule, **fields: Any) -> Router:
    """A router of layer 0 with these rows; ``fields`` are biases, a gain, another name."""
    made = Provenance("made", ("gate.weight",), "made.safetensors", "F32")
    of_layer_0 = {"name": "text/0", "stack": "text", "layer": 0}
    return Router(**(of_layer_0 | fields), weight=weight, rule=rule, provenance=made)


def normal_rows(experts: int, hidden: int, seed: int = 0) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal((experts, hidden)).astype(np.float32)


EXPERTS, HIDDEN, TOP_K = 12, 8, 3
TOKENS = 4 * TILE + 100
NAME = "text/0"


class Interrupted(Exception):
    """What a test raises in the middle of a scan."""


def merge(parts, out, **sides):
    """What the parts in these folders add up to."""
    return merge_parts(MergeRequest(tuple(parts), out=out, **sides))


def columns(tokens: int, domain: np.ndarray | None = None) -> TokenColumns:
    """Documents of 97 tokens, three in four of them with a domain."""
    token = np.arange(tokens)
    document = token // 97
    if domain is None:
        domain = np.array([0, 1, -1, 0])[document % 4]
    return columns_of(document, token % 1000, domain)


def unlabelled(tokens: int) -> TokenColumns:
    """Columns of a stream that tells no documents and no domains."""
    unknown = np.full(tokens, -1)
    return TokenColumns(
        document=unknown,
        position=unknown.astype(np.int32),
        token_id=unknown.astype(np.int32),
        domain=unknown.astype(np.int16),
    )


class Recorded:
    """A recording in memory; ``values`` and ``chosen`` are those of the one router."""

    def __init__(
        self,
        values: np.ndarray | TopLogits | None,
        stage: str = "router_input",
        chosen: np.ndarray | None = None,
        labels: TokenColumns | None = None,
        domains: Sequence[str] = ("code", "prose"),
    ) -> None:
        self.values, self.chosen = values, chosen
        self.columns = columns(len(values)) if labels is None else labels
        self.facts = SourceFacts(
            name="recorded",
            stage=stage,
            num_tokens=len(self.columns.document),
            routers=(NAME,),
            domains=tuple(domains),
            has_documents=bool((self.columns.document >= 0).any()),
            has_chosen=chosen is not None,
        )

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return self.columns.at(slice(start, stop))

    def read_values(self, router: str, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop].astype(np.float32)

    def stored_dtype(self, router: str) -> np.dtype:
        return self.values.dtype

    def read_stored(self, router: str, start: int, out: np.ndarray) -> None:
        out[...] = self.values[start : start + len(out)]

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        return TopLogits(self.values.logits[start:stop], self.values.expert[start:stop])

    def read_chosen(self, router: str, start: int, stop: int) -> np.ndarray | None:
        return None if self.chosen is None else self.chosen[start:stop]

    def read_output(self, router: str, kind: str, start: int, stop: int) -> None:
        return None


def source(stage: str, labels: TokenColumns, values=None, chosen=None) -> Recorded:
    """A recording of any stage."""
    return Recorded(values, stage, chosen, labels)


def inputs(tokens: int, seed: int = 1) -> np.ndarray:
    return normal_rows(tokens, HIDDEN, seed)


def recording(tokens: int = TOKENS) -> Recorded:
    """Router inputs."""
    return Recorded(inputs(tokens))


def router(kind: str = "softmax", norm: bool = False) -> Router:
    """Affine, or with ``sigmoid`` with selection bias and groups; rows 2 and 7 are duplicates."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
    weight[7] = weight[2]
    rule, bias = Rule(TOP_K, "softmax", SUM_TO_ONE), None
    if kind == "sigmoid":
        weights, groups = Weights("scores", True, 1e-20, 2.5), GroupMask(4, 2, "top2_sum", -np.inf)
        rule = Rule(TOP_K, "sigmoid", weights, has_selection_bias=True, groups=groups)
        bias = (0.1 * random.standard_normal(EXPERTS)).astype(np.float32)
    return router_with(
        weight,
        rule,
        selection_bias=bias,
        gain=np.linspace(0.5, 1.5, HIDDEN).astype(np.float32) if norm else None,
        norm=Norm("rms", 1e-6, "norm.weight") if norm else None,
    )


#: All but the searches for ties of several experts, which take a second each and have tests of
#: their own.
MEASURED = METRICS.all()


def run(source: Recorded, of: Router | None = None, **changes) -> RouterRun:
    """A run of a router on a source; ``changes`` are of its fields or of its options."""
    names = {f.name for f in dataclasses.fields(MeasureOptions)} & changes.keys()
    options = {"batch_tokens": TILE} | {name: changes.pop(name) for name in names}
    whole = RouterRun(of or router(), source, MEASURED, MeasureOptions(**options))
    return dataclasses.replace(whole, **changes)


def tables(measured) -> dict[str, list[dict]]:
    """Rows as they are written: nan is null, and columns have their types."""
    metrics = METRICS.all()
    return {
        table: table_of(measured.rows.get(table, []), arrow_schema(table, metrics)).to_pylist()
        for table in metric_tables(metrics)
    }


def measured(source: Recorded, of: Router | None = None, **changes) -> dict[str, list[dict]]:
    return tables(measure_router(run(source, of, **changes)))


def rows_of(rows: list[dict], variant: str = "as_stored") -> list[dict]:
    """The rows of a variant on all tokens."""
    return [r for r in rows if (r["variant"], r["population"]) == (variant, "all")]


def row_of(rows: list[dict], variant: str = "as_stored") -> dict:
    (row,) = rows_of(rows, variant)
    return row


def layer(source: Recorded, of: Router | None = None, **changes) -> dict:
    """The row of ``layers`` for the stored router on all tokens."""
    return row_of(measured(source, of, **changes)["layers"])
