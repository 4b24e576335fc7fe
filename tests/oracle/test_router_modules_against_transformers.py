"""Oracle: the modules of transformers: routers with random weights, a capacity, a whole sample model.

Chosen sets must be equal wherever the margin is above rounding, routing weights within 1e-5. Of
the model, forward hooks see the very tensors that a recording must return bit by bit.
"""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from transformers import AutoModelForCausalLM, SwitchTransformersConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3MoE,
    DeepseekV3TopkRouter,
)
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersTop1Router,
)
from transformers.utils import logging as transformers_logging

from moegeom.core.router import GroupMask, Provenance, Router, Rule, Weights
from moegeom.core.tokens import TokenColumns
from moegeom.geometry.selection import route
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.testing.array_source import ArraySource
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.writer import RecordingWriter

WIDTH, ROUTED, TOP_K, TOKENS = 24, 16, 4, 400

#: What a router of DeepSeek-V3 asks of a config.
CONFIG = SimpleNamespace(
    hidden_size=WIDTH,
    num_experts=ROUTED,
    num_local_experts=ROUTED,
    num_experts_per_tok=TOP_K,
    norm_topk_prob=True,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)


def test_the_fill_of_the_mask_decides_and_without_a_capacity_the_share_is_null():
    """The V3 router fills with -inf: a rule that fills with 0.0 must be caught."""
    router = DeepseekV3TopkRouter(CONFIG).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            # biases as large as the differences between scores, all of them negative
            tensor.normal_(0.0, 0.3, generator=generator)
        router.e_score_correction_bias -= 1.0
    y = torch.randn((TOKENS, WIDTH), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        logits, _, index = router(y)
    same = {}
    for fill in (0.0, -np.inf):
        groups = GroupMask(4, 2, "top2_sum", fill)
        rule = Rule(TOP_K, "sigmoid", Weights("scores"), True, groups=groups)
        found = route(logits.numpy(), rule, router.e_score_correction_bias.numpy()).chosen
        same[fill] = (np.sort(found, axis=1) == np.sort(index.numpy(), axis=1)).all(axis=1).mean()
    assert_array_equal([same[0.0] < 0.1, same[-np.inf] == 1.0], [True, True])
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((SWITCH_EXPERTS, SWITCH_HIDDEN), dtype=np.float32)
    values = generator.standard_normal((SEQUENCES, LENGTH, SWITCH_HIDDEN), dtype=np.float32)
    row, reasons = measured_switch(None, weight, values)
    assert row.get("capacity_dropped_share") is None
    assert "tokens of a sequence that an expert takes" in reasons["expert_capacity"]


# ----------------------------------------------------------------------------------------- capacity
SEQUENCES, LENGTH, SWITCH_HIDDEN, SWITCH_EXPERTS = 40, 48, 16, 4


def measured_switch(capacity: int | None, weight: np.ndarray, values: np.ndarray):
    """The row of the router as stored, and why metrics are null."""
    rule = Rule(1, "softmax", Weights("scores"), capacity=capacity)
    router = Router("text/0", "text", 0, weight, rule, Provenance("made up", (), "", "F32"))
    source = ArraySource({"text/0": values.reshape(-1, SWITCH_HIDDEN)}, document_tokens=LENGTH)
    found = measure_router(RouterRun(router, source, [METRICS["expert_capacity"], METRICS["load"]]))
    rows = [row for row in found.rows["layers"] if row["variant"] == "as_stored"]
    return next(row for row in rows if row["population"] == "all"), found.facts["reasons"]


@pytest.mark.parametrize("capacity", [1, 12, 48])
def test_dropped_tokens_are_those_that_the_router_masks(capacity):
    torch.manual_seed(0)
    config = SwitchTransformersConfig(
        d_model=SWITCH_HIDDEN,
        num_experts=SWITCH_EXPERTS,
        expert_capacity=capacity,
        router_bias=False,
    )
    router = SwitchTransformersTop1Router(config).eval()
    values = torch.randn(SEQUENCES, LENGTH, SWITCH_HIDDEN) + 0.5 * torch.randn(
        SEQUENCES, 1, SWITCH_HIDDEN
    )
    with torch.no_grad():
        kept = router(values)[0].sum().item()
    weight = router.classifier.weight.detach().numpy()
    row, _ = measured_switch(capacity, weight, values.numpy())
    expected = 1.0 - kept / (SEQUENCES * LENGTH)
    assert_allclose(row["capacity_dropped_share"], expected, rtol=1e-12, atol=1e-15)
    assert row["expert_capacity"] == capacity
    assert (row["capacity_dropped_share_se"] > 0.0) == (expected > 0.0)


# --------------------------------------------------------------------------------- recorded outputs
MODEL = Path(__file__).resolve().parents[2] / "sample_ckpts" / "deepseek-tiny"
NUM_DOCUMENTS, HIDDEN, EXPERTS = 4, 64, 32
#: The documents are 64 tokens each; shards of other sizes cut through them.
SHARDS = (100, 1, 155)


@pytest.fixture(scope="module")
def documents():
    """The columns of the first four documents of the stored recording."""
    stored = open_tokens(MODEL / "rec" / "step_1500")
    columns = stored.read_columns(0, stored.facts.num_tokens)
    known = columns.document < NUM_DOCUMENTS
    # The domains of the stored recording are not named in the one made here.
    found = {name: array[known] for name, array in vars(columns).items()}
    return TokenColumns(**{**found, "domain": np.full(known.sum(), -1, np.int16)})


@pytest.fixture(scope="module")
def model():
    transformers_logging.disable_progress_bar()
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    path = MODEL / "step_1500"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **eager).eval()


@pytest.fixture(scope="module")
def ran(model, documents):
    """Arrays by router: what went in, what the shared experts and the block gave, and more."""
    seen = defaultdict(lambda: defaultdict(list))

    def watched(module, name, router, pick):
        def hook(_, arguments, output):
            seen[name][router].append(pick(arguments, output).detach().clone())

        return module.register_forward_hook(hook)

    handles, blocks = [], {}
    for layer, whole in enumerate(model.model.layers):
        if isinstance(block := whole.mlp, DeepseekV3MoE):
            blocks[router := f"text/{layer}"] = block
            for name, module, pick in (
                ("input", block, lambda a, _: a[0].flatten(0, -2)),
                ("block", block, lambda _, o: o.flatten(0, -2)),
                ("shared", block.shared_experts, lambda _, o: o.flatten(0, -2)),
                ("routed", block.experts, lambda _, o: o.reshape(-1, o.shape[-1])),
                ("weights", block.gate, lambda _, o: o[1]),
                ("chosen", block.gate, lambda _, o: o[2]),
            ):
                handles.append(watched(module, name, router, pick))
    with torch.no_grad():
        for document in range(NUM_DOCUMENTS):
            ids = documents.token_id[documents.document == document]
            model(input_ids=torch.tensor(ids[None].astype(np.int64)), use_cache=False)
    for handle in handles:
        handle.remove()
    arrays = {
        name: {router: torch.cat(parts).numpy() for router, parts in by_router.items()}
        for name, by_router in seen.items()
    }
    return SimpleNamespace(**arrays, blocks=blocks)


def each_expert(block, inputs):
    """(tokens, experts, width): every expert of the block on every token, without weight."""
    experts = block.experts
    with torch.no_grad():
        both = torch.einsum("th,eih->tei", torch.from_numpy(inputs), experts.gate_up_proj)
        gate, up = both.chunk(2, dim=-1)
        inner = experts.act_fn(gate) * up
        return torch.einsum("tei,ehi->teh", inner, experts.down_proj).numpy()


@pytest.fixture(scope="module")
def recorded(ran, documents, tmp_path_factory):
    """The arrays that were handed over, by kind and router, and the recording of them."""
    outputs = {
        "shared_output": ran.shared,
        "routed_output": {r: ran.block[r] - ran.shared[r] for r in ran.block},
        "expert_output": {r: each_expert(ran.blocks[r], ran.input[r]) for r in ran.block},
    }
    path = tmp_path_factory.mktemp("outputs") / "rec"
    first = 0
    with RecordingWriter(path, "router_input", tuple(ran.input), engine="transformers") as writer:
        for size in SHARDS:
            rows = slice(first, first + size)
            writer.append(
                TokenColumns(**{name: array[rows] for name, array in vars(documents).items()}),
                {router: values[rows] for router, values in ran.input.items()},
                {router: ids[rows].astype(np.int32) for router, ids in ran.chosen.items()},
                outputs={
                    kind: {router: values[rows] for router, values in by_router.items()}
                    for kind, by_router in outputs.items()
                },
            )
            first += size
    return outputs, open_tokens(path, "router_input", routers=tuple(ran.input))


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32)


def test_every_output_comes_back_with_its_shape_and_bits(recorded):
    outputs, source = recorded
    tokens = sum(SHARDS)
    assert source.facts.routers == ("text/1", "text/2", "text/3")
    assert source.facts.num_tokens == tokens == 64 * NUM_DOCUMENTS
    assert source.facts.outputs == tuple(outputs)
    shapes = {"shared_output": (HIDDEN,), "routed_output": (HIDDEN,)}
    shapes["expert_output"] = (EXPERTS, HIDDEN)
    for kind, by_router in outputs.items():
        for router, expected in by_router.items():
            found = source.read_output(router, kind, 0, tokens)
            assert found.shape == (tokens, *shapes[kind])
            assert_array_equal(bits(found), bits(expected), strict=True)
            part = source.read_output(router, kind, 60, 140)
            assert_array_equal(bits(part), bits(expected[60:140]), strict=True)


def test_outputs_of_experts_add_up_to_the_routed_one_and_that_to_the_block(recorded, ran):
    _, source = recorded
    for router, block in ran.block.items():
        shared = source.read_output(router, "shared_output", 0, len(block))
        routed = source.read_output(router, "routed_output", 0, len(block))
        # A difference of float32 added back: one rounding of each.
        assert_allclose(shared + routed, block, rtol=0, atol=2e-7 * np.abs(block).max())
    for router, routed in ran.routed.items():
        found = source.read_output(router, "routed_output", 0, len(routed))
        largest = max(np.abs(ran.block[router]).max(), np.abs(ran.shared[router]).max())
        assert_allclose(found, routed, rtol=0, atol=4e-7 * largest)
        assert np.abs(routed).max() > 1e-3 * largest
    for router, routed in ran.routed.items():
        experts = source.read_output(router, "expert_output", 0, len(routed)).astype(np.float64)
        chosen = np.take_along_axis(experts, ran.chosen[router][:, :, None], axis=1)
        found = (chosen * ran.weights[router][:, :, None]).sum(axis=1)
        assert_allclose(found, routed, rtol=0, atol=1e-5 * np.abs(routed).max())
