"""What a record of attention says of the heads of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.text import half_width
from moegeom.geometry.gating import HeadFigure, gate_pull, gating_figures
from moegeom.router.attention.family import FUNCTIONS
from moegeom.router.attention.tensors import AttentionTensors
from moegeom.studies.attention.record import HeadRange, LayerOnTokens
from moegeom.tokens.attention_record import BINS_PER_UNIT, NUM_BINS, AttentionRecord, LayerSums

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
    known = _known(tensors, sums)
    found = {
        name: figure
        for name, figure in gating_figures(sums.by_name, sums.tokens, sums.queries).items()
        if name in known
    }
    gate = tensors.family.gate
    if tensors.gate is not None and gate is not None:
        for suffix, (total, squares) in zip(("", "_random"), sums.rows, strict=True):
            pull = gate_pull(total, squares, int(sums.tokens.sum()))
            found[f"gate_pull{suffix}"] = _exact(pull)
        found |= _deciles(sums, gate.function)
    blocks = int((sums.tokens > 0).sum())
    return LayerOnTokens(
        num_tokens=int(sums.tokens.sum()),
        num_blocks=blocks,
        figures={name: _measured(figure, blocks) for name, figure in found.items()},
        heads=tuple(
            {name: _number(figure.value[head]) for name, figure in found.items()}
            for head in range(tensors.num_heads)
        ),
    )


def _known(tensors: AttentionTensors, sums: LayerSums) -> set[str]:
    """Figures that were looked at: what is not seen adds up to 0."""
    gate = tensors.family.gate
    known: set[str] = set()
    if tensors.gate is not None and gate is not None:
        known |= {"gate_mean", "gate_closed_share", "gate_mean_random", "gate_closed_share_random"}
        if gate.function == "sigmoid":
            known.add("gate_entropy_nats")
        if sums.has_heads:
            known.add("energy_removed_share")
        if sums.has_places:
            known.add("gate_first_correlation")
    if sums.has_places:
        known |= {"first_token_mass", "first_4_mass", "uniform_mass"}
    if sums.has_weights and tensors.sinks is not None:
        known.add("sink_mass")
    return known


def _deciles(sums: LayerSums, function: str) -> Mapping[str, HeadFigure]:
    """From the histogram, right to an eighth in front of the function."""
    counts = np.cumsum(sums.histogram[0], axis=1)
    inner = (np.arange(NUM_BINS) + 0.5) / BINS_PER_UNIT - NUM_BINS / BINS_PER_UNIT / 2
    values = FUNCTIONS[function](inner)
    places = {
        name: (counts >= share * counts[:, -1:]).argmax(axis=1) for name, share in _DECILES.items()
    }
    return {name: _exact(values[place]) for name, place in places.items()}


def _exact(value: np.ndarray) -> HeadFigure:
    known = value[np.isfinite(value)]
    mean = float(known.mean()) if known.size else math.nan
    return HeadFigure(value, np.full(len(value), math.nan), mean, math.nan)


def _measured(figure: HeadFigure, blocks: int) -> HeadRange:
    width = half_width(figure.mean_error, blocks) if blocks > 1 else math.nan
    known = figure.value[np.isfinite(figure.value)]
    ends = (float(known.min()), float(known.max())) if known.size else (math.nan, math.nan)
    return HeadRange(*(_number(one) for one in (figure.mean, width, *ends)))


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
