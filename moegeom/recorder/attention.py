"""Sums over tokens of gates and sinks of attention, per head, while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import RecordingError, RouterError
from moegeom.core.files import refuse_existing
from moegeom.core.router import parse_layers
from moegeom.core.text import number_of
from moegeom.engine.task import block_of
from moegeom.geometry.attention_heads import CLOSED, FIRST_QUERY, SUMS
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.recorder.keep import Step, make_step
from moegeom.recorder.taps import ModelStore, as_array, holds_rows
from moegeom.router.attention.tensors import AttentionTensors, attention_layers, recognise_attention
from moegeom.tokens.attention_record import (
    BINS_PER_UNIT,
    NUM_BINS,
    AttentionRecord,
    LayerSums,
    write_attention_record,
)
from moegeom.tokens.recording.journal import Draft
from moegeom.variants.random_router import rows_in_random_directions

#: What a gate makes of its projection.
_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
}


class AttentionRecorder:
    """Adds up what gates, sinks and heads do while a model of transformers runs.

    ::

        model.set_attn_implementation("eager")  # else no attention weights are given back
        with AttentionRecorder(model, "rec", checkpoint="ckpt") as recorder:
            for batch in loader:
                recorder.tokens(batch["input_ids"], batch["attention_mask"])
                model(**batch, use_cache=False)

    Parameters
    ----------
    model
        A model whose ``model_type`` is one of ``moegeom/router/attention``.
    out
        The folder that is there when the block ends well; it must not exist.
    checkpoint
        The checkpoint that the model was loaded from, against which its gates are held.
    layers
        Layers, such as ``0,3-7``; all by default.
    engine
        What ran, in words.

    Each call of an attention layer in an announced pass counts, twice where a model runs a layer
    twice. What activation checkpointing runs again, and passes that were not announced, are left
    out. Nothing is trained or changed. ``moegeom research attention CKPT --tokens OUT`` reads the
    folder.

    Raises
    ------
    RecordingError
        When no gate and no sink of the model is known, or they are not those of the checkpoint.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        out: str | Path,
        *,
        checkpoint: str | Path | None = None,
        layers: str | None = None,
        engine: str = "",
    ) -> None:
        self._model, self._out = model, Path(out)
        self._engine = engine or f"torch {torch.__version__}"
        refuse_existing(self._out, hint="Choose another name.")
        self._checkpoint = "" if checkpoint is None else Path(checkpoint).name
        store = ModelStore(model)
        stored = _stored(checkpoint)
        self._taps = [_Tap(one, store, model, stored) for one in listened_layers(store, layers)]
        self._draft = Draft(self._out)
        self._step: Step | None = None
        self._documents: set[int] = set()
        self._num_sequences = 0
        self.num_tokens: int = 0

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that are listened to."""
        return tuple(tap.tensors.name for tap in self._taps)

    def __enter__(self) -> AttentionRecorder:
        self._draft.begin()
        self._stack = ExitStack()
        self._stack.callback(self._draft.leave)
        ended = self._model.register_forward_hook(self._after_pass, always_call=True)
        self._stack.callback(ended.remove)
        for tap in self._taps:
            for handle in tap.hooks():
                self._stack.callback(handle.remove)
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
        """Announces the tokens of the next forward pass, as of ``RouterRecorder``.

        Sums are not told apart by domain.
        """
        del domain
        sequences = 1 if input_ids.ndim == 1 else len(input_ids)
        domains = np.full(sequences, -1, np.int16)
        step = make_step(
            input_ids, attention_mask, documents, positions, domains, self._num_sequences, 1
        )
        self._num_sequences += sequences
        self._step = step
        announced = _Announced.of(step, sequences)
        self._documents.update(announced.documents)
        for tap in self._taps:
            tap.announced = announced

    def _after_pass(self, module: Any, arguments: tuple[Any, ...], result: Any) -> None:
        """Ends the announcement: recomputation for gradients is no new pass."""
        if self._step is not None and result is not None:
            self.num_tokens += self._taps[0].announced_tokens
        self._step = None
        for tap in self._taps:
            tap.announced = None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._stack:
            if kind is None:
                self._finish()

    def _finish(self) -> None:
        silent = [tap.tensors.name for tap in self._taps if not tap.num_tokens]
        if len(silent) == len(self._taps):
            raise RecordingError(
                "no attention layer saw a token: nothing was recorded.",
                "Call tokens() before each forward pass, inside the with block.",
            )
        record = AttentionRecord(
            self._out.name,
            self._checkpoint,
            self._engine,
            self.num_tokens,
            len(self._documents),
            tuple(tap.sums() for tap in self._taps if tap.num_tokens),
        )
        write_attention_record(self._draft.files, record)
        self._draft.publish()


def listened_layers(store: TensorStore, layers: str | None) -> list[AttentionTensors]:
    """The attention layers that have a gate or learned sinks.

    Raises
    ------
    RecordingError
        When none is known.
    """
    numbers = None if layers is None else parse_layers(layers)
    family = recognise_attention(store.config)
    if family is None:
        kind = str(store.config.get("model_type", ""))[:60]
        raise RecordingError(
            f"{store.label}: no gate and no learned sink of model_type '{kind}' is known.",
            "Families whose attention is known: docs/attention.md.",
        )
    try:
        tensors = attention_layers(store, family, numbers)
    except RouterError as error:
        raise RecordingError(error.message, error.hint) from None
    tensors = [one for one in tensors if one.gate is not None or one.sinks is not None]
    if not tensors:
        raise RecordingError(
            f"{store.label}: no layer {'of these ' if layers else ''}has a gate or learned sinks.",
            "Name other layers, or none for all." if layers else "",
        )
    return tensors


def _stored(checkpoint: str | Path | None) -> Mapping[str, AttentionTensors] | None:
    if checkpoint is None:
        return None
    store = open_checkpoint(checkpoint)
    family = recognise_attention(store.config)
    return {} if family is None else {one.name: one for one in attention_layers(store, family)}


class _Announced:
    """The tokens of a pass: which rows count, and the first keys of each sequence."""

    def __init__(self, is_token: torch.Tensor, block: np.ndarray, documents: set[int]) -> None:
        self.is_token, self.block, self.documents = is_token, block, documents
        #: place of each token in its sequence, padding left out; -1 before the first
        self.place = is_token.long().cumsum(dim=1) - 1

    @classmethod
    def of(cls, step: Step, sequences: int) -> _Announced:
        device = step.token_id.device
        rows = torch.ones(step.num_rows, dtype=torch.bool, device=device)
        is_token = (rows if step.is_token is None else step.is_token).reshape(sequences, -1)
        columns, _ = step.columns()
        return cls(is_token, block_of(columns, 0), set(np.unique(columns.document).tolist()))


class _Tap:
    """Hooks at one attention layer, and the sums of its heads."""

    def __init__(
        self,
        tensors: AttentionTensors,
        store: ModelStore,
        model: torch.nn.Module,
        stored: Mapping[str, AttentionTensors] | None,
    ) -> None:
        self.tensors = tensors
        self.announced: _Announced | None = None
        own = tensors if stored is None else stored.get(tensors.name)
        stem = tensors.output.name if tensors.output is not None else tensors.sinks or ""
        self._attention = _module(model, store, tensors, stem.rpartition(".")[0])
        self._into = None if tensors.output is None else _module(model, store, tensors, stem)
        self._gate = None
        heads = self._heads = tensors.num_heads
        self._channels, width = 0, 0
        if tensors.gate is not None:
            self._gate = _module(model, store, tensors, tensors.gate.name)
            self._channels = tensors.gate_channels
            rows = tensors.read_gate()
            width = rows.rows.shape[2]
            self._random = torch.from_numpy(rows_in_random_directions(rows.rows, tensors.name))
            self._bias = torch.from_numpy(rows.bias)
            self._own_bias = 0.0
            if tensors.gate_bias is not None:
                self._own_bias = store.tensor(tensors.start + tensors.gate_bias).detach()
        if own is None or not _is_held(own, tensors, _dtype(tensors, store)):
            raise RecordingError(
                f"gates or sinks of layer {tensors.name} of the running model are not those of "
                "the checkpoint.",
                "Name the checkpoint that the model was loaded from, or none.",
            )
        self._fingerprint = own.fingerprint()
        self._tokens = np.zeros(NUM_BLOCKS, np.int64)
        self._queries = np.zeros(NUM_BLOCKS, np.int64)
        self._sums = {name: np.zeros((NUM_BLOCKS, heads)) for name in SUMS}
        self._histogram = np.zeros((2, heads, NUM_BINS), np.int64)
        self._rows = np.zeros((2, 2, heads, self._channels))
        self._input_sum = np.zeros(width)
        self._has_weights = self._has_places = True
        self._seen: dict[str, torch.Tensor] = {}

    @property
    def num_tokens(self) -> int:
        return int(self._tokens.sum())

    @property
    def announced_tokens(self) -> int:
        return 0 if self.announced is None else len(self.announced.block)

    def sums(self) -> LayerSums:
        """All sums so far; RecordingError where one is not finite."""
        sums = np.stack([self._sums[name] for name in SUMS])
        if not all(np.isfinite(part).all() for part in (sums, self._rows, self._input_sum)):
            raise RecordingError(
                f"layer {self.tensors.name}: gates or attention of some token are not finite.",
                "The model overflows: try --dtype float32 or bfloat16.",
            )
        return LayerSums(
            self.tensors.name,
            self._into is not None,
            self._has_weights,
            self._has_weights and self._has_places,
            self._fingerprint,
            self._tokens,
            self._queries,
            sums,
            self._histogram,
            self._rows,
            self._input_sum,
        )

    # ------------------------------------------------------------------------------------- hooks
    def hooks(self) -> Iterator[Any]:
        """Attaches the hooks; each handle removes one."""
        if self._gate is not None:
            yield self._gate.register_forward_hook(self._after_gate)
        if self._into is not None:
            yield self._into.register_forward_pre_hook(self._before_output)
        yield self._attention.register_forward_hook(self._after_attention)

    def _after_gate(self, module: Any, arguments: tuple[Any, ...], result: Any) -> None:
        if self.announced is not None:
            self._seen |= {"read": arguments[0].detach(), "gate": result.detach()}

    def _before_output(self, module: Any, arguments: tuple[Any, ...]) -> None:
        if self.announced is not None:
            # copied: what stands behind may change it in place
            self._seen["into"] = arguments[0].detach().clone()

    @torch.no_grad()
    def _after_attention(self, module: Any, arguments: tuple[Any, ...], result: Any) -> None:
        seen, self._seen = self._seen, {}
        if self.announced is None or result is None:
            return
        is_token, block = self.announced.is_token, self.announced.block
        for name, part in seen.items():
            if part.shape[:-1].numel() != is_token.numel():
                raise RecordingError(
                    f"layer {self.tensors.name} saw {number_of(part.shape[:-1].numel(), 'token')};"
                    f" {is_token.numel()} were announced.",
                    "Announce what this process runs, padding and all.",
                )
            rows = part.reshape(is_token.numel(), -1)
            seen[name] = rows[is_token.reshape(-1).to(rows.device)]
        self._tokens += np.bincount(block, minlength=NUM_BLOCKS)
        gates = self._take_gates(seen, block) if "gate" in seen else None
        if "into" in seen:
            self._take_energy(seen["into"], gates, block)
        weights = _weights(result, self._heads)
        if weights is None:
            self._has_weights = False
        elif self._has_weights:
            self._take_weights(weights, gates)

    # -------------------------------------------------------------------------------------- sums
    def _take_gates(self, seen: Mapping[str, torch.Tensor], block: np.ndarray) -> torch.Tensor:
        """Adds up the gates; returns them, (tokens, heads, channels)."""
        spec, stem = self.tensors.family.gate, self.tensors.gate
        assert spec is not None and stem is not None
        function = _FUNCTIONS[spec.function]
        read, gate = seen["read"], seen["gate"]
        size = gate.shape[1] // stem.parts
        part = gate[:, stem.part * size :][:, :size]
        inner = part.reshape(len(part), self._heads, -1)[..., -self._channels :].double()
        inner = inner + torch.as_tensor(self._own_bias, device=inner.device).reshape(-1, 1)
        random = self._random.to(read.device, torch.float32)
        null = (read.float() @ random.flatten(0, 1).T).reshape(inner.shape).double()
        null = null + self._bias.to(null.device)
        gates = function(inner)
        mean = gates.mean(dim=2)
        self._add("gate", mean, block)
        self._add("closed", (gates < CLOSED).double().mean(dim=2), block)
        if spec.function == "sigmoid":
            entropy = -(
                torch.special.xlogy(gates, gates) + torch.special.xlog1py(1 - gates, -gates)
            )
            self._add("entropy", entropy.mean(dim=2), block)
        others = function(null)
        self._add("random_gate", others.mean(dim=2), block)
        self._add("random_closed", (others < CLOSED).double().mean(dim=2), block)
        for which, values in enumerate((inner, null)):
            self._rows[which] += (
                torch.stack([values.sum(dim=0), (values**2).sum(dim=0)]).cpu().numpy()
            )
            bins = ((values + NUM_BINS / BINS_PER_UNIT / 2) * BINS_PER_UNIT).floor()
            place = bins.clamp(0, NUM_BINS - 1).long()
            place += torch.arange(self._heads, device=place.device)[:, None] * NUM_BINS
            counted = torch.bincount(place.flatten(), minlength=self._heads * NUM_BINS)
            self._histogram[which] += counted.reshape(self._heads, NUM_BINS).cpu().numpy()
        self._input_sum += read.double().sum(dim=0).cpu().numpy()
        return gates

    def _take_energy(
        self, into: torch.Tensor, gates: torch.Tensor | None, block: np.ndarray
    ) -> None:
        """Adds up squares of head outputs behind the gate, and before it: divided by the gate."""
        after = into.reshape(len(into), self._heads, -1).double()
        before = after
        if gates is not None:
            before = torch.where(gates > 0.0, after / gates, 0.0)
        self._add("after", (after**2).sum(dim=2), block)
        self._add("before", (before**2).sum(dim=2), block)

    def _take_weights(self, weights: torch.Tensor, gates: torch.Tensor | None) -> None:
        """Attention on the first tokens of each sequence, of queries that have some before them."""
        assert self.announced is not None
        is_token, place = (
            one.to(weights.device) for one in (self.announced.is_token, self.announced.place)
        )
        if weights.shape[2] != is_token.shape[1]:
            raise RecordingError(
                f"layer {self.tensors.name} gives attention of {weights.shape[2]} queries in a "
                f"pass of {is_token.shape[1]} tokens."
            )
        counts = is_token & (place >= FIRST_QUERY)
        chosen = counts[is_token]
        block = self.announced.block[as_array(chosen)]
        paid = weights.movedim(1, 2)[counts].double()
        self._queries += np.bincount(block, minlength=NUM_BLOCKS)
        self._add("left", 1.0 - paid.sum(dim=-1), block)
        # other keys than tokens: of a cache, or compressed ones
        self._has_places &= weights.shape[3] == is_token.shape[1]
        if not self._has_places:
            return
        sequence = counts.nonzero()[:, 0]

        def on(keys: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
            return torch.where(keys[sequence][:, None], of, 0.0).sum(dim=-1)

        is_first = is_token & (place == 0)
        first = on(is_first, paid)
        seen = (paid > 0.0).double()
        self._add("first", first, block)
        self._add("first_4", on(is_token & (place < 4), paid), block)
        self._add("uniform", on(is_first, seen) / seen.sum(dim=-1).clamp(min=1.0), block)
        self._add("query_first_2", first**2, block)
        if gates is not None:
            gate = gates.mean(dim=2).to(first.device)[chosen.to(first.device)]
            self._add("query_gate", gate, block)
            self._add("query_gate_2", gate**2, block)
            self._add("query_gate_first", gate * first, block)

    def _add(self, name: str, values: torch.Tensor, block: np.ndarray) -> None:
        """Adds rows of (tokens, heads) to their blocks."""
        where = torch.from_numpy(block.astype(np.int64)).to(values.device)
        added = torch.zeros(NUM_BLOCKS, self._heads, dtype=torch.float64, device=values.device)
        self._sums[name] += added.index_add_(0, where, values.double()).cpu().numpy()


def _weights(result: Any, heads: int) -> torch.Tensor | None:
    """Attention weights [sequences, heads, queries, keys] among what the layer gives back."""
    parts = result if isinstance(result, (tuple, list)) else ()
    return next(
        (
            part.detach()
            for part in parts
            if isinstance(part, torch.Tensor) and part.ndim == 4 and part.shape[1] == heads
        ),
        None,
    )


def _is_held(stored: AttentionTensors, running: AttentionTensors, dtype: torch.dtype) -> bool:
    """Whether gate and sinks of the model are those of the checkpoint, rounded if need be."""
    theirs, ours = ([*one.recorded()] for one in (stored, running))
    return [part.shape for part in theirs] == [part.shape for part in ours] and all(
        holds_rows(one.reshape(len(one), -1), torch.from_numpy(two.reshape(len(two), -1)), dtype)
        for one, two in zip(theirs, ours, strict=True)
    )


def _dtype(tensors: AttentionTensors, store: ModelStore) -> torch.dtype:
    """The dtype in which the model holds what is recorded."""
    name = next(
        tensors.start + name
        for name in tensors.inside
        if name in (tensors.sinks, f"{tensors.gate.name if tensors.gate else ''}.weight")
    )
    return store.tensor(name).dtype


def _module(
    model: torch.nn.Module, store: ModelStore, tensors: AttentionTensors, stem: str
) -> torch.nn.Module:
    """A module of the layer, by the name of a tensor in it, wrappers included."""
    inside = next(name for name in tensors.inside if name.startswith(f"{stem}."))
    depth = inside.removeprefix(stem).count(".")
    return model.get_submodule(store.own_name(tensors.start + inside).rsplit(".", depth)[0])
