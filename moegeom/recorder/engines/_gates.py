"""The routers of a model that an engine has built of modules of its own, found by their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RecordingError
from moegeom.core.router import Router
from moegeom.recorder.identity import Identity, holds_rows
from moegeom.recorder.taps import Place
from moegeom.router.load import load_routers

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class EngineGate:
    """A router of the checkpoint and the engine's linear module that holds its weight."""

    router: Router
    path: str
    module: torch.nn.Module

    @property
    def holds_checkpoint(self) -> bool:
        """Whether the module has the weight that the checkpoint has."""
        return holds_rows(self.router.weight, _rows(self.module, self.router))

    def refuse_changed(self) -> None:
        """Raises RecordingError when the module no longer holds the checkpoint's weight."""
        if not self.holds_checkpoint:
            raise RecordingError(
                f"the weight of '{self.path}' changed while router {self.router.name} was being "
                "recorded: the tokens would belong to no single checkpoint.",
                "Stop before weights are updated, and make a recording for each checkpoint.",
            )


@dataclass(frozen=True, eq=False)
class EngineRouters:
    """The routers that an engine runs; ``left_out`` are stacks of the checkpoint that it does not.

    Drafts, say: layers that predict further tokens run in a model of their own.
    """

    identity: Identity
    gates: tuple[EngineGate, ...]
    left_out: tuple[str, ...]


def find_gates(model: torch.nn.Module, checkpoint: str | Path) -> EngineRouters:
    """Where each router of ``checkpoint`` is in ``model``: by shape, layer number and weight.

    Names of modules are the engine's own. A linear module is a router when it stands in a layer of
    that number, has one row for each expert, and holds the checkpoint's weight (rounded to the
    precision that the engine runs in).

    Raises
    ------
    RecordingError
        When a router of a stack that runs is not there, or not with this weight.
    MoeGeomError
        When the checkpoint cannot be read.
    """
    stored = load_routers(open_checkpoint(checkpoint))
    modules = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor)
    ]
    found: list[EngineGate] = []
    missing: dict[str, RecordingError] = {}
    for router in stored.routers:
        try:
            found.append(_gate(router, modules, stored.checkpoint))
        except RecordingError as error:
            missing.setdefault(router.stack, error)
    stacks = {gate.router.stack for gate in found}
    for stack, error in missing.items():
        if stack in stacks or not found:
            raise error
    identity = Identity(
        stored,
        tuple(Place(gate.router, (gate.path,)) for gate in found),
        stored.fingerprint,
        stored.checkpoint,
        str(checkpoint),
        _versions(found),
    )
    return EngineRouters(identity, tuple(found), tuple(sorted(missing)))


def _gate(router: Router, modules: Iterable[tuple[str, torch.nn.Module]], label: str) -> EngineGate:
    shape = tuple(router.weight.shape)
    alike = [
        EngineGate(router, path, module)
        for path, module in modules
        if str(router.layer) in path.split(".") and _shape(module) == shape
    ]
    same = [gate for gate in alike if gate.holds_checkpoint]
    if len(same) == 1:
        return same[0]
    if same:
        raise RecordingError(
            f"router {router.name}: modules {_listed(same)} of the engine hold the same weight.",
            "One of them has to be the router: report the model.",
        )
    if alike:
        raise RecordingError(
            f"router {router.name}: the engine's {_listed(alike)} has its shape, but not the "
            f"weight that {label} has.",
            "Name the checkpoint that the engine has loaded; a router that the engine quantises "
            "cannot be recorded.",
        )
    raise RecordingError(
        f"router {router.name}: no module in layer {router.layer} of the engine's model has a "
        f"weight of {shape[0]} x {shape[1]}.",
        "Name the checkpoint that the engine has loaded; pipeline stages are not recorded.",
    )


def _listed(gates: Sequence[EngineGate]) -> str:
    return ", ".join(f"'{gate.path}'" for gate in gates)


def _weight(module: torch.nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor), "find_gates looks at no other"
    return weight


def _shape(module: torch.nn.Module) -> tuple[int, ...]:
    """Outputs and inputs of a linear module, also of one that keeps its weight packed."""
    weight = _weight(module)
    if weight.numel():
        return tuple(weight.shape)
    return getattr(module, "output_size", 0), getattr(module, "input_size", 0)


@torch.no_grad()
def _rows(module: torch.nn.Module, router: Router) -> torch.Tensor:
    """The weight [experts, hidden]; of a packed one what the module makes of unit vectors.

    Each is one product and zeros, so that nothing is rounded.
    """
    weight = _weight(module)
    if weight.numel():
        return weight

    def response(inputs: torch.Tensor) -> torch.Tensor:
        result = module(inputs.to(weight.device, weight.dtype))
        return result[0] if isinstance(result, tuple) else result

    unit = torch.eye(router.hidden_size)
    if router.logit_bias is None:
        return response(unit).T
    return (response(unit) - response(torch.zeros_like(unit))).T


def _versions(gates: Iterable[EngineGate]) -> tuple[tuple[str, torch.Tensor, int], ...]:
    """What tells of a change between two passes; tensors of inference mode count no versions."""
    return tuple(
        (f"{gate.path}.weight", weight, weight._version)
        for gate in gates
        if not (weight := _weight(gate.module)).is_inference()
    )


def beside(path: str, candidates: Mapping[str, _T]) -> _T | None:
    """The one of ``candidates``, by path, that stands closest to ``path``.

    The module around ``path`` grows until it holds one; None where it then holds several.
    """
    around = path
    while "." in around:
        around = around.rpartition(".")[0]
        inside = [one for name, one in candidates.items() if name.startswith(f"{around}.")]
        if inside:
            return inside[0] if len(inside) == 1 else None
    return None
