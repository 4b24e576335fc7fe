"""An upcycled model computes what it did, drifts with the noise, and loads as what others know."""

import copy
import functools

import numpy as np
import pytest
import torch

import moegeom as mg
from moegeom.core.errors import UsageError
from moegeom.studies.check.study import GateRequest, gate
from moegeom.trainable.upcycling import SoftmaxGate, UpcycledBlock, export_upcycled, upcycle

transformers = pytest.importorskip("transformers")

SIZES = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 2),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS = {
    "llama": ("LlamaConfig", SIZES),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16}),
    "gemma": ("GemmaConfig", SIZES | {"head_dim": 8}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt_neox": ("GPTNeoXConfig", SIZES),
    "phi": ("PhiConfig", SIZES),
}
IDS = torch.arange(40).reshape(2, 20) * 7 % 64

#: Models with an architecture that has experts, what else is asked for, and which one it is.
EXPORTS = [
    ("llama", {}, "mixtral"),
    ("mistral", {}, "mixtral"),
    ("llama", {"layers": "1"}, "qwen2_moe"),
    ("llama", {"shared": 1}, "qwen2_moe"),
    ("qwen2", {}, "qwen2_moe"),
    ("qwen2", {"shared": 1, "layers": [0]}, "qwen2_moe"),
    ("qwen3", {"layers": [1]}, "qwen3_moe"),
    ("qwen3", {"drop": 0.5}, "qwen3_moe"),
]


@functools.cache
def _dense(name: str, dtype: torch.dtype) -> torch.nn.Module:
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)


def dense(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return copy.deepcopy(_dense(name, dtype))


@torch.no_grad()
def logits(model: torch.nn.Module) -> np.ndarray:
    return model(IDS).logits.double().numpy()


def small(name: str, **other) -> torch.nn.Module:
    return upcycle(dense(name), **{"num_experts": 4, "top_k": 2, **other})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shared", [0, 1])
def test_without_noise_the_function_is_unchanged(name, shared):
    model = small(name, noise=0.0, shared=shared)
    assert sum(isinstance(module, UpcycledBlock) for module in model.modules()) == 2
    np.testing.assert_allclose(logits(model), logits(dense(name)), atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_logits_drift_in_proportion_to_the_noise(name):
    """Noise of 1e-6 moves them by less than 1e-4, ten times as much noise ten times as far."""
    before = logits(dense(name, torch.float64))
    drifts = []
    for noise in (1e-6, 1e-5, 1e-4):
        model = upcycle(dense(name, torch.float64), None, 4, 2, noise=noise)
        drifts.append(np.abs(logits(model) - before).max())
    np.testing.assert_allclose(drifts[2] / drifts[1], 10.0, rtol=0.05)
    np.testing.assert_allclose(drifts[1] / drifts[0], 10.0, rtol=0.5)  # float32 norms
    assert 0.0 < drifts[0] < 1e-4


def test_noise_has_the_deviation_that_is_asked_for_and_is_that_of_the_seed():
    block = dense("llama").model.layers[0].mlp
    for relative, expected in ((False, 0.01), (True, 0.01 * block.up_proj.weight.std().item())):
        for expert in small("llama", relative=relative).model.layers[0].mlp.experts:
            moved = (expert.up_proj.weight - block.up_proj.weight).detach()
            np.testing.assert_allclose(moved.std().item(), expected, rtol=0.1)
    first, again, more = small("qwen2"), small("qwen2"), small("qwen2", num_experts=6)
    state = first.state_dict()
    for name, value in again.state_dict().items():
        assert torch.equal(value, state[name])
    for name, value in state.items():
        if ".gate.weight" not in name:
            assert torch.equal(value, more.state_dict()[name]), name
    assert not torch.equal(
        small("qwen2", seed=1).model.layers[0].mlp.experts[0].up_proj.weight,
        first.model.layers[0].mlp.experts[0].up_proj.weight,
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_a_share_of_neurons_is_drawn_anew_each_experts_own(name):
    model = small(name, noise=0.0, drop=0.25)
    before = dict(dense(name).named_modules())
    for path, block in model.named_modules():
        if not isinstance(block, UpcycledBlock):
            continue
        drawn = []
        for expert in block.experts:
            changed = [
                (value != before[path].get_parameter(leaf)).any(dim=axis)
                for leaf, value in expert.named_parameters()
                if value.ndim == 2
                for axis in (0, 1)
                if value.shape[1 - axis] != 32
            ]
            for one in changed:
                assert torch.equal(one, changed[0])
            assert int(changed[0].sum()) == round(0.25 * len(changed[0]))
            drawn.append(tuple(changed[0].tolist()))
        assert len(set(drawn)) > 1


def test_a_router_and_a_part_of_experts_train_and_a_frozen_shared_expert_does_not():
    model = small("llama", shared=1).train()
    model(IDS, labels=IDS).loss.backward()
    block = model.model.layers[0].mlp
    assert block.gate.weight.grad.abs().max() > 0.0
    assert block.experts[0].up_proj.weight.grad.abs().max() > 0.0
    assert [p.requires_grad for p in block.shared_expert.parameters()] == [False] * 3
    free = small("llama", shared=1, freeze_shared=False).model.layers[0].mlp.shared_expert
    assert all(p.requires_grad for p in free.parameters())


class Own(torch.nn.Module):
    """The same experts with the same weight for every token."""

    def __init__(self, experts: tuple[int, ...], weight: float) -> None:
        super().__init__()
        self.experts, self.weight = torch.tensor(experts), weight

    def forward(self, tokens):
        chosen = self.experts.expand(len(tokens), -1)
        return tokens.new_zeros(len(tokens), 4), tokens.new_full(chosen.shape, self.weight), chosen


def test_a_router_of_ones_own_chooses():
    before, own = logits(dense("llama")), Own((1, 3), 0.2)  # weights that do not sum to 1
    np.testing.assert_allclose(logits(small("llama", router=own, noise=0.0)), before, atol=1e-6)
    made = small("llama", router=lambda layer: own)
    used, moved = made.model.layers[1].mlp.experts, logits(made)
    for number, is_used in ((0, False), (3, True)):
        torch.nn.init.zeros_(used[number].down_proj.weight)
        assert np.array_equal(logits(made), moved) != is_used
    with pytest.raises(UsageError, match="its routers are Own"):
        export_upcycled(made, "nowhere")
    block = small("llama", router=Own((0,), 0.0)).model.layers[0].mlp  # no weight, no output
    assert torch.equal(block(torch.ones(2, 3, 32)), torch.zeros(2, 3, 32))


@pytest.mark.parametrize(("name", "asked", "architecture"), EXPORTS)
def test_the_export_gives_the_same_logits_elsewhere(tmp_path, name, asked, architecture):
    model = small(name, **asked)
    folder = export_upcycled(model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.config.model_type == architecture
    np.testing.assert_allclose(logits(loaded), logits(model), atol=1e-6)
    opened = mg.open(str(folder))
    assert opened.found.family == architecture
    for router in opened.routers:
        block = model.model.layers[router.layer].mlp
        np.testing.assert_array_equal(router.weight, block.gate.weight.detach().numpy())
        assert (router.rule.top_k, router.num_experts) == (2, 4)
    blocks = sum(isinstance(module, UpcycledBlock) for module in model.modules())
    assert len(opened.routers) == blocks


def test_experts_that_were_trained_are_no_longer_a_finding(tmp_path, monkeypatch):
    """Forty steps of AdamW from relative noise of 1 %."""
    monkeypatch.chdir(tmp_path)
    model = small("llama", relative=True, top_k=1).train()

    def found(name: str) -> str:
        folder = export_upcycled(model, tmp_path / name)
        (outcome,) = gate(
            GateRequest(str(folder), experts=True, select=("MGG208",))
        ).verdict.outcomes
        return outcome.state

    assert found("before") == "failed"
    steps = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    for _ in range(40):
        ids = torch.randint(0, 64, (4, 24))
        model(ids, labels=ids).loss.backward()
        steps.step()
        steps.zero_grad()
    assert found("after") == "passed"


def test_what_cannot_be_meant_is_refused():
    for options, message in (
        ({"num_experts": 0}, "num_experts=0"),
        ({"top_k": 5}, "top_k=5: expected 1 to num_experts=4"),
        ({"router": "best"}, "router='best'"),
        ({"noise": -1.0}, "noise=-1.0"),
        ({"noise": float("nan")}, "noise=nan"),
        ({"shared": 2}, "shared=2"),
        ({"drop": 1.5}, "drop=1.5"),
        ({"layers": [1, 7]}, "no feed-forward block in layer 7"),
    ):
        with pytest.raises(UsageError, match=message):
            small("llama", **options)
    with pytest.raises(UsageError, match="no feed-forward block in any layer"):
        upcycle(torch.nn.Linear(3, 3))
    two = torch.nn.ModuleDict({"a": dense("llama"), "b": dense("llama")})
    with pytest.raises(UsageError, match="layer 0 of ModuleDict has 2"):
        upcycle(two)


@pytest.mark.parametrize(
    ("make", "asked", "message"),
    [
        (lambda: dense("llama"), {}, "has no upcycled block"),
        (lambda: small("gemma"), {}, "gemma is another attention"),
        (lambda: small("qwen3", shared=1), {}, "not qwen3_moe: it has a shared expert"),
        (lambda: small("mistral", layers="0"), {}, "sliding window"),
        (lambda: small("llama"), {"architecture": "mixtrall"}, "'mixtrall' is not known"),
        (lambda: small("llama", shared=1), {"architecture": "mixtral"}, "it has a shared expert"),
        (lambda: upcycle(small("llama", layers="0"), "1", 8, 2), {}, "different numbers of exp"),
    ],
)
def test_no_architecture_is_written_that_computes_something_else(make, asked, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        export_upcycled(make(), tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_not_written_into(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="holds files already"):
        export_upcycled(small("llama"), tmp_path)


def test_the_gate_is_softmax_and_the_largest_of_it():
    torch.manual_seed(2)
    gate_ = SoftmaxGate(8, 6, 3)
    torch.nn.init.normal_(gate_.weight)
    tokens = torch.randn(5, 8)
    logits_, weights, chosen = gate_(tokens)
    expected = torch.softmax(tokens @ gate_.weight.T, -1)
    kept = torch.gather(expected, 1, chosen)
    assert torch.equal(kept, torch.sort(expected, descending=True).values[:, :3])
    torch.testing.assert_close(weights, kept / kept.sum(-1, keepdim=True))
    torch.testing.assert_close(logits_, tokens @ gate_.weight.T)
