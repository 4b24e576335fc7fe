"""What is known about a model family: names of its tensors and the steps of its rule, as records.

Each record is one table of a family's TOML file, each field one key; there are no other keys, so
a family cannot silently use a step that does not exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: What may stand before ``layers.`` in a tensor name. The same model is stored with and without.
PREFIXES = (
    "",
    "model.",
    "model.model.",
    "module.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "thinker.model.",
    "model.llm.",
    "llm.model.",
    "transformer.",
    "backbone.",
    "language_model.backbone.",
)

#: The name of the family that options on the command line describe.
DESCRIBED = "described"

Value = bool | int | float


@dataclass(frozen=True)
class Setting:
    """A value, or the keys of ``config.json`` that hold it (aliases: they must not disagree).

    In TOML a string or a list of strings names keys (dots for nesting); a table ``{key, default,
    plus, minus, over, zero, values}`` says more; anything else is the value. ``default`` counts
    where no key is given: that of the family's configuration class (a list where layers are
    listed). ``plus`` and ``minus`` are keys whose value is added or taken away (0 when it is not
    given); ``over`` replaces the value v by ``over / v``, ``zero`` a number 0 that stands for
    something else. ``values`` maps what the config says, true and false included, to what is meant.
    """

    keys: tuple[str, ...] = ()
    value: Value | None = None
    default: Value | tuple[int, ...] | None = None
    plus: str = ""
    minus: str = ""
    over: float = 0.0
    zero: float | None = None
    values: dict[str, Value] = field(default_factory=dict)


#: The score of a rule that takes every expert with a positive logit.
RELU = "relu"


@dataclass(frozen=True)
class Choice:
    """The name of a step, or the config key whose value selects it.

    In TOML a string is the step; a table ``{key, default, unset, values}`` maps values of the key
    to steps. ``unset`` is a value that says no more than a key that is not there.
    """

    step: str = ""
    keys: tuple[str, ...] = ()
    values: dict[str, str] = field(default_factory=dict)
    default: str = ""
    unset: str = ""

    @property
    def steps(self) -> tuple[str, ...]:
        """Every step that can come of it."""
        return (self.step,) if self.step else tuple(self.values.values())


@dataclass(frozen=True)
class TensorName:
    """A name pattern with ``{layer}``, without prefix, and how the tensor lies.

    ``transposed``: stored (hidden, experts). ``flat``: one dimension, expert after expert. ``row``:
    the row of a matrix that is meant. In TOML a string, or a table.
    """

    name: str
    layout: str = "rows"
    row: int | None = None

    @property
    def leaf(self) -> str:
        """What stands behind the last dot."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class NormSpec:
    """The norm whose output the router reads.

    Its gain is the tensor plus ``gain_offset``, times hidden_size^-1/2 with ``over_root_hidden``.
    Where the config gives ``rms_eps`` it is an RMS norm with that eps, whatever ``kind`` says.
    """

    kind: str
    weight: tuple[TensorName, ...]
    eps: Setting
    gain_offset: Setting = Setting(value=0.0)
    over_root_hidden: bool = False
    bias: tuple[TensorName, ...] = ()
    rms_eps: Setting = Setting()


@dataclass(frozen=True)
class GroupSpec:
    """The group mask; ``text`` is its part of the family's sentence.

    There is none where a key of ``when`` has another value, or ``num_groups`` is null or not given;
    behind a ``when`` that asks for one it must be given.
    """

    num_groups: Setting
    num_kept: Setting
    score: str
    fill: float
    text: str
    when: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ProjectionSpec:
    """What the rows of the router are compared with, where it is a projection of the input.

    The router's own weight has a column for each projected dimension, and each of its rows is
    divided by its length. With ``log_scale`` the logits are cosines: divided by the length of the
    projection too, and multiplied by e to the power of that tensor, but at most ``largest_scale``.
    """

    weight: tuple[TensorName, ...]
    bias: tuple[TensorName, ...] = ()
    log_scale: tuple[TensorName, ...] = ()
    largest_scale: float = math.inf


@dataclass(frozen=True)
class WeightsSpec:
    """How routing weights follow from the chosen experts (``core.router.Weights``).

    Weights of fewer than ``renormalise_from`` chosen experts are never renormalised.
    ``expert_scale``: a tensor with a factor for each expert, or one for all.
    """

    source: Choice
    renormalise: Setting = Setting(value=False)
    renormalise_from: int = 1
    epsilon: float = 0.0
    scale: Setting = Setting(value=1.0)
    floor: Setting = Setting(value=0.0)
    power: Setting = Setting(value=1.0)
    jitter: Setting = Setting(value=0.0)
    expert_scale: tuple[TensorName, ...] = ()


@dataclass(frozen=True)
class LayersSpec:
    """Which layers should have a router, to notice missing ones.

    Layer i below ``count`` has one if ``i >= first``, ``(i - start) % step == 0``, i is not in
    ``dense``, and, where the config gives them: i is in the list ``listed``, and the i-th entry of
    ``kinds`` is in ``sparse``. Without ``count`` there are as many layers as ``kinds``.
    """

    count: Setting
    first: Setting = Setting(value=0)
    step: Setting = Setting(value=1)
    start: Setting = Setting(value=-1)
    dense: Setting = Setting()
    listed: Setting = Setting()
    kinds: Setting = Setting()
    sparse: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeepsSpec:
    """Dtypes, as safetensors spells them, in which the family's own checkpoints keep a router."""

    weight: str = ""
    selection_bias: str = ""


@dataclass(frozen=True)
class ExpertsSpec:
    """What names and shapes do not say of the experts behind a router.

    ``interleaved``: gate and up are the even and the odd rows of one matrix. ``activation``: its
    name, where the config does not hold it. ``limit``: where gate and up are cut off.
    """

    interleaved: bool = False
    activation: str = ""
    limit: Setting = Setting()


@dataclass(frozen=True)
class StackSpec:
    """The routers of one stack (and slot, where a layer has several).

    The first spelling of a name that is in the checkpoint counts. A bias that is listed must be
    there, unless the config turns it off by the flag ``has_...``; with
    ``may_lack_selection_bias`` it is also off where no router of the stack has one. Tensors of
    ``beside`` belong to the router and change no choice. The last ``num_shared`` rows of the weight
    belong to experts that always run. Layers from ``mtp_from`` on are routers of the stack ``mtp``;
    so are those of modules of their own, whose names begin with one of ``mtp_layers`` where others
    begin with their part up to ``{layer}.``. A layer with one of the tensors ``token_table`` looks
    its experts up by token id, ``not_a_function`` says why no choice of the stack follows from
    router and input, and ``not_a_function_when`` says so for config flags that are true and for
    ``key=value``: all these are listed with the reason instead of being loaded. ``relu_when`` is
    such a flag or value with which every expert with a positive logit is chosen, and that logit is
    its weight; so it is with the score ``relu``. ``capacity``: tokens of one sequence that an
    expert takes.
    """

    name: str
    weight: tuple[TensorName, ...]
    top_k: Setting
    score: Choice
    weights: WeightsSpec
    num_experts: Setting = Setting()
    num_shared: Setting = Setting(value=0)
    slot: str = ""
    prefixes: tuple[str, ...] = PREFIXES
    config_roots: tuple[str, ...] = ()
    logit_bias: tuple[TensorName, ...] = ()
    has_logit_bias: Setting = Setting(value=True)
    selection_bias: tuple[TensorName, ...] = ()
    has_selection_bias: Setting = Setting(value=True)
    may_lack_selection_bias: bool = False
    beside: tuple[TensorName, ...] = ()
    multiplier: Setting = Setting(value=1.0)
    soft_cap: Setting = Setting()
    groups: GroupSpec | None = None
    norm: NormSpec | None = None
    projection: ProjectionSpec | None = None
    layers: LayersSpec | None = None
    mtp_from: Setting | None = None
    mtp_layers: tuple[str, ...] = ()
    hidden_size: Setting = Setting(keys=("hidden_size",))
    keeps: KeepsSpec = KeepsSpec()
    experts: ExpertsSpec = ExpertsSpec()
    token_table: tuple[TensorName, ...] = ()
    not_a_function: str = ""
    not_a_function_when: dict[str, str] = field(default_factory=dict)
    relu_when: str = ""
    capacity: Setting = Setting()


@dataclass(frozen=True)
class Family:
    """One family.

    ``require``: values, as they are spelled, that config keys, where present, must have.
    ``notes_when``: a sentence for ``key=value`` of the config. ``engines_read``: keys that the
    family does without and another engine does not, and what it takes where the config lacks them.
    """

    name: str
    source: str
    model_types: tuple[str, ...]
    text: str
    stacks: tuple[StackSpec, ...]
    config_roots: tuple[str, ...] = ("",)
    require: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes_when: dict[str, str] = field(default_factory=dict)
    engines_read: dict[str, str] = field(default_factory=dict)
