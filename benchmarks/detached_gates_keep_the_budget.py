"""A smoothed router keeps its budget of experts when no gradient flows through its gate.

A layer of 8 experts, 2 of them a token, learns 12 linear maps of 32 numbers, each on its own part
of the inputs, from 5 starts. Printed are the loss on new inputs over that of top-k with the same
start and batches, and the experts a token in evaluation: least and largest of the starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from moegeom.trainable import SmoothTopKRouter, TopKRouter, parameter_groups

HIDDEN, EXPERTS, K, WIDTH, TOKENS, STEPS, STARTS = 32, 8, 2, 48, 256, 400, 5
RATE, DECAY, CLIP = 0.003, 0.1, 1.0


class Layer(nn.Module):
    """Every expert runs; weights of those that were not chosen are 0."""

    def __init__(self, router: TopKRouter) -> None:
        super().__init__()
        self.router = router
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)

    def forward(self, x: torch.Tensor):
        routed = self.router(x)
        inner = torch.einsum("th,ehw->tew", x, self.up).relu()
        outputs = torch.einsum("tew,ewh->teh", inner, self.down)
        return (outputs * routed.dense()[..., None]).sum(dim=1), routed


def task(start: int) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 + start)
    centres = torch.randn(12, HIDDEN, generator=generator)
    maps = torch.randn(12, HIDDEN, HIDDEN, generator=generator) * HIDDEN**-0.5

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(TOKENS, HIDDEN, generator=generator)
        return x, torch.einsum("th,thk->tk", x, maps[(x @ centres.T).argmax(dim=1)])

    return batch


def groups_of(model: nn.Module, has_own_group: bool) -> list[dict]:
    common = {"lr": RATE, "weight_decay": DECAY}
    if has_own_group:
        return list(parameter_groups(model, 0.01, **common))
    return [{"params": list(model.parameters()), **common}]


def trained(make: Callable[[], TopKRouter], has_own_group: bool, start: int) -> tuple[float, float]:
    """Loss and experts a token on new inputs."""
    batch = task(start)
    torch.manual_seed(start)
    model = Layer(make())
    optimiser = torch.optim.AdamW(groups_of(model, has_own_group))
    generator = torch.Generator().manual_seed(start)
    for step in range(STEPS):
        optimiser.param_groups[0]["lr"] = RATE * (1.0 + math.cos(math.pi * step / STEPS)) / 2.0
        x, y = batch(generator)
        out, routed = model(x)
        ((out - y).square().mean() + routed.loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        optimiser.zero_grad()
    model.eval()
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        pairs = [batch(generator) for _ in range(10)]
        found = [(model(x), y) for x, y in pairs]
    losses = [float((out - y).square().mean()) for (out, _), y in found]
    counts = [float(routed.num_chosen.float().mean()) for (_, routed), _ in found]
    return sum(losses) / len(losses), sum(counts) / len(counts)


METHODS: dict[str, tuple[dict, bool]] = {
    "loss, theta among the others": ({}, False),
    "loss, theta in its group": ({}, True),
    "exact": ({"controller": "exact"}, False),
    "loss, theta among the others, detached": ({"detach_gate": True}, False),
    "loss, theta in its group, detached": ({"detach_gate": True}, True),
    "exact, detached": ({"controller": "exact", "detach_gate": True}, False),
}


def main() -> None:
    torch.set_num_threads(1)
    hard = [trained(lambda: TopKRouter(EXPERTS, K, HIDDEN), False, s)[0] for s in range(STARTS)]
    print(f"{'controller':42}{'loss over top-k':>20}{'experts a token, 2.5 meant':>30}")
    for name, (options, has_own_group) in METHODS.items():
        make = lambda o=options: SmoothTopKRouter(EXPERTS, K, HIDDEN, **o)
        found = [trained(make, has_own_group, start) for start in range(STARTS)]
        ratios = [loss / least for (loss, _), least in zip(found, hard, strict=True)]
        counts = [count for _, count in found]
        ends = f"{min(ratios):.3f} to {max(ratios):.3f}", f"{min(counts):.2f} to {max(counts):.2f}"
        print(f"{name:42}{ends[0]:>20}{ends[1]:>30}", flush=True)


if __name__ == "__main__":
    main()
