"""What is known about the attention of a model family: names of its tensors, where its gates are.

A family that has neither gates nor learned sinks has no file, and nothing is said of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from moegeom.core.documents import record_of_file, shipped_names, shipped_text
from moegeom.core.text import quoted

#: Where gates can stand: behind the output of heads, the values, the keys, the queries, the sum.
Position = Literal["G1", "G2", "G3", "G4", "G5"]

#: What a gate makes of its projection.
Function = Literal["sigmoid", "softplus"]
FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "sigmoid": lambda z: 1.0 / (1.0 + np.exp(-z)),
    "softplus": lambda z: np.logaddexp(z, 0.0),
}

_PACKAGE = "moegeom.router.attention"

#: Characters; the longest family here has 800.
_MOST_TEXT = 1 << 14

#: ``name``, or ``name[i/n]``: the i-th of n equal parts of its rows, from 0.
_STEM = re.compile(r"(?P<name>[\w.]+)(?:\[(?P<part>\d)/(?P<parts>[1-9])\])?")


class Stem:
    """The module of a matrix inside its layer, and which of its equal parts is meant."""

    def __init__(self, name: str, part: int = 0, parts: int = 1) -> None:
        self.name: str = name
        self.part: int = part
        self.parts: int = parts

    @classmethod
    def parsed(cls, text: object) -> Stem:
        """What a file names; ValueError where that is no module."""
        match = _STEM.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"{quoted(text, 60)} is no name of a module")
        return cls(match["name"], int(match["part"] or 0), int(match["parts"] or 1))


Stems = Annotated[tuple[Stem, ...], Meta(min_length=1)]
Texts = Annotated[tuple[str, ...], Meta(min_length=1)]


@dataclass(frozen=True)
class ValueSpec:
    """Values. The first spelling of a name that is there counts, here and below.

    Rows of a head begin with as many as the config keys ``before`` say together, of something else.
    ``latent`` is what the matrix reads, where that is a projection of the input: its first rows,
    normed with the gain ``latent_gain``. ``note`` says what else stands between values and outputs.
    """

    names: Stems
    before: Texts = ()
    latent: Stems = ()
    latent_gain: Stems = ()
    note: str = ""


@dataclass(frozen=True)
class OutputSpec:
    """The output matrix, whose columns are the channels of the heads, one head after the other."""

    names: Stems


@dataclass(frozen=True)
class GateSpec:
    """The gate: ``function`` of a projection of the attention input, at ``position``.

    ``per`` says whether a head has one number or one for each channel; ``head or channel``: the
    shape says it. ``before`` as in :class:`ValueSpec`. ``bias`` is one number for each head.
    ``reads`` names what is projected, where that is not the attention input.
    """

    position: Position
    function: Function
    per: Literal["head", "channel", "head or channel"]
    names: Stems
    before: Texts = ()
    bias: Stems = ()
    reads: str = "the attention input"


@dataclass(frozen=True)
class SinkSpec:
    """Learned sinks: logits of the softmax that belong to no token, one for each head.

    With ``is_projection`` they are a projection of the attention input.
    """

    names: Stems
    is_projection: bool = False


@dataclass(frozen=True)
class AttentionFamily:
    """The attention of one family.

    ``width`` are config keys (aliases) of the channels of a head. In layers of a kind, by what
    ``layer_types`` calls it, keys count that begin with what ``prefix_in`` says, where they are
    given, and before all those that ``per_layer_config`` has for the layer; with
    ``width_is_share`` heads share ``hidden_size`` where none is given. ``stacks`` are names of
    stacks of layers, and what stands before ``layers.`` in each. ``no_products`` says why values
    and outputs of heads are not multiplied.
    """

    name: str
    source: str
    model_types: Texts
    config_roots: Texts = ("",)
    width: Texts = ()
    prefix_in: dict[str, str] = field(default_factory=dict)
    width_is_share: bool = False
    stacks: dict[str, str] = field(default_factory=lambda: {"text": ""})
    value: ValueSpec | None = None
    output: OutputSpec | None = None
    gate: GateSpec | None = None
    sink: SinkSpec | None = None
    no_products: str = ""


def attention_families() -> Texts:
    """Names of all of them, sorted."""
    return shipped_names(_PACKAGE)


@cache
def load_attention_family(name: str) -> AttentionFamily:
    """The one of that name."""
    return record_of_file(AttentionFamily, name, shipped_text(_PACKAGE, name), _MOST_TEXT)


def attention_family_of(model_type: str) -> AttentionFamily | None:
    """The family with this ``model_type``, if its attention is known."""
    for name in sorted(attention_families(), key=lambda n: n != model_type):
        if model_type in load_attention_family(name).model_types:
            return load_attention_family(name)
    return None
