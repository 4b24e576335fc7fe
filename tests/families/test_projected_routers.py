"""Oracle: the gates of tutel and torchscale, written in torch from their formulas.

tutel: ``softmax(exp(min(t, log 100)) unit(P x + b) @ unit(S))``; torchscale leaves the first
``unit`` out. Checkpoints hold the tensors under the names that the models save.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.core.router import Router
from moegeom.core.tokens import SourceFacts, Stage
from moegeom.engine.batch import LazyBatch
from moegeom.engine.prepared import prepare, unavailable
from moegeom.engine.task import Task
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.table import load_kernels
from moegeom.router.load import load_routers
from moegeom.testing.array_source import ArraySource

EXPERTS, HIDDEN, PROJECTED, TOKENS = 6, 24, 5, 300

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Gate:
    """A family, where it keeps its gate, its config, and what it makes of inputs: the logits."""

    config: dict[str, Any]
    stack: str
    at: str
    parts: dict[str, tuple[int, ...]]
    logits: Callable[[Tensors, torch.Tensor], torch.Tensor]
    beside: dict[str, int]
    top_k: int = 1

    def renormalises(self) -> bool:
        return self.top_k > 1 and self.config.get("normalize_gate", True)


def _tutel(gate: Tensors, x: torch.Tensor) -> torch.Tensor:
    projected = x @ gate["cosine_projector.weight"].T + gate["cosine_projector.bias"]
    cosine = normalize(projected, dim=1) @ normalize(gate["sim_matrix"], dim=0)
    return cosine * torch.clamp(gate["temperature"], max=math.log(100.0)).exp()


def _torchscale(gate: Tensors, x: torch.Tensor) -> torch.Tensor:
    rows = gate["wg"] * (1.5 / gate["wg"].norm(dim=1, keepdim=True))
    return (x @ gate["wg_reduction.weight"].T) @ normalize(rows, dim=1, eps=1e-4).T


_TUTEL = {
    "cosine_projector.weight": (PROJECTED, HIDDEN),
    "cosine_projector.bias": (PROJECTED,),
    "sim_matrix": (PROJECTED, EXPERTS),
    "temperature": (1,),
}
_TORCHSCALE = {"wg_reduction.weight": (PROJECTED, HIDDEN), "wg": (EXPERTS, PROJECTED)}

_GMOE = Gate(
    {"model_type": "gmoe", "num_experts": EXPERTS, "embed_dim": HIDDEN},
    "vision", "model.blocks.8.mlp.gates.0.", _TUTEL, _tutel,
    {"model.blocks.8.norm2.weight": HIDDEN, "model.blocks.8.norm2.bias": HIDDEN},
)  # fmt: skip
_SWIN = Gate(
    {"model_type": "swin_moe", "MODEL": {"SWIN_MOE": {"TOP_VALUE": 1}}},
    "stage2", "layers.2.blocks.3.mlp._moe_layer.gates.0.", _TUTEL, _tutel,
    {"layers.2.blocks.3.norm2.weight": HIDDEN, "layers.2.blocks.3.norm2.bias": HIDDEN},
)  # fmt: skip
_XMOE = Gate(
    {"use_xmoe": True, "moe_expert_count": EXPERTS, "moe_freq": 2, "decoder_layers": 2,
     "decoder_embed_dim": HIDDEN, "moe_top1_expert": True},
    "decoder", "decoder.layers.1.moe_layer.gate.", _TORCHSCALE, _torchscale, {},
)  # fmt: skip

GATES = {
    "gmoe": _GMOE,
    "gmoe, two experts": replace(_GMOE, config=_GMOE.config | {"top_k": 2}, top_k=2),
    "gmoe, two experts, weights as they are": replace(
        _GMOE, config=_GMOE.config | {"top_k": 2, "normalize_gate": False}, top_k=2
    ),
    "swin_moe": _SWIN,
    "xmoe": _XMOE,
    "xmoe, two experts": replace(_XMOE, config=_XMOE.config | {"moe_top1_expert": False}, top_k=2),
}


class _Recorded(ArraySource):
    def __init__(self, router: Router, stage: Stage, values: np.ndarray) -> None:
        super().__init__({router.name: values})
        self._stage: Stage = stage

    @property
    def facts(self) -> SourceFacts:
        return replace(super().facts, stage=self._stage)


def _measured(router: Router, stage: Stage, values: np.ndarray) -> TokenBatch:
    source = _Recorded(router, stage, values)
    return LazyBatch(Task(prepare(router), source, load_kernels("cpu")), 0, len(values))


def _tensors(gate: Gate, temperature: float = 2.0) -> Tensors:
    draw = torch.Generator().manual_seed(1)
    made = {part: torch.randn(shape, generator=draw) for part, shape in gate.parts.items()}
    return made | ({"temperature": torch.tensor([temperature])} if "temperature" in made else {})


def _loaded(gate: Gate, tensors: Tensors, folder: Path) -> Router:
    stored = {gate.at + part: tensor for part, tensor in tensors.items()}
    stored |= {name: torch.ones(size) for name, size in gate.beside.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(gate.config))
    (router,) = load_routers(open_checkpoint(folder)).routers
    return router


def _inputs() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))


def _exact(gate: Gate, tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    return gate.logits({part: tensor.double() for part, tensor in tensors.items()}, x.double())


def _case(name: str, folder: Path, temperature: float = 2.0, size: float = 1.0) -> tuple[Any, ...]:
    gate, x = GATES[name], _inputs() * size
    tensors = _tensors(gate, temperature)
    router = _loaded(gate, tensors, folder)
    return gate, tensors, x, router, _measured(router, "router_input", x.numpy())


@pytest.mark.parametrize("name", GATES)
def test_choices_weights_margin_entropy_and_z_are_those_of_the_gate(name, tmp_path):
    gate, tensors, x, router, batch = _case(name, tmp_path)
    k = gate.top_k
    assert (router.stack, router.rule.top_k, router.rule.is_affine) == (gate.stack, k, True)
    weights, chosen = torch.softmax(gate.logits(tensors, x), dim=1).topk(k)
    if gate.renormalises():
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1.1920929e-07)
    is_clear = batch.margin > batch.float_bound
    assert is_clear.mean() > 0.98
    np.testing.assert_array_equal(batch.chosen[is_clear], chosen.numpy()[is_clear])
    np.testing.assert_allclose(batch.weights[is_clear], weights.numpy()[is_clear], rtol=1e-5)
    logits = _exact(gate, tensors, x)
    ordered = logits.sort(dim=1, descending=True).values
    log_p = torch.log_softmax(logits, dim=1)
    for mine, theirs in (
        (batch.margin, ordered[:, k - 1] - ordered[:, k]),
        (batch.selection, logits),
        (batch.log_sum_exp, torch.logsumexp(logits, dim=1)),
        (batch.entropy, -(log_p.exp() * log_p).sum(dim=1)),
    ):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["gmoe", "gmoe, two experts", "xmoe"])
def test_the_choice_of_the_gate_changes_at_the_distance_and_not_before(name, tmp_path):
    gate, tensors, x, router, batch = _case(name, tmp_path)
    rows = router.weight[batch.pair[:, 1]] - router.weight[batch.pair[:, 0]]
    direction = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    sets = []
    for share in (0.0, 0.999, 1.001):
        moved = x.double().numpy() + share * batch.distance[:, None] * direction
        chosen = _exact(gate, tensors, torch.from_numpy(moved)).topk(gate.top_k).indices
        sets.append(np.sort(chosen.numpy(), axis=1))
    np.testing.assert_array_equal(sets[0], sets[1])
    assert (sets[0] != sets[2]).any(axis=1).all()


def test_a_float32_engine_errs_within_the_bound_and_the_temperature_is_clamped(tmp_path):
    gate, tensors, x, _, batch = _case("gmoe", tmp_path, size=30.0)
    error = (gate.logits(tensors, x).double() - _exact(gate, tensors, x)).abs().amax(dim=1)
    assert (error.numpy() < batch.float_bound).all()
    gate, tensors, x, router, batch = _case("gmoe", tmp_path, temperature=7.0)
    np.testing.assert_allclose(router.projection.scale, 100.0)
    np.testing.assert_allclose(batch.selection, _exact(gate, tensors, x).numpy(), rtol=1e-6)


def test_logits_of_an_engine_tell_weights_and_no_distance(tmp_path):
    gate, tensors, x, router, whole = _case("gmoe, two experts", tmp_path)
    logits = gate.logits(tensors, x).numpy()
    batch = _measured(router, "logits", logits)
    np.testing.assert_allclose(batch.weights, whole.weights, rtol=1e-5)
    np.testing.assert_allclose(batch.margin, whole.margin, rtol=1e-3, atol=1e-5)
    assert batch.distance is None
    facts = _Recorded(router, "logits", logits).facts
    assert unavailable(router, facts)["distance"] == (
        "logits of this rule are divided by the length of the projected input, which needs "
        "recorded router inputs"
    )


def test_a_projection_that_does_not_fit_the_gate_or_the_memory_is_refused(tmp_path):
    gate, weight = GATES["gmoe"], "cosine_projector.weight"
    for spoilt, sentence in (
        ({weight: torch.ones(PROJECTED + 1, HIDDEN)}, "expected (5, hidden)"),
        ({weight: torch.ones(PROJECTED)}, "has shape (5,)"),
        ({"cosine_projector.bias": torch.ones(3)}, "its router needs (5,)"),
        ({"temperature": torch.ones(2)}, "its router needs (1,)"),
        ({"temperature": None}, "gates.0.temperature' is missing"),
        ({weight: torch.ones(PROJECTED, 25)}, "config.json says hidden size 24"),
    ):
        tensors = _tensors(gate) | spoilt
        with pytest.raises(RouterError) as caught:
            _loaded(gate, {k: v for k, v in tensors.items() if v is not None}, tmp_path)
        assert "tensor 'model.blocks.8.mlp.gates.0." in caught.value.message
        assert sentence in caught.value.message
    wide, bias = torch.zeros(1, 1 << 17), torch.zeros(1)
    tensors = _tensors(gate) | {weight: wide, "cosine_projector.bias": bias, "sim_matrix": wide + 0}
    with pytest.raises(RouterError, match="too large for a router of 131072 experts"):
        _loaded(replace(gate, config={"model_type": "gmoe"}), tensors, tmp_path)


@pytest.mark.parametrize("part", ["temperature", "cosine_projector.weight", "sim_matrix"])
def test_numbers_that_are_not_finite_are_refused_when_measured(part, tmp_path):
    tensors = _tensors(GATES["gmoe"])
    router = _loaded(GATES["gmoe"], tensors | {part: tensors[part] * math.nan}, tmp_path)
    with pytest.raises(RouterError):
        prepare(router)
