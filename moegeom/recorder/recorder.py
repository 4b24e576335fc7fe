"""Recording the routers of a running PyTorch model, three lines in anybody's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch

from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.core.text import number_of
from moegeom.recorder.folding import folding_device
from moegeom.recorder.keep import (
    Keep,
    RouterRows,
    RowReader,
    SinkFacts,
    Step,
    make_step,
    parse_keep,
)
from moegeom.recorder.ranks import ranks_of
from moegeom.recorder.sinks import (
    Sink,
    StagedPass,
    Staging,
    num_recorded,
    open_sink,
    refuse_unfoldable,
)
from moegeom.recorder.taps import Deliver, Identity, OutputTap, Place, Tap, identify
from moegeom.router.requested_family import NOTHING_ASKED, RequestedFamily

#: Bytes of a shard: what is held before it is written.
_SHARD_BYTES = 128 << 20
_MOST_TOKENS, _LEAST_TOKENS = 65_536, 1024

#: The same of inputs that stay on their device until they are folded there, and a share of what is
#: free of it: they are not copied, and few large pieces cost the model less than many.
_DEVICE_SHARD_BYTES, _SHARE_OF_FREE = 2 << 30, 0.1
_MOST_DEVICE_TOKENS = 1 << 18


class Taps(Protocol):
    """The routers of a model, and how to listen to them."""

    @property
    def identity(self) -> Identity: ...

    def hooks(self, deliver: Deliver) -> Iterable[Callable[[], None]]:
        """Begins to listen; each call that comes back ends a part of it."""
        ...


@dataclass(frozen=True, eq=False)
class ModelTaps:
    """Hooks at the modules whose names say that they are routers."""

    model: torch.nn.Module
    identity: Identity

    def hooks(self, deliver: Deliver) -> Iterator[Callable[[], None]]:
        for place in self.identity.places:
            for handle in Tap(place, self.model, deliver).hooks():
                yield handle.remove


class RouterRecorder:
    """Records what the routers of a model read and choose while it runs.

    ::

        with RouterRecorder(model, "rec/step_1000", checkpoint="ckpt/step_1000") as recorder:
            for batch in loader:
                recorder.tokens(batch["input_ids"], batch["attention_mask"])
                model(**batch)

    Parameters
    ----------
    model
        Any PyTorch model whose family moegeom knows or is told (``family``); wrappers of
        ``torch.compile``, DDP, FSDP and adapters may be around it.
    out
        The recording, or with ``fold`` the results directory, that is there when the block ends.
        A process of a distributed run writes ``<out>.parts/<rank>-of-<ranks>``; the last one to
        end merges them by (document, position).
    keep
        ``hidden``, ``logits``, ``top-logits:M`` or ``ids``; the default is as many of the largest
        logits as decide the boundary distance, or all logits where they do not. ``outputs`` keeps
        beside ``hidden`` what shared and routed experts give, ``outputs:every-expert`` what every
        expert gives on every token, too.
    checkpoint
        The checkpoint whose routers these are: its fingerprint goes into the recording, and the
        running model's routers are held against it.
    domains
        Names of domains that ``tokens`` may give; with ``fold`` all of them.
    fold
        Feed the reductions of a scan instead of writing tokens.
    num_tokens
        With ``fold``: how many tokens will come at most, on all ranks together. The samples are
        those of a scan of so many; left out, they are thinned while tokens come.
    journal
        What is being recorded, as JSON: an interrupted recording with the same journal goes on;
        with ``restart`` it begins again.
    rank, num_ranks
        Of this process; those of ``torch.distributed`` where it is in use.
    group
        The process group of the ranks that run different tokens, where it is not all of them.
    taps
        Where to listen in a model whose modules are not named as in its checkpoint.

    Nothing is waited for in a step: tensors of a device stay there until a shard is full, and a
    thread writes it. A forward pass that was not announced by ``tokens``, or is a second one over
    the same tokens (activation checkpointing), is left out and counted in ``num_ignored``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        out: str | Path,
        *,
        keep: str | None = None,
        checkpoint: str | Path | None = None,
        domains: Sequence[str] = (),
        fold: bool = False,
        num_tokens: int | None = None,
        family: RequestedFamily = NOTHING_ASKED,
        engine: str = "",
        journal: Mapping[str, Any] | None = None,
        restart: bool = False,
        rank: int | None = None,
        num_ranks: int | None = None,
        group: Any = None,
        taps: Taps | None = None,
    ) -> None:
        self._out = Path(out)
        self._taps: Taps = taps or ModelTaps(model, identify(model, checkpoint, family))
        self._identity: Identity = self._taps.identity
        routers = [place.router for place in self._identity.places]
        self.keep: Keep = (
            Keep("router_input") if fold and keep is None else parse_keep(keep, routers)
        )
        self._ranks = ranks_of(rank, num_ranks, group)
        self._facts = SinkFacts(
            out=self._out,
            fold=fold,
            num_tokens=num_tokens,
            domains=tuple(domains),
            engine=engine or f"torch {torch.__version__}",
            journal=journal,
            restart=restart,
            ranks=self._ranks,
        )
        refuse_unfoldable(self._facts, self.keep)
        self._domains = list(domains)
        self._parts = {p.router.name: RowReader(p, self.keep) for p in self._identity.places}
        self._outputs: dict[str, OutputTap] = {}
        if self.keep.outputs:
            self._outputs = {
                p.router.name: OutputTap(p, model, self.keep.outputs) for p in self._identity.places
            }
        self._staging: Staging | None = None
        self._sink: Sink | None = None
        self._step: Step | None = None
        self._seen: dict[str, RouterRows] = {}
        self._called: tuple[str, ...] = ()
        self._num_sequences = 0
        self.num_ignored: int = 0
        self.has_chosen: bool = False

    @property
    def identity(self) -> Identity:
        """The routers of the model, as their checkpoint has them."""
        return self._identity

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the routers were found in the model."""
        return self._identity.places

    @property
    def num_recorded(self) -> int:
        """Tokens of an interrupted recording that need not be run again; 0 for a new one."""
        return num_recorded(self._facts)

    def __enter__(self) -> RouterRecorder:
        self._stack = ExitStack()
        for tap in self._outputs.values():
            for handle in tap.hooks():
                self._stack.callback(handle.remove)
        for remove in self._taps.hooks(self._deliver):
            self._stack.callback(remove)
        return self

    def tokens(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        documents: torch.Tensor | Sequence[int] | None = None,
        positions: torch.Tensor | None = None,
        domain: str | Sequence[str] | None = None,
    ) -> None:
        """Announces the tokens of the next forward pass.

        Parameters
        ----------
        input_ids
            [sequences, tokens], or [tokens] for one sequence: rows in the order in which the
            routers see them.
        attention_mask
            0 where a token is padding, which is not recorded.
        documents
            A number for each sequence or each token; by default each sequence is a document.
        positions
            Place of each token in its document; by default counted from 0 in each sequence.
        domain
            One name, or one for each sequence.

        Raises
        ------
        RecordingError
            When the pass before did not reach some router, or its parameters were changed.
        """
        self._end_step()
        num_sequences = 1 if input_ids.ndim == 1 else len(input_ids)
        self._step = make_step(
            input_ids,
            attention_mask,
            documents,
            positions,
            self._domain_numbers(domain, num_sequences),
            self._num_sequences * self._ranks.num_ranks + self._ranks.rank,
            self._ranks.num_ranks,
        )
        self._num_sequences += num_sequences

    def skip(self, domain: str | None) -> None:
        """Passes over tokens that an interrupted recording holds already."""
        self._domain_numbers(domain, 1)

    def _domain_numbers(self, domain: str | Sequence[str] | None, sequences: int) -> np.ndarray:
        if domain is None:
            return np.full(sequences, -1, np.int16)
        names = [domain] * sequences if isinstance(domain, str) else list(domain)
        if len(names) != sequences:
            raise UsageError(f"{len(names)} domains for {sequences} sequences.")
        for name in names:
            if name not in self._domains:
                if self._facts.fold:
                    raise UsageError(
                        f"domain {name!r} was not announced.",
                        "With fold=True name all of them: RouterRecorder(..., domains=(...)).",
                    )
                self._domains.append(name)
        return np.array([self._domains.index(name) for name in names], np.int16)

    def _deliver(self, router: str, inputs: torch.Tensor, chosen: torch.Tensor | None) -> None:
        if self._step is None or router in self._seen:
            self.num_ignored += 1
            return
        if len(inputs) != self._step.num_rows:
            raise RecordingError(
                f"router {router} saw {number_of(len(inputs), 'token')}; {self._step.num_rows} "
                "were announced.",
                "Announce what this process runs: tokens() takes the chunk of this rank, padding "
                "and all.",
            )
        rows = self._parts[router].of(inputs, chosen)
        every = self._outputs[router].every(inputs) if router in self._outputs else None
        self._seen[router] = (
            rows if every is None else replace(rows, outputs={"expert_output": every})
        )

    def _end_step(self) -> None:
        """Hands the announced pass over; does nothing when no router has seen it."""
        step, seen = self._step, self._seen
        self._step, self._seen = None, {}
        if step is None or not seen:
            for tap in self._outputs.values():
                tap.forget()
            return
        for name, tap in self._outputs.items():
            if name in seen:
                both = {**tap.take(step.num_rows), **seen[name].outputs}
                seen[name] = replace(seen[name], outputs=both)
        self._identity.refuse_changed()
        if not self._called:
            self._begin(seen)
        missing = [name for name in self._called if name not in seen]
        if missing or len(seen) != len(self._called):
            raise RecordingError(
                f"a forward pass reached routers {', '.join(seen)}; the first one reached "
                f"{', '.join(self._called)}.",
                "Every pass must go through the same layers.",
            )
        assert self._staging is not None, "_begin makes it"
        self._staging.add(StagedPass(step, seen))

    def _begin(self, seen: Mapping[str, RouterRows]) -> None:
        """What the first pass shows: which routers run, and whether their choice can be seen."""
        places = [place for place in self._identity.places if place.router.name in seen]
        self.has_chosen = all(rows.chosen is not None for rows in seen.values())
        self._called = tuple(place.router.name for place in places)
        sink = self._stack.enter_context(
            open_sink(self._facts, self._identity, places, self.keep, self.has_chosen)
        )
        values = next(iter(seen.values())).values
        size = 4 if values is None else values.element_size()
        row = sum(self.keep.bytes_per_token(place.router, size) for place in places)
        least = 1 if self.keep.outputs else _LEAST_TOKENS
        device = folding_device(self._facts, values)
        shard, most = _SHARD_BYTES // row, _MOST_TOKENS
        if device is not None:
            free = int(_SHARE_OF_FREE * torch.cuda.mem_get_info(device)[0])
            shard, most = min(_DEVICE_SHARD_BYTES, free) // row, _MOST_DEVICE_TOKENS
        shard = min(max(shard, least), most)
        self._sink = sink
        self._staging = Staging(sink, shard, self._domains, self.has_chosen, device)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._end_step()
            if self._staging is not None:
                self._staging.close(drop=kind is not None)
            if kind is None and self._sink is None:
                raise RecordingError(
                    "no router saw a token: nothing was recorded.",
                    "Call tokens() before each forward pass, inside the with block.",
                )
        except BaseException as failure:
            if self._facts.fold and isinstance(failure, MoeGeomError):
                self._ranks.everywhere(failure.message)  # the others wait to hear from this one
            self._stack.__exit__(type(failure), failure, failure.__traceback__)
            raise
        self._stack.__exit__(kind, error, traceback)
