"""What to read for one router, checked by headers and config alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moegeom.checkpoint.store import TensorInfo, TensorStore
from moegeom.core.errors import RouterError
from moegeom.core.router import Norm, Rule
from moegeom.router.integrity import CONFIG_CONTRADICTED
from moegeom.router.match import Match
from moegeom.router.rule import build_norm, build_rule
from moegeom.router.settings import Settings
from moegeom.router.storage import block_size, check_plain, check_scale, find_scale


@dataclass(frozen=True)
class RouterPlan:
    """One router before its values: tensors, rule and norm agree with each other."""

    match: Match
    rule: Rule
    weight: TensorInfo
    scale: TensorInfo | None
    block: tuple[int, int]
    logit_bias: TensorInfo | None
    selection_bias: TensorInfo | None
    gain: TensorInfo | None
    norm: Norm | None

    def tensors(self) -> Iterator[TensorInfo]:
        """Every tensor to read."""
        parts = (self.weight, self.scale, self.logit_bias, self.selection_bias, self.gain)
        return (part for part in parts if part is not None)


def plan_router(match: Match, store: TensorStore, settings: Settings) -> RouterPlan:
    """The plan of one router; reads headers, no tensor.

    Raises
    ------
    RouterError
        If shapes, dtypes and config contradict each other.
    """
    weight = store.info(match.weight)
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise RouterError(
            f"{weight.file}: tensor '{weight.name}' has shape {weight.shape}, "
            "expected (experts, hidden).",
            code=CONFIG_CONTRADICTED,
        )
    num_experts, hidden = weight.shape
    claimed = settings.integer(match.spec.num_experts, least=1)
    if claimed != num_experts:
        raise RouterError(
            f"{weight.file}: tensor '{weight.name}' has shape {weight.shape}; "
            f"config.json says {claimed} experts.",
            "Is the config from another revision, or the tensor a slice of a sharded save?",
            code=CONFIG_CONTRADICTED,
        )
    hidden_setting = match.spec.hidden_size
    if settings.has(hidden_setting) and settings.integer(hidden_setting, least=1) != hidden:
        raise RouterError(
            f"{weight.file}: tensor '{weight.name}' has shape {weight.shape}; "
            f"config.json says hidden size {settings.integer(hidden_setting)}.",
            "Is the config from another revision, or the tensor a slice of a sharded save?",
            code=CONFIG_CONTRADICTED,
        )
    scale_name = find_scale(weight, match.beside)
    scale = store.info(scale_name) if scale_name else None
    block = block_size(settings)
    if scale:
        check_scale(weight, scale, block)
    gain = _vector(store, match.gain, hidden, "gain of the norm in front")
    spec = match.spec.norm
    return RouterPlan(
        match=match,
        rule=build_rule(match.spec, settings, num_experts, f"router {match.name}"),
        weight=weight,
        scale=scale,
        block=block,
        logit_bias=_vector(store, match.logit_bias, num_experts, "logit bias"),
        selection_bias=_vector(store, match.selection_bias, num_experts, "selection bias"),
        gain=gain,
        norm=build_norm(spec, settings, gain.name) if spec and gain else None,
    )


def _vector(store: TensorStore, name: str | None, length: int, what: str) -> TensorInfo | None:
    """A plain float tensor of one dimension and the given length."""
    if name is None:
        return None
    info = store.info(name)
    check_plain(info, what)
    if info.shape != (length,):
        raise RouterError(
            f"{info.file}: tensor '{name}' ({what}) has shape {info.shape}; "
            f"its router needs ({length},).",
            "Is one of the two a slice of a sharded save?",
            code=CONFIG_CONTRADICTED,
        )
    return info
