"""Oracles: torch's own bfloat16 layer, and products in many orders."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from moegeom.core.router import GroupMask, Provenance, Router, Rule, Weights
from moegeom.core.tokens import TILE
from moegeom.engine import flipping
from moegeom.engine.flipping import ReferenceChoice, emulated_choice, flip_of
from moegeom.geometry.number_formats import rounded_to
from moegeom.geometry.selection import route
from moegeom.kernels.table import load_kernels
from moegeom.measure.passes import measure_router
from moegeom.metrics import METRICS
from moegeom.variants.arithmetic import arithmetic, arithmetic_names
from moegeom.variants.emulated import emulate

TOKENS, WIDTH, EXPERTS, TOP_K = 2 * TILE + 77, 192, 24, 4
RULES = {
    "softmax": Rule(TOP_K, "softmax", Weights("scores", True)),
    "softmax with logit bias": Rule(
        TOP_K, "softmax", Weights("softmax_of_selected_logits"), has_logit_bias=True
    ),
    "sigmoid with bias": Rule(TOP_K, "sigmoid", Weights("scores", True), has_selection_bias=True),
    "sigmoid in groups": Rule(
        TOP_K,
        "sigmoid",
        Weights("scores", True),
        has_selection_bias=True,
        groups=GroupMask(4, 2, "top2_sum", -np.inf),
    ),
    "sqrt softplus with bias": Rule(
        TOP_K, "sqrt_softplus", Weights("scores", True), has_selection_bias=True
    ),
    "softmax with bias": Rule(TOP_K, "softmax", Weights("scores", True), has_selection_bias=True),
}
KERNELS = load_kernels("cpu")


def made(rule: Rule, seed: int = 0) -> Router:
    random = np.random.default_rng(seed)
    bias = (0.2 * random.standard_normal(EXPERTS)).astype(np.float32)
    return Router(
        name="text/0",
        stack="text",
        layer=0,
        weight=(random.standard_normal((EXPERTS, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32),
        rule=rule,
        provenance=Provenance("made", ("gate.weight",), "made.safetensors", "F32"),
        logit_bias=bias if rule.has_logit_bias else None,
        selection_bias=bias if rule.has_selection_bias else None,
    )


def inputs(tokens: int = TOKENS, seed: int = 1) -> np.ndarray:
    """Some of the tokens are sinks: a thousand times as long."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((tokens, WIDTH)).astype(np.float32)
    values[::97] *= 1000.0
    return values


def reference_of(router: Router, values: np.ndarray) -> ReferenceChoice:
    logits = values @ router.weight.T
    if router.logit_bias is not None:
        logits = logits + router.logit_bias
    found = route(logits, router.rule, router.selection_bias)
    return ReferenceChoice(values, logits, found.chosen, found.margin, found.weights, None)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_flips_where_nothing_is_changed(rule: str) -> None:
    router, values = made(RULES[rule]), inputs()
    found = flip_of(
        emulate(router, arithmetic("float32-blocks")), reference_of(router, values), KERNELS
    )
    assert not found.differs.any()
    assert found.proved.mean() > 0.99
    assert not found.weight_moved.any()


@pytest.mark.parametrize("experts", [1, TOP_K])
def test_where_every_expert_is_chosen_every_token_is_proved(experts: int) -> None:
    few = made(dataclasses.replace(RULES["softmax"], top_k=experts))
    router, values = dataclasses.replace(few, weight=few.weight[:experts]), inputs()
    reference = reference_of(router, values)
    for name in ("float32-blocks", "bf16-logits"):
        assert flip_of(emulate(router, arithmetic(name)), reference, KERNELS).proved.all()


def test_where_one_expert_is_left_out_no_token_that_flips_is_proved() -> None:
    made_router, values = made(RULES["softmax"]), inputs()
    router = dataclasses.replace(made_router, weight=made_router.weight[: TOP_K + 1])
    found = flip_of(
        emulate(router, arithmetic("bf16-logits")), reference_of(router, values), KERNELS
    )
    assert found.differs.any()
    assert not (found.proved & found.differs).any()


def test_logits_are_those_of_a_bfloat16_layer_of_torch() -> None:
    router, values = made(RULES["softmax"]), inputs()
    emulated = emulate(router, arithmetic("transformers-softmax"))
    logits, chosen, _ = emulated_choice(emulated, values, KERNELS)
    mine = rounded_to(logits, "bfloat16")
    layer = torch.nn.functional.linear(
        torch.from_numpy(values).bfloat16(), torch.from_numpy(router.weight).bfloat16()
    )
    theirs = layer.float().numpy()
    other = mine != theirs
    assert other.mean() < 1e-3
    # one step of bfloat16, where the last bit of the float32 sum decides
    assert (np.abs(mine - theirs)[other] <= 2.0**-7 * np.abs(theirs)[other]).all()
    scores = torch.softmax(layer, dim=-1, dtype=torch.float32)
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)[:, :TOP_K].numpy()
    same = ~other.any(axis=1)
    np.testing.assert_array_equal(np.sort(chosen[same]), np.sort(order[same]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", arithmetic_names())
def test_a_proved_token_keeps_its_set_in_every_order_of_summation(name: str, rule: str) -> None:
    router, values = made(RULES[rule]), inputs(TILE)
    emulated = emulate(router, arithmetic(name))
    reference = reference_of(router, values)
    proved = flip_of(emulated, reference, KERNELS).proved
    entering, random = emulated.inputs(values), np.random.default_rng(3)
    for _ in range(3):
        order = random.permutation(WIDTH)
        # sums of permuted blocks, in float32: an engine that the bound must cover
        blocks = [order[start : start + 16] for start in range(0, WIDTH, 16)]
        logits = np.zeros((len(values), EXPERTS), np.float32)
        for block in blocks:
            logits += entering[:, block] @ emulated.columns[block]
        if emulated.logit_bias is not None:
            logits += emulated.logit_bias.astype(np.float32)
        compared = emulated.compared(logits)
        if router.rule.groups is not None:
            compared, _ = KERNELS["group_mask"](compared, router.rule.groups)
        chosen, _ = KERNELS["top_k"](compared, TOP_K)
        same = (np.sort(chosen) == np.sort(reference.chosen)).all(axis=1)
        assert same[proved].all()


def test_a_token_is_proved_where_exact_logits_are_further_apart_than_an_engine_errs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a float32 product errs by, which what all logits share makes more than gaps."""
    router, values = made(RULES["softmax with logit bias"]), inputs(TILE)
    router.weight[:, 0], values[:, 0] = 1.0, np.geomspace(1.0, 1e5, TILE)
    assert router.logit_bias is not None
    exact = values.astype(np.float64) @ router.weight.T.astype(np.float64) + router.logit_bias
    found = route(exact, router.rule, None)
    reference = dataclasses.replace(reference_of(router, values), chosen=found.chosen)
    emulated = emulate(router, arithmetic("float32-blocks"))
    lengths = np.linalg.norm(values.astype(np.float64), axis=1)
    error, of_any = (emulated.sum_error(lengths, order) for order in ("blocks_of_16", "any"))
    off = np.random.default_rng(4).uniform(-0.9, 0.9, exact.shape) * of_any[:, None]
    monkeypatch.setattr(flipping, "engine_logits", lambda *_: (exact + off).astype(np.float32))
    proved = flipping.flip_of(emulated, reference, KERNELS).proved
    assert proved is not None
    assert proved[found.margin > 2.001 * error].all()
    sizes = (np.abs(values).astype(np.float64) @ np.abs(router.weight).T).max(axis=1)
    assert not proved[found.margin < 2.0 * error * sizes / lengths / emulated.longest_row].any()
    # neither the product nor its logits would tell
    assert (proved & (found.margin < of_any)).sum() > 50


@pytest.mark.parametrize("name", ["bf16", "int4", "fp8", "bias-bf16"])
def test_a_known_change_is_routed_anew(name: str) -> None:
    """What is certain about a change of rows and inputs is the choice of the changed ones."""
    router, values = made(RULES["sigmoid with bias"]), inputs()
    emulated = emulate(router, arithmetic(name))
    found = flip_of(emulated, reference_of(router, values), KERNELS)
    logits = emulated.inputs(values).astype(np.float64) @ emulated.columns.astype(np.float64)
    anew = route(logits, router.rule, emulated.selection_bias)
    before = reference_of(router, values).chosen
    differs = (np.sort(anew.chosen) != np.sort(before)).any(axis=1)
    clear = anew.margin > 1e-5
    np.testing.assert_array_equal(found.differs[clear], differs[clear])
    assert found.differs.any()
    assert (found.weight_moved > 0.0).sum() == found.differs.sum()


def test_ties_of_coarse_logits_leave_a_range() -> None:
    router, values = made(RULES["softmax"]), inputs()
    found = flip_of(
        emulate(router, arithmetic("bf16-logits")), reference_of(router, values), KERNELS
    )
    assert found.tied.any()
    assert (found.surely <= found.differs).all()
    assert (found.differs <= found.perhaps).all()
    assert found.surely.sum() < found.differs.sum() < found.perhaps.sum()
    assert not (found.proved & found.perhaps).any()


def measured(made_source, router, **changes):
    options = {"arithmetics": ("bf16-logits", "int8")} | changes
    options = dataclasses.replace(made_source.options, **options)
    return measure_router(dataclasses.replace(made_source, router=router, options=options))


def test_pace_and_workers_change_nothing(made, tmp_path) -> None:
    source, router = made.recording(), made.router()
    run = made.run(source, router)
    tables = [
        measured(run, router, batch_tokens=size, num_workers=workers).rows
        for size, workers in ((TILE, 1), (4 * TILE, 2))
    ]
    np.testing.assert_equal(tables[0], tables[1])
    rows = [r for r in tables[0]["layers"] if r["variant"] == "bf16-logits"]
    assert {row["population"] for row in rows} >= {"all", "domain=code"}
    assert all(row["flipped_share"] is not None for row in rows)


def test_shares_are_those_of_the_tokens(made) -> None:
    source, router = made.recording(), made.router()
    rows = measured(made.run(source, router), router).rows["layers"]
    found = {r["variant"]: r for r in rows if r["population"] == "all"}
    reference = reference_of(router, source.values)
    for name in ("bf16-logits", "int8"):
        flip = flip_of(emulate(router, arithmetic(name)), reference, KERNELS)
        assert found[name]["flipped_share"] == flip.differs.mean()
        assert found[name]["proved_share"] == flip.proved.mean()
        np.testing.assert_allclose(
            found[name]["weight_moved_mean"], flip.weight_moved.mean(), atol=1e-9
        )
        assert found[name]["num_disproved"] == 0
        assert found[f"random+{name}"]["flipped_share"] > 0.0


def test_arithmetics_need_router_inputs(made) -> None:
    router = made.router()
    logits = made.inputs(300) @ router.weight.T
    source = made.source("logits", made.columns(300), logits.astype(np.float32))
    found = measured(made.run(source, router), router)
    assert found.facts["reasons"]["flips"].startswith("needs recorded router inputs")
    assert not [row for row in found.rows["layers"] if row["variant"] == "int8"]


def test_metrics_that_compare_are_no_part_of_a_scan_without_variants(made) -> None:
    found = measure_router(made.run(made.recording(300)))
    names = {m.name for m in METRICS.all() if m.scope == "flip"}
    assert names
    assert not names & set(found.facts["reasons"])
    assert {row["variant"] for row in found.rows["layers"]} == {"as_stored", "random"}
