"""What is known about a model family: names of its tensors and the steps of its rule, as records.

Each record is one table of a family's TOML file, each field one key; there are no other keys, so
a family cannot silently use a step that does not exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

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
class Range:
    """The numbers that a setting, or an entry of a tensor, can be.

    From ``least`` to ``most`` there is a rule that can be computed. ``usual`` is what families have
    by default, widened: beyond it is no accident of one more family. ``off`` turns the thing off.
    """

    least: float
    most: float
    usual: tuple[float, float] = (-math.inf, math.inf)
    is_whole: bool = False
    off: float | None = None

    def holds(self, number: float) -> bool:
        """Whether it is legal."""
        return number == self.off or self.least <= number <= self.most

    def is_usual(self, number: float) -> bool:
        """Whether it is no surprise."""
        return number == self.off or self.usual[0] <= number <= self.usual[1]

    @property
    def metadata(self) -> dict[str, Range]:
        """That of a field for a setting that is a number of this range."""
        return {"range": self}

    @property
    def text(self) -> str:
        """``a number from 0 to 1``."""
        return f"{'an integer' if self.is_whole else 'a number'} from {self.ends(is_usual=False)}"

    def ends(self, is_usual: bool) -> str:
        """``0 to 1``: what is usual, or legal."""
        low, high = self.usual if is_usual else (self.least, self.most)
        return f"{low:g} to {high:g}" + ("" if self.off is None else f", or {self.off:g}")


COUNT = Range(0, 10**9, is_whole=True)
SOME = Range(1, 10**9, is_whole=True)
#: More layers than any model has; a range over them must not eat the memory.
LAYERS = Range(0, 10**5, is_whole=True)
OFFSET_OF_LAYERS = Range(-1, 10**5, is_whole=True)
#: Beside a mean square of about 1.
EPS = Range(0.0, 1.0, usual=(1e-12, 1e-3))
#: 1 where a tensor holds how much a gain differs from 1.
OFFSET = Range(0.0, 1.0, usual=(0.0, 1.0))
#: 0 leaves nothing, and less turns the order of the experts around.
FACTOR = Range(1e-6, 1e6, usual=(0.01, 100.0))
#: Where numbers are cut off, or bent.
CAP = Range(1e-3, 1e6, usual=(0.1, 1e3), off=0.0)
POWER = Range(0.1, 100.0, usual=(1.0, 2.0))
SHARE = Range(0.0, 1.0, usual=(0.0, 0.5))
#: Beside a sum of at most about 1.
FLOOR = Range(0.0, 1.0, usual=(0.0, 1e-3))

#: Sizes of what inputs and logits are multiplied by; zeros are found by checks of their own.
SIZE = Range(1e-8, 1e8, usual=(1e-4, 1e4), off=0.0)
BIAS = Range(0.0, 1e8, usual=(0.0, 1e4))
LOGARITHM = Range(0.0, 80.0, usual=(0.0, 10.0))


@dataclass(frozen=True)
class Setting:
    """A value, or the keys of ``config.json`` that hold it (aliases: they must not disagree).

    In TOML a string or a list of strings names keys (dots for nesting); a table ``{key, default,
    plus, minus, over, zero, values}`` says more; anything else is the value. ``default`` counts
    where no key is given: that of the family's configuration class (a list where layers are
    listed). ``plus`` and ``minus`` are keys whose value is added or taken away (0 when it is not
    given); ``over`` replaces the value v by ``over / v``, ``zero`` a number 0 that stands for
    something else. ``values`` maps what the config says, true and false included, to what is meant.
    ``range`` is that of the field which holds the setting; a setting without one is no number.
    """

    keys: tuple[str, ...] = ()
    value: Value | None = None
    default: Value | tuple[int, ...] | None = None
    plus: str = ""
    minus: str = ""
    over: float = 0.0
    zero: float | None = None
    values: dict[str, Value] = field(default_factory=dict)
    range: Range | None = field(default=None, compare=False)


class _Ranged:
    """Gives every setting of a record the range of its field."""

    def __post_init__(self) -> None:
        for item in fields(cast("Any", self)):
            setting = getattr(self, item.name)
            if isinstance(setting, Setting) and "range" in item.metadata:
                ranged = replace(setting, range=item.metadata["range"])
                object.__setattr__(self, item.name, ranged)


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
class NormSpec(_Ranged):
    """The norm whose output the router reads.

    Its gain is the tensor plus ``gain_offset``, times hidden_size^-1/2 with ``over_root_hidden``.
    Where the config gives ``rms_eps`` it is an RMS norm with that eps, whatever ``kind`` says.
    """

    kind: str
    weight: tuple[TensorName, ...]
    eps: Setting = field(metadata=EPS.metadata)
    gain_offset: Setting = field(default=Setting(value=0.0), metadata=OFFSET.metadata)
    over_root_hidden: bool = False
    bias: tuple[TensorName, ...] = ()
    rms_eps: Setting = field(default=Setting(), metadata=EPS.metadata)


@dataclass(frozen=True)
class GroupSpec(_Ranged):
    """The group mask; ``text`` is its part of the family's sentence.

    There is none where a key of ``when`` has another value, or ``num_groups`` is null or not given;
    behind a ``when`` that asks for one it must be given.
    """

    num_groups: Setting = field(metadata=COUNT.metadata)
    num_kept: Setting = field(metadata=COUNT.metadata)
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
class WeightsSpec(_Ranged):
    """How routing weights follow from the chosen experts (``core.router.Weights``).

    Weights of fewer than ``renormalise_from`` chosen experts are never renormalised.
    ``expert_scale``: a tensor with a factor for each expert, or one for all.
    """

    source: Choice
    renormalise: Setting = Setting(value=False)
    renormalise_from: int = 1
    epsilon: float = 0.0
    scale: Setting = field(default=Setting(value=1.0), metadata=FACTOR.metadata)
    floor: Setting = field(default=Setting(value=0.0), metadata=FLOOR.metadata)
    power: Setting = field(default=Setting(value=1.0), metadata=POWER.metadata)
    jitter: Setting = field(default=Setting(value=0.0), metadata=SHARE.metadata)
    expert_scale: tuple[TensorName, ...] = ()


@dataclass(frozen=True)
class LayersSpec(_Ranged):
    """Which layers should have a router, to notice missing ones.

    Layer i below ``count`` has one if ``i >= first``, ``(i - start) % step == 0``, i is not in
    ``dense``, and, where the config gives them: i is in the list ``listed``, and the i-th entry of
    ``kinds`` is in ``sparse``. Without ``count`` there are as many layers as ``kinds``.
    """

    count: Setting = field(metadata=LAYERS.metadata)
    first: Setting = field(default=Setting(value=0), metadata=LAYERS.metadata)
    step: Setting = field(default=Setting(value=1), metadata=SOME.metadata)
    start: Setting = field(default=Setting(value=-1), metadata=OFFSET_OF_LAYERS.metadata)
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
class LatentSpec(_Ranged):
    """Experts that read a projection of the router input; what they give is projected back.

    ``width`` is the key that says how wide the projection is; there is none where it is not given.
    ``norm`` stands behind ``into``, ``output_norm`` behind each expert; with
    ``scales_before_output_norm`` its gain is in front of it.
    """

    width: Setting = field(metadata=SOME.metadata)
    into: tuple[TensorName, ...]
    out_of: tuple[TensorName, ...]
    norm: NormSpec | None = None
    output_norm: NormSpec | None = None
    scales_before_output_norm: bool = False


@dataclass(frozen=True)
class ExpertsSpec(_Ranged):
    """What names and shapes do not say of the experts behind a router.

    ``interleaved``: gate and up are the even and the odd rows of one matrix. ``activation``: its
    name, where the config does not hold it; the numbers in it (``geometry.expert_block.Neurons``)
    are ``limit``, where gate and up are cut off (``limits_activation``: the activation of the gate
    is, in the gate's place), ``slope``, ``gate_cap`` and ``up_cap``. ``shared_limit`` is the limit
    of shared experts, where theirs is another one.

    What experts give is multiplied by the routing weight (with ``weighs_inputs`` their input is,
    instead) and by ``factor``, where there are shared experts by ``factor_beside_shared``, and by
    what is left of them beside the share ``dropped`` in training. The last ``copies`` experts give
    their input. ``gain`` is that of the experts' own norm of what the
    router norms for itself. ``lot``: where the routers of a layer number their experts in one row,
    how many lots come before those of this one. ``not_a_function`` says why what an expert gives
    does not follow from the router input, ``behind`` what the block does to the sum of its experts.
    """

    interleaved: bool = False
    activation: str = ""
    limit: Setting = field(default=Setting(), metadata=CAP.metadata)
    shared_limit: Setting | None = field(default=None, metadata=CAP.metadata)
    limits_activation: bool = False
    slope: Setting = field(default=Setting(value=1.702), metadata=FACTOR.metadata)
    gate_cap: Setting = field(default=Setting(), metadata=CAP.metadata)
    up_cap: Setting = field(default=Setting(), metadata=CAP.metadata)
    weighs_inputs: bool = False
    factor: Setting = field(default=Setting(value=1.0), metadata=FACTOR.metadata)
    factor_beside_shared: Setting = field(default=Setting(value=1.0), metadata=FACTOR.metadata)
    dropped: Setting = field(default=Setting(value=0.0), metadata=SHARE.metadata)
    copies: Setting = field(default=Setting(value=0), metadata=COUNT.metadata)
    gain: tuple[TensorName, ...] = ()
    latent: LatentSpec | None = None
    lot: int = 0
    not_a_function: str = ""
    behind: str = ""


@dataclass(frozen=True)
class StackSpec(_Ranged):
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
    top_k: Setting = field(metadata=SOME.metadata)
    score: Choice
    weights: WeightsSpec
    num_experts: Setting = field(default=Setting(), metadata=SOME.metadata)
    num_shared: Setting = field(default=Setting(value=0), metadata=COUNT.metadata)
    slot: str = ""
    prefixes: tuple[str, ...] = PREFIXES
    config_roots: tuple[str, ...] = ()
    logit_bias: tuple[TensorName, ...] = ()
    has_logit_bias: Setting = Setting(value=True)
    selection_bias: tuple[TensorName, ...] = ()
    has_selection_bias: Setting = Setting(value=True)
    may_lack_selection_bias: bool = False
    beside: tuple[TensorName, ...] = ()
    multiplier: Setting = field(default=Setting(value=1.0), metadata=FACTOR.metadata)
    soft_cap: Setting = field(default=Setting(), metadata=CAP.metadata)
    groups: GroupSpec | None = None
    norm: NormSpec | None = None
    projection: ProjectionSpec | None = None
    layers: LayersSpec | None = None
    mtp_from: Setting | None = field(default=None, metadata=LAYERS.metadata)
    mtp_layers: tuple[str, ...] = ()
    hidden_size: Setting = field(default=Setting(keys=("hidden_size",)), metadata=SOME.metadata)
    keeps: KeepsSpec = KeepsSpec()
    experts: ExpertsSpec = ExpertsSpec()
    token_table: tuple[TensorName, ...] = ()
    not_a_function: str = ""
    not_a_function_when: dict[str, str] = field(default_factory=dict)
    relu_when: str = ""
    capacity: Setting = field(default=Setting(), metadata=SOME.metadata)


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
