"""``research attention``: gates, sinks and heads of attention layers, by weights and on tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError, RecordingError, RouterError
from moegeom.core.router import parse_layers
from moegeom.core.shapes import Float64
from moegeom.core.text import half_width
from moegeom.geometry import attention_heads
from moegeom.geometry.gram import cosines, gram_score, random_gram_score, random_gram_score_sd
from moegeom.pipeline import Watch
from moegeom.research.attention.record import (
    Attention,
    AttentionLayer,
    AttentionRequest,
    Head,
    HeadRange,
    LayerOnTokens,
    TokensFacts,
)
from moegeom.router.attention.tensors import (
    FUNCTIONS,
    LARGEST,
    AttentionTensors,
    GateRows,
    attention_layers,
    recognise_attention,
)
from moegeom.studies.announced import announce_bytes
from moegeom.studies.study import each
from moegeom.studies.written import refuse_out, write_rows
from moegeom.tokens.attention_record import (
    BINS_PER_UNIT,
    NUM_BINS,
    AttentionRecord,
    LayerSums,
    read_attention_record,
)

# ---------------------------------------------------------------------------------------- on tokens
#: Shares of the gates of a head below the figure.
_DECILES = {"gate_decile_1": 0.1, "gate_median": 0.5, "gate_decile_9": 0.9}


def layer_on_tokens(tensors: AttentionTensors, record: AttentionRecord) -> LayerOnTokens | None:
    """Figures of each head of the layer; None where it was not recorded.

    Raises
    ------
    RecordingError
        When other gates or sinks were recorded.
    """
    sums = next((one for one in record.layers if one.name == tensors.name), None)
    if sums is None:
        return None
    shape = (tensors.num_heads, tensors.gate_channels if tensors.gate is not None else 0)
    if sums.fingerprint != tensors.fingerprint() or (*sums.rows.shape[2:],) != shape:
        raise RecordingError(
            f"{record.label}: layer {tensors.name} was recorded with other gates or sinks than "
            f"those of {tensors.store.label}.",
            f"It was recorded from {record.checkpoint}." if record.checkpoint else "",
        )
    measured = attention_heads.gating_figures(sums.by_name, sums.tokens, sums.queries)
    names, gate = _recorded(tensors, sums), tensors.gate and tensors.family.gate
    figures = {name: figure for name, figure in measured.items() if name in names}
    if gate is not None:
        for suffix, (total, squares) in zip(("", "_random"), sums.rows, strict=True):
            pull = attention_heads.gate_pull(total, squares, int(sums.tokens.sum()))
            figures[f"gate_pull{suffix}"] = _exact(pull)
        figures |= _deciles(sums, gate.function)
    blocks = int((sums.tokens > 0).sum())
    return LayerOnTokens(
        num_tokens=int(sums.tokens.sum()),
        num_blocks=blocks,
        figures={name: _measured(figure, blocks) for name, figure in figures.items()},
        heads=tuple(
            {name: _number(figure.value[head]) for name, figure in figures.items()}
            for head in range(tensors.num_heads)
        ),
    )


def _recorded(tensors: AttentionTensors, sums: LayerSums) -> set[str]:
    """Names of the figures that were recorded; sums of the others are 0."""
    gate = tensors.gate and tensors.family.gate
    names: set[str] = set()
    if gate is not None:
        names |= {"gate_mean", "gate_closed_share", "gate_mean_random", "gate_closed_share_random"}
        if gate.function == "sigmoid":
            names.add("gate_entropy_nats")
        if sums.has_heads:
            names.add("energy_removed_share")
        if sums.has_places:
            names.add("gate_first_correlation")
    if sums.has_places:
        names |= {"first_token_mass", "first_4_mass", "uniform_mass"}
    if sums.has_weights and tensors.sinks is not None:
        names.add("sink_mass")
    return names


def _deciles(sums: LayerSums, function: str) -> Mapping[str, attention_heads.HeadFigure]:
    """From the histogram, right to an eighth in front of the function."""
    counts = np.cumsum(sums.histogram[0], axis=1)
    inner = (np.arange(NUM_BINS) + 0.5) / BINS_PER_UNIT - NUM_BINS / BINS_PER_UNIT / 2
    values = FUNCTIONS[function](inner)
    places = {
        name: (counts >= share * counts[:, -1:]).argmax(axis=1) for name, share in _DECILES.items()
    }
    return {name: _exact(values[place]) for name, place in places.items()}


def _exact(value: np.ndarray) -> attention_heads.HeadFigure:
    finite = value[np.isfinite(value)]
    mean = float(finite.mean()) if finite.size else math.nan
    return attention_heads.HeadFigure(value, mean, math.nan)


def _measured(figure: attention_heads.HeadFigure, blocks: int) -> HeadRange:
    width = half_width(figure.mean_error, blocks) if blocks > 1 else math.nan
    finite = figure.value[np.isfinite(figure.value)]
    ends = (float(finite.min()), float(finite.max())) if finite.size else (math.nan, math.nan)
    return HeadRange(*(_number(one) for one in (figure.mean, width, *ends)))


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


# ---------------------------------------------------------------------------------------- one layer
def attention_layer(tensors: AttentionTensors) -> AttentionLayer:
    """Its figures; matrices are read one kind after the other.

    Raises
    ------
    RouterError
        When shapes contradict each other, or values are not finite.
    """
    gate, sink = tensors.gate and tensors.family.gate, tensors.sinks and tensors.family.sink
    number, shared, gating = tensors.num_heads, tensors.num_value_heads, "none"
    values = [head * shared // number if shared else None for head in range(number)]
    #: Fields of heads, with the value of each head.
    fields: dict[str, Sequence[Any]] = {"head": range(number), "value_head": values}
    alike: list[tuple[int, int, float]] = []
    grams: dict[str, Any] = dict.fromkeys(("gram", "gram_random", "gram_random_sd"))
    if tensors.value is not None:
        matrices = tensors.read_heads()
        fields |= _of_products(attention_heads.product_spectra(matrices.values, matrices.outputs))
        alike = attention_heads.alike_heads(matrices.values, matrices.outputs)
    if gate is not None:
        rows = tensors.read_gate()
        _refuse_not_finite(tensors, "gates", rows.rows, rows.bias)
        gating = "one a head" if rows.rows.shape[1] == 1 and tensors.width > 1 else "one a channel"
        of_heads, grams = _of_gate(rows)
        fields |= of_heads
    is_projection = bool(sink and sink.is_projection)
    if sink:
        fields["sink"] = _sinks(tensors, is_projection)
    columns = zip(*fields.values(), strict=True)
    return AttentionLayer(
        layer=tensors.name,
        num_heads=number,
        num_value_heads=shared,
        width=tensors.width if tensors.output is not None else 0,
        hidden=tensors.hidden,
        gating=gating,
        **{name: getattr(gate, name) if gate else "" for name in _OF_GATE},
        **grams,
        alike=tuple(alike),
        has_sinks=bool(sink),
        sink_is_projection=is_projection,
        num_bytes=tensors.num_bytes,
        heads=tuple(Head(**dict(zip(fields, each, strict=True))) for each in columns),
    )


#: What a family says of its gates.
_OF_GATE = ("position", "function", "reads")


def _refuse_not_finite(tensors: AttentionTensors, what: str, *arrays: np.ndarray) -> None:
    if not all(float(np.abs(values).max(initial=0.0)) <= LARGEST for values in arrays):
        raise RouterError(
            f"{tensors.store.label}: {what} of layer {tensors.name} hold values that are not "
            "finite, or beyond 1e70."
        )


def _sinks(tensors: AttentionTensors, is_projection: bool) -> list[float | None]:
    """Of each head; None for a logit of minus infinity, which is no sink."""
    sinks = tensors.read_sinks()
    is_none = np.isneginf(sinks[:, 0]) & (not is_projection)
    _refuse_not_finite(tensors, "sinks", sinks[~is_none])
    sizes = np.linalg.norm(sinks, axis=1) if is_projection else sinks[:, 0]
    return [None if none else float(s) for none, s in zip(is_none, sizes, strict=True)]


def _of_products(spectra: Float64[np.ndarray, "heads channels"]) -> dict[str, Sequence[Any]]:
    norms = np.linalg.norm(spectra, axis=1)
    ranks, effective = zip(*map(attention_heads.spectrum_rank, spectra), strict=True)
    return {
        "rank": ranks,
        "effective_rank": effective,
        "product_norm": norms.tolist(),
        "is_dead": attention_heads.dead_heads(norms).tolist(),
    }


def _of_gate(gate: GateRows) -> tuple[dict[str, Sequence[Any]], dict[str, Any]]:
    """Fields of its heads, and what is expected of random rows beside the score of the layer."""
    heads, channels, width = gate.rows.shape
    own = [_score(rows) if channels > 1 else None for rows in gate.rows]
    fields = {
        "gate_norm": [float(np.sqrt((rows**2).sum(axis=1).mean())) for rows in gate.rows],
        "gate_bias": [float(bias.mean()) for bias in gate.bias],
        "gate_gram": own,
    }
    number, scores = channels, [one for one in own if one is not None]
    score = float(np.mean(scores)) if scores else None
    if channels == 1:
        number, score = heads, _score(gate.rows[:, 0])
    if number < 2:
        return fields, dict.fromkeys(("gram", "gram_random", "gram_random_sd"))
    return fields, {
        "gram": score,
        "gram_random": random_gram_score(number, width, False),
        "gram_random_sd": random_gram_score_sd(number, width, False),
    }


def _score(rows: Float64[np.ndarray, "rows width"]) -> float | None:
    """Gram score of uncentred rows: a vector added to all of them changes a gate."""
    score = gram_score(cosines(rows @ rows.T))
    return None if np.isnan(score) else score


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

    Examples
    --------
    >>> import moegeom as mg
    >>> mg.attention("sample_ckpts/olmoe-balanced/step_1500").value.family
    ''
    """
    if request.out is not None:
        refuse_out(request.out, request.overwrite, (".parquet",))
    numbers = None if request.layers is None else parse_layers(request.layers)
    record = None if request.tokens is None else read_attention_record(request.tokens)
    store = open_checkpoint(request.checkpoint, request.remote)
    family = recognise_attention(store.config)
    named = str(store.config.get("model_type", ""))[:60]
    layers: list[AttentionLayer] = []
    left_out: list[tuple[str, str]] = []
    if family is not None:
        chosen = list(_sized(attention_layers(store, family, numbers), left_out))
        announce_bytes(
            sum(one.num_bytes for one in chosen),
            "of attention are",
            request.yes,
            watch,
            noun="attention",
        )
        for tensors in each(chosen, watch):
            try:
                layer = attention_layer(tensors)
            except (CheckpointError, RouterError) as error:
                left_out.append((tensors.name, error.message.rstrip(".")))
            else:
                on_tokens = None if record is None else layer_on_tokens(tensors, record)
                layers.append(dataclasses.replace(layer, on_tokens=on_tokens))
    if request.out is not None:
        write_rows(request.out, (row for one in layers for row in rows_of(one)))
    both = [] if family is None else [family.no_products, family.value.note if family.value else ""]
    return Attention(
        checkpoint=store.label,
        model_type=named,
        family=family.name if family else "",
        source=family.source if family else "",
        layers=tuple(layers),
        left_out=tuple(left_out),
        notes=tuple(note for note in both if note),
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
    """Layers whose headers are valid; the others go to ``left_out`` with the reason."""
    for tensors in layers:
        try:
            assert tensors.num_bytes >= 0
        except (CheckpointError, RouterError) as error:
            left_out.append((tensors.name, error.message.rstrip(".")))
        else:
            yield tensors


def rows_of(layer: AttentionLayer) -> Iterator[dict[str, Any]]:
    """Rows of the file: the columns of the layer, then of the head."""
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
