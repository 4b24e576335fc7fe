"""Attention of model families, by file: names of tensors, where gates are; and the gates, values,
outputs and sinks of a checkpoint, found by headers and read layer by layer.

A family that has neither gates nor learned sinks has no file, and nothing is said of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from moegeom.checkpoint.store import TensorStore
from moegeom.core.digest import digest_of
from moegeom.core.documents import record_of_file, shipped_names, shipped_text
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.limits import ATTENTION_LAYERS
from moegeom.core.shapes import Float, Float64
from moegeom.core.text import number_of, quoted
from moegeom.router.family import COUNT, PREFIXES, SOME, Range, Setting
from moegeom.router.plain_names import with_plain_names
from moegeom.router.settings import Settings
from moegeom.router.storage import Stored, check_plain, find_storage

# ----------------------------------------------------------------------------------------- families
#: Where gates can stand: behind the output of heads, the values, the keys, the queries, the sum.
Position = Literal["G1", "G2", "G3", "G4", "G5"]

#: What a gate makes of its projection.
Function = Literal["sigmoid", "softplus"]
FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "sigmoid": lambda z: 0.5 + 0.5 * np.tanh(0.5 * z),
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


# ------------------------------------------------------------------------------------------ tensors
_LAYER = re.compile(r"(?P<before>(?:.*?\.)?)layers\.(?P<layer>[0-9]{1,5})\.")

#: Float64 holds no fourth power of more.
LARGEST = 1e70


class HeadShapeError(RouterError):
    """A tensor has a shape that heads of this layer cannot use."""


@dataclass(frozen=True, eq=False)
class GateRows:
    """The gate of a layer: a number of each row and token, as ``function(rows x + bias)``.

    A head has one row or as many as channels.
    """

    rows: Float64[np.ndarray, "heads channels width"]
    bias: Float64[np.ndarray, "heads channels"]


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """Values and outputs of a layer.

    Head h has the values of number h // (heads / value heads). Where values read a projection, its
    columns are in an orthonormal basis of what that projection can see.
    """

    values: Float[np.ndarray, "values channels inputs"]
    outputs: Float[np.ndarray, "heads hidden channels"]


@dataclass(frozen=True, eq=False)
class AttentionTensors:
    """One attention layer, before any value is read.

    ``start`` is how names of its tensors begin, ``inside`` are the rest of these names. ``gate``,
    ``value``, ``latent``, ``latent_gain`` and ``output`` are modules, ``sinks`` is a module or a
    tensor; None is not there.
    """

    store: TensorStore
    family: AttentionFamily
    name: str
    start: str
    inside: tuple[str, ...]
    settings: Settings
    gate: Stem | None
    gate_bias: str | None
    value: Stem | None
    latent: Stem | None
    latent_gain: str | None
    output: Stem | None
    sinks: str | None

    # ------------------------------------------------------------------------------------- shapes
    @property
    def width(self) -> int:
        """Channels of a head."""
        if self.family.width_is_share and self._key(self.family.width) is None:
            keys = ("hidden_size", "num_attention_heads")
            hidden, heads = (self.settings.integer(Setting((key,), range=SOME)) for key in keys)
            return hidden // heads
        return self._integer(self.family.width, SOME)

    @property
    def num_heads(self) -> int:
        if self.output is None:
            shape = self._sink_shape
            if not shape or not shape[0]:
                raise self._refuse(self.sinks or "", f"shape {shape}", "a number for each head")
            return shape[0]
        columns = self._shape(self.output)[1]
        if columns % self.width:
            raise self._refuse(
                self.output.name, number_of(columns, "column"), f"heads of {self.width}"
            )
        return columns // self.width

    @property
    def num_value_heads(self) -> int:
        """Heads with values of their own."""
        if self.value is None or self.family.value is None:
            return 0
        rows = self._shape(self.value)[0]
        each = self._before(self.family.value.before) + self.width
        if rows % each or self.num_heads % (rows // each or self.num_heads + 1):
            heads = number_of(self.num_heads, "head")
            text = f"{number_of(each, 'row')} for each of {heads}, or for as many as share values"
            raise self._refuse(self.value.name, number_of(rows, "row"), text)
        return rows // each

    @property
    def hidden(self) -> int:
        """Width of the residual stream; 0 where no output matrix is looked at."""
        return self._shape(self.output)[0] if self.output is not None else 0

    @property
    def gate_channels(self) -> int:
        """Rows of the gate in a head: 1, or one for each channel.

        Raises
        ------
        RouterError
            When the tensor has another shape than heads can use.
        """
        assert self.gate is not None and self.family.gate is not None
        rows, heads = self._shape(self.gate)[0], self.num_heads
        possible = {
            heads * (self._before(self.family.gate.before) + channels): channels
            for channels in _channels(self.family.gate, self.width)
        }
        if rows not in possible:
            text = " or ".join(f"{number}" for number in possible)
            text += f" for {number_of(heads, 'head')}"
            raise self._refuse(self.gate.name, number_of(rows, "row"), text)
        return possible[rows]

    def _before(self, keys: Sequence[str]) -> int:
        return sum(self._integer((key,)) for key in keys)

    def _integer(self, keys: tuple[str, ...], of: Range = COUNT) -> int:
        return self.settings.integer(replace(self._key(keys) or Setting(keys), range=of))

    def _key(self, keys: tuple[str, ...]) -> Setting | None:
        """The setting of these aliases that counts in this layer; None where none is given."""
        kinds = self.settings.entries(Setting(("layer_types",))) or []
        layer = int(self.name.rpartition("/")[2])
        kind = kinds[layer] if layer < len(kinds) else None
        prefixes = [f"per_layer_config.{layer}.", self.family.prefix_in.get(str(kind), ""), ""]
        spellings = (Setting(tuple(prefix + key for key in keys)) for prefix in prefixes)
        return next((one for one in spellings if self.settings.has(one)), None)

    def _stored(self, stem: str) -> Stored:
        names = self._names(stem)
        infos = {key: self.store.info(name) for key, name in names.items() if key != "bias"}
        return find_storage(
            infos,
            self.settings,
            f"'{self.start}{stem}'",
            read=lambda key: self.store.read(names[key]),
        )

    def _names(self, stem: str) -> dict[str, str]:
        """Tensors of a module, by the part of their name behind it."""
        names = (name for name in self.inside if name.startswith(f"{stem}."))
        return {name.removeprefix(f"{stem}."): self.start + name for name in names}

    def _shape(self, stem: Stem) -> tuple[int, int]:
        shape = self._stored(stem.name).shape
        if len(shape) != 2 or not all(shape) or shape[0] % stem.parts:
            raise self._refuse(stem.name, f"shape {shape}", f"a matrix of {stem.parts} parts")
        return shape[0] // stem.parts, shape[1]

    @property
    def _sink_shape(self) -> tuple[int, ...]:
        assert self.sinks is not None and self.family.sink is not None
        if self.family.sink.is_projection:
            return self._stored(self.sinks).shape
        return self.store.info(self.start + self.sinks).shape

    def _refuse(self, tensor: str, actual: str, expected: str) -> HeadShapeError:
        return HeadShapeError(
            f"{self.store.label}: '{self.start}{tensor}' has {actual}, expected {expected}."
        )

    # -------------------------------------------------------------------------------------- bytes
    @property
    def num_bytes(self) -> int:
        """What reading all of it reads."""
        stems = [s.name for s in (self.gate, self.value, self.latent, self.output) if s is not None]
        return self.gate_bytes + sum(self._bytes(name) for name in stems[self.gate is not None :])

    @property
    def gate_bytes(self) -> int:
        """What reading gate and sinks reads."""
        gate = self._bytes(self.gate.name) if self.gate is not None else 0
        if self.sinks is None:
            return gate
        assert self.family.sink is not None
        if self.family.sink.is_projection:
            return gate + self._bytes(self.sinks)
        return gate + self.store.info(self.start + self.sinks).size_bytes

    def _bytes(self, stem: str) -> int:
        return sum(info.size_bytes for info in self._stored(stem).tensors)

    # ------------------------------------------------------------------------------------- values
    def fingerprint(self) -> str:
        """A digest of gate and sinks in float32, by which a recording knows its layer again."""
        return digest_of(*(np.asarray(values, np.float32) for values in self.recorded()))

    def recorded(self) -> Iterator[np.ndarray]:
        """Rows and biases of the gate, and sinks: what a recording belongs to."""
        if self.gate is not None:
            gate = self.read_gate()
            yield from (gate.rows, gate.bias)
        if self.sinks is not None:
            yield self.read_sinks()

    def read_gate(self) -> GateRows:
        """The gate; its values may be anything.

        Raises
        ------
        RouterError
            When the tensor has another shape than heads can use, or an unknown storage.
        """
        assert self.gate is not None and self.family.gate is not None
        channels, heads = self.gate_channels, self.num_heads
        whole, bias = self._matrix(self.gate)
        rows = whole.reshape(heads, -1, whole.shape[1])[:, -channels:]
        added = np.zeros((heads, channels))
        if bias is not None:
            added = added + bias.reshape(heads, -1)[:, -channels:]
        if self.gate_bias is not None:
            added = added + self._plain(self.gate_bias, heads)[:, None]
        return GateRows(rows.astype(np.float64), added)

    def read_sinks(self) -> Float64[np.ndarray, "heads width"]:
        """Sink logits, one column; or the rows of their projection; they may be anything."""
        assert self.sinks is not None and self.family.sink is not None
        heads = self.num_heads
        if not self.family.sink.is_projection:
            return self._plain(self.sinks, heads)[:, None]
        rows, _ = self._matrix(Stem(self.sinks))
        if len(rows) != heads:
            raise self._refuse(self.sinks, number_of(len(rows), "row"), f"{heads}, one a head")
        return rows.astype(np.float64)

    def read_heads(self) -> HeadMatrices:
        """Values and outputs of the heads.

        Raises
        ------
        RouterError
            When shapes contradict each other, or values are not finite.
        """
        assert self.value is not None and self.output is not None
        number, width = self.num_value_heads, self.width
        whole, _ = self._matrix(self.value)
        values = whole.reshape(number, -1, whole.shape[1])[:, -width:]
        if self.latent is not None:
            values = values.astype(np.float64) @ self._seen(whole.shape[1])
        output, _ = self._matrix(self.output)
        outputs = output.reshape(len(output), self.num_heads, width).swapaxes(0, 1)
        for stem, numbers in ((self.value, values), (self.output, outputs)):
            if not float(np.abs(numbers).max(initial=0.0)) <= LARGEST:
                raise RouterError(
                    f"{self.store.label}: '{self.start}{stem.name}' holds values that are not "
                    "finite, or beyond 1e70."
                )
        return HeadMatrices(values, outputs)

    def _seen(self, rank: int) -> Float64[np.ndarray, "rank inputs"]:
        """The latent projection behind its gain, without the rotation that all heads share."""
        assert self.latent is not None
        latent, _ = self._matrix(self.latent)
        if len(latent) < rank:
            raise self._refuse(self.latent.name, number_of(len(latent), "row"), f"{rank} or more")
        triangle = np.asarray(np.linalg.qr(latent[:rank].T.astype(np.float64), mode="r")).T
        if self.latent_gain is None:
            return triangle
        return self._plain(f"{self.latent_gain}.weight", rank)[:, None] * triangle

    def _matrix(
        self, stem: Stem
    ) -> tuple[Float[np.ndarray, "rows columns"], Float64[np.ndarray, "rows"] | None]:
        """A part of a matrix, and of its bias where there is one."""
        stored, names = self._stored(stem.name), self._names(stem.name)
        stored_names = {info.name for info in stored.tensors}
        parts = {key: self.store.read(name) for key, name in names.items() if name in stored_names}
        whole, bias = stored.decode(parts), None
        if whole.ndim != 2 or not whole.size:
            raise self._refuse(stem.name, f"shape {whole.shape}", "a matrix")
        if "bias" in names:
            bias = self._plain(f"{stem.name}.bias", len(whole))
        rows = slice(*(len(whole) // stem.parts * place for place in (stem.part, stem.part + 1)))
        return whole[rows], None if bias is None else bias[rows]

    def _plain(self, name: str, size: int) -> Float64[np.ndarray, "size"]:
        info = self.store.info(self.start + name)
        check_plain(info, "a part of attention")
        if info.shape != (size,):
            raise self._refuse(name, f"shape {info.shape}", f"({size},)")
        return self.store.read(info.name).astype(np.float64)


def _channels(gate: GateSpec, width: int) -> tuple[int, ...]:
    return {"head": (1,), "channel": (width,)}.get(gate.per, (1, width))


# ------------------------------------------------------------------------------------------ finding
def recognise_attention(config: Mapping[str, Any]) -> AttentionFamily | None:
    """The family that ``model_type`` names, or that of the language model inside; None for none."""
    inner = [config.get(key) for key in ("text_config", "llm_config", "language_config")]
    for table in (config, *inner):
        kind = table.get("model_type") if isinstance(table, Mapping) else None
        if isinstance(kind, str) and (family := attention_family_of(kind)) is not None:
            return family
    return None


def attention_layers(
    store: TensorStore, family: AttentionFamily, layers: Collection[int] | None = None
) -> list[AttentionTensors]:
    """The attention layers by their names, stack by stack; reads nothing.

    Layers without the matrices of the family's attention are others: of linear attention, say.

    Raises
    ------
    RouterError
        When no layer has any.
    """
    store = with_plain_names(store)
    places = _places(store, family)
    inside: dict[str, list[str]] = {start: [] for start in places.values()}
    for name in store.names():
        match = _LAYER.match(name)
        if match is not None and match[0] in inside:
            inside[match[0]].append(name.removeprefix(match[0]))
    settings = Settings(store.config, family.config_roots)
    all_layers = [
        layer
        for (stack, number), start in sorted(places.items(), key=lambda one: one[0])
        if (layer := _opened(store, family, f"{stack}/{number}", start, inside[start], settings))
    ]
    if not all_layers:
        specs = (family.output, family.sink, family.gate)
        example = next(spec.names[0].name for spec in specs if spec is not None)
        raise RouterError(
            f"{store.label}: found no attention layer of family {family.name}, expected tensors "
            f"such as 'layers.0.{example}'.",
            "A file of routers alone has none; pass the whole checkpoint.",
        )
    if len(all_layers) > ATTENTION_LAYERS:
        raise CheckpointError(f"{store.label}: {len(all_layers)} attention layers, too many.")
    return [f for f in all_layers if layers is None or int(f.name.rpartition("/")[2]) in layers]


def _places(store: TensorStore, family: AttentionFamily) -> dict[tuple[str, int], str]:
    """How names of tensors of each layer begin, by stack and number."""
    stacks = {
        prefix + inside: stack for stack, inside in family.stacks.items() for prefix in PREFIXES
    }
    places: dict[tuple[str, int], str] = {}
    for name in store.names():
        match = _LAYER.match(name)
        if match is not None and match["before"] in stacks:
            places.setdefault((stacks[match["before"]], int(match["layer"])), match[0])
    return places


def _opened(
    store: TensorStore,
    family: AttentionFamily,
    name: str,
    start: str,
    inside: Sequence[str],
    settings: Settings,
) -> AttentionTensors | None:
    """The layer, None where it has none of the family's attention."""
    modules = {n.rpartition(".")[0] for n in inside} | set(inside)

    def first(stems: Sequence[Stem]) -> Stem | None:
        return next((stem for stem in stems if stem.name in modules), None)

    def name_of(stems: Sequence[Stem]) -> str | None:
        stem = first(stems)
        return None if stem is None else stem.name

    value = first(family.value.names) if family.value else None
    output = first(family.output.names) if family.output else None
    sinks = name_of(family.sink.names) if family.sink else None
    needed = (value, output) if family.value else (sinks,)
    if any(one is None for one in needed):
        return None
    return AttentionTensors(
        store,
        family,
        name,
        start,
        tuple(inside),
        settings,
        gate=first(family.gate.names) if family.gate else None,
        gate_bias=name_of(family.gate.bias) if family.gate else None,
        value=value,
        latent=first(family.value.latent) if family.value else None,
        latent_gain=name_of(family.value.latent_gain) if family.value else None,
        output=output,
        sinks=sinks,
    )
