"""Oracle: transformers runs a sample model; what its MoE blocks gave comes back from a recording.

Forward hooks on the shared experts and on the whole block see the very tensors of the model. The
recording must return their bits; that ``routed_output`` and ``expert_output`` mean what the format
says is held against the model's own experts.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.utils import logging as transformers_logging

from moegeom.core.tokens import TokenColumns
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.writer import RecordingWriter

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
    return AutoModelForCausalLM.from_pretrained(
        MODEL / "step_1500",
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


@pytest.fixture(scope="module")
def ran(model, documents):
    """Arrays by router: what went in, what the shared experts and the block gave, and more."""
    seen = SimpleNamespace(
        **{
            name: defaultdict(list)
            for name in ("input", "shared", "block", "routed", "weights", "chosen")
        }
    )

    def keep(name, router, pick):
        def hook(_, arguments, output):
            getattr(seen, name)[router].append(pick(arguments, output).detach().clone())

        return hook

    handles = []
    blocks = {}
    for layer, whole in enumerate(model.model.layers):
        if isinstance(block := whole.mlp, DeepseekV3MoE):
            router = f"text/{layer}"
            blocks[router] = block
            for name, module, pick in (
                ("input", block, lambda a, _: a[0].flatten(0, -2)),
                ("block", block, lambda _, o: o.flatten(0, -2)),
                ("shared", block.shared_experts, lambda _, o: o.flatten(0, -2)),
                ("routed", block.experts, lambda _, o: o.reshape(-1, o.shape[-1])),
                ("weights", block.gate, lambda _, o: o[1]),
                ("chosen", block.gate, lambda _, o: o[2]),
            ):
                handles.append(module.register_forward_hook(keep(name, router, pick)))
    with torch.no_grad():
        for document in range(NUM_DOCUMENTS):
            ids = documents.token_id[documents.document == document]
            model(input_ids=torch.tensor(ids[None].astype(np.int64)), use_cache=False)
    for handle in handles:
        handle.remove()
    arrays = {
        name: {router: torch.cat(parts).numpy() for router, parts in by_router.items()}
        for name, by_router in vars(seen).items()
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
            np.testing.assert_array_equal(bits(found), bits(expected), strict=True)
            part = source.read_output(router, kind, 60, 140)
            np.testing.assert_array_equal(bits(part), bits(expected[60:140]), strict=True)


def test_the_block_is_the_sum_of_the_recorded_outputs(recorded, ran):
    _, source = recorded
    for router, block in ran.block.items():
        shared = source.read_output(router, "shared_output", 0, len(block))
        routed = source.read_output(router, "routed_output", 0, len(block))
        # A difference of float32 added back: one rounding of each.
        np.testing.assert_allclose(shared + routed, block, rtol=0, atol=2e-7 * np.abs(block).max())


def test_the_routed_output_is_what_the_routed_experts_gave(recorded, ran):
    _, source = recorded
    for router, routed in ran.routed.items():
        found = source.read_output(router, "routed_output", 0, len(routed))
        largest = max(np.abs(ran.block[router]).max(), np.abs(ran.shared[router]).max())
        np.testing.assert_allclose(found, routed, rtol=0, atol=4e-7 * largest)
        assert np.abs(routed).max() > 1e-3 * largest


def test_expert_outputs_times_routing_weights_are_the_routed_output(recorded, ran):
    _, source = recorded
    for router, routed in ran.routed.items():
        experts = source.read_output(router, "expert_output", 0, len(routed)).astype(np.float64)
        chosen = np.take_along_axis(experts, ran.chosen[router][:, :, None], axis=1)
        found = (chosen * ran.weights[router][:, :, None]).sum(axis=1)
        np.testing.assert_allclose(found, routed, rtol=0, atol=1e-5 * np.abs(routed).max())
