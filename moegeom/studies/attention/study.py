"""``moegeom attention``: gates, sinks and heads of attention layers, by weights and on tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.router import parse_layers
from moegeom.pipeline import Watch
from moegeom.router.attention.tensors import (
    AttentionTensors,
    attention_layers,
    recognise_attention,
)
from moegeom.studies.announced import announce_bytes
from moegeom.studies.attention.layer import attention_layer
from moegeom.studies.attention.on_tokens import layer_on_tokens
from moegeom.studies.attention.record import (
    Attention,
    AttentionLayer,
    AttentionRequest,
    TokensFacts,
)
from moegeom.studies.written import refuse_out, write_rows
from moegeom.tokens.attention_record import read_attention_record


def attention(request: AttentionRequest, watch: Watch | None = None) -> Attention:
    """What the weights of gates, values, outputs and sinks say, and their record on tokens.

    Where ``model_type`` names no family whose gates or sinks are known, nothing is looked for.

    Raises
    ------
    RouterError
        When a family that is known has no attention layer in this file.
    RecordingError
        When the tokens are no record of attention, or one of other gates.
    UsageError
        When more than 2 GB are to be read without ``yes``, and when ``out`` cannot be written.
    """
    if request.out is not None:
        refuse_out(request.out, request.overwrite, (".parquet",))
    wanted = None if request.layers is None else parse_layers(request.layers)
    record = None if request.tokens is None else read_attention_record(request.tokens)
    store = open_checkpoint(request.checkpoint, request.remote)
    family = recognise_attention(store.config)
    named = str(store.config.get("model_type", ""))[:60]
    found: list[AttentionLayer] = []
    left_out: list[tuple[str, str]] = []
    if family is not None:
        asked = list(_sized(attention_layers(store, family, wanted), left_out))
        announce_bytes(
            sum(one.num_bytes for one in asked),
            "of attention are",
            request.yes,
            watch,
            of="attention",
        )
        if watch:
            watch.start(len(asked))
        for tensors in asked:
            if watch:
                watch.begin(tensors.name)
            try:
                layer = attention_layer(tensors)
            except (CheckpointError, RouterError) as error:
                left_out.append((tensors.name, error.message.rstrip(".")))
            else:
                on_tokens = None if record is None else layer_on_tokens(tensors, record)
                found.append(dataclasses.replace(layer, on_tokens=on_tokens))
            if watch:
                watch.advance(1)
    if request.out is not None:
        _write(request.out, found)
    said = [] if family is None else [family.no_products, family.value.note if family.value else ""]
    return Attention(
        checkpoint=store.label,
        model_type=named,
        family=family.name if family else "",
        source=family.source if family else "",
        layers=tuple(found),
        left_out=tuple(left_out),
        notes=tuple(note for note in said if note),
        bytes_read=store.bytes_read,
        bytes_total=store.bytes_total,
        written=None if request.out is None else request.out.name,
        tokens=None
        if record is None
        else TokensFacts(record.label, record.engine, record.num_tokens, record.num_documents),
    )


def _sized(
    layers: list[AttentionTensors], left_out: list[tuple[str, str]]
) -> Iterator[AttentionTensors]:
    """Layers whose headers can be understood; the others with the reason."""
    for tensors in layers:
        try:
            assert tensors.num_bytes >= 0
        except (CheckpointError, RouterError) as error:
            left_out.append((tensors.name, error.message.rstrip(".")))
        else:
            yield tensors


def _write(out: Path, found: list[AttentionLayer]) -> None:
    """A row for each head of each layer."""
    write_rows(out, [row for one in found for row in rows_of(one)])


def rows_of(layer: AttentionLayer) -> Iterator[dict[str, Any]]:
    """Rows of the file: what is said of the layer, then of the head."""
    alike: dict[int, tuple[int, float]] = {}
    for one, two, cosine in layer.alike:
        for head, other in ((one, two), (two, one)):
            if cosine > alike.get(head, (0, -1.0))[1]:
                alike[head] = (other, cosine)
    names = ("layer", "position", "gating", "function", "width", "hidden")
    for head in layer.heads:
        other, cosine = alike.get(head.head, (None, None))
        yield {
            **{name: getattr(layer, name) for name in names},
            **dataclasses.asdict(head),
            **(layer.on_tokens.heads[head.head] if layer.on_tokens is not None else {}),
            "gate_gram_random": layer.gram_random,
            "gate_gram_random_sd": layer.gram_random_sd,
            "alike_head": other,
            "alike_cosine": cosine,
        }
