"""Gates, sinks and heads of the attention of a checkpoint: request and record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moegeom.checkpoint.remote.url import RemoteOptions
from moegeom.core.option import argument, option
from moegeom.engine.request import CHECKPOINT, FETCHED, LAYERS, NO_CACHE, OutTerms

Gating = Literal["one a channel", "one a head", "none"]

#: What can change inside a head without changing what it computes, by its gate (docs/attention.md).
FREE: Mapping[Gating, str] = {
    "one a channel": "only the scale of each channel, between values and outputs, is free",
    "one a head": "channel mixing inside a head is free",
    "none": "channel mixing inside a head is free",
}


@dataclass(frozen=True)
class AttentionRequest(OutTerms):
    """The options of ``attention``, each with what it means."""

    checkpoint: str = argument(f"Checkpoint: {CHECKPOINT}.")
    _: dataclasses.KW_ONLY
    tokens: Path | None = option("What capture --keep attention wrote, of this checkpoint.")
    layers: str | None = option(LAYERS, also="layer")
    remote: RemoteOptions | None = option(NO_CACHE, in_python=FETCHED)
    yes: bool = option("Read more than 2 GB of attention.", False)
    out: Path | None = option("Write a row for each head: FILE.parquet.")


@dataclass(frozen=True)
class Head:
    """One head of a layer.

    ``value_head`` are the values that it reads, of which groups of heads share some. ``rank``,
    ``effective_rank`` and ``product_norm`` (Frobenius) are of its output times its value matrix;
    None where these are not multiplied. ``is_dead``: that norm is below 1 % of the median of the
    layer. ``gate_norm`` is the rms length of its gate rows, ``gate_bias`` the mean of what is
    added, ``gate_gram`` the Gram score of its own rows, None with fewer than two that are not zero.
    ``sink`` is its sink logit, or the length of the row that projects one; None where its sink is
    turned off, by minus infinity.
    """

    head: int
    value_head: int | None
    rank: int | None = None
    effective_rank: float | None = None
    product_norm: float | None = None
    is_dead: bool | None = None
    gate_norm: float | None = None
    gate_bias: float | None = None
    gate_gram: float | None = None
    sink: float | None = None


@dataclass(frozen=True)
class HeadRange:
    """A figure of the heads of a layer: mean, half-width of its 95 % interval, least and most.

    None where it is not known: an interval needs documents in two blocks.
    """

    mean: float | None
    half_width: float | None
    least: float | None
    most: float | None


@dataclass(frozen=True)
class LayerOnTokens:
    """What a layer did on recorded tokens: figures of docs/attention.md by their names.

    ``heads`` has those of each head. What was not looked at is not there: without a gate all of
    gates, with fused attention all of attention weights.
    """

    num_tokens: int
    num_blocks: int
    figures: Mapping[str, HeadRange]
    heads: tuple[Mapping[str, float | None], ...]


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer.

    ``position`` is that of the gate (G1 to G5), empty without one; ``function`` is what is taken of
    its projection of what it ``reads``. ``gram`` is the Gram score of the rows of a gate with one
    row a head, else the mean of those of the heads; ``gram_random`` that of random rows of this
    shape and ``gram_random_sd`` its deviation (of one head). ``alike`` are pairs of heads whose
    products have a cosine of .99 or more. ``sink_is_projection``: sinks depend on the token.
    ``on_tokens`` is None where no tokens were given or the layer is not in their record.
    """

    layer: str
    num_heads: int
    num_value_heads: int
    width: int
    hidden: int
    gating: Gating
    position: str
    function: str
    reads: str
    gram: float | None
    gram_random: float | None
    gram_random_sd: float | None
    alike: tuple[tuple[int, int, float], ...]
    has_sinks: bool
    sink_is_projection: bool
    num_bytes: int
    heads: tuple[Head, ...]
    on_tokens: LayerOnTokens | None = None

    @property
    def free(self) -> str:
        """What can change inside a head without changing what it computes."""
        return FREE[self.gating]

    @property
    def dead(self) -> list[int]:
        """Numbers of the dead heads."""
        return [one.head for one in self.heads if one.is_dead]


@dataclass(frozen=True)
class TokensFacts:
    """The record of attention that was read."""

    name: str
    engine: str
    num_tokens: int
    num_documents: int


@dataclass(frozen=True)
class Attention:
    """The attention of a checkpoint; ``left_out`` are layers that could not be read, with reasons.

    ``family`` is empty, with no layers, where no gate and no sink of this ``model_type`` is known.
    ``notes`` are what the family says of its products.
    """

    checkpoint: str
    model_type: str
    family: str
    source: str
    layers: tuple[AttentionLayer, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    bytes_read: int
    bytes_total: int
    written: str | None = None
    tokens: TokensFacts | None = None
