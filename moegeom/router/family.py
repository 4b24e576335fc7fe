"""What is known about a model family: names of its tensors and the steps of its rule, as records.

Each record is one table of a family's TOML file, each field one key; there are no other keys, so
a family cannot silently use a step that does not exist.
"""

# Annotations are objects here, not texts: they are read when a family file is.
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_type_hints

from msgspec import Meta

from moegeom.core import router as core
from moegeom.core.documents import record_of_file, shipped_names, shipped_text
from moegeom.core.errors import InternalError
from moegeom.core.limits import FAMILY_CHARACTERS
from moegeom.core.registry import unknown_name
from moegeom.core.router import mantissa_bits
from moegeom.core.text import quoted

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

Texts = Annotated[tuple[str, ...], Meta(min_length=1)]


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
    def metadata(self) -> "dict[str, Range]":
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


class _Keyed:
    """What a key of a config says, or the first of several keys that is there."""

    key: str | Texts

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, also where a file has one alone."""
        return (self.key,) if isinstance(self.key, str) else self.key


@dataclass(frozen=True)
class Setting(_Keyed):
    """A value, or the keys of ``config.json`` that hold it (aliases: they must not disagree).

    In TOML a string or a list of strings names keys (dots for nesting); a table ``{key, default,
    plus, minus, over, zero, values}`` says more; anything else is the value. ``default`` counts
    where no key is given: that of the family's configuration class (a list where layers are
    listed). ``plus`` and ``minus`` are keys whose value is added or taken away (0 when it is not
    given); ``over`` replaces the value v by ``over / v``, ``zero`` a number 0 that stands for
    something else. ``values`` maps what the config says, true and false included, to what is meant.
    ``range`` is that of the field which holds the setting; a setting without one is no number. No
    file can say it: it does not compare.
    """

    key: str | Texts = ()
    value: Value | None = None
    default: Value | tuple[int, ...] | None = None
    plus: str = ""
    minus: str = ""
    over: float = 0.0
    zero: float | None = None
    values: dict[str, Value] = field(default_factory=dict)
    range: Range | None = field(default=None, compare=False)


#: The score of a rule that takes every expert with a positive logit.
RELU = "relu"


@dataclass(frozen=True)
class Choice(_Keyed):
    """The name of a step, or the config key whose value selects it.

    In TOML a string is the step; a table ``{key, default, unset, values}`` maps values of the key
    to steps. ``unset`` is a value that says no more than a key that is not there.
    """

    step: str = ""
    key: str | Texts = ()
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
    layout: Literal["rows", "transposed", "flat"] = "rows"
    row: int | None = None

    @property
    def leaf(self) -> str:
        """What stands behind the last dot."""
        return self.name.rpartition(".")[2]


if TYPE_CHECKING:
    AnySetting = Setting
    AnyChoice = Choice
    TensorNames = tuple[TensorName, ...]
else:  # as files spell them: `_Spelled` makes the records of it
    AnySetting = Setting | Value | str | Texts
    AnyChoice = Choice | str
    TensorNames = Annotated[tuple[TensorName | str, ...], Meta(min_length=1, max_length=100)]


def _setting(spelled: Any, of: Range | None) -> Setting | None:
    if spelled is None:
        return None
    if not isinstance(spelled, Setting):
        is_key = isinstance(spelled, str | tuple)
        spelled = Setting(spelled) if is_key else Setting(value=spelled)
    return replace(spelled, range=of) if of else spelled


def _choice(spelled: Choice | str, _: None) -> Choice:
    return Choice(spelled) if isinstance(spelled, str) else spelled


def _tensor_names(spelled: tuple[TensorName | str, ...], _: None) -> tuple[TensorName, ...]:
    return tuple(TensorName(one) if isinstance(one, str) else one for one in spelled)


@cache
def _spelled(record: Any) -> list[tuple[str, Callable[[Any, Any], Any], Range | None]]:
    """Fields of a record that files spell shorter, what makes them, and their range."""
    makers = {AnySetting: _setting, AnySetting | None: _setting, AnyChoice: _choice,
              TensorNames: _tensor_names}  # fmt: skip
    made = [(item, makers.get(cast("Any", item.type))) for item in fields(record)]
    return [(item.name, make, item.metadata.get("range")) for item, make in made if make]


class _Spelled:
    """Makes settings, of the range of their field, choices and names of what a file spells."""

    def __post_init__(self) -> None:
        for name, make, of in _spelled(type(self)):
            object.__setattr__(self, name, make(getattr(self, name), of))


@dataclass(frozen=True)
class NormSpec(_Spelled):
    """The norm whose output the router reads.

    Its gain is the tensor plus ``gain_offset``, times hidden_size^-1/2 with ``over_root_hidden``.
    Where the config gives ``rms_eps`` it is an RMS norm with that eps, whatever ``kind`` says.
    """

    kind: str
    weight: TensorNames
    eps: AnySetting = field(metadata=EPS.metadata)
    gain_offset: AnySetting = field(default=Setting(value=0.0), metadata=OFFSET.metadata)
    over_root_hidden: bool = False
    bias: TensorNames = ()
    rms_eps: AnySetting = field(default=Setting(), metadata=EPS.metadata)


@dataclass(frozen=True)
class GroupSpec(_Spelled):
    """The group mask; ``text`` is its part of the family's sentence.

    There is none where a key of ``when`` has another value, or ``num_groups`` is null or not given;
    behind a ``when`` that asks for one it must be given.
    """

    num_groups: AnySetting = field(metadata=COUNT.metadata)
    num_kept: AnySetting = field(metadata=COUNT.metadata)
    score: str
    fill: float
    text: str
    when: dict[str, Texts] = field(default_factory=dict)


@dataclass(frozen=True)
class ProjectionSpec(_Spelled):
    """What the rows of the router are compared with, where it is a projection of the input.

    The router's own weight has a column for each projected dimension, and each of its rows is
    divided by its length. With ``log_scale`` the logits are cosines: divided by the length of the
    projection too, and multiplied by e to the power of that tensor, but at most ``largest_scale``.
    """

    weight: TensorNames
    bias: TensorNames = ()
    log_scale: TensorNames = ()
    largest_scale: float = math.inf


@dataclass(frozen=True)
class WeightsSpec(_Spelled):
    """How routing weights follow from the chosen experts (``core.router.Weights``).

    Weights of fewer than ``renormalise_from`` chosen experts are never renormalised.
    ``expert_scale``: a tensor with a factor for each expert, or one for all.
    """

    source: AnyChoice
    renormalise: AnySetting = Setting(value=False)
    renormalise_from: int = 1
    epsilon: float = 0.0
    scale: AnySetting = field(default=Setting(value=1.0), metadata=FACTOR.metadata)
    floor: AnySetting = field(default=Setting(value=0.0), metadata=FLOOR.metadata)
    power: AnySetting = field(default=Setting(value=1.0), metadata=POWER.metadata)
    jitter: AnySetting = field(default=Setting(value=0.0), metadata=SHARE.metadata)
    expert_scale: TensorNames = ()


@dataclass(frozen=True)
class LayersSpec(_Spelled):
    """Which layers should have a router, to notice missing ones.

    Layer i below ``count`` has one if ``i >= first``, ``(i - start) % step == 0``, i is not in
    ``dense``, and, where the config gives them: i is in the list ``listed``, and the i-th entry of
    ``kinds`` is in ``sparse``. Without ``count`` there are as many layers as ``kinds``.
    """

    count: AnySetting = field(metadata=LAYERS.metadata)
    first: AnySetting = field(default=Setting(value=0), metadata=LAYERS.metadata)
    step: AnySetting = field(default=Setting(value=1), metadata=SOME.metadata)
    start: AnySetting = field(default=Setting(value=-1), metadata=OFFSET_OF_LAYERS.metadata)
    dense: AnySetting = Setting()
    listed: AnySetting = Setting()
    kinds: AnySetting = Setting()
    sparse: Texts = ()


@dataclass(frozen=True)
class KeepsSpec:
    """Dtypes, as safetensors spells them, in which the family's own checkpoints keep a router."""

    weight: str = ""
    selection_bias: str = ""


@dataclass(frozen=True)
class LatentSpec(_Spelled):
    """Experts that read a projection of the router input; what they give is projected back.

    ``width`` is the key that says how wide the projection is; there is none where it is not given.
    ``norm`` stands behind ``into``, ``output_norm`` behind each expert; with
    ``scales_before_output_norm`` its gain is in front of it.
    """

    width: AnySetting = field(metadata=SOME.metadata)
    into: TensorNames
    out_of: TensorNames
    norm: NormSpec | None = None
    output_norm: NormSpec | None = None
    scales_before_output_norm: bool = False


@dataclass(frozen=True)
class ExpertsSpec(_Spelled):
    """What names and shapes do not say of the experts behind a router.

    ``interleaved``: gate and up are the even and the odd rows of one matrix. ``activation``: its
    name, where the config does not hold it; the numbers in it (``geometry.expert_block.Neurons``)
    are ``limit``, where gate and up are cut off (``limits_activation``: the activation of the gate
    is, in the gate's place), ``slope``, ``gate_cap`` and ``up_cap``. ``shared_limit`` is the limit
    of shared experts, where theirs is another one; ``has_shared_gate``: their output is gated.
    ``may_lack_gate``: experts may have one first matrix alone; ``has_biases``: each matrix has one.

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
    limit: AnySetting = field(default=Setting(), metadata=CAP.metadata)
    shared_limit: AnySetting | None = field(default=None, metadata=CAP.metadata)
    has_shared_gate: bool = False
    may_lack_gate: bool = False
    has_biases: bool = False
    limits_activation: bool = False
    slope: AnySetting = field(default=Setting(value=1.702), metadata=FACTOR.metadata)
    gate_cap: AnySetting = field(default=Setting(), metadata=CAP.metadata)
    up_cap: AnySetting = field(default=Setting(), metadata=CAP.metadata)
    weighs_inputs: bool = False
    factor: AnySetting = field(default=Setting(value=1.0), metadata=FACTOR.metadata)
    factor_beside_shared: AnySetting = field(default=Setting(value=1.0), metadata=FACTOR.metadata)
    dropped: AnySetting = field(default=Setting(value=0.0), metadata=SHARE.metadata)
    copies: AnySetting = field(default=Setting(value=0), metadata=COUNT.metadata)
    gain: TensorNames = ()
    latent: LatentSpec | None = None
    lot: int = 0
    not_a_function: str = ""
    behind: str = ""


@dataclass(frozen=True)
class StackSpec(_Spelled):
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
    weight: TensorNames
    top_k: AnySetting = field(metadata=SOME.metadata)
    score: AnyChoice
    weights: WeightsSpec
    num_experts: AnySetting = field(default=Setting(), metadata=SOME.metadata)
    num_shared: AnySetting = field(default=Setting(value=0), metadata=COUNT.metadata)
    slot: str = ""
    prefixes: Texts = PREFIXES
    config_roots: Texts = ()
    logit_bias: TensorNames = ()
    has_logit_bias: AnySetting = Setting(value=True)
    selection_bias: TensorNames = ()
    has_selection_bias: AnySetting = Setting(value=True)
    may_lack_selection_bias: bool = False
    beside: TensorNames = ()
    multiplier: AnySetting = field(default=Setting(value=1.0), metadata=FACTOR.metadata)
    soft_cap: AnySetting = field(default=Setting(), metadata=CAP.metadata)
    groups: GroupSpec | None = None
    norm: NormSpec | None = None
    projection: ProjectionSpec | None = None
    layers: LayersSpec | None = None
    mtp_from: AnySetting | None = field(default=None, metadata=LAYERS.metadata)
    mtp_layers: Texts = ()
    hidden_size: AnySetting = field(default=Setting("hidden_size"), metadata=SOME.metadata)
    keeps: KeepsSpec = KeepsSpec()
    experts: ExpertsSpec = ExpertsSpec()
    token_table: TensorNames = ()
    not_a_function: str = ""
    not_a_function_when: dict[str, str] = field(default_factory=dict)
    relu_when: str = ""
    capacity: AnySetting = field(default=Setting(), metadata=SOME.metadata)


@dataclass(frozen=True)
class Family:
    """One family.

    ``require``: values, as they are spelled, that config keys, where present, must have.
    ``notes_when``: a sentence for ``key=value`` of the config. ``engines_read``: keys that the
    family does without and another engine does not, and what it takes where the config lacks them;
    nothing where all engines take the family's default.
    """

    name: str
    source: str
    model_types: Texts
    text: str
    stacks: Annotated[tuple[StackSpec, ...], Meta(min_length=1)]
    config_roots: Texts = ("",)
    require: dict[str, Texts] = field(default_factory=dict)
    notes_when: dict[str, str] = field(default_factory=dict)
    engines_read: dict[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------------ family files
_PACKAGE = "moegeom.router.families"


def families() -> tuple[str, ...]:
    """Names of all families, sorted."""
    return shipped_names(_PACKAGE)


@cache
def load_family(name: str) -> Family:
    """The family of that name."""
    if name not in families():
        raise unknown_name("family", name, families())
    return parse_family(name, shipped_text(_PACKAGE, name))


@cache
def family_of_class(name: str, model_type: str) -> Family | None:
    """The family of a class such as ``Qwen3MoeForCausalLM``, named for one of its model types;
    that of ``model_type`` where the class is named for it, or for the text part of it.
    """
    stem = _plain(re.sub(r"(For[A-Z][A-Za-z]*|LMHeadModel|Model)$", "", name))
    if _plain(model_type) in (stem, f"{stem}text"):
        return family_of(model_type)
    each = map(load_family, sorted(families()))
    return next((one for one in each if stem in map(_plain, one.model_types)), None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def family_of(model_type: str) -> Family | None:
    """The family whose rule a ``model_type`` of ``config.json`` follows, if one is known."""
    # The file of that name first: most types have one, and the others need not be parsed.
    for name in sorted(families(), key=lambda n: n != model_type):
        if model_type in load_family(name).model_types:
            return load_family(name)
    return None


def parse_family(name: str, text: str, **defaults: Any) -> Family:
    """The family that a TOML file describes; an unknown key or value is an error.

    ``defaults`` are what keys say that the file may leave out.
    """
    family = record_of_file(Family, name, text, FAMILY_CHARACTERS, **defaults)
    where = f"{name}.toml"
    for stack in family.stacks:
        _check_patterns(stack, where)
        _check_names(stack, where)
        _check_text(family, stack, where)
    return family


def _check_patterns(stack: StackSpec, where: str) -> None:
    norm = stack.norm.weight + stack.norm.bias if stack.norm else ()
    biases = stack.logit_bias + stack.selection_bias
    others = stack.beside + stack.token_table + stack.weights.expert_scale
    inner = stack.projection
    projection = inner.weight + inner.bias + inner.log_scale if inner else ()
    experts = stack.experts.gain
    if latent := stack.experts.latent:
        experts += latent.into + latent.out_of
        experts += tuple(n for s in (latent.norm, latent.output_norm) if s for n in s.weight)
    tensors = stack.weight + biases + norm + projection + others + experts
    names = [tensor.name for tensor in tensors]
    for name in (*names, *stack.mtp_layers):
        if name.count("{layer}.") != 1 or name.count("{") != 1:
            raise InternalError(f"{where}: pattern {quoted(name)} must hold '{{layer}}.' once.")
    if inner and not inner.largest_scale > 0.0:
        raise InternalError(
            f"{where}: largest_scale is {inner.largest_scale}, expected more than 0."
        )
    if inner and inner.log_scale and stack.selection_bias:
        raise InternalError(f"{where}: a selection bias beside logits that are cosines.")


@cache
def _choices(cls: type, name: str) -> tuple[str, ...]:
    return get_args(get_type_hints(cls)[name])


def _check_names(stack: StackSpec, where: str) -> None:
    """Every step that the stack names exists in the core records."""
    sources = _choices(core.Weights, "source")
    scores = (*sorted(core.MONOTONE_SCORES), RELU)
    named = [("score", step, scores) for step in stack.score.steps]
    named += [("weights.source", step, sources) for step in stack.weights.source.steps]
    if stack.groups:
        named.append(
            ("groups.score", stack.groups.score, (*_choices(core.GroupMask, "score"), "topn_sum"))
        )
    if stack.norm:
        named.append(("norm.kind", stack.norm.kind, _choices(core.Norm, "kind")))
    for key, dtype in vars(stack.keeps).items():
        if dtype and mantissa_bits(dtype) is None:
            raise InternalError(f"{where}: keeps.{key} {quoted(dtype)} is no float dtype.")
    for key, step, steps in named:
        if step not in steps:
            raise InternalError(
                f"{where}: {key} {quoted(step)} is no step.", f"Known: {', '.join(steps)}."
            )


def _check_text(family: Family, stack: StackSpec, where: str) -> None:
    """The sentences hold known placeholders, as they stand: a width could ask for any length."""
    texts = [(family.text, {"num_experts", "top_k", "groups", "score", "bias"})]
    texts += [(stack.groups.text, {"num_groups", "num_kept"})] if stack.groups else []
    for text, placeholders in texts:
        try:
            fields = [parts[1:] for parts in Formatter().parse(text) if parts[1] is not None]
        except ValueError as error:
            raise InternalError(f"{where}: text '{text[:60]}' is no sentence ({error}).") from None
        for name, width, conversion in fields:
            if name not in placeholders or width or conversion:
                raise InternalError(
                    f"{where}: text has an unknown placeholder ({quoted(name, 40)}).",
                    f"Known: {', '.join(sorted(placeholders))}.",
                )
