"""What can be done to a router without looking at another: one list for all who compare routers.

``moegeom diff``, ``signoff``, ``track`` and baselines hold each edited router against the rows,
biases and scales of B, ``moegeom explain`` against its choices. What is fitted to numbers (a
factor, a permutation, an update of low rank) stands with whoever fits it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np

from moegeom.core.router import LogitMap, Router, Rule, Weights
from moegeom.core.shapes import Float, Int64

#: What an edit changes.
Subject = Literal[
    "gain", "columns", "layout", "rows", "selection bias", "logit bias", "rule", "weights"
]

#: The biases of a router: their fields by what they are called.
BIASES: Mapping[Subject, str] = MappingProxyType(
    {"selection bias": "selection_bias", "logit bias": "logit_bias"}
)


@dataclass(frozen=True, eq=False)
class RouterInModel:
    """Router ``number`` of the ``routers`` of a checkpoint.

    ``other`` is in its place in another one, with rows for the inputs of this one.
    """

    router: Router
    number: int = 0
    routers: Sequence[Router] = ()
    other: Router | None = None

    @property
    def bits(self) -> float:
        """Bits that name one of the routers."""
        return math.log2(max(len(self.routers), 2))

    def elsewhere(self) -> Iterator[tuple[int, Router]]:
        """Routers of the same shape and how many further on they stand, this one left out."""
        for number, router in enumerate(self.routers):
            if number != self.number and router.weight.shape == self.router.weight.shape:
                yield number - self.number, router


@dataclass(frozen=True, eq=False)
class EditedRouter:
    """A router after one edit.

    ``name`` is the same at every router, ``text`` is read by people, ``cause`` is the word of a
    verdict. ``bits`` say which parameters the edit has.
    """

    name: str
    text: str
    subject: Subject
    cause: str
    router: Router
    bits: float = 0.0

    def on_inputs_of(self, own: Router) -> Router | None:
        """The edited router for inputs behind the gain of ``own``; None where that has a 0."""
        gain, other = own.gain, self.router.gain
        if gain is None or other is None or other is gain:
            return self.router
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            factor = other / gain.astype(np.float64)
            rows = (self.router.weight.astype(np.float64) * factor).astype(own.weight.dtype)
        if not np.isfinite(factor).all():
            return None
        return dataclasses.replace(self.router, weight=rows, gain=gain)


def edits_of(
    model: RouterInModel, subjects: Collection[Subject] | None = None
) -> Iterator[EditedRouter]:
    """Every edit of the router that changes one of these subjects, or any; simplest first."""
    for subject, edits in _EDITS.items():
        if subjects is None or subject in subjects:
            yield from edits(model)


# ------------------------------------------------------------------------------------------ vectors
@dataclass(frozen=True)
class VectorEdit:
    """What can be done to a vector of numbers: to a bias, a gain, the scales of the experts."""

    name: str
    text: str
    make: Callable[[Float[np.ndarray, "size"]], Float[np.ndarray, "size"]]
    bits: float


def _read_as_halves(
    values: Float[np.ndarray, "size"], dtype: type[np.generic]
) -> Float[np.ndarray, "size"]:
    """The first bytes of the float32 numbers read as 16 bits each; 0 where not finite."""
    raw = np.ascontiguousarray(values, np.float32)
    return _finite(raw.view(dtype)[: len(values)], values)


def _read_as_float32(values: Float[np.ndarray, "size"]) -> Float[np.ndarray, "size"]:
    """Pairs of bfloat16 numbers read as float32, padded with zeros; 0 where not finite."""
    halves = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return _finite(np.concatenate([halves, np.zeros_like(halves)]).view(np.float32), values)


def _finite(read: np.ndarray, values: Float[np.ndarray, "size"]) -> Float[np.ndarray, "size"]:
    with np.errstate(invalid="ignore"):  # casts of signalling numbers
        numbers = read.astype(values.dtype)
    return np.where(np.isfinite(numbers), numbers, values.dtype.type(0.0))


def _vector_edits() -> Iterator[VectorEdit]:
    yield VectorEdit("negated", "negated", np.negative, 1.0)
    for name, word, dtype in (("", "bf16", ml_dtypes.bfloat16), ("_half", "fp16", np.float16)):
        read = functools.partial(_read_as_halves, dtype=dtype)
        yield VectorEdit(f"misread{name}", f"its float32 bytes read as {word}", read, 2.0)
    yield VectorEdit("misread_wide", "its bf16 bytes read as float32", _read_as_float32, 2.0)
    yield VectorEdit("reversed", "in reverse order", np.flip, 2.0)
    for by in (-2, -1, 1, 2):
        moved = functools.partial(np.roll, shift=by)
        yield VectorEdit(f"rolled{by:+d}", f"moved along by {by:+d}", moved, 2.0)
    for parts, word in ((4, "a quarter"), (2, "a half")):
        yield VectorEdit(
            f"rolled_{parts}",
            f"moved along by {word}",
            lambda values, parts=parts: np.roll(values, len(values) // parts),
            2.0,
        )


#: Edits of a vector, by name; leaving it out is another thing for a bias and for a factor.
VECTOR_EDITS: Mapping[str, VectorEdit] = MappingProxyType(
    {edit.name: edit for edit in _vector_edits()}
)


# --------------------------------------------------------------------------------------------- rows
def _with_rows_of(other: Router, router: Router) -> Router:
    """Rows and biases of the one, behind the gain of the other."""
    parts = {name: getattr(other, name) for name in ("weight", "logit_bias", "selection_bias")}
    return dataclasses.replace(router, **parts)


def _rows(model: RouterInModel) -> Iterator[EditedRouter]:
    router, other = model.router, model.other
    has_bias = router.selection_bias is not None or router.logit_bias is not None
    for apart, there in model.elsewhere():
        text = f"of layer {there.layer} for {router.layer}"
        yield EditedRouter(
            f"router_of_layer{apart:+d}",
            f"router {text}",
            "rows",
            "rows of another layer",
            _with_rows_of(there, router),
            model.bits,
        )
        gain, own_gain = there.gain, router.gain
        if gain is not None and own_gain is not None and own_gain.all():
            rows = there.weight.astype(np.float64) * (gain / own_gain.astype(np.float64))
            whole = _with_rows_of(there, router)
            yield EditedRouter(
                f"router_of_layer{apart:+d}_with_gain",
                f"router {text}, with its gain",
                "rows",
                "rows of another layer",
                dataclasses.replace(whole, weight=rows.astype(router.weight.dtype)),
                model.bits + 1.0,
            )
        if has_bias:
            yield EditedRouter(
                f"rows_of_layer{apart:+d}",
                f"rows {text}, with biases of its own",
                "rows",
                "rows of another layer",
                dataclasses.replace(router, weight=there.weight),
                model.bits,
            )
    if other is None or other.weight.shape != router.weight.shape:
        return
    of_other = "of the other checkpoint"
    if router.selection_bias is not None and not np.array_equal(router.weight, other.weight):
        rows = dataclasses.replace(router, weight=other.weight)
        yield EditedRouter("rows_of_other", f"rows {of_other}", "rows", "router stale", rows, 12.0)
    if router.gain is not None and other.gain is not None and other.gain.all():
        # as they are stored
        raw = other.weight.astype(np.float64) * (router.gain / other.gain.astype(np.float64))
        if not np.array_equal(router.gain, other.gain):
            text = f"rows {of_other} behind the gain of this one"
            stored = dataclasses.replace(router, weight=raw.astype(router.weight.dtype))
            name = "rows_behind_own_gain_of_other"
            yield EditedRouter(name, text, "rows", "router stale", stored, 14.0)
    whole = _with_rows_of(other, router)
    yield EditedRouter("router_of_other", f"router {of_other}", "rows", "router stale", whole, 24.0)


# -------------------------------------------------------------------------------- gains and columns
#: What may be done to a gain.
_GAINS: Mapping[str, tuple[str, Callable[[np.ndarray], np.ndarray], float]] = MappingProxyType(
    {
        "missing": ("left out", np.ones_like, 0.0),
        "twice": ("applied twice", np.square, 0.0),
        "and_root": ("applied, and its root", lambda gain: np.abs(gain) ** 1.5, 1.0),
        "and_one": ("taken as 1 + g", lambda gain: gain + gain.dtype.type(1.0), 1.0),
        "less_one": ("taken as g - 1", lambda gain: gain - gain.dtype.type(1.0), 1.0),
    }
)


#: Layers up and down whose gain may stand beside one.
_NEAR = 3


def _gains(model: RouterInModel) -> Iterator[EditedRouter]:
    router, gain = model.router, model.router.gain
    if gain is None:
        return
    own = gain.astype(np.float64)
    others = [(name, text, make(own), bits) for name, (text, make, bits) in _GAINS.items()]
    others += [
        (edit.name, edit.text, edit.make(own), edit.bits)
        for edit in VECTOR_EDITS.values()
        if edit.name != "negated"
    ]
    if model.other is not None and model.other.gain is not None:
        others.append(("of_other", "of the other checkpoint", model.other.gain, 0.0))
    for apart, there in model.elsewhere():
        if there.gain is not None and there.gain.shape == own.shape:
            text = f"of layer {there.layer} for {router.layer}"
            others.append((f"of_layer{apart:+d}", text, there.gain, model.bits))
            if abs(apart) > _NEAR or not there.gain.all():
                continue
            for power, word in ((1.0, "and"), (-1.0, "over"), (0.5, "and the root of")):
                text = f"{word} that of layer {there.layer}"
                both = own * np.abs(there.gain.astype(np.float64)) ** power
                others.append((f"with_layer{apart:+d}_{power:g}", text, both, model.bits + 2.0))
    for name, text, other, bits in others:
        if not np.array_equal(other, own):
            edited = dataclasses.replace(router, gain=other.astype(np.float64))
            yield EditedRouter(
                f"gain_{name}", f"norm gain {text}", "gain", "gain not folded", edited, bits
            )


#: The smallest blocks of a rotation.
_LEAST_TURNED = 4


def _orders(columns: int) -> Iterator[tuple[str, str, Int64[np.ndarray, "columns"]]]:
    """Orders that columns are put in by mistakes of layout."""
    own = np.arange(columns, dtype=np.int64)
    yield "reversed", "in reverse order", own[::-1]
    for by in (-1, 1):
        yield f"rolled{by:+d}", f"moved along by {by:+d}", np.roll(own, by)
    for parts in (2, 4, 8):
        if columns % parts or columns <= parts:
            continue
        blocks = own.reshape(parts, -1)
        yield (
            f"blocks_{parts}_reversed",
            f"of {parts} blocks in reverse order",
            blocks[::-1].ravel(),
        )
        yield f"interleaved_{parts}", f"of {parts} blocks interleaved", blocks.T.ravel()
        apart = own.reshape(-1, parts).T.ravel()
        if parts * parts != columns:
            yield f"apart_{parts}", f"taken apart into {parts} blocks", apart
    for size in dict.fromkeys((2, 4, 8, 16, 32, 64, 128, columns // 2)):
        if size < 2 or columns % size or columns <= size or size % 2:
            continue
        blocks, half = own.reshape(-1, size), size // 2
        halves = blocks.reshape(-1, 2, half)
        ways = {
            "reversed": blocks[:, ::-1],
            "halves exchanged": halves[:, ::-1],
            "halves interleaved": halves.transpose(0, 2, 1),
            "taken apart by two": blocks.reshape(-1, half, 2).transpose(0, 2, 1),
            "moved along by one": np.roll(blocks, 1, axis=1),
        }
        orders = {words: order.ravel() for words, order in ways.items()}
        unlike = {order.tobytes(): words for words, order in reversed(orders.items())}
        for words in unlike.values():
            yield f"in_{size}_{words}", f"{words} in each block of {size}", orders[words]
    for parts in (2, 4, 8):
        size = columns // parts
        for place in range(1, parts if columns % parts == 0 else 1):
            order = own.copy()
            order[place * size : (place + 1) * size] -= size
            first, last = place * size, (place + 1) * size - 1
            yield f"again_{first}_{last}", f"{first}-{last} a copy of those before", order


def _layouts(model: RouterInModel) -> Iterator[EditedRouter]:
    router = model.router
    experts, hidden = router.weight.shape
    rows = np.ascontiguousarray(router.weight)
    ways = {"transposed": (rows.reshape(hidden, experts).T, "rows read as columns")}
    if experts != hidden:
        ways["transposed_back"] = rows.T.reshape(experts, hidden), "columns read as rows"
    for name, (turned, words) in ways.items():
        text = words + " (shapes exchanged)" * (experts != hidden)
        edited = dataclasses.replace(router, weight=np.ascontiguousarray(turned))
        yield EditedRouter(name, text, "layout", "rows damaged", edited)


def _columns(model: RouterInModel) -> Iterator[EditedRouter]:
    router = model.router
    for name, text, order in _orders(router.hidden_size):
        rows = np.ascontiguousarray(router.weight[:, order])
        edited = dataclasses.replace(router, weight=rows)
        yield EditedRouter(
            f"columns_{name}", f"columns {text}", "columns", "columns damaged", edited, 4.0
        )
    for size, rows in _turned(router.weight):
        text = f"columns turned by a Hadamard matrix of {size}, inputs not"
        edited = dataclasses.replace(router, weight=rows)
        name = f"columns_hadamard_{size}"
        yield EditedRouter(name, text, "columns", "columns damaged", edited, 4.0)


def _turned(
    rows: Float[np.ndarray, "experts hidden"],
) -> Iterator[tuple[int, Float[np.ndarray, "experts hidden"]]]:
    """Rows times blocks of Sylvester's orthonormal matrix, of every power of two from 4."""
    turned, size = rows, 1
    while rows.shape[1] % (2 * size) == 0:
        pair = turned.reshape(len(rows), -1, 2, size)
        both = np.stack([pair[:, :, 0] + pair[:, :, 1], pair[:, :, 0] - pair[:, :, 1]], axis=2)
        turned, size = (both * rows.dtype.type(0.5**0.5)).reshape(rows.shape), 2 * size
        if size >= _LEAST_TURNED:
            yield size, turned


# ------------------------------------------------------------------------------------------- biases
def _biases(kind: Subject) -> Callable[[RouterInModel], Iterator[EditedRouter]]:
    field = BIASES[kind]

    def edits(model: RouterInModel) -> Iterator[EditedRouter]:
        router, own = model.router, getattr(model.router, field)
        if own is None or not own.any():
            return
        others = [("missing", " left out", "bias missing", np.zeros_like(own), 0.0)]
        for edit in VECTOR_EDITS.values():
            comma = ", " if edit.text.startswith("its") else " "
            made = "subtracted" if edit.name == "negated" else edit.text
            others.append((edit.name, f"{comma}{made}", "bias differs", edit.make(own), edit.bits))
        for apart, there in model.elsewhere():
            text, bias = f" of {beside(apart)}", getattr(there, field)
            others.append((f"of_layer{apart:+d}", text, "bias stale", bias, model.bits))
        bias = getattr(model.other, field, None)
        others.append(("of_other", " of the other checkpoint", "bias stale", bias, 0.0))
        for name, text, cause, bias, bits in others:
            if bias is not None and bias.shape == own.shape and not np.array_equal(bias, own):
                edited = dataclasses.replace(router, **{field: bias})
                yield EditedRouter(f"bias_{name}", f"{kind}{text}", kind, cause, edited, bits)

    return edits


def beside(apart: int) -> str:
    """The layer so many routers further on, or before."""
    return f"the layer {abs(apart)} {'further on' if apart > 0 else 'before'}"


# ----------------------------------------------------------------------------------------- the rule
#: Soft caps c of logits, c tanh(x / c), that models have.
CAPS = (2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0)

#: Scores that models have.
_SCORES = ("softmax", "sigmoid", "sqrt_softplus", "identity")

#: Scores in words.
_WORDS = {"identity": "raw logits", "sqrt_softplus": "sqrt(softplus)"}


def _rules(model: RouterInModel) -> Iterator[EditedRouter]:
    router = model.router
    for name, text, changes in _other_rules(router.rule):
        other = dataclasses.replace(router.rule, **changes)
        groups = other.groups
        if groups is not None:
            size, left = divmod(router.num_experts, groups.num_groups)
            if left or groups.num_kept * size < other.top_k:
                continue
        edited = dataclasses.replace(router, rule=other)
        yield EditedRouter(name, text, "rule", "rule differs", edited, 2.0)


def _other_rules(rule: Rule) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, words, and the fields that another rule has."""
    groups = rule.groups
    if groups is not None:
        yield "groups_ignored", "groups of experts ignored", {"groups": None}
        of_groups: list[tuple[str, str, dict[str, Any]]] = [
            (
                "other_fill",
                "dropped groups filled otherwise",
                {"fill": 0.0 if np.isneginf(groups.fill) else -np.inf},
            ),
            (
                "other_group_score",
                "groups scored otherwise",
                {"score": "max" if groups.score == "top2_sum" else "top2_sum"},
            ),
        ]
        for number in (groups.num_groups // 2, groups.num_groups, groups.num_groups * 2):
            for num_kept in range(1, number):
                if (number, num_kept) != (groups.num_groups, groups.num_kept):
                    changes = {"num_groups": number, "num_kept": num_kept}
                    text = f"{num_kept} of {number} groups kept"
                    of_groups.append((f"{num_kept}_of_{number}_groups", text, changes))
        for name, text, changes in of_groups:
            yield name, text, {"groups": dataclasses.replace(groups, **changes)}
    # of an affine rule the score changes weights alone
    for score in () if rule.is_affine else _SCORES:
        if score != rule.score:
            yield f"score_{score}", _in_place(score, rule), {"score": score}
    if rule.logit_map is None and not rule.is_affine:
        for cap in CAPS:
            capped = {"logit_map": LogitMap(soft_cap=cap)}
            yield f"cap_{cap:g}", f"logits capped softly at {cap:g}", capped
    if rule.logit_map is not None:
        yield "no_logit_map", "logits not capped or scaled", {"logit_map": None}


def _in_place(score: str, rule: Rule) -> str:
    one, own = (_WORDS.get(name, name) for name in (score, rule.score))
    return f"{one} in place of {own}"


def _weights(model: RouterInModel) -> Iterator[EditedRouter]:
    """Other weights of the same choice: another score, another sum, another factor, a cap."""
    router, rule = model.router, model.router.rule
    own = rule.weights
    flipped = "not renormalised" if own.renormalise else "renormalised"
    sums = {"": {}, flipped: {"renormalise": not own.renormalise}}
    if own.scale != 1.0:
        sums[f"without the scaling factor {own.scale:g}"] = {"scale": 1.0}
    ways: dict[str, tuple[Weights, dict[str, Any]]] = {"": (own, {})}
    source = "scores" if own.source == "softmax_of_selected_logits" else own.source
    for score in _SCORES if source == "scores" else ():
        if score != rule.score or own.source != "scores":
            text = f"{_WORDS.get(score, score)} of all logits" * (own.source != "scores")
            plain = dataclasses.replace(own, source="scores")
            ways[text or _in_place(score, rule)] = plain, {"score": score}
    if rule.score == "softmax" and own.source == "scores":
        chosen = dataclasses.replace(own, source="softmax_of_selected_logits")
        ways["softmax of the chosen logits"] = chosen, {}
    if rule.logit_map is None:
        for cap in CAPS:
            ways[f"of logits capped at {cap:g}"] = own, {"logit_map": LogitMap(soft_cap=cap)}
    for text, (weights, of_rule) in ways.items():
        for words, changes in sums.items():
            name = ", ".join(one for one in (text, words) if one)
            if name:
                other = dataclasses.replace(weights, **changes)
                edited = dataclasses.replace(router, rule=_replaced(rule, other, of_rule))
                yield EditedRouter(
                    name,
                    name,
                    "weights",
                    "routing weights differ",
                    edited,
                    2.0 * len(name.split(", ")),
                )


def _replaced(rule: Rule, weights: Weights, changes: Mapping[str, Any]) -> Rule:
    return dataclasses.replace(rule, weights=weights, **changes)


#: All edits by what they change, in the order in which they are tried.
_EDITS: Mapping[Subject, Callable[[RouterInModel], Iterator[EditedRouter]]] = MappingProxyType(
    {
        "gain": _gains,
        **{kind: _biases(kind) for kind in BIASES},
        "layout": _layouts,
        "rows": _rows,
        "columns": _columns,
        "rule": _rules,
        "weights": _weights,
    }
)

#: What changes which experts are chosen.
SETS: Collection[Subject] = tuple(subject for subject in _EDITS if subject != "weights")
