"""What is trained is written as a checkpoint whose routers are read, recognised and verified.
An upcycled model computes what it did, drifts with the noise, and loads as what others know.
"""

import copy
import functools
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from safetensors.torch import load_file
from torch import nn

import moegeom as mg
from moegeom import trainable
from moegeom.core.errors import UsageError
from moegeom.studies.check.study import GateRequest, gate
from moegeom.trainable.upcycling import SoftmaxGate, UpcycledBlock, export_upcycled, upcycle
from moegeom_cli.app import exit_code
from tests.by_day import by_day
from tests.columns import columns_of, recording_of

EXPERTS, K, HIDDEN, TOKENS = 8, 2, 16, 256

KINDS: dict[str, Callable[[], trainable.RouterModule]] = {
    "top-k": lambda: trainable.TopKRouter(EXPERTS, K, HIDDEN, has_bias=True, z_coef=0.001),
    "sigmoid": lambda: trainable.TopKRouter(EXPERTS, K, HIDDEN, score="sigmoid", bias_rate=0.01, scale=2.5),
    "smooth": lambda: trainable.SmoothTopKRouter(EXPERTS, K, HIDDEN, hard_at_inference=True),
    "exact": lambda: trainable.SmoothTopKRouter(EXPERTS, K, HIDDEN, controller="exact", hard_at_inference=True),
    "cosine": lambda: trainable.CosineRouter(EXPERTS, K, HIDDEN, projected=12),
    "smooth cosine": lambda: trainable.SmoothCosineRouter(EXPERTS, K, HIDDEN, projected=12, hard_at_inference=True),
    "centred": lambda: trainable.CentredRouter(trainable.TopKRouter(EXPERTS, K, HIDDEN)),
    "relu": lambda: trainable.ReLURouter(EXPERTS, K, HIDDEN, has_bias=True),
    "centred relu": lambda: trainable.CentredRouter(trainable.ReLURouter(EXPERTS, K, HIDDEN)),
}  # fmt: skip


_RELU = "ReLU of logits + bias, every expert above 0 (training aims at 2)"
#: Screens that say of a rule what it is, by kind.
WORDS = {
    "top-k": "softmax of biased logits, top 2, weights sum to 1",
    "sigmoid": "sigmoid + selection bias, top 2, weights sum to 1, x 2.5",
    **dict.fromkeys(("smooth", "exact"), "softmax, top 2, weights sum to 1"),
    **dict.fromkeys(("cosine", "smooth cosine"), "cosines in 12 projected dimensions x"),
    "centred": "softmax of biased logits, top 2, weights sum to 1",
    **dict.fromkeys(("relu", "centred relu"), _RELU),
}


class Layer(nn.Module):
    def __init__(self, router: trainable.RouterModule) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))


class Model(nn.Module):
    """Two layers in which every expert runs, times its weight: a mixture without the saving."""

    def __init__(self, kind: Callable[[], trainable.RouterModule]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind()) for _ in range(2))

    def forward(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[trainable.Routed]]:
        inputs, routed = [], []
        for layer in self.layers:
            inputs.append(x)
            outputs = torch.stack([expert(x) for expert in layer.experts], dim=-1)
            routed.append(layer.router(x))
            weights = routed[-1].dense().reshape(*x.shape[:-1], EXPERTS, 1)
            x = x + (outputs @ weights).squeeze(-1)
        return x, inputs, routed


def trained(kind: str) -> Model:
    torch.manual_seed(0)
    model = Model(KINDS[kind])
    optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(5):
        x = torch.randn(4, 32, HIDDEN)
        out, _, routed = model(x)
        loss = (out - x.flip(-1)).square().mean() + sum(r.loss for r in routed)
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
        optimiser.step()
        for layer, record in zip(model.layers, routed, strict=True):
            if getattr(layer.router, "bias_rate", 0.0):
                layer.router.update_bias(record.load)
    return model.eval()


def record(model: Model, folder: Path, has_inputs: bool) -> None:
    with torch.no_grad():
        _, inputs, routed = model(torch.randn(4, TOKENS // 4, HIDDEN))
    columns = columns_of(np.arange(TOKENS) // 16, domain=0)
    names = ("text/0", "text/1")
    chosen = {n: r.chosen.numpy().astype(np.int32) for n, r in zip(names, routed, strict=True)}
    read = {n: x.reshape(TOKENS, HIDDEN).numpy() for n, x in zip(names, inputs, strict=True)}
    stage = "router_input" if has_inputs else "ids"
    tensors = (read, chosen) if has_inputs else (chosen,)
    recording_of(folder, stage, columns, *tensors, domains=("text",))


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def moegeom(capsys) -> Run:
    def run(command: str, folder: Path, *arguments: str | Path) -> tuple[int, str]:
        """A command about results, or about a checkpoint by the family file in it."""
        family = folder / "family.toml"
        options = ("--family", family) if family.exists() else ()
        code = exit_code([*command.split(), *map(str, (folder, *options, *arguments))])
        screen = capsys.readouterr()
        return code, " ".join((screen.out + screen.err).split())

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_router_is_read_by_its_rule(kind, moegeom, tmp_path):
    code, screen = moegeom(
        "list routers", trainable.export_checkpoint(trained(kind), tmp_path / "model")
    )
    assert (code, WORDS[kind] in screen) == (0, True), screen


def scanned(model: Model, moegeom: Run, folder: Path, has_inputs: bool) -> str:
    record(model, folder / "rec", has_inputs)
    recording = ("--tokens", folder / "rec", "--out", folder / "results")
    code, screen = moegeom("scan", trainable.export_checkpoint(model, folder / "model"), *recording)
    assert code == 0, screen
    return screen


@pytest.mark.parametrize(
    "kind", by_day(KINDS, {"softmax": "centred", "sigmoid": "sigmoid", "ReLU": "centred relu"})
)
def test_choices_of_a_trained_router_verify_its_rule(kind, moegeom, tmp_path):
    screen = scanned(trained(kind), moegeom, tmp_path, has_inputs=True)
    assert "the rule gives 512 of 512 recorded choices" in screen
    code, screen = moegeom("check", tmp_path / "results")
    assert code == 0, screen
    assert "verified: 100 % of the first recorded choices follow" in screen


def test_all_tensors_are_written_once_and_files_name_score_and_number(tmp_path):
    model = Model(KINDS["exact"])
    model.tied = model.layers[0].experts[0]
    state = load_file(trainable.export_checkpoint(model, tmp_path / "model") / "model.safetensors")
    assert set(state) == {name for name in model.state_dict() if not name.startswith("tied")}
    fresh = trainable.SmoothTopKRouter(EXPERTS, K, HIDDEN, controller="exact")
    head = "layers.1.router."
    own = {n.removeprefix(head): t for n, t in state.items() if n.startswith(head)}
    fresh.load_state_dict(own)
    assert_array_equal(fresh.weight.detach(), model.layers[1].router.weight.detach())
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["routers"] == {"layers.{layer}.router": "SmoothTopKRouter"}
    router = trainable.ReLURouter(EXPERTS, K, HIDDEN, has_bias=True)
    file = trainable.export_checkpoint(router, tmp_path / "m") / "family.toml"
    (stack,) = tomllib.loads(file.read_text())["stacks"]
    assert (stack["score"], stack["top_k"], stack["num_experts"]) == ("relu", K, EXPERTS)
    assert stack["logit_bias"] == ["layers.{layer}.router.bias"]


def test_a_router_alone_is_layer_0_and_other_names_are_other_stacks(moegeom, tmp_path):
    code, screen = moegeom(
        "list routers",
        trainable.export_checkpoint(trainable.TopKRouter(EXPERTS, K, HIDDEN), tmp_path / "alone"),
    )
    assert code == 0 and "text/0" in screen
    model = Model(KINDS["top-k"])
    model.layers[1].gate = trainable.CosineRouter(4, 1, HIDDEN, projected=3)
    code, screen = moegeom("list routers", trainable.export_checkpoint(model, tmp_path / "both"))
    assert code == 0 and "text0/0-1" in screen and "text1/1" in screen, screen


def test_what_cannot_be_said_is_refused_before_anything_is_written(tmp_path):
    mixed = Model(KINDS["top-k"])
    mixed.layers[1].router = trainable.ReLURouter(EXPERTS, K, HIDDEN)
    unnumbered = nn.ModuleDict({"router": trainable.TopKRouter(EXPERTS, K, HIDDEN)})
    cases = {
        "differ in their rule": mixed,
        "has 0 numbers in its name": unnumbered,
        "there is no router": nn.Linear(3, 3),
        "a bias beside cosines": trainable.CosineRouter(EXPERTS, K, HIDDEN, has_bias=True),
        "in CentredRouter has a bias or cosines": trainable.CentredRouter(KINDS["top-k"]()),
    }
    for message, model in cases.items():
        with pytest.raises(UsageError, match=message):
            trainable.export_checkpoint(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    trainable.export_checkpoint(KINDS["top-k"](), tmp_path / "model")
    with pytest.raises(UsageError, match="exists already"):
        trainable.export_checkpoint(KINDS["top-k"](), tmp_path / "model")


# ---------------------------------------------------------------------------------- upcycled models
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
