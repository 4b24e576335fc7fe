"""Which checkpoint's routers a running model has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RecordingError
from moegeom.core.router import Router, RouterSet
from moegeom.recorder.model_store import ModelStore
from moegeom.recorder.taps import Place, find_places
from moegeom.router.load import load_routers
from moegeom.router.requested_family import RequestedFamily


@dataclass(frozen=True, eq=False)
class Identity:
    """The routers and where they are; ``fingerprint`` is that of ``checkpoint``, if one is named.

    ``routers`` are those of the checkpoint, which hold the same numbers as the model's; of the
    model itself where no checkpoint is named.
    """

    routers: RouterSet
    places: tuple[Place, ...]
    fingerprint: str
    checkpoint_name: str
    checkpoint: str
    _tensors: tuple[tuple[str, torch.Tensor, int], ...]

    def refuse_changed(self) -> None:
        """Raises RecordingError when a router has changed since the recording began."""
        for name, tensor, version in self._tensors:
            if tensor._version != version:
                raise RecordingError(
                    f"parameter '{name}' changed while its router was being recorded: the tokens "
                    "would belong to no single checkpoint.",
                    "Record between two optimiser steps, a recording for each.",
                )


def identify(
    model: torch.nn.Module, checkpoint: str | Path | None, family: RequestedFamily
) -> Identity:
    """The routers of ``model``, held against those of ``checkpoint``.

    Raises
    ------
    RouterError
        When the model's family is not known, or a router cannot be interpreted.
    RecordingError
        When the model's routers are not those of the checkpoint.
    """
    store = ModelStore(model)
    running = load_routers(store, asked=family)
    names = {name for router in running.routers for name in router.provenance.tensors}
    tensors = tuple((n, store.tensor(n), store.tensor(n)._version) for n in sorted(names))
    places = find_places(running.routers, store)
    if checkpoint is None:
        return Identity(running, places, "", "", running.checkpoint, tensors)
    stored = load_routers(open_checkpoint(checkpoint), asked=family)
    by_name = {router.name: router for router in stored.routers}
    for router in running.routers:
        _refuse_other(router, by_name.get(router.name), store, stored.checkpoint)
    return Identity(stored, places, stored.fingerprint, stored.checkpoint, str(checkpoint), tensors)


def holds_rows(
    stored: Float[np.ndarray, "experts hidden"],
    running: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> bool:
    """Whether ``running`` is ``stored``, rounded if need be to ``dtype``, or to its own."""
    rows = torch.tensor(stored)
    rounded = rows.to(dtype or running.dtype).to(rows.dtype)
    found = running.detach().cpu().to(rows.dtype)
    return torch.equal(rows, found) or torch.equal(rounded, found)


def _refuse_other(running: Router, stored: Router | None, store: ModelStore, label: str) -> None:
    """Raises RecordingError unless the rows agree, rounded to the model's precision if need be."""
    dtype = store.tensor(running.provenance.tensors[0]).dtype
    if stored is None:
        raise RecordingError(
            f"{label} has no router {running.name}; the running model has.",
            "Name the checkpoint that the model was loaded from.",
        )
    if holds_rows(stored.weight, torch.from_numpy(running.weight), dtype):
        return
    raise RecordingError(
        f"router {running.name} of the running model is not that of {label}.",
        "Name the checkpoint that the model was loaded from, or none.",
    )
