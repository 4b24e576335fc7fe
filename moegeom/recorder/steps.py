"""Tokens on their way from the model to a sink: those of one forward pass, and shards of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moegeom.core.errors import InternalError, UsageError
from moegeom.core.shapes import Bool
from moegeom.core.tokens import TokenColumns, TopLogits
from moegeom.recorder.model_store import as_array
from moegeom.tokens.recording.writer import Values


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


@dataclass(frozen=True, eq=False)
class InputRows:
    """Router inputs of some tokens, and the model's own choices (empty where it gives none)."""

    columns: TokenColumns
    values: Mapping[str, np.ndarray]
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

    def then(self, more: InputRows) -> InputRows:
        """These and those that follow."""
        return InputRows(
            self.columns.then(more.columns),
            {n: np.concatenate([self.values[n], rows]) for n, rows in more.values.items()},
            {n: np.concatenate([self.chosen[n], rows]) for n, rows in more.chosen.items()},
        )


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
