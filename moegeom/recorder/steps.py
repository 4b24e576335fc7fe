"""The tokens of one forward pass: whose they are, and which rows are padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool

from moegeom.core.errors import UsageError
from moegeom.core.tokens import TokenColumns
from moegeom.recorder.arrays import as_array


@dataclass(frozen=True, eq=False)
class Step:
    """One entry per row that the routers see, sequence after sequence; not yet on the host."""

    token_id: torch.Tensor
    document: torch.Tensor
    position: torch.Tensor
    kept: torch.Tensor | None
    domain: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.token_id)

    def columns(self) -> tuple[TokenColumns, Bool[np.ndarray, "rows"]]:
        """Columns of the rows that are no padding, and which those are; waits for the device."""
        kept = np.ones(self.num_rows, bool) if self.kept is None else as_array(self.kept)
        columns = TokenColumns(
            document=as_array(self.document)[kept].astype(np.int64),
            position=as_array(self.position)[kept].astype(np.int32),
            token_id=as_array(self.token_id)[kept].astype(np.int32),
            domain=self.domain[kept],
        )
        return columns, kept


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
    kept = None if mask is None else _fitting("attention mask", mask, ids.shape) != 0
    if positions is None:
        counted = torch.ones_like(ids) if kept is None else kept.to(ids.dtype)
        positions = counted.cumsum(dim=1) - 1
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
        kept=None if kept is None else kept.reshape(-1),
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
