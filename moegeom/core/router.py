"""The router record: identity, provenance, and the selection rule as typed steps.

The order of the steps is fixed: input, form, logit map, score, selection bias, mask, pick, weights.
Each step names a pure function in ``geometry/selection.py``; a new family that needs a new function
adds it there and names it here. The record holds arrays and no code.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from moegeom.core.errors import UsageError
from moegeom.core.text import quoted

#: Scores that are one strictly increasing function of the logit (per token, for softmax): they
#: never change which logits are the k largest. docs/theory.md 0.
MONOTONE_SCORES = frozenset({"identity", "softmax", "sigmoid", "sqrt_softplus"})


#: In place of a score: of routers that only recorded choices tell of (``Router.listed``).
RECORDED = "recorded"


@dataclass(frozen=True)
class Norm:
    """The normalisation whose output is the router input.

    ``y = unit(x) * gain + bias`` with the gain ``gain_scale * (gain_offset + tensor)``; a bias only
    behind a layer norm that has one.
    """

    kind: Literal["rms", "layer"]
    eps: float
    tensor: str
    gain_offset: float = 0.0
    gain_scale: float = 1.0
    bias_tensor: str = ""


@dataclass(frozen=True)
class GroupMask:
    """Keep ``num_kept`` of ``num_groups`` equal groups of experts; the others get ``fill``."""

    num_groups: int
    num_kept: int
    score: Literal["max", "top2_sum"]
    fill: float


@dataclass(frozen=True)
class LogitMap:
    """What happens to every logit before its score: ``z -> cap * tanh(multiplier * z / cap)``.

    ``multiplier`` is positive and ``soft_cap`` inf when there is none, so the map is increasing.
    """

    multiplier: float = 1.0
    soft_cap: float = np.inf


@dataclass(frozen=True, eq=False)
class Projection:
    """A projection ``P y + b`` of the router input, which the rows of the router are compared with.

    ``weight`` is P (projected, hidden). With ``scale`` the logits are cosines times ``scale``: they
    are divided by the length of the projection, at least 1e-12. That is one positive factor for all
    experts of a token; it changes no choice and moves no boundary. None: nothing is divided.
    """

    weight: NDArray[np.floating]
    bias: NDArray[np.floating] | None = None
    scale: float | None = None


@dataclass(frozen=True)
class Weights:
    """How routing weights follow from the chosen experts.

    ``source`` names a function of ``geometry/selection.py``. With ``renormalise`` they are
    divided by the larger of ``floor`` and ``(sum w^power)^(1/power) + epsilon``, the sum including
    the shared experts that the router also scores (``Router.shared_rows``). Then they are
    multiplied by ``scale``, and by ``Router.expert_scale`` where there is one.
    """

    source: Literal[
        "scores", "softmax_of_selected_logits", "sigmoid_of_selected_logits", "sparsemixer"
    ]
    renormalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    floor: float = 0.0
    power: float = 1.0
    jitter: float = 0.0


@dataclass(frozen=True)
class Rule:
    """The selection rule without its numbers, so that two layers can share one.

    ``pick`` is how many are chosen: the ``top_k`` best; every expert whose score is above 0
    (``threshold``), where ``top_k`` is what training aims at; or as a what-if takes them
    (``varying``). ``capacity`` is how many tokens of one sequence an expert takes, the first ones;
    it changes what runs and not what is chosen. None where an expert takes all, or the limit counts
    a batch.
    """

    top_k: int
    score: str
    weights: Weights
    has_selection_bias: bool = False
    has_logit_bias: bool = False
    groups: GroupMask | None = None
    logit_map: LogitMap | None = None
    capacity: int | None = None
    pick: Literal["top_k", "threshold", "varying"] = "top_k"

    @property
    def num_chosen(self) -> int | None:
        """Experts of every token; None where tokens choose different numbers of them."""
        return self.top_k if self.pick == "top_k" else None

    @property
    def is_affine(self) -> bool:
        """True when the chosen set is the top-k of ``W y + b``, so that cells are those of top-k.

        A bias added to identity scores is a logit bias in disguise; added to any other score, or
        behind a logit map, it bends the boundaries (docs/theory.md E1), and a group mask makes them
        non-convex (E2).
        """
        if self.pick == "threshold":
            return False
        is_plain = self.score == "identity" and self.logit_map is None
        straight_bias = not self.has_selection_bias or is_plain
        return self.groups is None and straight_bias and self.score in MONOTONE_SCORES

    @property
    def is_linear(self) -> bool:
        """True when boundaries are hyperplanes: of an affine rule, and of one with a threshold."""
        return self.is_affine or (self.pick == "threshold" and self.logit_map is None)

    @property
    def is_weight_one(self) -> bool:
        """Whether one expert is chosen and its weight divided by itself."""
        is_divided = self.weights.renormalise or self.weights.source.startswith("softmax_of")
        return self.pick == "top_k" and self.top_k == 1 and is_divided

    @property
    def selection_score_unit(self) -> str:
        """What a margin is measured in: ``logit`` for a linear rule, else the biased score."""
        if self.is_linear:
            return "logit"
        return f"{self.score} score" + (" + bias" if self.has_selection_bias else "")


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from.

    Dtypes are spelled as in safetensors; ``kept_`` dtypes are those in which the family keeps the
    tensor. Empty where there is no such tensor, or nothing is known.
    """

    family: str
    tensors: tuple[str, ...]
    file: str
    stored_dtype: str
    bias_tensor: str = ""
    bias_dtype: str = ""
    kept_dtype: str = ""
    kept_bias_dtype: str = ""


#: The part of a router that has a number for each expert and is no bias.
EXPERT_SCALE = "scale of the experts"


class StoredRows:
    """Rows in their stored dtype, whose floats are made when a router's ``weight`` is looked at.

    The floats live as long as somebody holds them, those of the last few routers a little longer:
    a command that walks through all layers never has all of them. While they live everybody has
    the same ones. ``floats_of`` takes the numbers as ``stored`` to floats of this ``shape``;
    ``is_finite`` says whether all of them are.
    """

    #: Two routers that are compared, on each of two cores.
    _latest: ClassVar[deque[NDArray[np.floating]]] = deque(maxlen=4)

    def __init__(
        self,
        stored: NDArray[Any],
        shape: tuple[int, int],
        is_finite: bool,
        floats_of: Callable[[NDArray[Any]], NDArray[np.floating]],
    ) -> None:
        self.stored: NDArray[Any] = stored
        self.shape: tuple[int, int] = shape
        self.is_finite: bool = is_finite
        self._floats_of, self._lock = floats_of, threading.Lock()
        self._living: weakref.ref[NDArray[np.floating]] | None = None

    def floats(self) -> NDArray[np.floating]:
        """All rows, in any thread."""
        with self._lock:
            floats = None if self._living is None else self._living()
            if floats is None:
                floats = self._floats_of(self.stored)
                self._living = weakref.ref(floats)
                self._latest.append(floats)
            return floats

    def __reduce__(self) -> tuple[Any, ...]:
        return np.asarray, (self.floats(),)  # a lock goes nowhere


class _Weight:
    """The attribute ``weight`` of a router, be it an array or ``StoredRows``."""

    def __get__(self, router: Router | None, of: type[Router]) -> NDArray[np.floating]:
        if router is None:
            raise AttributeError("weight")  # so that the record has no default
        rows = vars(router)["weight"]
        return rows.floats() if isinstance(rows, StoredRows) else rows

    def __set__(self, router: Router, rows: NDArray[np.floating] | StoredRows) -> None:
        vars(router)["weight"] = rows


@dataclass(frozen=True, eq=False)
class Router:
    """One router, as every later stage sees it.

    ``weight`` is (experts, hidden), one row per expert; float64 where it is stored so, else
    float32: hold it while you use it (``StoredRows``). ``gain`` is the effective gain of the norm
    in front (offset and scale applied), so that ``weight * gain`` is the effective router;
    ``norm_bias`` is that of a layer norm.
    ``shared_rows`` are rows of experts that always run and never compete: they only count in the
    sum that weights are divided by. ``expert_scale`` multiplies the weight of each expert, and the
    sigmoid of the product of ``shared_gate`` and the input what shared experts give.
    Behind a ``projection`` the rows and the logit bias are composed with it in float64, so that
    ``W y + b`` are the logits before any division by the length of the projected input.
    ``listed`` says why the choice does not follow from router and input, where it does not: then
    the rows have no columns, the rule is no more than the number of chosen experts, and only
    recorded choices tell anything.
    """

    name: str
    stack: str
    layer: int
    weight: NDArray[np.floating]
    rule: Rule
    provenance: Provenance
    logit_bias: NDArray[np.floating] | None = None
    selection_bias: NDArray[np.floating] | None = None
    gain: NDArray[np.floating] | None = None
    norm: Norm | None = None
    slot: str = ""
    norm_bias: NDArray[np.floating] | None = None
    shared_rows: NDArray[np.floating] | None = None
    expert_scale: NDArray[np.floating] | None = None
    shared_gate: NDArray[np.floating] | None = None
    projection: Projection | None = None
    listed: str = ""

    if not TYPE_CHECKING:
        weight = _Weight()

    @property
    def num_experts(self) -> int:
        return vars(self)["weight"].shape[0]

    @property
    def hidden_size(self) -> int:
        return vars(self)["weight"].shape[1]

    @property
    def stored_numbers(self) -> NDArray[Any]:
        """The numbers of ``weight`` as they lie in memory, whatever their dtype and order."""
        rows = vars(self)["weight"]
        return rows.stored if isinstance(rows, StoredRows) else rows

    @property
    def non_finite_rows(self) -> NDArray[np.intp]:
        """Which rows hold NaN or infinity."""
        rows = vars(self)["weight"]
        if isinstance(rows, StoredRows) and rows.is_finite:
            return np.empty(0, np.intp)
        return np.flatnonzero(~np.isfinite(self.weight).all(axis=1))

    @property
    def num_slots(self) -> int:
        """Places of a token for the experts that it chooses."""
        return self.rule.num_chosen or self.num_experts

    @property
    def has_cosine_logits(self) -> bool:
        """True when logits are ``W y + b`` divided by the length of the projected input."""
        return self.projection is not None and self.projection.scale is not None

    @property
    def other_parts(self) -> Mapping[str, NDArray[np.floating]]:
        """What is neither rows, gain nor bias, by its name; without what is not there."""
        parts = {
            EXPERT_SCALE: self.expert_scale,
            "gate of the shared experts": self.shared_gate,
            "rows of the shared experts": self.shared_rows,
            "bias of the norm in front": self.norm_bias,
        }
        if self.projection is not None and self.projection.scale is not None:
            # else the rows are composed with it, and it is in them
            parts["projection of the input"] = self.projection.weight
            parts["scale of the cosines"] = np.array([self.projection.scale])
        return {name: values for name, values in parts.items() if values is not None}

    @property
    def affine_bias(self) -> NDArray[np.floating] | None:
        """b of ``W y + b`` when the rule is affine: the logit bias, plus a bias on raw logits."""
        if not self.rule.has_selection_bias or self.selection_bias is None:
            return self.logit_bias
        if self.logit_bias is None:
            return self.selection_bias
        return self.logit_bias + self.selection_bias


@dataclass(frozen=True)
class Skipped:
    """A tensor that looks like a router and was not loaded, with the reason."""

    tensor: str
    reason: str


@dataclass(frozen=True)
class TableName:
    """A layer whose experts are looked up by token id: the table, and the weight that mixes."""

    router: str
    tensor: str
    weight: str


@dataclass(frozen=True)
class RouterSet:
    """All routers of one checkpoint in natural order, and everything worth saying about them.

    ``revision`` names the commit or the ETags of a remote checkpoint, ``tables`` are those that
    stand in the place of routers; ``initializer_range`` is that of the config, ``claims`` what else
    it says or leaves open, as ``run.json`` has it.
    """

    routers: tuple[Router, ...]
    checkpoint: str
    family: str
    family_text: str
    fingerprint: str
    skipped: tuple[Skipped, ...] = ()
    num_expected: int | None = None
    bytes_read: int = 0
    bytes_total: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    layer_notes: tuple[str, ...] = ()
    revision: str = ""
    tables: tuple[TableName, ...] = ()
    initializer_range: float | None = None
    claims: Mapping[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------- precision
_EXPLICIT_BITS = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7, "F8_E4M3": 3, "F8_E5M2": 2}


def mantissa_bits(dtype: str) -> int | None:
    """Explicit mantissa bits of a dtype spelled as in safetensors; None for what is no float."""
    return _EXPLICIT_BITS.get(dtype.upper())


# ---------------------------------------------------------------------------------- tables by token
#: Whole numbers up to here are numbers of bfloat16; of larger ones only the even ones are.
EXACT_IN_BFLOAT16 = 256

#: Ids beyond that are enough to tell: of healthy ones about every second is odd.
_ENOUGH = 64


@dataclass(frozen=True)
class TokenTable:
    """What a table of (tokens, experts a token) holds; ``reason`` says why it was not read.

    ``num_outside`` entries are no expert of the layer, ``num_repeated`` rows name an expert twice,
    ``num_used`` experts are named at all. ``num_large`` entries are above 256, ``num_large_odd`` of
    them odd. ``num_ids`` is how many token ids the config has, ``weight_state`` what is wrong with
    the rows that weigh the experts of the table.
    """

    router: str
    tensor: str
    dtype: str
    num_tokens: int = 0
    top_k: int = 0
    num_experts: int = 0
    largest: float = 0.0
    num_outside: int = 0
    num_repeated: int = 0
    num_used: int = 0
    num_large: int = 0
    num_large_odd: int = 0
    reason: str = ""
    num_ids: int = 0
    weight_state: str = ""
    digest: str = ""

    @property
    def is_rounded(self) -> bool:
        """Whether its ids went through bfloat16: many above 256, and not one of them is odd."""
        return self.num_large >= _ENOUGH and self.num_large_odd == 0


# ---------------------------------------------------------------------------------- names of layers
_NAME = re.compile(r"[^/]+/[0-9]{1,9}(/[^/]+)*")


class RouterName(str):
    """``text/31``, and ``text/31/second`` where a layer has several routers."""

    __slots__ = ()

    @classmethod
    def parsed(cls, value: object) -> RouterName:
        """The name in a file; ValueError where it is none."""
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise ValueError(f"{quoted(value, 40)} is no router's name")
        return cls(value)


_PART = re.compile(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?")


def parse_layers(text: str) -> frozenset[int]:
    """The layers that a list of numbers and ranges (ends included) names."""
    chosen: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise UsageError(
                f"Layers {text[:60]!r}: {part.strip()[:60]!r} is neither a layer nor a range.",
                "Write numbers and ranges, such as 0,3-7.",
            )
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise UsageError(
                f"Layers {text[:60]!r}: the range {part.strip()!r} runs backwards.",
                f"Write {last}-{first}.",
            )
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def format_layers(layers: frozenset[int] | set[int]) -> str:
    """The shortest text that ``parse_layers`` reads as these layers; empty for none."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
