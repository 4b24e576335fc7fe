"""What is trained is written as a checkpoint whose routers are read, recognised and verified."""

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

from moegeom.core.errors import UsageError
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.trainable import (
    CentredRouter,
    CosineRouter,
    GRURouter,
    OSRRouter,
    ReLURouter,
    Routed,
    RouterModule,
    SmoothTopKRouter,
    TopKRouter,
    export_checkpoint,
)
from moegeom_cli.app import exit_code
from tests.by_day import by_day
from tests.columns import columns_of

EXPERTS, K, HIDDEN, TOKENS = 8, 2, 16, 256

KINDS: dict[str, Callable[[], RouterModule]] = {
    "top-k": lambda: TopKRouter(EXPERTS, K, HIDDEN, has_bias=True, z_coef=0.001),
    "sigmoid": lambda: TopKRouter(EXPERTS, K, HIDDEN, score="sigmoid", bias_rate=0.01, scale=2.5),
    "smooth": lambda: SmoothTopKRouter(EXPERTS, K, HIDDEN, hard_at_inference=True),
    "exact": lambda: SmoothTopKRouter(EXPERTS, K, HIDDEN, controller="exact", hard_at_inference=True),
    "cosine": lambda: CosineRouter(EXPERTS, K, HIDDEN, projected=12),
    "centred": lambda: CentredRouter(TopKRouter(EXPERTS, K, HIDDEN)),
    "relu": lambda: ReLURouter(EXPERTS, K, HIDDEN, has_bias=True),
    "centred relu": lambda: CentredRouter(ReLURouter(EXPERTS, K, HIDDEN)),
}  # fmt: skip

LISTED: dict[str, Callable[[], RouterModule]] = {
    "gru": lambda: GRURouter(EXPERTS, K, HIDDEN, router_dim=4),
    "osr": lambda: OSRRouter(EXPERTS, K, HIDDEN, router_dim=2),
}

_RELU = "ReLU of logits + bias, every expert above 0 (training aims at 2)"
#: Screens that say of a rule what it is, by kind.
WORDS = {
    "top-k": "softmax of biased logits, top 2, weights sum to 1",
    "sigmoid": "sigmoid + selection bias, top 2, weights sum to 1, x 2.5",
    **dict.fromkeys(("smooth", "exact"), "softmax, top 2, weights sum to 1"),
    "cosine": "cosines in 12 projected dimensions x",
    "centred": "softmax of biased logits, top 2, weights sum to 1",
    **dict.fromkeys(("relu", "centred relu"), _RELU),
}


class Layer(nn.Module):
    def __init__(self, router: RouterModule) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))


class Model(nn.Module):
    """Two layers in which every expert runs, times its weight: a mixture without the saving."""

    def __init__(self, kind: Callable[[], RouterModule]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[Routed]]:
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
    model = Model((KINDS | LISTED)[kind])
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
    with RecordingWriter(folder, stage, names, domains=("text",)) as writer:
        writer.append(columns, *((read, chosen) if has_inputs else (chosen,)))


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
    code, screen = moegeom("list routers", export_checkpoint(trained(kind), tmp_path / "model"))
    assert (code, WORDS[kind] in screen) == (0, True), screen


def scanned(model: Model, moegeom: Run, folder: Path, has_inputs: bool) -> str:
    record(model, folder / "rec", has_inputs)
    recording = ("--tokens", folder / "rec", "--out", folder / "results")
    code, screen = moegeom("scan", export_checkpoint(model, folder / "model"), *recording)
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


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("gru", "its state along tokens decides"), ("osr", "its costs are no product")],
)
def test_what_no_row_decides_is_listed_with_the_reason_and_counted(kind, reason, moegeom, tmp_path):
    assert reason in scanned(trained(kind), moegeom, tmp_path, has_inputs=False)
    code, screen = moegeom("list routers", tmp_path / "model")
    assert code == 3 and f"cannot be measured: {reason}" in screen


def test_all_tensors_are_written_once_and_files_name_score_and_number(tmp_path):
    model = Model(KINDS["exact"])
    model.tied = model.layers[0].experts[0]
    state = load_file(export_checkpoint(model, tmp_path / "model") / "model.safetensors")
    assert set(state) == {name for name in model.state_dict() if not name.startswith("tied")}
    fresh = SmoothTopKRouter(EXPERTS, K, HIDDEN, controller="exact")
    head = "layers.1.router."
    own = {n.removeprefix(head): t for n, t in state.items() if n.startswith(head)}
    fresh.load_state_dict(own)
    assert_array_equal(fresh.weight.detach(), model.layers[1].router.weight.detach())
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["routers"] == {"layers.{layer}.router": "SmoothTopKRouter"}
    router = ReLURouter(EXPERTS, K, HIDDEN, has_bias=True)
    file = export_checkpoint(router, tmp_path / "m") / "family.toml"
    (stack,) = tomllib.loads(file.read_text())["stacks"]
    assert (stack["score"], stack["top_k"], stack["num_experts"]) == ("relu", K, EXPERTS)
    assert stack["logit_bias"] == ["layers.{layer}.router.bias"]


def test_a_router_alone_is_layer_0_and_other_names_are_other_stacks(moegeom, tmp_path):
    code, screen = moegeom(
        "list routers", export_checkpoint(TopKRouter(EXPERTS, K, HIDDEN), tmp_path / "alone")
    )
    assert code == 0 and "text/0" in screen
    model = Model(KINDS["top-k"])
    model.layers[1].gate = CosineRouter(4, 1, HIDDEN, projected=3)
    code, screen = moegeom("list routers", export_checkpoint(model, tmp_path / "both"))
    assert code == 0 and "text0/0-1" in screen and "text1/1" in screen, screen


def test_what_cannot_be_said_is_refused_before_anything_is_written(tmp_path):
    mixed = Model(KINDS["top-k"])
    mixed.layers[1].router = ReLURouter(EXPERTS, K, HIDDEN)
    unnumbered = nn.ModuleDict({"router": TopKRouter(EXPERTS, K, HIDDEN)})
    cases = {
        "differ in their rule": mixed,
        "has 0 numbers in its name": unnumbered,
        "there is no router": nn.Linear(3, 3),
        "a bias beside cosines": CosineRouter(EXPERTS, K, HIDDEN, has_bias=True),
        "in CentredRouter has a bias or cosines": CentredRouter(KINDS["top-k"]()),
    }
    for message, model in cases.items():
        with pytest.raises(UsageError, match=message):
            export_checkpoint(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    export_checkpoint(KINDS["top-k"](), tmp_path / "model")
    with pytest.raises(UsageError, match="exists already"):
        export_checkpoint(KINDS["top-k"](), tmp_path / "model")
