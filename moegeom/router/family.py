"""What is known about a model family: names of its tensors and the steps of its rule, as records.

Each record is one table of a family's TOML file, each field one key; there are no other keys, so
a family cannot silently use a step that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: What may stand before ``layers.`` in a tensor name. The same model is stored with and without.
PREFIXES = (
    "",
    "model.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "thinker.model.",
    "model.llm.",
    "llm.model.",
    "transformer.",
)


@dataclass(frozen=True)
class Setting:
    """A value, or the keys of ``config.json`` that hold it (aliases: they must not disagree).

    In TOML a string or a list of strings names keys (dots for nesting); anything else is the value.
    """

    keys: tuple[str, ...] = ()
    value: bool | int | float | None = None


@dataclass(frozen=True)
class NormSpec:
    """The norm whose output the router reads; its gain is ``gain_offset`` plus the tensor."""

    kind: str
    weight: tuple[str, ...]
    eps: Setting
    gain_offset: float = 0.0


@dataclass(frozen=True)
class GroupSpec:
    """The group mask; ``text`` is its part of the family's sentence."""

    num_groups: Setting
    num_kept: Setting
    score: str
    fill: float
    text: str


@dataclass(frozen=True)
class WeightsSpec:
    """How routing weights follow from the chosen experts."""

    source: str
    renormalise: Setting = Setting(value=False)
    epsilon: float = 0.0
    scale: Setting = Setting(value=1.0)


@dataclass(frozen=True)
class LayersSpec:
    """Which layers should have a router, to notice missing ones.

    Layer i below ``count`` has one if ``i >= first``, ``(i + 1) % step == 0`` and i is not in
    ``dense``.
    """

    count: Setting
    first: Setting = Setting(value=0)
    step: Setting = Setting(value=1)
    dense: Setting = Setting()


@dataclass(frozen=True)
class KeepsSpec:
    """Dtypes, as safetensors spells them, in which the family's own checkpoints keep a router."""

    weight: str = ""
    selection_bias: str = ""


@dataclass(frozen=True)
class StackSpec:
    """The routers of one stack (and slot, where a layer has several).

    Tensor names are patterns with ``{layer}``, without prefix; the first spelling that is in the
    checkpoint counts. A bias that is listed here must be there. Layers from ``mtp_from`` on are
    routers of the stack ``mtp``.
    """

    name: str
    weight: tuple[str, ...]
    num_experts: Setting
    top_k: Setting
    score: str
    weights: WeightsSpec
    slot: str = ""
    prefixes: tuple[str, ...] = PREFIXES
    logit_bias: tuple[str, ...] = ()
    selection_bias: tuple[str, ...] = ()
    groups: GroupSpec | None = None
    norm: NormSpec | None = None
    layers: LayersSpec | None = None
    mtp_from: Setting | None = None
    hidden_size: Setting = Setting(keys=("hidden_size",))
    keeps: KeepsSpec = KeepsSpec()


@dataclass(frozen=True)
class Family:
    """One family. ``require``: values that config keys, where present, must have."""

    name: str
    source: str
    model_types: tuple[str, ...]
    text: str
    stacks: tuple[StackSpec, ...]
    config_roots: tuple[str, ...] = ("",)
    require: dict[str, tuple[str, ...]] = field(default_factory=dict)
