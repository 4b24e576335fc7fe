"""Theorems that every metric must meet.

Each raises AssertionError with the table, the column and the two values.

Inputs, weights and gains of the stream are small whole numbers over powers of two: every logit is
exact in float32 in whatever order it is summed, so two ways to the same figure must agree in every
bit of every choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.errors import InternalError
from moegeom.core.metric import Column, Invariance, Metric
from moegeom.core.router import GroupMask, Norm, Provenance, Router, Rule, Weights
from moegeom.core.row_keys import ALL, is_random
from moegeom.core.shapes import Float32, Int64
from moegeom.core.tokens import TILE, InputNoise, SourceFacts, TokenColumns, TopLogits
from moegeom.engine.request import MeasureOptions
from moegeom.measure.finish import measure_weights
from moegeom.measure.passes import RouterRun, measure_router

# ------------------------------------------------------------------------------------------- stream
EXPERTS, TOP_K, HIDDEN = 8, 3, 12
DOCUMENTS, DOCUMENT_TOKENS = 48, 64
DOMAINS = ("code", "prose", "tables")


@dataclass(frozen=True, eq=False)
class Stream:
    """Tokens as arrays: a source that a scan can read. ``row``: which tokens, in which order."""

    row: Int64[np.ndarray, "tokens"]
    inputs: Float32[np.ndarray, "all hidden"]
    outputs: dict[str, np.ndarray]

    @property
    def facts(self) -> SourceFacts:
        return SourceFacts(
            name="stream",
            stage="router_input",
            num_tokens=len(self.row),
            routers=("text/0",),
            domains=DOMAINS,
            has_documents=True,
            has_chosen=False,
            num_documents=DOCUMENTS,
            outputs=tuple(self.outputs),
        )

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        row = self.row[start:stop]
        document = row // DOCUMENT_TOKENS
        return TokenColumns(
            document=document,
            position=(row % DOCUMENT_TOKENS).astype(np.int32),
            token_id=(row * row % 37).astype(np.int32),
            domain=(document % len(DOMAINS)).astype(np.int16),
        )

    def read_values(
        self, router: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens hidden"]:
        return self.inputs[self.row[start:stop]]

    def read_chosen(self, router: str, start: int, stop: int) -> None:
        return None

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        raise InternalError("a stream holds router inputs")

    def read_output(self, router: str, kind: str, start: int, stop: int) -> np.ndarray | None:
        rows = self.outputs.get(kind)
        return None if rows is None else rows[self.row[start:stop]]

    def reordered(self, row: Int64[np.ndarray, "tokens"]) -> Stream:
        """The same tokens, or some of them, in another order."""
        return dataclasses.replace(self, row=row)


def stream(seed: int = 0) -> Stream:
    """A few thousand tokens in documents and domains that differ, two of them outliers."""
    random = np.random.default_rng(seed)
    tokens = DOCUMENTS * DOCUMENT_TOKENS
    document = np.arange(tokens) // DOCUMENT_TOKENS
    centre = random.integers(-200, 200, (DOCUMENTS, HIDDEN))[document]
    centre += random.integers(-300, 300, (len(DOMAINS), HIDDEN))[document % len(DOMAINS)]
    inputs = (centre + random.integers(-900, 900, (tokens, HIDDEN))) / np.float32(512)
    inputs[[5, 1000]] *= 64.0  # what attention sinks look like
    outputs = {
        "shared_output": random.standard_normal((tokens, HIDDEN)) + 1.0,
        "routed_output": random.standard_normal((tokens, HIDDEN)),
        "expert_output": random.standard_normal((tokens, EXPERTS, 4)),
    }
    singles = {name: values.astype(np.float32) for name, values in outputs.items()}
    return Stream(np.arange(tokens), inputs.astype(np.float32), singles)


#: Rules that the theorems are tried on.
RULES = {
    "softmax": Rule(TOP_K, "softmax", Weights("scores")),
    "sigmoid with selection bias": Rule(
        TOP_K, "sigmoid", Weights("scores", renormalise=True), has_selection_bias=True
    ),
    "sigmoid with groups": Rule(
        TOP_K,
        "sigmoid",
        Weights("scores", renormalise=True),
        has_selection_bias=True,
        groups=GroupMask(4, 2, "top2_sum", -np.inf),
    ),
}


def router(rule: Rule, seed: int = 1) -> Router:
    """A router with the rule; whole numbers over 64, a gain of powers of two."""
    random = np.random.default_rng(seed)
    weight = random.integers(-40, 40, (EXPERTS, HIDDEN)) / np.float32(64)
    bias = None
    if rule.has_selection_bias:
        bias = (random.integers(-32, 32, EXPERTS) / 256).astype(np.float32)
    gain = np.float32(2.0) ** random.integers(-1, 2, HIDDEN).astype(np.float32)
    return Router(
        name="text/0",
        stack="text",
        layer=0,
        weight=weight.astype(np.float32),
        rule=rule,
        provenance=Provenance("synthetic", (), "", "F32"),
        selection_bias=bias,
        gain=gain,
        norm=Norm("rms", 1e-6, "norm"),
    )


# ----------------------------------------------------------------------------------------- theorems
Rows = Mapping[str, Sequence[Mapping[str, Any]]]

#: Sums of float64 may be taken in another order.
_RTOL = 1e-9

#: Another order of experts, a shift or a factor changes the rounding of float32 scores.
_RTOL_CHANGED = 2e-5

#: Another gauge changes the last bit of distances and angles, and a token may then fall into the
#: neighbouring bin of a histogram: that moves a quantile a little, and its standard error more.
_RTOL_GAUGE = 2e-3
_RTOL_GAUGE_ERROR = 0.1

#: Units of columns that name an expert or a group, which a relabelling changes.
_LABELS = ("expert", "group")


def measured(metric: Metric, of: Router, source: Stream, **options: Any) -> Rows:
    """Rows of one metric for a router on a stream, null included; under another arithmetic, or
    noise, for a metric that needs it.
    """
    if metric.scope == "weights":
        return measure_weights(of, [metric], "no tokens").rows
    if metric.scope == "flip":
        options |= {"arithmetics": ("bf16-logits",)}
    if metric.scope == "noise":
        options |= {"noise": InputNoise(0.02)}
    run = RouterRun(of, source, [metric], MeasureOptions(**options))
    return measure_router(run).rows


def cut_anywhere(metric: Metric) -> None:
    """Batches of any size and any number of threads give the same rows, bit for bit."""
    for rule in RULES.values():
        one = measured(metric, router(rule), stream(), batch_tokens=1024, num_workers=1)
        other = measured(metric, router(rule), stream(), batch_tokens=4096, num_workers=3)
        _same(metric, one, other, rtol=0.0)


def errors_of_each(metric: Metric) -> None:
    """``without_each`` gives the standard errors that finishing without each block does."""
    if metric.without_each is None:
        return
    each = dataclasses.replace(metric, without_each=None)
    for rule in RULES.values():
        one = measured(metric, router(rule), stream())
        _same(metric, one, measured(each, router(rule), stream()), rtol=0.0, rtol_error=1e-12)


def permuted_tokens(metric: Metric) -> None:
    """Tokens in another order, with their documents and domains, give the same rows.

    In any order for the router itself, whose logits on the stream are exact. Those of its random
    router are not: a processor may add up the terms of a product in another order for another row
    of the tile. The random router is held to an order in which each token moves to another tile and
    keeps its row there, where it meets the same product, so that its logits are equal in every bit
    as well.
    """
    if "token_permutation" not in metric.invariances:
        return
    tokens, random = stream(), np.random.default_rng(3)
    row = tokens.row
    anywhere = tokens.reordered(row[random.permutation(len(row))])
    same_row = tokens.reordered(random.permuted(row.reshape(-1, TILE), axis=0).ravel())
    for rule in RULES.values():
        one, other = (
            measured(metric, router(rule), tokens),
            measured(metric, router(rule), anywhere),
        )
        _same(metric, _of_router(one), _of_router(other), _RTOL, "token_permutation")
        other = measured(metric, router(rule), same_row)
        _same(metric, one, other, _RTOL, "token_permutation")


def relabelled_experts(metric: Metric) -> None:
    """Experts in another order (groups kept whole) give the same figures, of the same experts."""
    if "expert_relabelling" not in metric.invariances:
        return
    for rule in RULES.values():
        whole = router(rule)
        size = whole.num_experts // (rule.groups.num_groups if rule.groups else 1)
        inside = np.random.default_rng(4).permuted(
            np.arange(whole.num_experts).reshape(-1, size), axis=1
        )
        new = np.random.default_rng(5).permutation(inside, axis=0).ravel()
        bias = whole.selection_bias
        renamed = dataclasses.replace(
            whole, weight=whole.weight[new], selection_bias=None if bias is None else bias[new]
        )
        tokens = stream()
        outputs = dict(tokens.outputs, expert_output=tokens.outputs["expert_output"][:, new])
        one = measured(metric, whole, tokens)
        other = measured(metric, renamed, dataclasses.replace(tokens, outputs=outputs))
        first, second = _without_random(one), _without_random(_renamed(other, new))
        first, second = _anonymous(metric, first), _anonymous(metric, second)
        _same(metric, first, second, _RTOL_CHANGED, "expert_relabelling")


def empty_stream(metric: Metric) -> None:
    """No token gives nulls, zeros and no rows, and never an exception."""
    if metric.scope == "weights":
        return
    tokens = stream()
    for rule in RULES.values():
        rows = measured(metric, router(rule), tokens.reordered(tokens.row[:0]))
        for table, listed in rows.items():
            floats = {c.name for c in metric.columns[table] if c.kind == "float" and not _fixed(c)}
            for row in listed:
                for name in floats & set(row):
                    assert row[name] in (None, 0.0) or math.isnan(row[name]), (table, name, row)


def one_document(metric: Metric) -> None:
    """A single document gives values, and no standard error."""
    if metric.scope == "weights":
        return
    tokens = stream().reordered(np.arange(DOCUMENT_TOKENS))
    for rule in RULES.values():
        for table, listed in measured(metric, router(rule), tokens).items():
            with_se = [f"{c.name}_se" for c in metric.columns[table] if c.has_se]
            for row in listed:
                for name in with_se:
                    value = row.get(name)
                    assert value is None or math.isnan(value), (table, name, value)


def declared_columns(metric: Metric) -> None:
    """Every value stands in a declared column, and every column is declared once."""
    for rule in RULES.values():
        for table, listed in measured(metric, router(rule), stream()).items():
            columns = metric.columns[table]
            names = [c.name for c in columns]
            assert len(set(names)) == len(names), table
            allowed = {*names, *(f"{c.name}_se" for c in columns if c.has_se)}
            for row in listed:
                assert set(row) <= {*allowed, "router", "variant", "population"}, (table, row)


def shifted_rows(metric: Metric) -> None:
    """One vector added to every row changes nothing, for a softmax rule."""
    if "common_row_shift" not in metric.invariances:
        return
    whole, tokens = router(RULES["softmax"]), stream()
    shift = np.random.default_rng(6).integers(-16, 16, whole.hidden_size) / np.float32(64)
    other = dataclasses.replace(whole, weight=whole.weight + shift.astype(np.float32))
    _compare_routers(metric, whole, other, tokens, tokens, "common_row_shift")


def scaled_router(metric: Metric) -> None:
    """All rows times four changes nothing, for a softmax rule."""
    if "positive_scaling" not in metric.invariances:
        return
    whole, tokens = router(RULES["softmax"]), stream()
    other = dataclasses.replace(whole, weight=whole.weight * np.float32(4.0))
    _compare_routers(metric, whole, other, tokens, tokens, "positive_scaling")


def folded_gain(metric: Metric) -> None:
    """Factors moved from the gain into the rows, and out of the inputs, change nothing."""
    if "gain_folding" not in metric.invariances:
        return
    whole, tokens = router(RULES["softmax"]), stream()
    random = np.random.default_rng(7)
    factor = np.float32(2.0) ** random.integers(-2, 3, whole.hidden_size).astype(np.float32)
    assert whole.gain is not None
    other = dataclasses.replace(whole, weight=whole.weight * factor, gain=whole.gain / factor)
    moved = dataclasses.replace(tokens, inputs=tokens.inputs / factor)
    _compare_routers(metric, whole, other, tokens, moved, "gain_folding")


#: By name; run them all.
THEOREMS: Mapping[str, Callable[[Metric], None]] = {
    theorem.__name__: theorem
    for theorem in (
        declared_columns,
        cut_anywhere,
        errors_of_each,
        permuted_tokens,
        relabelled_experts,
        empty_stream,
        one_document,
        shifted_rows,
        scaled_router,
        folded_gain,
    )
}


def _compare_routers(
    metric: Metric, one: Router, other: Router, tokens: Stream, moved: Stream, under: Invariance
) -> None:
    first = _without_random(measured(metric, one, tokens))
    second = _without_random(measured(metric, other, moved))
    if under == "gain_folding":  # which tokens are outliers is a matter of the lengths of inputs
        first, second = _of_all_tokens(first), _of_all_tokens(second)
    _same(metric, first, second, _RTOL_GAUGE, under, _RTOL_GAUGE_ERROR)


def _fixed(column: Column) -> bool:
    """A step of a ladder or a chance level, known without any token."""
    ladders = ("threshold", "width", "capacity_factor")
    return column.name in ladders or column.name.endswith(("_chance", "_log10", "_rate"))


def _without_random(rows: Rows) -> Rows:
    """The random router depends on the number and the length of each row."""
    return {
        table: [row for row in listed if row["variant"] != "random"]
        for table, listed in rows.items()
    }


def _of_router(rows: Rows) -> Rows:
    """Without the random router, under any arithmetic."""
    return {
        table: [row for row in listed if not is_random(row["variant"])]
        for table, listed in rows.items()
    }


def _of_all_tokens(rows: Rows) -> Rows:
    return {
        table: [row for row in listed if row["population"] == ALL] for table, listed in rows.items()
    }


def _renamed(rows: Rows, new: np.ndarray) -> Rows:
    """Rows of the table of experts under the names before the relabelling, in their order."""
    if "experts" not in rows:
        return rows
    listed = [{**row, "expert": int(new[row["expert"]])} for row in rows["experts"]]
    place = {population: at for at, population in enumerate(r["population"] for r in listed)}
    ordered = sorted(listed, key=lambda r: (r["variant"], place[r["population"]], r["expert"]))
    return {**rows, "experts": ordered}


def _anonymous(metric: Metric, rows: Rows) -> Rows:
    """Rows without the names of experts; lists of pairs and sets by their figures alone."""
    anonymous: dict[str, list[dict[str, Any]]] = {}
    for table, listed in rows.items():
        named = {c.name for c in metric.columns[table] if c.unit in _LABELS}
        if table == "experts":
            others = named - {"expert"}
            anonymous[table] = [{n: v for n, v in row.items() if n not in others} for row in listed]
            continue
        rest = [{n: v for n, v in row.items() if n not in named} for row in listed]
        if named and table != "layers":
            # which of a pair is the first one is a matter of its name
            rest = [
                {"variant": row["variant"], "population": row["population"], "figures": figures}
                for row in rest
                for figures in [sorted(v for v in row.values() if not isinstance(v, str))]
            ]
            rest.sort(key=lambda row: (row["variant"], row["population"], row["figures"]))
        anonymous[table] = rest
    return anonymous


def _same(
    metric: Metric,
    one: Rows,
    other: Rows,
    rtol: float,
    under: Invariance | None = None,
    rtol_error: float = 0.0,
) -> None:
    """Equal tables: the same rows in the same order, floats within ``rtol``.

    Standard errors are held to the larger of ``rtol`` and ``rtol_error``.

    Columns that say they change under the transformation are not compared.
    """
    assert set(one) == set(other)
    for table in one:
        skipped = {c.name for c in metric.columns[table] if under in c.changes_with}
        skipped |= {f"{name}_se" for name in skipped}
        first, second = one[table], other[table]
        assert len(first) == len(second), f"{metric.name}: {table}"
        for left, right in zip(first, second, strict=True):
            for name in left.keys() - skipped:
                where = f"{metric.name}: {table}.{name} of {left['population']}"
                near = max(rtol, rtol_error) if name.endswith("_se") else rtol
                _assert_equal(left[name], right.get(name), near, where)


def _assert_equal(left: Any, right: Any, rtol: float, where: str) -> None:
    if left is None or right is None or isinstance(left, str | bool):
        same = left == right or (left != left and right != right)
        assert same, f"{where}: {left} and {right}"
        return
    np.testing.assert_allclose(left, right, rtol, rtol * 1e-3, err_msg=where)
