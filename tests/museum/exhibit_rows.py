"""Incidents of rows: copied, in the place of others, patched in, or of another checkpoint."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tests.museum.checkpoint import (
    F32,
    Build,
    Checkpoint,
    edited,
    name_of,
    permuted,
    swapped,
    text_order,
    within_groups,
)
from tests.museum.exhibit_quantisers import float32_model
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import (
    deep_model,
    olmoe,
    sigmoid_model,
    softmax_model,
    trained,
    trained_sigmoid,
)


# ----------------------------------------------------------------------------------------- copies
def _copied(pairs: int, noise: float = 0.0, model: Build = softmax_model) -> Build:
    """Rows 0 ... over the rows behind them, with noise of a share of their length."""

    def copied(weight: np.ndarray, _: int) -> np.ndarray:
        rows = weight[:pairs]
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        normal = np.random.default_rng(10).standard_normal(rows.shape) / np.sqrt(rows.shape[1])
        weight[pairs : 2 * pairs] = rows + noise * length * normal
        return weight

    return edited(model, "weight", copied, (1,))


COPIED_EXPERTS = Incident(
    "experts_copied",
    "A merge or a conversion wrote experts twice: equal rows, so that no token tells the two "
    "apart.",
    "MGI104",
    Case("one pair of 32", _copied(1), (1,)),
    Case("four pairs", _copied(4), (1,)),
    Case("half of the experts are copies", _copied(16), (1,)),
    (Case("every row its own", softmax_model),),
)

NEARLY_COPIED = Incident(
    "experts_nearly_copied",
    "A copied expert that was trained on for a while, or that noise was added to.",
    "MGG201",
    Case("a copy with noise of 10 % of its length", _copied(1, 0.1), (1,)),
    Case("with noise of 1 %", _copied(1, 0.01), (1,)),
    Case("with noise of 0.1 %", _copied(1, 0.001), (1,)),
    (Case("every row its own", softmax_model),),
)

COPIED_BUT_BIAS = Incident(
    "experts_copied_but_their_bias",
    "Copied rows whose selection biases moved apart afterwards: the rows are equal, the experts "
    "are told apart by the bias alone.",
    "MGG201",
    Case("one pair of 64", _copied(1, model=sigmoid_model), (1,)),
    Case("four pairs", _copied(4, model=sigmoid_model), (1,)),
    Case("half of the experts", _copied(32, model=sigmoid_model), (1,)),
    (Case("every row its own", sigmoid_model),),
)


def _over(layers: Sequence[int], factor: float = 1.0, model: Build = softmax_model) -> Build:
    """The router of layer 0, times a factor, over others; their gains stay their own."""

    def copied() -> Checkpoint:
        first = model().tensors[name_of("weight", 0)]
        again = (factor * first.astype(F32)).astype(first.dtype)
        return model().changed({name_of("weight", layer): again for layer in layers})

    return copied


COPIED_ROUTER = Incident(
    "router_copied_to_other_layers",
    "A loop over layers wrote one router to several of them; every one is sound by itself.",
    "MGI112",
    Case("two layers of four", _over([1]), (0, 1)),
    Case("three layers", _over([1, 2]), (0, 1, 2)),
    Case("all four", _over([1, 2, 3]), range(4)),
    (Case("every router its own", softmax_model),),
)


def _block(rows: int) -> Build:
    def copied(weight: np.ndarray, _: int) -> np.ndarray:
        weight[:rows] = softmax_model().tensors[name_of("weight", 0)][:rows].astype(np.float64)
        return weight

    return edited(softmax_model, "weight", copied, (2,))


COPIED_BLOCK = Incident(
    "rows_copied_to_another_layer",
    "A merge of slices wrote the rows of one rank of a layer into another layer too.",
    "MGI112",
    Case("two rows of 32", _block(2), (0, 2)),
    Case("half of the rows", _block(16), (0, 2)),
    Case("all but one", _block(31), (0, 2)),
    (Case("every row its own", softmax_model),),
)


COPIED_CAST = Incident(
    "router_copied_and_changed",
    "One router in several layers again, after a cast or a factor: no byte is equal any more.",
    "MGI112",
    Case("times 1.5", _over([2], 1.5, float32_model), (0, 2)),
    Case("as it was in two of four layers", _over([1, 2], 1.0, float32_model), (0, 1, 2)),
    Case("times 0.9 in all four", _over([1, 2, 3], 0.9, float32_model), range(4)),
    (Case("every router its own", float32_model),),
)


def _twice(change: Callable[[np.ndarray], np.ndarray]) -> Build:
    """Layer 1 under a second name, as another rank would have it."""

    def stored() -> Checkpoint:
        model = softmax_model()
        again = {
            f"language_model.{name}": change(tensor) if "gate" in name else tensor
            for name, tensor in model.tensors.items()
            if ".layers.1." in name
        }
        return model.changed(again)

    return stored


def _one_row(weight: np.ndarray) -> np.ndarray:
    changed = weight.copy()
    changed[5] *= changed.dtype.type(1.01)
    return changed


COPIES_DIFFER = Incident(
    "replicas_drifted_apart",
    "The gradient of the router was not summed over tensor-parallel ranks: after one step every "
    "rank had a router of its own.",
    "MGI114",
    Case("one row of 32 by a hundredth", _twice(_one_row)),
    Case("every row by a hundredth", _twice(lambda w: w * w.dtype.type(1.01))),
    Case("another router altogether", _twice(lambda w: w[::-1].copy())),
    (Case("stored twice, and equal", _twice(lambda w: w)),),
    threads=("pytorch/torchtitan#2387", "NVIDIA/Megatron-LM#599"),
)

# ----------------------------------------------------------------------------------------- places
_ORDER = within_groups(32, 4)
_ROWS, _BIASES, _EXPERTS = "weight", "bias", "experts"


def _moved(
    model: Build, order: Sequence[int], *parts: str, layers: Sequence[int] | None = None
) -> Build:
    return lambda: permuted(model(), order, parts, layers)


ROWS_SORTED_AS_TEXT = Incident(
    "rows_sorted_as_text",
    "A conversion sorted the names of experts as text, 10 before 2, and moved one of rows and "
    "experts without the other.",
    "MGI121",
    Case("two rows of one layer swapped", _moved(olmoe, swapped(16), _ROWS, layers=[1]), (1,)),
    Case("one layer sorted as text", _moved(olmoe, text_order(16), _ROWS, layers=[1]), (1,)),
    Case("all layers sorted as text", _moved(olmoe, text_order(16), _ROWS), range(3)),
    (
        Case("two rows and their experts swapped", _moved(olmoe, swapped(16), _ROWS, _EXPERTS)),
        Case(
            "rows and experts sorted as text, all of them",
            _moved(olmoe, text_order(16), _ROWS, _EXPERTS),
        ),
    ),
    olmoe,
    threads=("pytorch/torchtitan#1918",),
)


def _left_behind(name: str, story: str, parts: tuple[str, str], twin: str) -> Incident:
    moved = partial(_moved, trained_sigmoid)
    return Incident(
        name,
        story,
        "MGI121",
        Case("two experts swapped in one layer", moved(swapped(32), *parts, layers=[1]), (1,)),
        Case("all experts of one layer", moved(_ORDER, *parts, layers=[1]), (1,)),
        Case("all experts of all layers", moved(_ORDER, *parts), (1, 2, 3)),
        (Case(twin, moved(_ORDER, _ROWS, _BIASES, _EXPERTS)),),
        trained_sigmoid,
        threads=("pytorch/torchtitan#1918",),
    )


BIAS_LEFT_BEHIND = _left_behind(
    "bias_left_behind",
    "The same with a selection bias: rows and experts were moved, and the bias was not.",
    (_ROWS, _EXPERTS),
    "groups and what is in them renumbered, bias included",
)

EXPERTS_LEFT_BEHIND = _left_behind(
    "experts_left_behind",
    "Rows and selection bias were moved, and the experts were not.",
    (_ROWS, _BIASES),
    "groups and what is in them renumbered, experts included",
)

_across = partial(_moved, trained_sigmoid)

GROUPS_MIXED = Incident(
    "groups_mixed",
    "Everything that belongs to an expert was moved along, but across the borders of groups: a "
    "rule that keeps whole groups now keeps other experts together.",
    "MGI121",
    Case(
        "one expert of each of two groups exchanged",
        _across([8, *range(1, 8), 0, *range(9, 32)], _ROWS, _BIASES, _EXPERTS, layers=[1]),
        (1,),
    ),
    Case(
        "one layer sorted as text",
        _across(text_order(32), _ROWS, _BIASES, _EXPERTS, layers=[1]),
        (1,),
    ),
    Case("all layers sorted as text", _across(text_order(32), _ROWS, _BIASES, _EXPERTS), (1, 2, 3)),
    (Case("groups and what is in them renumbered", _across(_ORDER, _ROWS, _BIASES, _EXPERTS)),),
    trained_sigmoid,
)


# -------------------------------------------------------------------------------- rows of one layer
def _row(change: Callable[[np.ndarray], np.ndarray], hidden: int = 256) -> Build:
    def patched(weight: np.ndarray, _: int) -> np.ndarray:
        weight[6] = change(weight[6])
        return weight

    return edited(partial(softmax_model, hidden=hidden), "weight", patched, (1,))


ROW_TOO_LONG = Incident(
    "row_too_long",
    "The row of one expert was patched in from elsewhere and is longer than those beside it.",
    "MGG203",
    Case("twice as long", _row(lambda row: 2.0 * row), (), ("MGG205",), is_missed=True),
    Case("four times", _row(lambda row: 4.0 * row), (1,)),
    Case("ten times", _row(lambda row: 10.0 * row), (1,)),
    (Case("as trained", softmax_model),),
)


def _partly_zero(share: float) -> Build:
    return _row(lambda row: np.where(np.arange(row.size) < share * row.size, 0.0, row), 512)


ROW_PARTLY_ZERO = Incident(
    "row_partly_zero",
    "A part of one row was never written and is zero.",
    "MGG205",
    Case("a quarter of the row", _partly_zero(0.25), (1,)),
    Case("half of it", _partly_zero(0.5), (1,)),
    Case("nine tenths of it", _partly_zero(0.9), (1,)),
    (Case("as trained", partial(softmax_model, hidden=512)),),
)


def _low_rank(rank: int) -> Build:
    def cut(weight: np.ndarray, _: int) -> np.ndarray:
        left, values, right = np.linalg.svd(weight, full_matrices=False)
        return (left[:, :rank] * values[:rank]) @ right[:rank]

    return edited(softmax_model, "weight", cut, (1,))


LOW_RANK = Incident(
    "router_of_low_rank",
    "A low-rank update was merged as if it were the whole router, or training collapsed.",
    "MGG202",
    Case("rank 16 of 31", _low_rank(16), (1,)),
    Case("rank 8", _low_rank(8), (1,), ("MGG205",)),
    Case("rank 2", _low_rank(2), (1,), ("MGG201", "MGG204", "MGG205")),
    (Case("as trained", softmax_model),),
)


def _crowded(share: float) -> Build:
    """Four groups of eight rows whose cosine within a group is ``share``."""

    def crowded(weight: np.ndarray, layer: int) -> np.ndarray:
        hidden = weight.shape[1]
        common = np.random.default_rng([15, layer]).standard_normal((4, hidden)) / np.sqrt(hidden)
        return np.sqrt(share) * common.repeat(8, axis=0) + np.sqrt(1.0 - share) * weight

    return edited(softmax_model, "weight", crowded, (1,))


ROWS_CROWD = Incident(
    "rows_crowd",
    "Experts of one device share most of their direction: few of them are told apart.",
    "MGG204",
    Case("cosine 0.3 within four groups", _crowded(0.3), is_missed=True),
    Case("cosine 0.7", _crowded(0.7), (1,), ("MGG205",)),
    Case("cosine 0.95", _crowded(0.95), (1,), ("MGG205",)),
    (Case("as trained", softmax_model),),
)


# -------------------------------------------------------------------- routers of another checkpoint
def _earlier(step: int) -> Build:
    name = name_of("weight", 1)
    return lambda: olmoe().changed({name: trained(f"olmoe-balanced/step_{step}").tensors[name]})


ROUTER_OF_ANOTHER_STEP = Incident(
    "router_of_another_step",
    "The router of one layer was taken from an earlier checkpoint of the same training.",
    "MGG401",
    Case("layer 1 of step 1000 in step 1500", _earlier(1000), (1,)),
    Case("of step 300", _earlier(300), (1,)),
    Case("of step 100", _earlier(100), (1,)),
    (Case("step 1500 itself", olmoe),),
    olmoe,
)


def _scaled_layer(factor: float) -> Build:
    return edited(deep_model, "weight", lambda w, _: factor * w, (5,))


ROUTER_OF_ANOTHER_REVISION = Incident(
    "router_of_another_revision",
    "The same without a baseline: a router of another revision, with rows of another length, among "
    "twelve layers that change smoothly with depth.",
    "MGG206",
    Case("rows 1.2 times as long", _scaled_layer(1.2), is_missed=True),
    Case("1.6 times", _scaled_layer(1.6), (5,)),
    Case("3 times", _scaled_layer(3.0), (5,)),
    (Case("all layers of one revision", deep_model),),
)
