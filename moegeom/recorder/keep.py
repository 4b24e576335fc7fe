"""What a recording holds of each token, and how it comes from what a router's module reads.

Tokens of one forward pass, rows of each router, and shards of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moegeom.core.errors import InternalError, RecordingError, UsageError
from moegeom.core.router import Router
from moegeom.core.shapes import Bool
from moegeom.core.tokens import (
    Stage,
    TokenColumns,
    TopLogits,
    best_stage,
    bytes_per_token,
    common_stage,
    enough_logits,
    expert_bytes,
)
from moegeom.recorder.ranks import Ranks
from moegeom.recorder.request import ATTENTION
from moegeom.recorder.taps import Place, as_array
from moegeom.tokens.recording.writer import Values

# ---------------------------------------------------------------------------------- rows of routers
#: What people write for outputs of experts, which are kept beside what routers read, and the kinds.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "outputs": ("shared_output", "routed_output"),
    "outputs:every-expert": ("shared_output", "routed_output", "expert_output"),
}

#: What people write, and the stage of a recording that holds it.
STAGES: dict[str, Stage] = {
    "hidden": "router_input",
    "logits": "logits",
    "top-logits": "top_logits",
    "ids": "ids",
}


@dataclass(frozen=True)
class Keep:
    """The stage of the recording; ``num_logits`` counts for ``top_logits``.

    ``outputs`` are the kinds of outputs of experts that are kept beside.
    """

    stage: Stage
    num_logits: int = 0
    outputs: tuple[str, ...] = ()

    def bytes_per_token(self, router: Router, float_bytes: int) -> int:
        """Bytes of a token at a router; ``float_bytes`` is the size of a number of its input."""
        beside = sum(router.num_experts if kind == "expert_output" else 1 for kind in self.outputs)
        return beside * router.hidden_size * float_bytes + bytes_per_token(
            self.stage,
            router.num_experts,
            router.rule.top_k,
            router.hidden_size,
            self.num_logits,
            float_bytes,
        )


def parse_keep(text: str | None, routers: Sequence[Router]) -> Keep:
    """What ``text`` asks for; without text the largest logits, where they decide everything.

    Raises
    ------
    UsageError
        For another word, for fewer logits than the chosen experts and one, or where the largest
        logits do not decide.
    """
    if text is None:
        return _default(routers)
    if text in OUTPUTS:
        return Keep("router_input", outputs=OUTPUTS[text])
    word, _, count = text.partition(":")
    if word == ATTENTION:
        raise UsageError(
            f"keep {text!r}: attention is added up beside no router.",
            "AttentionRecorder, or moegeom capture CKPT --keep attention.",
        )
    if word not in STAGES or (count and word != "top-logits"):
        raise UsageError(
            f"keep {text!r}: expected hidden, logits, top-logits, top-logits:M, ids, outputs, "
            "outputs:every-expert or attention."
        )
    if word != "top-logits":
        return Keep(STAGES[word])
    if count and not (count.isascii() and count.isdigit()):
        raise UsageError(f"keep {text!r}: expected a number of logits, such as top-logits:24.")
    for router in routers:
        if not router.rule.is_affine or router.rule.has_selection_bias:
            raise UsageError(
                f"keep {text!r}: router {router.name} adds a bias to its {router.rule.score} "
                "scores or masks groups, so that the largest logits do not decide.",
                "Keep logits, or hidden.",
            )
    num_logits = int(count) if count else _enough(routers)
    least = max(router.rule.top_k for router in routers) + 1
    if num_logits < least:
        raise UsageError(
            f"keep {text!r}: {least} logits at least are needed, the chosen ones and the next."
        )
    return _capped(num_logits, routers)


def _default(routers: Sequence[Router]) -> Keep:
    stages: set[Stage] = {
        best_stage(
            router.rule.is_affine,
            router.rule.has_selection_bias,
            router.num_experts,
            router.rule.top_k,
        )
        for router in routers
    }
    if common_stage(stages) == "logits":
        return Keep("logits")
    return _capped(_enough(routers), routers)


def _enough(routers: Sequence[Router]) -> int:
    return max(enough_logits(router.rule.top_k) for router in routers)


def _capped(num_logits: int, routers: Sequence[Router]) -> Keep:
    if num_logits >= min(router.num_experts for router in routers):
        return Keep("logits")
    return Keep("top_logits", num_logits)


#: Integers by their size in bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, eq=False)
class RouterRows:
    """Rows of one router: ``values`` (None for ids), ``expert`` beside the largest logits.

    ``outputs`` of experts by their kind.
    """

    values: torch.Tensor | None
    expert: torch.Tensor | None
    chosen: torch.Tensor | None
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class RowReader:
    """One router's way from inputs to what is kept; its weight is moved to a device once."""

    place: Place
    keep: Keep
    _on_device: dict[torch.device, _DeviceRouter] = field(default_factory=dict)

    def of(self, inputs: torch.Tensor, chosen: torch.Tensor | None) -> RouterRows:
        """What is kept of these tokens; nothing is waited for."""
        router = self.place.router
        experts = None if chosen is None else _numbers(chosen, router)
        if self.keep.stage == "ids":
            if experts is None:
                raise RecordingError(
                    f"router {router.name}: its module ({self.place.paths[0]}) does not give its "
                    "choice back, and ids are all that is to be kept.",
                    "Keep logits or hidden.",
                )
            return RouterRows(None, None, experts)
        if self.keep.stage == "router_input":
            return RouterRows(inputs, None, experts)
        logits = self._logits(inputs)
        if self.keep.stage == "logits":
            return RouterRows(logits, None, experts)
        largest = logits.topk(self.keep.num_logits, dim=-1)
        return RouterRows(largest.values, _numbers(largest.indices, router), experts)

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """W y + b in float32, whatever precision the model runs in."""
        router = self._router_on(inputs.device)
        # autocast would take the product back to 16 bits
        with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
            y = inputs.to(router.rows.dtype)
            return (router.logits(y) * router.cosine_scale(y)).float()

    def _router_on(self, device: torch.device) -> _DeviceRouter:
        if device not in self._on_device:
            self._on_device[device] = _DeviceRouter.on(device, self.place.router)
        return self._on_device[device]


@dataclass(frozen=True, eq=False)
class _DeviceRouter:
    """A router's arrays on one device, in the dtype of its rows."""

    rows: torch.Tensor
    bias: torch.Tensor | None
    projection: torch.Tensor | None
    projection_bias: torch.Tensor | None
    scale: float | None

    @classmethod
    def on(cls, device: torch.device, router: Router) -> _DeviceRouter:
        def moved(array: np.ndarray | None) -> torch.Tensor | None:
            if array is None:
                return None
            # arrays of a mapped checkpoint cannot be written to, which torch warns of
            return torch.tensor(array.astype(router.weight.dtype, copy=False), device=device)

        rows = torch.tensor(router.weight, device=device)
        bias, projection = moved(router.logit_bias), router.projection
        if projection is None or projection.scale is None:
            return cls(rows, bias, None, None, None)
        return cls(rows, bias, moved(projection.weight), moved(projection.bias), projection.scale)

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        logits = y @ self.rows.T
        return logits if self.bias is None else logits + self.bias

    def cosine_scale(self, y: torch.Tensor) -> torch.Tensor | float:
        """What turns ``W y + b`` into scaled cosines: 1 for routers that compare no directions."""
        if self.projection is None or self.scale is None:
            return 1.0
        projected = y @ self.projection.T
        if self.projection_bias is not None:
            projected = projected + self.projection_bias
        # a zero vector has no direction: every cosine is 0, as where it is divided by 1e-12
        return self.scale / projected.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def _numbers(experts: torch.Tensor, router: Router) -> torch.Tensor:
    return experts.to(_INTEGERS[expert_bytes(router.num_experts)])


# -------------------------------------------------------------------------------- tokens and shards
@dataclass(frozen=True, eq=False)
class Step:
    """One entry per row that the routers see, sequence after sequence; not yet on the host."""

    token_id: torch.Tensor
    document: torch.Tensor
    position: torch.Tensor
    is_token: torch.Tensor | None
    domain: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.token_id)

    def columns(self) -> tuple[TokenColumns, Bool[np.ndarray, "rows"]]:
        """Columns of the rows that are no padding, and which those are; waits for the device."""
        is_token = (
            np.ones(self.num_rows, bool) if self.is_token is None else as_array(self.is_token)
        )
        columns = TokenColumns(
            document=as_array(self.document)[is_token].astype(np.int64),
            position=as_array(self.position)[is_token].astype(np.int32),
            token_id=as_array(self.token_id)[is_token].astype(np.int32),
            domain=self.domain[is_token],
        )
        return columns, is_token


def make_step(
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    documents: torch.Tensor | Sequence[int] | None,
    positions: torch.Tensor | None,
    domains: np.ndarray,
    first_document: int,
    stride: int,
) -> Step:
    """A step from what a forward pass is given; ``domains`` has one number per sequence.

    Without ``documents`` each sequence is one: ``first_document``, then every ``stride``-th
    number. Without ``positions`` tokens of a sequence are counted, padding left out.
    """
    ids = input_ids.detach()
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2:
        raise UsageError(
            f"input ids of shape {list(input_ids.shape)}; expected [tokens] or [sequences, tokens]."
        )
    is_token = None if mask is None else _fitting("attention mask", mask, ids.shape) != 0
    if positions is None:
        ones = torch.ones_like(ids) if is_token is None else is_token.to(ids.dtype)
        positions = ones.cumsum(dim=1) - 1
    if documents is None:
        number = torch.arange(len(ids), device=ids.device) * stride + first_document
    else:
        number = torch.as_tensor(documents, device=ids.device)
    if number.shape == ids.shape[:1]:
        number = number[:, None].expand(ids.shape)
    elif number.ndim == 0:
        number = number.expand(ids.shape)
    return Step(
        token_id=ids.reshape(-1).clone(),
        document=_fitting("documents", number, ids.shape).reshape(-1).clone(),
        position=_fitting("positions", positions, ids.shape).reshape(-1).clone(),
        is_token=None if is_token is None else is_token.reshape(-1),
        domain=np.repeat(domains, ids.shape[1]).astype(np.int16),
    )


def _fitting(what: str, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    values = values.detach()
    values = values[None] if values.ndim == 1 and shape[0] == 1 else values
    if values.shape != shape:
        raise UsageError(
            f"{what} of shape {list(values.shape)}; the input ids have {list(shape)}.",
            "An attention mask says which tokens are padding, one number for each token."
            if what == "attention mask"
            else "",
        )
    return values


@dataclass(frozen=True, eq=False)
class Shard:
    """What is kept of some tokens at every router; ``domains`` are the names known so far.

    ``values`` is None where ids alone are kept, ``chosen`` where the model does not give them.
    ``outputs`` of experts stand by kind, then by router; None where none are kept.
    """

    columns: TokenColumns
    values: Values | None
    chosen: Mapping[str, np.ndarray] | None
    domains: tuple[str, ...]
    outputs: Mapping[str, Mapping[str, np.ndarray]] | None = None


def joined(parts: Sequence[Any]) -> Any:
    """Rows one below the other, arrays or tensors, where they lie."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return torch.cat(list(parts))


@dataclass(frozen=True, eq=False)
class InputRows:
    """Router inputs of some tokens, and the model's own choices (empty where it gives none).

    Inputs that are folded on a GPU stay there, as tensors.
    """

    columns: TokenColumns
    values: Mapping[str, Any]
    chosen: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, shard: Shard) -> InputRows:
        """Those of a shard that holds router inputs."""
        values = {}
        for name, rows in (shard.values or {}).items():
            if isinstance(rows, TopLogits):
                raise InternalError(f"router {name} gives logits where inputs are folded")
            values[name] = rows
        return cls(shard.columns, values, shard.chosen or {})

    def __len__(self) -> int:
        return len(self.columns.document)

    def at(self, rows: slice) -> InputRows:
        """Some of them."""
        return InputRows(
            self.columns.at(rows),
            {name: array[rows] for name, array in self.values.items()},
            {name: array[rows] for name, array in self.chosen.items()},
        )

    def then(self, *more: InputRows) -> InputRows:
        """These and those that follow."""
        parts = (self, *more)
        return InputRows(
            self.columns.then(*(one.columns for one in more)),
            {n: joined([one.values[n] for one in parts]) for n in self.values},
            {n: joined([one.chosen[n] for one in parts]) for n in self.chosen},
        )

    def on_host(self) -> InputRows:
        """The same in memory of the host."""
        values = {
            name: as_array(rows) if isinstance(rows, torch.Tensor) else rows.copy()
            for name, rows in self.values.items()
        }
        return InputRows(self.columns, values, self.chosen)


NO_ROWS = InputRows(
    TokenColumns(
        document=np.empty(0, np.int64),
        position=np.empty(0, np.int32),
        token_id=np.empty(0, np.int32),
        domain=np.empty(0, np.int16),
    ),
    {},
    {},
)


# -------------------------------------------------------------------------------------------- facts
@dataclass(frozen=True)
class SinkFacts:
    """What was asked for; see ``RouterRecorder``."""

    out: Path
    fold: bool
    num_tokens: int | None
    domains: tuple[str, ...]
    engine: str
    journal: Mapping[str, Any] | None
    restart: bool
    ranks: Ranks
