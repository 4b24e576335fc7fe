"""One training: a method and a seed in, its figures and curves out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.trained.evaluation import evaluate
from benchmarks.trained.methods import Method
from benchmarks.trained.model import ByteModel, MoE, initialise, is_of_router, next_byte_loss
from benchmarks.trained.text import batches, held_out
from moegeom.trainable.continuous import SmoothTopKRouter
from moegeom.trainable.router import RouterModule
from sample_ckpts.schedule import warmup_then_cosine

if TYPE_CHECKING:
    from benchmarks.trained.settings import Settings

#: Points of a curve; each is the mean over the steps since the one before.
CURVE_POINTS = 40

BETAS = (0.9, 0.95)
#: Learning rate of a width of smoothing: of its own, constant and without decay.
WIDTH_RATE = 0.02

Run = dict[str, Any]


def prepare_torch() -> None:
    """One thread and one order of summation, so that a seed decides every bit."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid, and slow
    # bytes that never occur and idle experts leave denormal numbers in AdamW, which are slow
    torch.set_flush_denormal(True)


def build(method: Method, settings: Settings, seed: int) -> ByteModel:
    """The untrained model: what two methods share has the same values."""

    def block(layer: int) -> nn.Module:
        prepare_router_seed(seed, layer)
        return method.layer(settings, layer)

    model = ByteModel(settings, block)
    initialise(model, seed)
    return model


def prepare_router_seed(seed: int, layer: int) -> None:
    """Routers draw their own start from torch: that of a layer is the same for every method."""
    torch.manual_seed(1000 * seed + layer)


@dataclass
class Curves:
    """What is noted while a training runs."""

    every: int
    experts: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    chosen: list[list[np.ndarray]] = field(default_factory=list)

    def note(self, step: int, loss: float, chosen: list[np.ndarray], model: nn.Module) -> None:
        """Adds a step, and a point after every so many."""
        self.losses.append(loss / math.log(2.0))
        self.chosen.append(chosen)
        if step % self.every:
            return
        row: dict[str, Any] = {"step": step, "bits": rounded(float(np.mean(self.losses)))}
        layers = list(zip(*self.chosen, strict=True))
        if layers:
            row["experts_per_token"] = [
                rounded(float(np.mean([(c >= 0).sum(axis=1).mean() for c in layer])))
                for layer in layers
            ]
            first = np.concatenate([c[c >= 0] for c in layers[0]])
            share = np.bincount(first, minlength=self.experts) / max(len(first), 1)
            row["usage"] = [rounded(s) for s in share.tolist()]
        widths = [r.eps.item() for r in routers_of(model) if isinstance(r, SmoothTopKRouter)]
        if widths:
            row["eps"] = [rounded(width) for width in widths]
        self.rows.append(row)
        self.losses.clear()
        self.chosen.clear()


@dataclass(frozen=True)
class Fitted:
    """What a training leaves besides its model: curves, and processor time of a step in ms."""

    curves: list[dict[str, Any]]
    ms_per_step: float


def train(method: Method, settings: Settings, seed: int) -> list[Run]:
    """Trains a language model and evaluates it; one run, and one for each other way to do that."""
    started = time.perf_counter()
    model = build(method, settings, seed)
    pairs = ((tokens, tokens) for tokens in batches(settings, seed))
    fitted = fit(model, method, settings, pairs, next_byte_loss)
    text = held_out(settings.length, settings.held_out_per_domain)
    runs = []
    for evaluated in (method, *method.also):
        evaluated.prepare(routers_of(model))
        figures = evaluate(model, text, evaluated, settings)
        runs.append(run_of(evaluated.name, seed, settings.steps, model, figures))
    runs[0]["figures"]["ms_per_step"] = fitted.ms_per_step
    runs[0]["seconds"] = rounded(time.perf_counter() - started)
    runs[0]["curves"] = fitted.curves
    return runs


def run_of(name: str, seed: int, steps: int, model: nn.Module, figures: dict[str, float]) -> Run:
    """The record of a run."""
    return {
        "method": name,
        "seed": seed,
        "steps": steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "figures": {figure: rounded(value) for figure, value in figures.items()},
    }


def fit(
    model: nn.Module,
    method: Method,
    settings: Settings,
    pairs: Iterator[tuple[Tensor, Tensor]],
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> Fitted:
    """Trains ``model``, from inputs to logits and what was routed, on inputs and targets."""
    optimizer, schedule = make_optimizer(model, settings)
    curves = Curves(max(1, settings.steps // CURVE_POINTS), settings.experts)
    times = []
    for step, (inputs, targets) in zip(range(1, settings.steps + 1), pairs, strict=False):
        before, progress = time.process_time(), step / settings.steps
        method.before_step(routers_of(model), progress)
        logits, done = model(inputs)
        loss = loss_of(logits, targets)
        (loss + sum(routed.loss for routed in done)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), method.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        method.after_step(routers_of(model), progress)
        times.append(time.process_time() - before)
        curves.note(step, loss.item(), [routed.chosen.numpy() for routed in done], model)
    return Fitted(curves.rows, rounded(1e3 * float(np.median(times))))


def make_optimizer(
    model: nn.Module, settings: Settings
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW; routers and experts at rates of their own, vectors without decay, widths constant."""
    falling = warmup_then_cosine(settings.steps)
    kinds = {
        "matrix": (settings.learning_rate, settings.weight_decay, falling),
        "expert": (settings.expert_learning_rate, settings.weight_decay, falling),
        "vector": (settings.learning_rate, 0.0, falling),
        "router": (settings.router_learning_rate, settings.weight_decay, falling),
        "width": (WIDTH_RATE, 0.0, lambda _: 1.0),
    }
    parameters: dict[str, list[nn.Parameter]] = {kind: [] for kind in kinds}
    for name, parameter in model.named_parameters():
        parameters[_kind(name, parameter)].append(parameter)
    groups = [
        {"params": parameters[kind], "lr": rate, "weight_decay": decay}
        for kind, (rate, decay, _) in kinds.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=True)
    factors = [factor for _, _, factor in kinds.values()]
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factors)


def _kind(name: str, parameter: nn.Parameter) -> str:
    if name.endswith(".router.theta"):
        return "width"
    if parameter.ndim < 2:
        return "vector"
    if is_of_router(name):
        return "router"
    return "expert" if ".experts." in name else "matrix"


def routers_of(model: nn.Module) -> list[RouterModule]:
    """The routers, in the order of the layers."""
    return [module.router for module in model.modules() if isinstance(module, MoE)]


def rounded(value: float) -> float:
    """Six digits that count: a result file is read by people too."""
    return float(f"{value:.6g}")
